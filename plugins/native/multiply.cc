// SPDX-License-Identifier: Apache-2.0
//
// The kernels that multiply a panel with a tile of tokens.
//
// A block of columns is summed on its own and joins the total times its scale: so several chains of additions are
// in flight, and one multiplication by a scale serves the block. The order of operations for a token is the same in
// every tile size, hence so is its result.

#include "formats.h"
#include "op.h"

namespace nemo {
namespace {

constexpr int64_t kAhead = 9216;  // bytes

template <class Format>
constexpr int64_t kSuperblock = (Format::kChunks + (Format::kScaled ? 1 : 0)) * kChunk;

// Asks for weights some superblocks ahead. The processor's own prefetcher falls behind: this takes decoding with one
// thread from 31 to 39 GB/s where plain reading takes 42, and four sequences at a time from 11 to 26 (Zen 5).
template <class Format>
INLINE void prefetch(const uint8_t* at) {
  for (int64_t i = 0; i < kSuperblock<Format>; i += kChunk) __builtin_prefetch(at + kAhead + i);
}

template <class Format, int M>
INLINE void join(const uint8_t* at, int block, int part, const F (&block_total)[M], F (&total)[M]) {
  if constexpr (Format::kScaled) {
    const F scale = Format::scale(at, block, part);
    for (int m = 0; m < M; ++m) total[m] = fma(scale, block_total[m], total[m]);
  } else {
    for (int m = 0; m < M; ++m) total[m] = total[m] + block_total[m];
  }
}

template <class Format>
struct Float32Kernels {
  static constexpr InputLayout kLayout = {Storage::kFloat32, 1, nullptr, 0};

  template <int M>
  static void run(const uint8_t* panel, int64_t superblocks, const uint8_t* x, int64_t stride, float* out) {
    for (int part = 0; part < kPanelRows / kW; ++part) {
      const uint8_t* at = panel;
      F total[M] = {};
      for (int64_t s = 0; s < superblocks; ++s, at += kSuperblock<Format>) {
        if (part == 0) prefetch<Format>(at);
        for (int block = 0; block < kDepth / Format::kBlock; ++block) {
          F block_total[M] = {};
#pragma GCC unroll 32
          for (int i = 0; i < Format::kBlock; ++i) {
            const int k = block * Format::kBlock + i;
            const F w = Format::value(at, k, part);
            for (int m = 0; m < M; ++m) {
              const float input = reinterpret_cast<const float*>(x + m * stride)[s * kDepth + k];
              block_total[m] = fma(w, splat(input), block_total[m]);
            }
          }
          join<Format>(at, block, part, block_total, total);
        }
      }
      for (int m = 0; m < M; ++m) store(out + m * kPanelRows + part * kW, total[m]);
    }
  }
};

#if defined(__AVX512BF16__)

template <class Format>
struct BFloat16Kernels {
  static constexpr InputLayout kLayout = {Storage::kBFloat16, Format::kGroup, Format::kOrder, 0};

  template <int M>
  static void run(const uint8_t* panel, int64_t superblocks, const uint8_t* x, int64_t stride, float* out) {
    const uint8_t* at = panel;
    F total[M] = {};
    for (int64_t s = 0; s < superblocks; ++s, at += kSuperblock<Format>) {
      prefetch<Format>(at);
#pragma GCC unroll 4
      for (int block = 0; block < kDepth / Format::kBlock; ++block) {
        F block_total[M] = {};
#pragma GCC unroll 16
        for (int i = 0; i < Format::kBlock / 2; ++i) {
          const int p = block * Format::kBlock / 2 + i;
          const __m512bh w = bits<__m512bh>(Format::pair(at, p));
          for (int m = 0; m < M; ++m) {
            const int32_t input = reinterpret_cast<const int32_t*>(x + m * stride)[s * kDepth / 2 + p];
            block_total[m] = _mm512_dpbf16_ps(block_total[m], w, bits<__m512bh>(_mm512_set1_epi32(input)));
          }
        }
        join<Format>(at, block, 0, block_total, total);
      }
    }
    for (int m = 0; m < M; ++m) store(out + m * kPanelRows, total[m]);
  }
};

#endif

#if defined(__AVX512VNNI__)

template <class Format>
struct Int8Kernels {
  static constexpr InputLayout kLayout = {Storage::kInt8, Format::kGroup, Format::kOrderBytes, Format::kOffset};

  template <int M>
  static void run(const uint8_t* panel, int64_t superblocks, const uint8_t* x, int64_t stride, float* out) {
    const uint8_t* at = panel;
    F total[M] = {};
    for (int64_t s = 0; s < superblocks; ++s, at += kSuperblock<Format>) {
      prefetch<Format>(at);
#pragma GCC unroll 4
      for (int block = 0; block < 4; ++block) {  // of 16 columns
        __m512i dot[M];
        for (int m = 0; m < M; ++m) dot[m] = _mm512_set1_epi32(input(x, m * stride, s)->bias[block]);
#pragma GCC unroll 4
        for (int q = block * 4; q < block * 4 + 4; ++q) {
          const __m512i w = Format::bytes(at, q);
          for (int m = 0; m < M; ++m) {
            int32_t codes;
            std::memcpy(&codes, input(x, m * stride, s)->codes + 4 * q, sizeof codes);
            dot[m] = _mm512_dpbusd_epi32(dot[m], w, _mm512_set1_epi32(codes));
          }
        }
        const F scale = Format::scale(at, block * 16 / Format::kBlock, 0);
        for (int m = 0; m < M; ++m) {
          const F both = scale * splat(input(x, m * stride, s)->scale[block]);
          total[m] = fma(_mm512_cvtepi32_ps(dot[m]), both, total[m]);
        }
      }
    }
    for (int m = 0; m < M; ++m) store(out + m * kPanelRows, total[m] * splat(1 / Format::kFactor));
  }

 private:
  static INLINE const Int8Superblock* input(const uint8_t* x, int64_t offset, int64_t superblock) {
    return reinterpret_cast<const Int8Superblock*>(x + offset) + superblock;
  }
};

#endif

#if defined(__AVX512F__)
constexpr int kSizes[] = {12, 8, 6, 4, 3, 2, 1};
#else
constexpr int kSizes[] = {4, 2, 1};  // 16 registers hold no more totals
#endif

template <class Kernels, size_t... Size>
Multiplier make(std::index_sequence<Size...>) {
  static constexpr PanelKernel kRun[] = {&Kernels::template run<kSizes[Size]>...};
  return {Kernels::kLayout, static_cast<int>(sizeof...(Size)), kSizes, kRun};
}

template <class Kernels>
Multiplier make() {
  return make<Kernels>(std::make_index_sequence<sizeof(kSizes) / sizeof(*kSizes)>());
}

// Formats whose codes are exact in bfloat16.
template <class Format>
Multiplier narrow(Precision precision) {
#if defined(__AVX512BF16__)
  if (precision != Precision::kFloat32) return make<BFloat16Kernels<Format>>();
#endif
  (void)precision;
  return make<Float32Kernels<Format>>();
}

// Formats of integer codes, which int8 inputs can be multiplied with.
template <class Format>
Multiplier integer(Precision precision) {
#if defined(__AVX512VNNI__)
  if (precision == Precision::kInt8) return make<Int8Kernels<Format>>();
#endif
  return narrow<Format>(precision);
}

}  // namespace

Multiplier multiplier(Format format, Precision precision) {
  switch (format) {
    case Format::kNvfp4:
      return integer<Nvfp4>(precision);
    case Format::kInt4:
      return integer<Int4>(precision);
    case Format::kInt8:
      return integer<Int8>(precision);
    case Format::kFp8:
      return narrow<Fp8>(precision);
    case Format::kBf16:
      return narrow<Bf16>(precision);
    case Format::kF16:
      return make<Float32Kernels<F16>>();
    case Format::kF32:
      return make<Float32Kernels<F32>>();
  }
  throw Invalid("unknown weight format");
}

}  // namespace nemo

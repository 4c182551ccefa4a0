// SPDX-License-Identifier: Apache-2.0
//
// NVFP4 and FP8 codecs of weights. Plain C functions, loaded by native.py through ctypes.
//
// One source serves every instruction set: the kernels are written over vectors of W floats (GNU vector
// extensions) and instantiated for W = 4 without flags, 8 with AVX2 and 16 with AVX-512. Lanes never mix except
// in maxima and in one sum whose order is fixed, so every instantiation writes the same bytes, which are those of
// the NumPy reference in nvfp4.py and fp8.py. Compile without contraction (-ffp-contract=off) and without
// -ffast-math: quotients are rounded once, then compared with the rounding thresholds.
//
// Callers pass finite values only; nemo_amax says whether they are.

#include "../native/lanes.h"

#include <limits>
#include <utility>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// A block of 16 values as float32.
template <int W>
struct Block {
  static constexpr int kCount = kBlock / W;
  typedef typename Lanes<W>::F F;
  typedef typename Lanes<W>::I I;
  F x[kCount], magnitude[kCount];

  template <class T>
  static INLINE Block read(const typename T::Raw* at) {
    Block block;
    for (int i = 0; i < kCount; ++i) {
      block.x[i] = T::template read<W>(at + i * W);
      block.magnitude[i] = bits<F>(bits<I>(block.x[i]) & 0x7FFFFFFF);
    }
    return block;
  }
};

template <int Step, class I, size_t... Lane>
INLINE int32_t horizontal_max(I v, std::index_sequence<Lane...> lanes) {
  if constexpr (Step == 0) {
    return v[0];
  } else {
    const I rotated = __builtin_shufflevector(v, v, ((Lane + Step) % sizeof...(Lane))...);
    return horizontal_max<Step / 2>(v > rotated ? v : rotated, lanes);
  }
}

// Bits of non-negative floats are ordered as the floats are.
template <int W>
INLINE float block_amax(const Block<W>& block) {
  typedef typename Lanes<W>::I I;
  I top = bits<I>(block.magnitude[0]);
  for (int i = 1; i < Block<W>::kCount; ++i) {
    const I next = bits<I>(block.magnitude[i]);
    top = top > next ? top : next;
  }
  return bits<float>(horizontal_max<W / 2>(top, std::make_index_sequence<W>()));
}

// Write the 8 bytes of a block's codes; element 2j is the low nibble of byte j.
template <int W>
INLINE void write_codes(const Block<W>& block, float scale, uint8_t* out) {
  typedef typename Lanes<W>::I I;
  typedef typename Lanes<W>::U U;
  typedef typename Lanes<W>::Pairs Pairs;
  for (int i = 0; i < Block<W>::kCount; ++i) {
    const auto q = block.magnitude[i] / scale;
    const I magnitude = to_e2m1<W>(q);
    const I sign = bits<I>(bits<U>(block.x[i]) >> 28) & 8;
    const I code = q > 0 ? magnitude | sign : magnitude;  // -0.0 and quotients that underflow have no sign
    const Pairs both = bits<Pairs>(code) | (bits<Pairs>(code) >> 28);
    store(out + i * W / 2, __builtin_convertvector(both & 0xFF, typename Lanes<W>::PairBytes));
  }
}

// The constants of a tensor; nvfp4.py computes them.
struct Plan {
  float scale_2;
  float divisor;     // plain: 6 * scale_2; four over six: amax / 6
  float to_fake;     // four over six: factor into and out of the range of E4M3 when candidates are judged
  float from_fake;
};

// Sum of squared errors of a block under one candidate scale. The order of the additions is that of
// torch.sum on a CPU: lane i with lane i + 8, then the eight sums one after the other.
template <int W>
INLINE float squared_error(const Block<W>& block, float divide, float multiply) {
  float squares[kBlock];
  for (int i = 0; i < Block<W>::kCount; ++i) {
    const auto value = from_e2m1<W>(to_e2m1<W>(block.magnitude[i] / divide)) * multiply;
    const auto error = block.magnitude[i] - value;
    store(squares + i * W, error * error);
  }
  float sum = 0;
  for (int i = 0; i < 8; ++i) sum += squares[i] + squares[i + 8];
  return sum;
}

template <int W>
INLINE float candidate_error(const Block<W>& block, float amax, const Plan& plan) {
  const float ratio = amax / 6.0f * plan.to_fake;
  // Up to half of the smallest E4M3 number a scale is zero here, though it is written as 2^-9.
  const float scale = (ratio <= 0x1p-10f ? 0.0f : from_e4m3(to_e4m3(ratio))) * plan.from_fake;
  const float divide = scale != 0 && scale - scale == 0 ? scale : 1.0f;
  return squared_error(block, divide, scale == 0 ? 0.0f : divide);
}

template <int W, class T, bool kFourOverSix>
INLINE void encode_nvfp4(const void* weight, int64_t blocks, const Plan& plan, uint8_t* codes, uint8_t* scales) {
  const typename T::Raw* at = static_cast<const typename T::Raw*>(weight);
  for (int64_t b = 0; b < blocks; ++b) {
    const Block<W> block = Block<W>::template read<T>(at + b * kBlock);
    float amax = block_amax<W>(block);
    float scale;
    if (kFourOverSix) {
      const float wide = amax * 1.5f;
      amax = candidate_error<W>(block, wide, plan) < candidate_error<W>(block, amax, plan) ? wide : amax;
      const float sixth = amax / 6.0f;
      scale = (sixth == 0 ? 1.0f : sixth) * 256.0f / plan.divisor;
    } else {
      scale = amax / plan.divisor;
      scale = scale == 0 ? 1.0f : scale;
    }
    scales[b] = to_e4m3(scale);
    write_codes<W>(block, from_e4m3(scales[b]) * plan.scale_2, codes + b * kBlock / 2);
  }
}

template <int W>
INLINE void decode_nvfp4(const uint8_t* codes, const uint8_t* scales, int64_t blocks, float scale_2, float* out) {
  typedef typename Lanes<W>::I I;
  typedef typename Lanes<W>::U U;
  typedef typename Lanes<W>::F F;
  typedef typename Lanes<W>::Pairs Pairs;
  for (int64_t b = 0; b < blocks; ++b) {
    const float magnitude = from_e4m3(scales[b] & 0x7F);
    const float scale = (scales[b] & 0x80 ? -magnitude : magnitude) * scale_2;
    for (int i = 0; i < kBlock / W; ++i) {
      const auto bytes = load<typename Lanes<W>::PairBytes>(codes + (b * kBlock + i * W) / 2);
      const Pairs pairs = __builtin_convertvector(bytes, Pairs);
      const I code = bits<I>(pairs | (pairs << 28));
      const F value = from_e2m1<W>(code & 7);
      store(out + b * kBlock + i * W, bits<F>(bits<U>(value) | (bits<U>(code & 8) << 28)) * scale);
    }
  }
}

// To E4M3 after rounding to T, ties to even, magnitudes past 448 to 448.
template <int W, class T>
INLINE typename Lanes<W>::U to_fp8(typename Lanes<W>::F value) {
  typedef typename Lanes<W>::F F;
  typedef typename Lanes<W>::U U;
  const U q = bits<U>(value);
  const U top = U{} + bits<uint32_t>(448.0f);
  U u = q & 0x7FFFFFFF;
  u = u < top ? u : top;  // before rounding to T: 448 is one of its numbers
  u = T::template round<W>(u);
  const U normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - (120u << 3);
  const U subnormal = bits<U>(bits<F>(u) * 0x1p9f + 0x1p23f) & 0xFF;
  return (u < (121u << 23) ? subnormal : normal) | ((q >> 24) & 0x80);
}

template <int W>
INLINE typename Lanes<W>::F magnitude_of_fp8(typename Lanes<W>::U code) {
  typedef typename Lanes<W>::F F;
  typedef typename Lanes<W>::I I;
  const I magnitude = bits<I>(code & 0x7F);
  return magnitude < 8 ? __builtin_convertvector(magnitude, F) * 0x1p-9f : bits<F>((magnitude << 20) + (120 << 23));
}

template <int W, class T>
INLINE void encode_fp8(const void* weight, int64_t count, float scale, uint8_t* codes) {
  typedef typename Lanes<W>::Bytes Bytes;
  const typename T::Raw* at = static_cast<const typename T::Raw*>(weight);
  int64_t i = 0;
  for (; i + W <= count; i += W)
    store(codes + i, __builtin_convertvector(to_fp8<W, T>(T::template read<W>(at + i) / scale), Bytes));
  if (i == count) return;
  typename T::Raw rest[W] = {};
  std::memcpy(rest, at + i, static_cast<size_t>(count - i) * sizeof(typename T::Raw));
  const Bytes bytes = __builtin_convertvector(to_fp8<W, T>(T::template read<W>(rest) / scale), Bytes);
  std::memcpy(codes + i, &bytes, static_cast<size_t>(count - i));
}

// Sum of squared errors of fake quantization to FP8, in 16 float64 sums whatever W is.
template <int W, class T>
INLINE double error_fp8(const void* weight, int64_t count, float to_fake, float from_fake) {
  typedef double Sums __attribute__((vector_size(8 * W)));
  const typename T::Raw* at = static_cast<const typename T::Raw*>(weight);
  Sums sums[kBlock / W] = {};
  for (int64_t i = 0; i < count; i += kBlock) {
    typename T::Raw rest[kBlock] = {};
    const typename T::Raw* from = at + i;
    if (count - i < kBlock) {
      std::memcpy(rest, from, static_cast<size_t>(count - i) * sizeof(typename T::Raw));
      from = rest;
    }
    const Block<W> block = Block<W>::template read<T>(from);
    for (int v = 0; v < Block<W>::kCount; ++v) {
      const auto code = to_fp8<W, Float32>(block.magnitude[v] * to_fake);
      const auto error = block.magnitude[v] - magnitude_of_fp8<W>(code) * from_fake;
      sums[v] += __builtin_convertvector(error * error, Sums);
    }
  }
  double total = 0;
  for (int i = 0; i < kBlock; ++i) total += sums[i / W][i % W];
  return total;
}

template <int W, class T>
INLINE int find_amax(const void* weight, int64_t count, float* amax) {
  typedef typename T::Signed Signed;
  typedef Signed V __attribute__((vector_size(4 * W)));
  constexpr int kStep = 4 * W / sizeof(Signed);
  constexpr Signed kMask = std::numeric_limits<Signed>::max();
  const Signed* at = static_cast<const Signed*>(weight);
  V tops = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const V v = load<V>(at + i) & kMask;
    tops = tops > v ? tops : v;
  }
  Signed top = 0;
  for (int lane = 0; lane < kStep; ++lane) top = tops[lane] > top ? tops[lane] : top;
  for (; i < count; ++i) {
    const Signed v = at[i] & kMask;
    top = v > top ? v : top;
  }
  *amax = T::widen(static_cast<typename T::Raw>(top));
  return top < T::kInfinity;
}

struct Kernels {
  int (*amax[3])(const void*, int64_t, float*);
  void (*nvfp4[3][2])(const void*, int64_t, const Plan&, uint8_t*, uint8_t*);
  void (*decode)(const uint8_t*, const uint8_t*, int64_t, float, float*);
  void (*fp8[3])(const void*, int64_t, float, uint8_t*);
  double (*fp8_error[3])(const void*, int64_t, float, float);
};

// One instruction set: the templates above, inlined into functions that may use it.
#define INSTRUCTION_SET(Name, W, TARGET)                                                                   \
  struct Name {                                                                                            \
    template <class T>                                                                                     \
    TARGET static int amax(const void* w, int64_t n, float* amax) {                                        \
      return find_amax<W, T>(w, n, amax);                                                                  \
    }                                                                                                      \
    template <class T, bool kFourOverSix>                                                                  \
    TARGET static void nvfp4(const void* w, int64_t n, const Plan& plan, uint8_t* codes, uint8_t* scales) {\
      encode_nvfp4<W, T, kFourOverSix>(w, n, plan, codes, scales);                                         \
    }                                                                                                      \
    TARGET static void decode(const uint8_t* c, const uint8_t* s, int64_t n, float scale_2, float* out) {  \
      decode_nvfp4<W>(c, s, n, scale_2, out);                                                              \
    }                                                                                                      \
    template <class T>                                                                                     \
    TARGET static void fp8(const void* w, int64_t n, float scale, uint8_t* codes) {                        \
      encode_fp8<W, T>(w, n, scale, codes);                                                                \
    }                                                                                                      \
    template <class T>                                                                                     \
    TARGET static double fp8_error(const void* w, int64_t n, float to_fake, float from_fake) {             \
      return error_fp8<W, T>(w, n, to_fake, from_fake);                                                    \
    }                                                                                                      \
  };

INSTRUCTION_SET(Plain, 4, )
#if defined(__x86_64__)
INSTRUCTION_SET(Avx2, 8, __attribute__((target("avx2"))))
INSTRUCTION_SET(Avx512, 16, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

template <class Set>
constexpr Kernels kernels() {
  typedef Float32 A;
  typedef BFloat16 B;
  typedef Float16 C;
  return {
      {Set::template amax<A>, Set::template amax<B>, Set::template amax<C>},
      {{Set::template nvfp4<A, false>, Set::template nvfp4<A, true>},
       {Set::template nvfp4<B, false>, Set::template nvfp4<B, true>},
       {Set::template nvfp4<C, false>, Set::template nvfp4<C, true>}},
      Set::decode,
      {Set::template fp8<A>, Set::template fp8<B>, Set::template fp8<C>},
      {Set::template fp8_error<A>, Set::template fp8_error<B>, Set::template fp8_error<C>},
  };
}

constexpr Kernels kKernels[] = {
    kernels<Plain>(),
#if defined(__x86_64__)
    kernels<Avx2>(),
    kernels<Avx512>(),
#endif
};

}  // namespace

// Instruction sets are 0 plain, 1 AVX2, 2 AVX-512; data types 0 float32, 1 bfloat16, 2 float16.

// Raise with native.py when a signature or Plan changes: a checkout may hold a library of older sources.
EXPORT int nemo_interface() { return 1; }

EXPORT int nemo_supports(int set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (set == 1) return __builtin_cpu_supports("avx2") != 0;
  if (set == 2)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return set == 0;
}

// The largest magnitude of n values; returns 0 if one of them is infinite or NaN.
EXPORT int nemo_amax(int set, int dtype, const void* weight, int64_t n, float* amax) {
  return kKernels[set].amax[dtype](weight, n, amax);
}

// Encode n blocks of 16 values to 8 n bytes of codes and n bytes of scales.
EXPORT void nemo_nvfp4_encode(int set, int dtype, int four_over_six, const void* weight, int64_t n, const Plan* plan,
                              uint8_t* codes, uint8_t* scales) {
  kKernels[set].nvfp4[dtype][four_over_six != 0](weight, n, *plan, codes, scales);
}

// Decode n blocks to 16 n values.
EXPORT void nemo_nvfp4_decode(int set, const uint8_t* codes, const uint8_t* scales, int64_t n, float scale_2,
                              float* out) {
  kKernels[set].decode(codes, scales, n, scale_2, out);
}

// Encode n values to n bytes.
EXPORT void nemo_fp8_encode(int set, int dtype, const void* weight, int64_t n, float scale, uint8_t* codes) {
  kKernels[set].fp8[dtype](weight, n, scale, codes);
}

// The sum of squared differences between n values and what E4M3 makes of them at the given factors.
EXPORT double nemo_fp8_error(int set, int dtype, const void* weight, int64_t n, float to_fake, float from_fake) {
  return kKernels[set].fp8_error[dtype](weight, n, to_fake, from_fake);
}

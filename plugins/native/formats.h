// SPDX-License-Identifier: Apache-2.0
//
// How a panel's codes become numbers: one struct a format.
//
//   kChunks                 chunks of codes in a superblock
//   kBlock                  columns that share a scale, or that are summed before they join the total
//   value(at, k, part)      column k of a superblock, as float32; lanes are rows part*kW .. part*kW+kW-1
//   scale(at, block, part)  scales of a block of columns; only where kScaled
//   bytes(at, q)            with AVX-512 VNNI, integer codes only: four columns as unsigned bytes, code * kFactor +
//                           kOffset, for all 16 rows; `kOrderBytes` says which columns, like kOrder.
//   pair(at, p)             with AVX-512 BF16: a pair of columns as bfloat16, two a lane, for all 16 rows.
//                           `kOrder` says which columns: columns kOrder[2j] and kOrder[2j+1] of each group of
//                           kGroup are pair j of the group.
//
// Codes of E2M1, E4M3, INT4, INT8 and BF16 are exact in bfloat16.

#pragma once

#include "panels.h"
#include "small_floats.h"
#include "vec.h"

namespace nemo {

INLINE U words(const uint8_t* at, int chunk, int part) { return load<U>(at + chunk * kChunk + part * kW * 4); }

#if defined(__AVX512VNNI__)
INLINE __m512i chunk512(const uint8_t* at, int chunk) { return _mm512_loadu_si512(at + chunk * kChunk); }

INLINE __m512i nibbles(const uint8_t* at, int q) {
  const __m512i both = chunk512(at, q / 2);
  return _mm512_and_si512(q % 2 == 0 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
}

INLINE __m512i table16(const uint16_t (&values)[16]) {  // for _mm512_permutexvar_epi16, which reads 5 bits: twice
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_broadcast_i64x4(half);
}
#endif

INLINE F minimum(F a, F b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// A narrow float's magnitude, its bits shifted to where float32 has mantissa and exponent; `bias` is the difference of
// the exponents' biases. A subnormal code, read as if it had an implicit one, is v = s (1 + m) where s m * 2 is meant,
// with s below the smallest normal number n = 2s: that is 2v - n, which is below v for subnormal codes alone. (The
// usual multiplication of the bits by a power of two is slow: it reads float32 subnormals.)
INLINE F widen(U magnitude, uint32_t bias) {
  const F v = bits<F>(magnitude + (bias << 23));
  return minimum(v, fma(v, splat(2.0f), splat(-from_bits((bias + 1) << 23))));
}

// E4M3 scales of four blocks in a word; no sign.
INLINE F e4m3_scale(U u, int block) {
  return widen(block == 0   ? (u & 0x7Fu) << 20
               : block == 1 ? (u & 0x7F00u) << 12
               : block == 2 ? (u & 0x7F0000u) << 4
                            : (u & 0x7F000000u) >> 4,
               120);
}

// bfloat16 scales of two blocks in a word.
INLINE F bf16_scale(U u, int block) { return bits<F>(block == 0 ? u << 16 : u & 0xFFFF0000u); }

constexpr uint8_t kOrder4[] = {0, 4, 1, 5, 2, 6, 3, 7};  // of eight 4-bit codes in a word, as pairs
constexpr uint8_t kOrder8[] = {0, 2, 1, 3};              // of four bytes in a word
constexpr uint8_t kOrder16[] = {0, 1};
constexpr uint8_t kOrder4Bytes[] = {0, 2, 4, 6, 1, 3, 5, 7};
constexpr uint8_t kOrder8Bytes[] = {0, 1, 2, 3};

struct Nvfp4 {
  static constexpr int kChunks = 8, kBlock = 16, kGroup = 8;
  static constexpr bool kScaled = true;
  static constexpr const uint8_t* kOrder = kOrder4;
  static constexpr const uint8_t* kOrderBytes = kOrder4Bytes;
  static constexpr int kOffset = 12;
  static constexpr float kFactor = 2;

  static INLINE F value(const uint8_t* at, int k, int part) {
    const U u = words(at, k / 8, part) >> (4 * (k % 8));
#if defined(__AVX512F__)
    const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    return _mm512_permutexvar_ps(bits<__m512i>(u), table);
#elif defined(__AVX2__)
    const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    const F magnitude = _mm256_permutevar8x32_ps(table, bits<__m256i>(u));
    return bits<F>(bits<U>(magnitude) | ((u & 8) << 28));
#else
    return bits<F>(bits<U>(from_e2m1<kW>(bits<I>(u & 7))) | ((u & 8) << 28));
#endif
  }
  static INLINE F scale(const uint8_t* at, int block, int part) { return e4m3_scale(words(at, kChunks, part), block); }

#if defined(__AVX512BF16__)
  static INLINE __m512i pair(const uint8_t* at, int p) {
    static constexpr uint16_t kValues[16] = {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                                             0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(chunk512(at, p / 4), 4 * (p % 4)), table16(kValues));
  }
#endif

#if defined(__AVX512VNNI__)
  static INLINE __m512i bytes(const uint8_t* at, int q) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return _mm512_shuffle_epi8(table, nibbles(at, q));
  }
#endif
};

struct Int4 {
  static constexpr int kChunks = 8, kBlock = 32, kGroup = 8;
  static constexpr bool kScaled = true;
  static constexpr const uint8_t* kOrder = kOrder4;
  static constexpr const uint8_t* kOrderBytes = kOrder4Bytes;
  static constexpr int kOffset = 8;
  static constexpr float kFactor = 1;

  static INLINE F value(const uint8_t* at, int k, int part) {
    const U u = (words(at, k / 8, part) >> (4 * (k % 8))) & 15;
    return __builtin_convertvector(bits<I>(u) - 8, F);
  }
  static INLINE F scale(const uint8_t* at, int block, int part) { return bf16_scale(words(at, kChunks, part), block); }

#if defined(__AVX512BF16__)
  static INLINE __m512i pair(const uint8_t* at, int p) {
    static constexpr uint16_t kValues[16] = {0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80,
                                             0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(chunk512(at, p / 4), 4 * (p % 4)), table16(kValues));
  }
#endif

#if defined(__AVX512VNNI__)
  static INLINE __m512i bytes(const uint8_t* at, int q) { return nibbles(at, q); }
#endif
};

struct Fp8 {
  static constexpr int kChunks = 16, kBlock = 16, kGroup = 4;
  static constexpr bool kScaled = false;
  static constexpr const uint8_t* kOrder = kOrder8;

  static INLINE F value(const uint8_t* at, int k, int part) {
    const U u = words(at, k / 4, part) << (24 - 8 * (k % 4));
    return bits<F>(bits<U>(widen((u & 0x7F000000u) >> 4, 120)) | (u & 0x80000000u));
  }

#if defined(__AVX512BF16__)
  static INLINE __m512i pair(const uint8_t* at, int p) {
    const __m512i both = chunk512(at, p / 2);
    const __m512i u = p % 2 == 0 ? _mm512_slli_epi16(both, 8) : both;  // the code in the upper half of each half word
    const __m512i magnitude = _mm512_srli_epi16(_mm512_and_si512(u, _mm512_set1_epi16(0x7F00)), 4);
    const __m512i normal = _mm512_add_epi16(magnitude, _mm512_set1_epi16(120 << 7));
    // Subnormal codes from a table: the multiplication would read subnormal bfloat16 as zero.
    static constexpr uint16_t kSubnormal[16] = {0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
    const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8 << 4));
    const __m512i value = _mm512_mask_permutexvar_epi16(normal, small, _mm512_srli_epi16(magnitude, 4),
                                                        table16(kSubnormal));
    return _mm512_ternarylogic_epi32(value, u, _mm512_set1_epi16(-0x8000), 0xF8);  // value | (u & sign)
  }
#endif
};

struct Int8 {
  static constexpr int kChunks = 16, kBlock = 32, kGroup = 4;
  static constexpr bool kScaled = true;
  static constexpr const uint8_t* kOrder = kOrder8;
  static constexpr const uint8_t* kOrderBytes = kOrder8Bytes;
  static constexpr int kOffset = 128;
  static constexpr float kFactor = 1;

  static INLINE F value(const uint8_t* at, int k, int part) {
    const I code = bits<I>(words(at, k / 4, part) << (24 - 8 * (k % 4))) >> 24;
    return __builtin_convertvector(code, F);
  }
  static INLINE F scale(const uint8_t* at, int block, int part) { return bf16_scale(words(at, kChunks, part), block); }

#if defined(__AVX512BF16__)
  static INLINE __m512i pair(const uint8_t* at, int p) {
    // The codes of a pair are the same byte of the lower and upper half word.
    const __m512i both = chunk512(at, p / 2);
    const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(both, p % 2 == 0 ? 24 : 16), 24);
    const __m512i high = _mm512_srai_epi32(p % 2 == 0 ? _mm512_slli_epi32(both, 8) : both, 24);
    const __m512i a = _mm512_castps_si512(_mm512_cvtepi32_ps(low));  // integers below 256: exact in bfloat16
    const __m512i b = _mm512_castps_si512(_mm512_cvtepi32_ps(high));
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, _mm512_set1_epi32(0xFFFF0000), 0xF8);
  }
#endif

#if defined(__AVX512VNNI__)
  static INLINE __m512i bytes(const uint8_t* at, int q) {
    return _mm512_xor_si512(chunk512(at, q), _mm512_set1_epi8(-128));
  }
#endif
};

struct Bf16 {
  static constexpr int kChunks = 32, kBlock = 16, kGroup = 2;
  static constexpr bool kScaled = false;
  static constexpr const uint8_t* kOrder = kOrder16;

  static INLINE F value(const uint8_t* at, int k, int part) {
    const U u = words(at, k / 2, part);
    return bits<F>(k % 2 == 0 ? u << 16 : u & 0xFFFF0000u);
  }

#if defined(__AVX512BF16__)
  static INLINE __m512i pair(const uint8_t* at, int p) { return chunk512(at, p); }
#endif
};

struct F16 {
  static constexpr int kChunks = 32, kBlock = 16, kGroup = 1;
  static constexpr bool kScaled = false;

  static INLINE F value(const uint8_t* at, int k, int part) {
    const U u = k % 2 == 0 ? words(at, k / 2, part) << 16 : words(at, k / 2, part);
    return bits<F>(bits<U>(widen((u & 0x7FFF0000u) >> 3, 112)) | (u & 0x80000000u));
  }
};

struct F32 {
  static constexpr int kChunks = 64, kBlock = 16, kGroup = 1;
  static constexpr bool kScaled = false;

  static INLINE F value(const uint8_t* at, int k, int part) { return bits<F>(words(at, k, part)); }
};

}  // namespace nemo

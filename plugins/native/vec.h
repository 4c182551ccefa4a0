// SPDX-License-Identifier: Apache-2.0
//
// Vectors of the widest registers that this copy of the library is compiled for, and the functions of them that
// kernels share. The library is compiled once for each instruction set (see setup.py); kernels are written over
// `F` and `kW` and compile to plain, AVX2 and AVX-512 code.

#pragma once

#include <cstring>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "lanes.h"

namespace nemo {

#if defined(__AVX512F__)
constexpr int kW = 16;
#elif defined(__AVX2__)
constexpr int kW = 8;
#else
constexpr int kW = 4;
#endif

typedef Lanes<kW>::F F;
typedef Lanes<kW>::I I;
typedef Lanes<kW>::U U;

INLINE F splat(float value) { return value - F{}; }  // unlike adding 0, this is no operation

// Goes before the body of a lambda that must not become a call.
#define INLINED __attribute__((always_inline))

template <class Work, int... I>
INLINE void unrolled(std::integer_sequence<int, I...>, const Work& work) {
  (work(std::integral_constant<int, I>{}), ...);
}
// work(0) .. work(N - 1) without a loop, so that the compiler keeps arrays of vectors that it indexes in registers.
template <int N, class Work>
INLINE void unrolled(const Work& work) {
  unrolled(std::make_integer_sequence<int, N>{}, work);
}

// The first `n` floats at `at`, then zeros; and their counterpart, which writes n floats. n >= kW means all lanes.
INLINE F load_part(const float* at, int64_t n) {
  if (n >= kW) return load<F>(at);
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), at);
#else
  F v = {};
  std::memcpy(&v, at, n * sizeof(float));
  return v;
#endif
}

INLINE void store_part(float* at, F v, int64_t n) {
  if (n >= kW) return store(at, v);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(at, static_cast<__mmask16>((1u << n) - 1), v);
#else
  std::memcpy(at, &v, n * sizeof(float));
#endif
}

// a * b + c, rounded once where the instruction set can. Explicit, so that no kernel's result depends on what the
// compiler chose to contract.
INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// Sum of the lanes, in a fixed order: the upper half is added to the lower one until one lane is left.
INLINE float sum(F v) {
#if defined(__AVX512F__)
  const auto eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  const F eight = v;
#endif
#if defined(__AVX2__)
  const auto four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
  const F four = v;
#endif
  const auto two = four + __builtin_shufflevector(four, four, 2, 3, 2, 3);
  return two[0] + two[1];
}

// exp(x) to about 2 ulp; 0 below -87.3 and clamped above 88.3, NaN stays NaN. Reduction by ln 2 in two parts, then
// the Taylor polynomial of degree 6 on [-ln2/2, ln2/2].
INLINE F exp(F x) {
  const F low = splat(-87.33654f), high = splat(88.37626f);
  const I below = x < low;
  F v = x > high ? high : x;
  v = below ? low : v;
  const F rounded = fma(v, splat(1.44269504f), splat(12582912.0f));  // 1.5 * 2^23: the integer is in the low bits
  const F n = rounded - splat(12582912.0f);
  F r = fma(n, splat(-0.693359375f), v);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  const I exponent = bits<I>(rounded) << 23;
  const F result = bits<F>(bits<I>(p) + exponent);
  return below ? F{} : result;
}

// x * sigmoid(x).
INLINE F silu(F x) { return x / (splat(1.0f) + exp(-x)); }

}  // namespace nemo

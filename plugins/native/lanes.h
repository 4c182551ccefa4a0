// SPDX-License-Identifier: Apache-2.0
//
// Vectors of W floats, the storage types of weights, and the small formats E4M3 and E2M1.

#pragma once

#include <cstdint>
#include <cstring>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "packs nibbles through little-endian words"
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int kBlock = 16;

template <int W>
struct Lanes {
  typedef float F __attribute__((vector_size(4 * W)));
  typedef int32_t I __attribute__((vector_size(4 * W)));
  typedef uint32_t U __attribute__((vector_size(4 * W)));
  typedef uint64_t Pairs __attribute__((vector_size(4 * W)));  // two 32-bit lanes each
  typedef uint16_t Halves __attribute__((vector_size(2 * W)));
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  typedef uint8_t PairBytes __attribute__((vector_size(W / 2)));
};

template <class To, class From>
INLINE To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

template <class V>
INLINE V load(const void* at) {
  V result;
  std::memcpy(&result, at, sizeof result);
  return result;
}

template <class V>
INLINE void store(void* at, V value) {
  std::memcpy(at, &value, sizeof value);
}

// Storage types: the bits of infinity, a load of W values, and the rounding of a float32 result to the type.

struct Float32 {
  typedef uint32_t Raw;
  typedef int32_t Signed;
  static constexpr Signed kInfinity = 0x7F800000;
  static INLINE float widen(Raw raw) { return bits<float>(raw); }
  template <int W>
  static INLINE typename Lanes<W>::F read(const Raw* at) {
    return load<typename Lanes<W>::F>(at);
  }
  template <int W>
  static INLINE typename Lanes<W>::U round(typename Lanes<W>::U u) {
    return u;
  }
};

struct BFloat16 {
  typedef uint16_t Raw;
  typedef int16_t Signed;
  static constexpr Signed kInfinity = 0x7F80;
  static INLINE float widen(Raw raw) { return bits<float>(uint32_t{raw} << 16); }
  template <int W>
  static INLINE typename Lanes<W>::F read(const Raw* at) {
    typedef typename Lanes<W>::U U;
    U wide = __builtin_convertvector(load<typename Lanes<W>::Halves>(at), U);
    return bits<typename Lanes<W>::F>(wide << 16);
  }
  template <int W>
  static INLINE typename Lanes<W>::U round(typename Lanes<W>::U u) {
    return (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000u;
  }
};

struct Float16 {
  typedef uint16_t Raw;
  typedef int16_t Signed;
  static constexpr Signed kInfinity = 0x7C00;
  static constexpr float kBias = 0x1p112f;  // between the exponents of float16 and float32
  static INLINE float widen(Raw raw) { return bits<float>((raw & 0x7FFFu) << 13) * kBias; }  // magnitude
  template <int W>
  static INLINE typename Lanes<W>::F read(const Raw* at) {
    typedef typename Lanes<W>::U U;
    typedef typename Lanes<W>::F F;
    U wide = __builtin_convertvector(load<typename Lanes<W>::Halves>(at), U);
    U magnitude = bits<U>(bits<F>((wide & 0x7FFF) << 13) * kBias);
    return bits<F>(magnitude | ((wide & 0x8000) << 16));
  }
  // Subnormals of float16 keep too many bits here; E4M3 rounds them to zero either way.
  template <int W>
  static INLINE typename Lanes<W>::U round(typename Lanes<W>::U u) {
    return (u + 0xFFF + ((u >> 13) & 1)) & 0xFFFFE000u;
  }
};

// E4M3 and E2M1.

INLINE float from_e4m3(uint8_t byte) {  // of a non-negative scale
  return byte < 8 ? byte * 0x1p-9f : bits<float>((uint32_t{byte} << 20) + (120u << 23));
}

INLINE uint8_t to_e4m3(float value) {  // clamped to [2^-9, 448], then to nearest, ties to even
  value = value < 0x1p-9f ? 0x1p-9f : value;
  value = value > 448.0f ? 448.0f : value;
  const uint32_t u = bits<uint32_t>(value);
  const uint32_t normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - (120u << 3);
  const uint32_t subnormal = bits<uint32_t>(value * 0x1p9f + 0x1p23f) & 0xFF;
  return static_cast<uint8_t>(value < 0x1p-6f ? subnormal : normal);
}

// The nearest 3-bit magnitude of a quotient, ties to the even code; 7 for NaN, as a sorted search finds.
template <int W>
INLINE typename Lanes<W>::I to_e2m1(typename Lanes<W>::F q) {
  return 7 + ((q <= 0.25f) + (q < 0.75f) + (q <= 1.25f) + (q < 1.75f) + (q <= 2.5f) + (q < 3.5f) + (q <= 5.0f));
}

template <int W>
INLINE typename Lanes<W>::F from_e2m1(typename Lanes<W>::I code) {
  typedef typename Lanes<W>::F F;
  const F small = __builtin_convertvector(code, F) * 0.5f;
  return code < 2 ? small : bits<F>((code << 22) + (126 << 23));
}

}  // namespace

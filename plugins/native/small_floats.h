// SPDX-License-Identifier: Apache-2.0
//
// Conversions of single values between float32 and the narrower storage types.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace nemo {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float from_bfloat16(uint16_t raw) { return from_bits(uint32_t{raw} << 16); }

// To nearest, ties to even; NaN stays NaN.
inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_float16(uint16_t raw) {
  const uint32_t sign = uint32_t{raw & 0x8000u} << 16;
  if ((raw & 0x7C00) == 0x7C00) return from_bits(sign | 0x7F800000 | (uint32_t{raw & 0x3FFu} << 13));
  return from_bits(sign | to_bits(from_bits(uint32_t{raw & 0x7FFFu} << 13) * 0x1p112f));
}

// E4M3 without infinities; NaN for the code 0x7F.
inline float from_e4m3(uint8_t raw) {
  const float sign = raw & 0x80 ? -1.0f : 1.0f;
  const int exponent = (raw >> 3) & 15, mantissa = raw & 7;
  if ((raw & 0x7F) == 0x7F) return NAN;
  if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-9f;
  return sign * from_bits((uint32_t(exponent + 120) << 23) | (uint32_t(mantissa) << 20));
}

}  // namespace nemo

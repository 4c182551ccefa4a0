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

inline float from_float16(uint16_t raw) {
  const uint32_t sign = uint32_t{raw & 0x8000u} << 16;
  if ((raw & 0x7C00) == 0x7C00) return from_bits(sign | 0x7F800000 | (uint32_t{raw & 0x3FFu} << 13));
  return from_bits(sign | to_bits(from_bits(uint32_t{raw & 0x7FFFu} << 13) * 0x1p112f));
}

}  // namespace nemo

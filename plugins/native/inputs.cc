// SPDX-License-Identifier: Apache-2.0

#include "inputs.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "op.h"
#include "small_floats.h"
#include "vec.h"

namespace nemo {
namespace {

// To E4M3 and back, ties to even, for values within +-448.
INLINE F round_e4m3(F v) {
  const U u = bits<U>(v);
  const F normal = bits<F>((u + 0x7FFFF + ((u >> 20) & 1)) & 0xFFF00000u);
  const F magic = splat(0x1.8p14f);  // float32 has steps of 2^-9, those of subnormal E4M3, there
  const F subnormal = (v + magic) - magic;
  return bits<I>(u & 0x7FFFFFFF) < bits<I>(splat(0x1p-6f)) ? subnormal : normal;
}

INLINE F clamp(F v, float low, float high) {
  v = v < splat(low) ? splat(low) : v;
  return v > splat(high) ? splat(high) : v;
}

void round_fp8(float* x, int64_t n, float scale) {
  for (int64_t i = 0; i < n; i += kW) {
    store(x + i, round_e4m3(clamp(load<F>(x + i) / splat(scale), -448.0f, 448.0f)));
  }
}

// E2M1 magnitude of a ratio, ties to even.
inline float round_e2m1(float ratio) {
  if (ratio < 2) return std::nearbyint(ratio * 2) / 2;
  if (ratio < 4) return std::nearbyint(ratio);
  return std::min(std::nearbyint(ratio / 2) * 2, 6.0f);
}

// Blocks of 16 with an E4M3 scale each, which stays in the result; plugins/formats/activations.py has the formula.
void round_nvfp4(float* x, int64_t n, float scale) {
  for (int64_t b = 0; b < n; b += 16) {
    float top = 0;
    for (int i = 0; i < 16; ++i) top = std::max(top, std::fabs(x[b + i]));
    const float wanted = std::clamp(top / (scale * 6.0f), 0x1p-9f, 448.0f);
    float lanes[kW];
    store(lanes, round_e4m3(splat(wanted)));
    const float step = lanes[0] * scale;
    for (int i = 0; i < 16; ++i) x[b + i] = std::copysign(round_e2m1(std::fabs(x[b + i]) / step) * lanes[0], x[b + i]);
  }
}

INLINE U bfloat16_bits(F v) {  // in the upper half of each lane
  const U u = bits<U>(v);
  const U rounded = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000u;
  return (u & 0x7FFFFFFF) > 0x7F800000u ? (u | 0x400000u) & 0xFFFF0000u : rounded;
}

// Codes of 32 values and their scale. Blocks too small for a quotient are zeros; NaN and infinities give a NaN scale,
// so that they reach the results.
float quantize_int8(const float* x, float* codes) {
  F top = {};
  for (int i = 0; i < 32; i += kW) {
    const F v = bits<F>(bits<U>(load<F>(x + i)) & 0x7FFFFFFFu);
    top = v > top ? v : top;
  }
  float lanes[kW], most = 0;
  store(lanes, top);
  for (float v : lanes) most = std::max(most, v);
  float sum_of_zeros = 0;  // NaN if a value is NaN or infinite: comparisons above may have lost a NaN
  for (int i = 0; i < 32; ++i) sum_of_zeros += x[i] * 0.0f;
  if (sum_of_zeros != 0 || most < 0x1p-100f) {
    std::fill_n(codes, 32, 0.0f);
    return sum_of_zeros;
  }
  const float scale = most / 127.0f, inverse = 127.0f / most;
  const F magic = splat(0x1.8p23f);
  for (int i = 0; i < 32; i += kW) store(codes + i, (load<F>(x + i) * splat(inverse) + magic) - magic);
  return scale;
}

int64_t bytes_of(const InputLayout& layout, int64_t padded) {
  switch (layout.storage) {
    case Storage::kFloat32:
      return padded * 4;
    case Storage::kBFloat16:
      return padded * 2;
    case Storage::kInt8:
      return padded / kDepth * static_cast<int64_t>(sizeof(Int8Superblock));
  }
  return 0;
}

}  // namespace

Rounding rounding_named(const std::string& name) {
  if (name == "none") return Rounding::kNone;
  if (name == "fp8") return Rounding::kFp8;
  if (name == "nvfp4") return Rounding::kNvfp4;
  throw Invalid(("there is no activation format " + name).c_str());
}

Inputs::Inputs(const InputLayout& layout, Precision precision, int64_t columns, int64_t tokens)
    : layout_(layout),
      precision_(precision),
      columns_(columns),
      padded_(superblocks_of(columns) * kDepth),
      // An odd number of cache lines, so that the inputs of a tile do not all fall into one set of the cache.
      stride_(((bytes_of(layout, padded_) + kChunk - 1) / kChunk | 1) * kChunk) {
  const size_t bytes = std::max<size_t>(stride_ * tokens, kChunk);
  data_.reset(static_cast<uint8_t*>(std::aligned_alloc(kChunk, bytes)));
  if (!data_) throw std::bad_alloc();
}

void Inputs::Free::operator()(uint8_t* p) const { std::free(p); }

void Inputs::set(int64_t token, const float* x, Rounding rounding, float scale) {
  uint8_t* out = data_.get() + token * stride_;
  thread_local std::vector<float> scratch;
  const bool direct = layout_.storage == Storage::kFloat32;
  if (!direct && static_cast<int64_t>(scratch.size()) < padded_) scratch.resize(padded_);
  float* values = direct ? reinterpret_cast<float*>(out) : scratch.data();
  std::memcpy(values, x, columns_ * sizeof(float));
  std::fill(values + columns_, values + padded_, 0.0f);
  if (rounding == Rounding::kFp8) round_fp8(values, padded_, scale);
  if (rounding == Rounding::kNvfp4) round_nvfp4(values, padded_, scale);
  switch (layout_.storage) {
    case Storage::kBFloat16:
      return store_bfloat16(values, out);
    case Storage::kInt8:
      return store_int8(values, out);
    case Storage::kFloat32:
      break;
  }
  if (precision_ == Precision::kBFloat16) {
    for (int64_t i = 0; i < padded_; i += kW) store(values + i, bits<F>(bfloat16_bits(load<F>(values + i))));
  } else if (precision_ == Precision::kInt8) {
    for (int64_t i = 0; i < padded_; i += 32) {
      const float step = quantize_int8(values + i, values + i);
      for (int j = 0; j < 32; ++j) values[i + j] *= step;
    }
  }
}

#if defined(__AVX512BF16__)
void Inputs::store_bfloat16(const float* x, uint8_t* out) const {
  uint16_t index[32];
  for (int i = 0; i < 32; ++i) {
    index[i] = static_cast<uint16_t>(i / layout_.group * layout_.group + layout_.order[i % layout_.group]);
  }
  const __m512i order = _mm512_loadu_si512(index);
  for (int64_t i = 0; i < padded_; i += 32) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i));
    _mm512_store_si512(out + 2 * i, _mm512_permutexvar_epi16(order, bits<__m512i>(both)));
  }
}
#else
void Inputs::store_bfloat16(const float*, uint8_t*) const {}  // no kernel here takes them
#endif

void Inputs::store_int8(const float* x, uint8_t* out) const {
  Int8Superblock* to = reinterpret_cast<Int8Superblock*>(out);
  for (int64_t s = 0; s < padded_ / kDepth; ++s, ++to) {
    float codes[kDepth];
    for (int half = 0; half < 2; ++half) {
      to->scale[2 * half] = to->scale[2 * half + 1] = quantize_int8(x + s * kDepth + half * 32, codes + half * 32);
    }
    for (int b = 0; b < 4; ++b) {
      int32_t total = 0;
      for (int i = 0; i < 16; ++i) total += static_cast<int32_t>(codes[b * 16 + i]);
      to->bias[b] = -layout_.offset * total;
    }
    for (int i = 0; i < kDepth; i += layout_.group) {
      for (int j = 0; j < layout_.group; ++j) {
        to->codes[i + j] = static_cast<int8_t>(codes[i + layout_.order[j]]);
      }
    }
  }
}

}  // namespace nemo

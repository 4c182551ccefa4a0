// SPDX-License-Identifier: Apache-2.0

#include "weights.h"

#include <cmath>

extern "C" void nemo_pack_panels(int format, int64_t rows, int64_t columns, const uint8_t* codes, const uint8_t* scales,
                                 int64_t first, int64_t count, uint8_t* out);

namespace nemo::cases {
namespace {

// Any code stands for a number, except for E4M3's NaN.
void fill_codes(Rng& rng, Format format, const Value& codes) {
  for (size_t i = 0; i < codes.bytes(); ++i) {
    const uint8_t code = static_cast<uint8_t>(rng.between(0, 255));
    codes.as<uint8_t>()[i] = format == Format::kFp8 && (code & 0x7F) == 0x7F ? 0 : code;
  }
}

}  // namespace

void Weight::pack(uint8_t* out) const {
  nemo_pack_panels(static_cast<int>(format), rows, columns, codes->as<uint8_t>(),
                   scales ? scales->as<uint8_t>() : nullptr, 0, panels_of(rows), out);
}

Format random_format(Rng& rng) { return static_cast<Format>(rng.between(0, kFormats - 1)); }

Format random_stored_format(Rng& rng) {
  return rng.one_of({Format::kF32, Format::kF16, Format::kBf16, Format::kFp8, Format::kNvfp4});
}

const char* stored_name(Format format) {
  return format == Format::kFp8 ? "fp8" : format == Format::kNvfp4 ? "nvfp4" : "plain";
}

int64_t width_for(Format format, const std::string& rounding, int64_t columns) {
  return format == Format::kNvfp4 || rounding == "nvfp4" ? (columns + 15) / 16 * 16 : columns;
}

Weight random_weight(Rng& rng, Format format, int64_t rows, int64_t columns) {
  Weight weight{format, rows, columns, nullptr, nullptr};
  const int64_t blocks = (columns + 31) / 32;
  switch (format) {
    case Format::kF32:
      weight.codes = normals(rng, {rows, columns});
      return weight;
    case Format::kF16:
      weight.codes = normals(rng, {rows, columns}, abi::kFloat16);
      return weight;
    case Format::kBf16:
      weight.codes = normals(rng, {rows, columns}, abi::kBFloat16);
      return weight;
    case Format::kFp8:
      weight.codes = tensor(rng, abi::kFloat8E4M3, {rows, columns});
      break;
    case Format::kNvfp4:
      weight.codes = tensor(rng, abi::kUint8, {rows, columns / 2});
      weight.scales = tensor(rng, abi::kFloat8E4M3, {rows, columns / 16});
      for (size_t i = 0; i < weight.scales->bytes(); ++i) {
        weight.scales->as<uint8_t>()[i] = static_cast<uint8_t>(rng.between(0, 0x7E));
      }
      break;
    case Format::kInt8:
    case Format::kInt4:
      weight.codes = tensor(rng, abi::kUint8, {rows, format == Format::kInt8 ? columns : (columns + 1) / 2});
      weight.scales = normals(rng, {rows, blocks}, abi::kBFloat16);
      break;
  }
  fill_codes(rng, format, *weight.codes);
  return weight;
}

std::string set_arithmetic(Rng& rng, fake::Attributes& attributes) {
  if (rng.chance(80)) attributes.texts["precision"] = rng.one_of({"float32", "bfloat16", "int8"});
  if (rng.chance(30)) return "none";
  return attributes.texts["activation_format"] = rng.one_of({"none", "fp8", "nvfp4"});
}

std::shared_ptr<Value> scales(Rng& rng, std::vector<int64_t> dims) {
  auto value = normals(rng, std::move(dims));
  for (int64_t i = 0; i < value->size(); ++i) {
    value->as<float>()[i] = 0.01f + 0.1f * std::fabs(value->as<float>()[i]);
  }
  return value;
}

std::shared_ptr<Value> scale(Rng& rng) {
  return scales(rng, rng.chance(50) ? std::vector<int64_t>{} : std::vector<int64_t>{1});
}

}  // namespace nemo::cases

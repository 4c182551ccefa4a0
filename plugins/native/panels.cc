// SPDX-License-Identifier: Apache-2.0
//
// The table of formats, and the packing of panels.

#include "panels.h"

#include <algorithm>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "op.h"

namespace nemo {
namespace {

constexpr FormatInfo kInfo[kFormats] = {
    {"nvfp4", 4, 16, 1}, {"int4", 4, 32, 2},  {"fp8", 8, 0, 0},  {"int8", 8, 32, 2},
    {"bf16", 16, 0, 0},  {"f16", 16, 0, 0},  {"f32", 32, 0, 0},
};

#if defined(__AVX512F__)
// 16 words of 16 rows: four rounds that swap halves of ever larger groups.
void transpose_tile(const uint8_t* rows, int64_t stride, uint8_t* out) {
  __m512i a[16], b[16];
  for (int r = 0; r < 16; ++r) a[r] = _mm512_loadu_si512(rows + r * stride);
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
  }
  for (int r = 0; r < 16; r += 4) {
    for (int i = 0; i < 2; ++i) {
      a[r + 2 * i] = _mm512_unpacklo_epi64(b[r + i], b[r + i + 2]);
      a[r + 2 * i + 1] = _mm512_unpackhi_epi64(b[r + i], b[r + i + 2]);
    }
  }
  // a[4 q + i] now has word i of every 128-bit lane, of rows 4 q .. 4 q + 3.
  for (int i = 0; i < 4; ++i) {
    const __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88), low2 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD);
    const __m512i up = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    const __m512i up2 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xDD);
    _mm512_storeu_si512(out + i * kChunk, _mm512_shuffle_i32x4(low, up, 0x88));
    _mm512_storeu_si512(out + (i + 8) * kChunk, _mm512_shuffle_i32x4(low, up, 0xDD));
    _mm512_storeu_si512(out + (i + 4) * kChunk, _mm512_shuffle_i32x4(low2, up2, 0x88));
    _mm512_storeu_si512(out + (i + 12) * kChunk, _mm512_shuffle_i32x4(low2, up2, 0xDD));
  }
}
#endif

// Copies the words of up to 16 rows, `words` each, to chunks; rows and words that are not there become zeros.
// `have` is how many bytes of a row there are.
void transpose(const uint8_t* rows, int64_t stride, int64_t count, int64_t have, int64_t words, uint8_t* out) {
  const int64_t whole = std::min(have / 4, words);
  int64_t w = 0;
#if defined(__AVX512F__)
  if (count == kPanelRows) {
    for (; w + 16 <= whole; w += 16) transpose_tile(rows + w * 4, stride, out + w * kChunk);
  }
#endif
  for (; w < whole; ++w) {
    for (int64_t r = 0; r < count; ++r) std::memcpy(out + w * kChunk + r * 4, rows + r * stride + w * 4, 4);
    if (count < kPanelRows) std::memset(out + w * kChunk + count * 4, 0, (kPanelRows - count) * 4);
  }
  if (whole == words) return;
  std::memset(out + whole * kChunk, 0, (words - whole) * kChunk);
  const int64_t rest = std::clamp<int64_t>(have - whole * 4, 0, 3);
  for (int64_t r = 0; r < count; ++r) std::memcpy(out + whole * kChunk + r * 4, rows + r * stride + whole * 4, rest);
}

}  // namespace

const FormatInfo& info(Format format) { return kInfo[static_cast<int>(format)]; }

Format format_named(const std::string& name) {
  for (int i = 0; i < kFormats; ++i) {
    if (name == kInfo[i].name) return static_cast<Format>(i);
  }
  throw Invalid(("there is no panel format " + name).c_str());
}

Precision precision_named(const std::string& name) {
  if (name == "float32") return Precision::kFloat32;
  if (name == "bfloat16") return Precision::kBFloat16;
  if (name == "int8") return Precision::kInt8;
  throw Invalid(("there is no precision " + name).c_str());
}

Precision effective(Format format, Precision wanted) {
  const bool integer = info(format).block > 0;
  return wanted == Precision::kInt8 && !integer ? Precision::kBFloat16 : wanted;
}

void pack_panel(const StoredWeight& weight, int64_t panel, uint8_t* out) {
  const FormatInfo& f = info(weight.format);
  const int64_t first = panel * kPanelRows, count = std::min(kPanelRows, weight.rows - first);
  const int64_t row_bytes = (weight.columns * f.code_bits + 7) / 8;
  const int64_t row_scales = f.block == 0 ? 0 : (weight.columns + f.block - 1) / f.block * f.scale_size;
  const int64_t words = f.code_bits * 2;
  for (int64_t s = 0; s < superblocks_of(weight.columns); ++s) {
    const int64_t from = s * words * 4;
    transpose(weight.codes + first * row_bytes + from, row_bytes, count, row_bytes - from, words, out);
    out += words * kChunk;
    if (f.block == 0) continue;
    transpose(weight.scales + first * row_scales + s * 4, row_scales, count, row_scales - s * 4, 1, out);
    out += kChunk;
  }
}

}  // namespace nemo

// For the build, through ctypes: panels first .. first + count - 1 of a stored weight. Formats by their number.
extern "C" __attribute__((visibility("default"))) void nemo_pack_panels(int format, int64_t rows, int64_t columns,
                                                                        const uint8_t* codes, const uint8_t* scales,
                                                                        int64_t first, int64_t count, uint8_t* out) {
  const nemo::StoredWeight weight{static_cast<nemo::Format>(format), rows, columns, codes, scales};
  const int64_t bytes = nemo::panel_bytes(weight.format, columns);
  for (int64_t i = 0; i < count; ++i) nemo::pack_panel(weight, first + i, out + i * bytes);
}

// SPDX-License-Identifier: Apache-2.0
//
// Weights in panels: the layout that the CPU kernels multiply.
//
// A panel is 16 output rows of a weight [N, K]; it is cut along K into superblocks of 64 columns. A superblock is a
// row of 64-byte chunks: the codes, then, where the format has them, the block scales. Every chunk holds one 32-bit
// word of each of the 16 rows, words and the codes within them in the order in which a row stores them. So a panel
// is its rows' words transposed, one lane of a vector register is one output row, no sum runs across lanes, and
// scales lie beside the codes they belong to. K is padded to 64 and N to 16 with zeros.
//
//   format  codes of a superblock          block scales        bytes  bits a weight
//   nvfp4   8 chunks, 8 a word             16 columns, E4M3      576   4.5
//   int4    8 chunks, 8 a word, value + 8  32 columns, bfloat16  576   4.5
//   fp8     16 chunks, 4 a word            -                    1024   8
//   int8    16 chunks, 4 a word            32 columns, bfloat16 1088   8.5
//   bf16    32 chunks, 2 a word            -                    2048   16
//   f16     32 chunks, 2 a word            -                    2048   16
//   f32     64 chunks                      -                    4096   32
//
// plugins/panels.py has the same table for the build.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace nemo {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kDepth = 64;  // columns of a superblock
constexpr int64_t kChunk = 64;  // bytes

enum class Format : int { kNvfp4, kInt4, kFp8, kInt8, kBf16, kF16, kF32 };
constexpr int kFormats = 7;

struct FormatInfo {
  const char* name;
  int code_bits;   // of one weight
  int block;       // columns that share a scale; 0 without block scales
  int scale_size;  // bytes of one
  int64_t superblock() const { return (code_bits * 2 + (block ? 1 : 0)) * kChunk; }
};

const FormatInfo& info(Format format);
// Throws Invalid for a name that is not in the table.
Format format_named(const std::string& name);

inline int64_t panels_of(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }
inline int64_t superblocks_of(int64_t columns) { return (columns + kDepth - 1) / kDepth; }
inline int64_t panel_bytes(Format format, int64_t columns) {
  return superblocks_of(columns) * info(format).superblock();
}

// A weight as checkpoints store it: row-major codes, and row-major block scales where the format has them.
struct StoredWeight {
  Format format;
  int64_t rows, columns;
  const uint8_t* codes;
  const uint8_t* scales;
};

// Lays rows 16*panel .. 16*panel+15 out as a panel.
void pack_panel(const StoredWeight& weight, int64_t panel, uint8_t* out);

// What a multiplication rounds its inputs to, besides what the checkpoint asks for: nothing, bfloat16, or int8 in
// blocks of 32 with a scale each.
enum class Precision : int { kFloat32, kBFloat16, kInt8 };
Precision precision_named(const std::string& name);
// What is done where `wanted` is asked for: formats without integer codes take bfloat16 for int8.
Precision effective(Format format, Precision wanted);

// How a kernel wants its inputs.
enum class Storage : int {
  kFloat32,   // float32, in order
  kBFloat16,  // bfloat16, each `group` of columns permuted: position i holds column order[i]
  kInt8,      // an Int8Superblock for each superblock, its codes permuted likewise
};

struct InputLayout {
  Storage storage;
  int group;
  const uint8_t* order;
  int offset;  // kInt8: what the weights' codes are shifted by
};

struct Int8Superblock {
  int8_t codes[kDepth];
  int32_t bias[kDepth / 16];  // -offset * sum of the codes of 16 columns
  float scale[kDepth / 16];   // of 16 columns; equal for the two halves of 32
};

// out[t * 16 + r] = sum over k of the panel's row r times input t, for a fixed number of inputs, `stride` bytes apart.
typedef void (*PanelKernel)(const uint8_t* panel, int64_t superblocks, const uint8_t* x, int64_t stride, float* out);

struct Multiplier {
  InputLayout layout;
  int tiles;               // how many sizes there are
  const int* sizes;        // of token tiles, largest first; the last is 1
  const PanelKernel* run;  // one a size

  // Results for a token do not depend on how many others there are.
  void operator()(const uint8_t* panel, int64_t superblocks, const uint8_t* x, int64_t stride, int64_t tokens,
                  float* out) const {
    for (int i = 0; i < tiles; ++i) {
      for (; tokens >= sizes[i]; tokens -= sizes[i]) {
        run[i](panel, superblocks, x, stride, out);
        x += sizes[i] * stride;
        out += sizes[i] * kPanelRows;
      }
    }
  }
};

Multiplier multiplier(Format format, Precision precision);

}  // namespace nemo

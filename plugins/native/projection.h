// SPDX-License-Identifier: Apache-2.0
//
// A projection y = x W^T whose weight is packed in panels, or is stored by rows and packed a panel at a time.

#pragma once

#include <algorithm>
#include <vector>

#include "inputs.h"
#include "op.h"
#include "panels.h"

namespace nemo {

class Projection {
 public:
  static constexpr int64_t kTokenBlock = 96;  // inputs that stay in the second-level cache while panels pass

  // Either `panels` or `weight` has the data.
  Projection(Format format, Precision precision, Rounding rounding, int64_t rows, int64_t columns, float weight_scale,
             float input_scale)
      : precision_(effective(format, precision)),
        multiplier_(multiplier(format, precision_)),
        rounding_(rounding),
        weight_{format, rows, columns, nullptr, nullptr},
        panel_bytes_(nemo::panel_bytes(format, columns)),
        input_scale_(input_scale),
        factor_(weight_scale * (rounding == Rounding::kNone ? 1.0f : input_scale)) {}

  void use_panels(const uint8_t* panels) { panels_ = panels; }
  void use_rows(const uint8_t* codes, const uint8_t* scales) {
    weight_.codes = codes;
    weight_.scales = scales;
  }

  int64_t rows() const { return weight_.rows; }
  int64_t columns() const { return weight_.columns; }

  Inputs inputs(int64_t tokens) const { return Inputs(multiplier_.layout, precision_, columns(), tokens); }
  void set(Inputs& inputs, int64_t token, const float* x) const { inputs.set(token, x, rounding_, input_scale_); }

  // Panels that make a task: enough bytes to stream, few enough to balance the threads.
  int64_t task_panels() const { return std::max<int64_t>(1, kTaskBytes / panel_bytes_); }
  int64_t tasks() const { return (panels_of(rows()) + task_panels() - 1) / task_panels(); }

  // Of multiplying with so many inputs; reading a weight counts for one.
  int64_t cost(int64_t inputs) const { return rows() * columns() * (inputs + 1); }

  // Multiplies the panels of a task with inputs from .. from + count - 1 and calls
  // sink(i, first output row, how many, values) for each panel and each input from + i.
  template <class Sink>
  void run_task(int64_t task, const Inputs& inputs, int64_t from, int64_t count, const Sink& sink) const {
    float out[kTokenBlock * kPanelRows];
    const int64_t first = task * task_panels(), last = std::min(first + task_panels(), panels_of(rows()));
    for (int64_t block = 0; block < count; block += kTokenBlock) {
      const int64_t tokens = std::min(kTokenBlock, count - block);
      for (int64_t panel = first; panel < last; ++panel) {
        multiplier_(packed(panel), superblocks_of(columns()), inputs.at(from + block), inputs.stride(), tokens, out);
        const int64_t row = panel * kPanelRows, count_rows = std::min(kPanelRows, rows() - row);
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t r = 0; r < kPanelRows; ++r) out[t * kPanelRows + r] *= factor_;
          sink(block + t, row, count_rows, out + t * kPanelRows);
        }
      }
    }
  }

 private:
  static constexpr int64_t kTaskBytes = 1 << 16;  // of weights

  const uint8_t* packed(int64_t panel) const {
    if (panels_ != nullptr) return panels_ + panel * panel_bytes_;
    thread_local std::vector<uint8_t> scratch;
    if (static_cast<int64_t>(scratch.size()) < panel_bytes_) scratch.resize(panel_bytes_);
    pack_panel(weight_, panel, scratch.data());
    return scratch.data();
  }

  Precision precision_;
  Multiplier multiplier_;
  Rounding rounding_;
  StoredWeight weight_;
  int64_t panel_bytes_;
  float input_scale_, factor_;
  const uint8_t* panels_ = nullptr;
};

// The attributes of a node that say how its weights are stored and what its inputs are rounded to.
class ProjectionOptions {
 public:
  explicit ProjectionOptions(const Node& node)
      : format_name_(node.text("weight_format", "plain")),
        rounding_(rounding_named(node.text("activation_format", "none"))),
        precision_(precision_named(node.text("precision", "float32"))) {}

  // Stored tensors of a weight: codes, then scales.
  int64_t parts() const { return format_name_ == "nvfp4" ? 3 : format_name_ == "fp8" ? 2 : 1; }
  Rounding rounding() const { return rounding_; }

  int64_t packed_bytes(int64_t rows, int64_t columns) const {
    return panels_of(rows) * panel_bytes(format_named(format_name_), columns);
  }

  Projection packed(const uint8_t* panels, int64_t rows, int64_t columns, float weight_scale, float input_scale) const {
    Projection projection(format_named(format_name_), precision_, rounding_, rows, columns, weight_scale, input_scale);
    projection.use_panels(panels);
    return projection;
  }

  Projection stored(const Tensor& weight, const Tensor& block_scales, float weight_scale, float input_scale) const {
    require(weight.rank == 2, "a stored weight must be a matrix");
    const Format format = stored_format(weight.type);
    const int64_t columns = weight.dims[1] * (format == Format::kNvfp4 ? 2 : 1);
    Projection projection(format, precision_, rounding_, weight.dims[0], columns, weight_scale, input_scale);
    projection.use_rows(weight.bytes(), block_scales.bytes());
    return projection;
  }

 private:
  Format stored_format(int type) const {
    if (format_name_ != "plain") return format_named(format_name_);
    switch (type) {
      case abi::kFloat:
        return Format::kF32;
      case abi::kFloat16:
        return Format::kF16;
      case abi::kBFloat16:
        return Format::kBf16;
      default:
        throw Invalid("a plain weight must be float32, float16 or bfloat16");
    }
  }

  std::string format_name_;
  Rounding rounding_;
  Precision precision_;
};

// The value of a scalar; 1 if it is absent.
inline float scalar(const Tensor& tensor) { return tensor ? element(tensor, 0) : 1.0f; }

// Which rows of the flattened tokens of x [B, L, .] are within `lengths`; all rows if there are no lengths.
inline std::vector<int64_t> valid_rows(const Tensor& x, const Tensor& lengths) {
  std::vector<int64_t> rows;
  if (!lengths || x.rank != 3) {
    rows.resize(x.rows());
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
    return rows;
  }
  for (int64_t b = 0; b < x.dims[0]; ++b) {
    require(lengths.ints()[b] >= 0 && lengths.ints()[b] <= x.dims[1], "lengths are not within those of x");
    for (int64_t t = 0; t < lengths.ints()[b]; ++t) rows.push_back(b * x.dims[1] + t);
  }
  return rows;
}

// Of an element that inputs are rounded from.
constexpr int64_t kRoundingCost = 4;

// Runs work(i), of some cost, for every token.
template <class Work>
void each_token(const Context& context, size_t tokens, int64_t cost, const Work& work) {
  constexpr size_t kGroup = 8;
  context.parallel((tokens + kGroup - 1) / kGroup, tokens * cost, [&](size_t task) {
    const size_t last = std::min(tokens, (task + 1) * kGroup);
    for (size_t i = task * kGroup; i < last; ++i) work(static_cast<int64_t>(i));
  });
}

}  // namespace nemo

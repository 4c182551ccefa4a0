// SPDX-License-Identifier: Apache-2.0
//
// The inputs of a multiplication: rounded as the checkpoint and the chosen precision say, stored as a kernel wants.

#pragma once

#include <memory>
#include <string>

#include "panels.h"

namespace nemo {

// What a checkpoint rounds the inputs of a projection to.
enum class Rounding : int { kNone, kFp8, kNvfp4 };
Rounding rounding_named(const std::string& name);

class Inputs {
 public:
  // Room for `tokens` inputs of `columns` values.
  Inputs(const InputLayout& layout, Precision precision, int64_t columns, int64_t tokens);

  // Stores x, rounded with the checkpoint's `scale` and divided by it: results are to be multiplied by `factor`.
  void set(int64_t token, const float* x, Rounding rounding = Rounding::kNone, float scale = 1.0f);

  const uint8_t* at(int64_t token) const { return data_.get() + token * stride_; }
  int64_t stride() const { return stride_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  void store_bfloat16(const float* x, uint8_t* out) const;
  void store_int8(const float* x, uint8_t* out) const;

  InputLayout layout_;
  Precision precision_;
  int64_t columns_, padded_, stride_;
  std::unique_ptr<uint8_t[], Free> data_;
};

}  // namespace nemo

// SPDX-License-Identifier: Apache-2.0
//
// Random weights as checkpoints store them, and in panels.

#pragma once

#include "case.h"
#include "panels.h"

namespace nemo::cases {

struct Weight {
  Format format;
  int64_t rows, columns;
  std::shared_ptr<Value> codes, scales;  // no scales where the format has no blocks

  size_t panel_bytes() const { return panels_of(rows) * nemo::panel_bytes(format, columns); }
  void pack(uint8_t* out) const;
};

Format random_format(Rng& rng);
// Only formats that checkpoints have: plain ones, fp8 and nvfp4.
Format random_stored_format(Rng& rng);
// The attribute `weight_format` of ops on stored weights.
const char* stored_name(Format format);
// A width that a weight of the format may have, near `columns`.
int64_t width_for(Format format, const std::string& rounding, int64_t columns);
Weight random_weight(Rng& rng, Format format, int64_t rows, int64_t columns);

// Sets `precision` and `activation_format`, each at times; returns what inputs are rounded to.
std::string set_arithmetic(Rng& rng, fake::Attributes& attributes);

// A positive scale: a scalar of rank 0 or 1, or `count` of them.
std::shared_ptr<Value> scale(Rng& rng);
std::shared_ptr<Value> scales(Rng& rng, std::vector<int64_t> dims);

}  // namespace nemo::cases

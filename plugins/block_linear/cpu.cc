// SPDX-License-Identifier: Apache-2.0
//
// BlockLinear on the CPU; see schema.py. Two forms: `nemo::BlockLinear` multiplies a weight as the checkpoint
// stores it, each panel packed when it is used; `nemo.cpu::BlockLinear` has a weight that the build packed.

#include <algorithm>
#include <cstring>

#include "op.h"
#include "panels.h"
#include "projection.h"

namespace nemo {
namespace {

struct BlockLinear {
  explicit BlockLinear(const Node& node)
      : options_(node), packed_rows_(node.integer("rows", 0)), packed_columns_(node.integer("columns", 0)) {}

  void compute(Context& context) {
    const Tensor x = context.input(0), lengths = context.input(2);
    const Projection projection = packed_rows_ ? packed(context) : stored(context);
    require(x.type == abi::kFloat, "BlockLinear: x must be float32");
    require(x.rank > 0, "BlockLinear: x is a scalar");
    require(x.last() == projection.columns(), "BlockLinear: x and the weight have different widths");

    const std::vector<int64_t> tokens = valid_rows(x, lengths);
    Inputs inputs = projection.inputs(static_cast<int64_t>(tokens.size()));
    each_token(context, tokens.size(), kRoundingCost * projection.columns(), [&](int64_t i) {
      projection.set(inputs, i, x.floats() + tokens[i] * projection.columns());
    });
    int64_t dims[kMaxRank];
    std::copy(x.dims, x.dims + x.rank, dims);
    dims[x.rank - 1] = projection.rows();
    const Tensor y = context.output(0, dims, x.rank);

    // A block of tokens at a time for all panels, so that the tokens stay in the cache.
    for (int64_t from = 0; from < static_cast<int64_t>(tokens.size()); from += Projection::kTokenBlock) {
      const int64_t count = std::min<int64_t>(Projection::kTokenBlock, tokens.size() - from);
      context.parallel(projection.tasks(), projection.cost(count), [&](size_t task) {
        projection.run_task(task, inputs, from, count, [&](int64_t i, int64_t row, int64_t rows, const float* values) {
          float* to = y.mutable_floats() + tokens[from + i] * projection.rows() + row;
          std::memcpy(to, values, rows * sizeof(float));
        });
      });
    }
  }

 private:
  // Inputs: x, panels, lengths, weight scale, input scale.
  Projection packed(const Context& context) const {
    const Tensor panels = context.input(1);
    require(panels.size() == options_.packed_bytes(packed_rows_, packed_columns_), "BlockLinear: bytes of the panels");
    return options_.packed(panels.bytes(), packed_rows_, packed_columns_, scalar(context.input(3)),
                           scalar(context.input(4)));
  }

  // Inputs: x, weight, lengths, weight_scale, weight_scale_2, input_scale.
  Projection stored(const Context& context) const {
    const Tensor scale = context.input(3);
    return options_.stored(context.input(1), scale, scalar(options_.parts() == 3 ? context.input(4) : scale),
                           scalar(context.input(5)));
  }

  const ProjectionOptions options_;
  const int64_t packed_rows_, packed_columns_;
};

const Registration<BlockLinear> stored{{"nemo",
                                        "BlockLinear",
                                        {abi::kRequired, abi::kRequired, abi::kOptional, abi::kOptional,
                                         abi::kOptional, abi::kOptional},
                                        1}};
const Registration<BlockLinear> packed{
    {"nemo.cpu",
     "BlockLinear",
     {abi::kRequired, abi::kRequired, abi::kOptional, abi::kOptional, abi::kOptional},
     1}};

}  // namespace
}  // namespace nemo

// SPDX-License-Identifier: Apache-2.0
//
// RoutedExperts on the CPU; see schema.py. Two forms, as of BlockLinear: `nemo::RoutedExperts` takes the tensors of
// every expert as the checkpoint stores them, `nemo.cpu::RoutedExperts` two stacks of packed weights.
//
// Pairs of token and choice are sorted by expert. Each chosen expert's weights are read once for all of its tokens.
// A token's results are added in the order of its choices, so they do not depend on the other tokens.

#include <algorithm>

#include "op.h"
#include "panels.h"
#include "projection.h"

namespace nemo {
namespace {

// The pairs of one expert: order[first] .. order[first + count - 1].
struct Group {
  int64_t expert, first, count;
};

struct Pairs {
  Pairs(const std::vector<int64_t>& tokens, const int64_t* indices, int64_t top_k, int64_t experts) {
    std::vector<int64_t> counts(experts + 1, 0);
    for (const int64_t token : tokens) {
      for (int64_t j = 0; j < top_k; ++j) {
        const int64_t expert = indices[token * top_k + j];
        require(expert >= 0 && expert < experts, "RoutedExperts: an index is not that of an expert");
        ++counts[expert + 1];
      }
    }
    for (int64_t e = 0; e < experts; ++e) {
      if (counts[e + 1] > 0) groups.push_back({e, counts[e], counts[e + 1]});
      counts[e + 1] += counts[e];
    }
    order.resize(tokens.size() * top_k);
    place.resize(order.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
      for (int64_t j = 0; j < top_k; ++j) {
        const int64_t pair = static_cast<int64_t>(i) * top_k + j;
        place[pair] = counts[indices[tokens[i] * top_k + j]]++;
        order[place[pair]] = pair;
      }
    }
  }

  std::vector<Group> groups;
  std::vector<int64_t> order;  // pairs (position of the token * top_k + choice) by expert
  std::vector<int64_t> place;  // the inverse
};

struct RoutedExperts {
  explicit RoutedExperts(const Node& node)
      : options_(node),
        experts_(node.integer("num_experts", 0)),
        width_(node.integer("width", 0)),
        inner_(node.integer("inner", 0)) {}

  void compute(Context& context) {
    const Tensor x = context.input(0), indices = context.input(1), weights = context.input(2);
    require(x.type == abi::kFloat && x.rank == 3 && indices.rank == 3, "RoutedExperts: shapes or types");
    require(indices.rows() == x.rows() && weights.size() == indices.size(), "RoutedExperts: x, indices and weights");
    require(indices.last() > 0, "RoutedExperts: no choices");
    const Tensor y = context.output(0, x.dims, 3);
    const int64_t width = x.last(), top_k = indices.last();
    const std::vector<int64_t> tokens = valid_rows(x, context.input(3));
    if (tokens.empty()) return;
    const Pairs pairs(tokens, indices.ints(), top_k, experts_);
    const int64_t count = static_cast<int64_t>(pairs.order.size());

    std::vector<Projection> up, down;
    for (const Group& group : pairs.groups) {
      up.push_back(projection(context, group.expert, 0));
      down.push_back(projection(context, group.expert, 1));
      require(up.back().columns() == width && down.back().rows() == width, "RoutedExperts: an expert's width differs");
      require(up.back().rows() == up.front().rows() && down.back().columns() == up.front().rows(),
              "RoutedExperts: an expert's inner width differs");
    }
    const int64_t inner = up.front().rows();
    std::vector<int64_t> group_of(count);
    for (size_t g = 0; g < pairs.groups.size(); ++g) {
      const Group& group = pairs.groups[g];
      std::fill_n(group_of.begin() + group.first, group.count, static_cast<int64_t>(g));
    }

    Inputs outer = up.front().inputs(count);
    each_token(context, count, kRoundingCost * width, [&](int64_t i) {
      up[group_of[i]].set(outer, i, x.floats() + tokens[pairs.order[i] / top_k] * width);
    });
    std::unique_ptr<float[]> hidden(new float[count * inner]);
    run(context, pairs, up, outer, [&](int64_t i, int64_t row, int64_t rows, const float* values) {
      float* to = hidden.get() + i * inner + row;
      for (int64_t r = 0; r < rows; ++r) {
        const float positive = std::max(values[r], 0.0f);
        to[r] = positive * positive;
      }
    });
    Inputs middle = down.front().inputs(count);
    each_token(context, count, kRoundingCost * inner, [&](int64_t i) {
      down[group_of[i]].set(middle, i, hidden.get() + i * inner);
    });
    std::unique_ptr<float[]> results(new float[count * width]);
    run(context, pairs, down, middle, [&](int64_t i, int64_t row, int64_t rows, const float* values) {
      std::memcpy(results.get() + i * width + row, values, rows * sizeof(float));
    });
    each_token(context, tokens.size(), top_k * width, [&](int64_t i) {
      float* to = y.mutable_floats() + tokens[i] * width;
      std::fill_n(to, width, 0.0f);
      for (int64_t j = 0; j < top_k; ++j) {
        const float weight = weights.floats()[tokens[i] * top_k + j];
        const float* from = results.get() + pairs.place[i * top_k + j] * width;
        for (int64_t c = 0; c < width; ++c) to[c] += weight * from[c];
      }
    });
  }

 private:
  template <class Sink>
  static void run(const Context& context, const Pairs& pairs, const std::vector<Projection>& projections,
                  const Inputs& inputs, const Sink& sink) {
    const int64_t tasks = projections.front().tasks();
    int64_t cost = 0;
    for (const Group& group : pairs.groups) cost += projections.front().cost(group.count);
    context.parallel(tasks * pairs.groups.size(), cost, [&](size_t task) {
      const Group& group = pairs.groups[task / tasks];
      projections[task / tasks].run_task(
          task % tasks, inputs, group.first, group.count,
          [&](int64_t i, int64_t row, int64_t rows, const float* values) { sink(group.first + i, row, rows, values); });
    });
  }

  Projection projection(const Context& context, int64_t expert, int half) const {
    return inner_ ? packed(context, expert, half) : stored(context, expert, half);
  }

  // Inputs: x, indices, weights, lengths, panels of all up and of all down projections, and of each half: a scale and,
  // where inputs are rounded, an input scale an expert.
  Projection packed(const Context& context, int64_t expert, int half) const {
    const Tensor panels = context.input(4 + half), scales = context.input(6 + half);
    const Tensor input_scales = context.input(8 + half);
    const int64_t rows = half == 0 ? inner_ : width_, columns = half == 0 ? width_ : inner_;
    const int64_t bytes = options_.packed_bytes(rows, columns);
    require(panels.size() == bytes * experts_, "RoutedExperts: bytes of the panels");
    const uint8_t* at = panels.bytes() + bytes * expert;
    return options_.packed(at, rows, columns, scales ? scales.floats()[expert] : 1.0f,
                           input_scales ? input_scales.floats()[expert] : 1.0f);
  }

  // Inputs: x, indices, weights, lengths, and of each half: the parts of the format and, where inputs are rounded, the
  // input scale, each for all experts.
  Projection stored(const Context& context, int64_t expert, int half) const {
    const int64_t parts = options_.parts();
    const int64_t stride = (parts + (options_.rounding() == Rounding::kNone ? 0 : 1)) * experts_;
    const auto part = [&](int64_t i) { return context.input(4 + half * stride + i * experts_ + expert); };
    const Tensor scales = parts > 1 ? part(1) : Tensor{};
    const Tensor input_scale = options_.rounding() == Rounding::kNone ? Tensor{} : part(parts);
    return options_.stored(part(0), scales, scalar(parts > 2 ? part(2) : scales), scalar(input_scale));
  }

  const ProjectionOptions options_;
  const int64_t experts_, width_, inner_;
};

const Registration<RoutedExperts> stored{
    {"nemo",
     "RoutedExperts",
     {abi::kRequired, abi::kRequired, abi::kRequired, abi::kRequired, abi::kVariadic},
     1}};
const Registration<RoutedExperts> packed{
    {"nemo.cpu",
     "RoutedExperts",
     {abi::kRequired, abi::kRequired, abi::kRequired, abi::kRequired, abi::kRequired, abi::kRequired, abi::kOptional,
      abi::kOptional, abi::kOptional, abi::kOptional},
     1}};

}  // namespace
}  // namespace nemo

// SPDX-License-Identifier: Apache-2.0
//
// CausalConv1d on the CPU; see schema.py.

#include <algorithm>

#include "op.h"
#include "vec.h"

namespace nemo {
namespace {

constexpr int64_t kTile = 512;  // channels a task takes: the window of a tile stays in the first-level cache

struct CausalConv1d {
  explicit CausalConv1d(const Node& node) : parameters_(node.constant(1), node.constant(2)) {}

  void compute(Context& context) {
    const Tensor x = context.input(0), weight = context.input(1), bias = context.input(2), state = context.input(3);
    const int64_t *slots = context.input(4).ints(), *past = context.input(5).ints();
    const int64_t *accepted = context.input(6).ints(), *lengths = context.input(7).ints();
    require(x.rank == 3 && weight.rank == 3 && state.rank == 3 && weight.dims[2] > 0, "CausalConv1d: shapes");
    require(weight.dims[0] == x.dims[2] && state.dims[2] == x.dims[2], "CausalConv1d: channels differ");
    require(state.dims[1] >= weight.dims[2] - 1, "CausalConv1d: the state has no room for the window");
    // Weights that are constants of the graph, as they should be, were read when the session was made.
    const bool known = parameters_.taps && (!bias || parameters_.has_bias);
    const Parameters now = known ? Parameters() : Parameters(weight, bias);
    const Parameters& parameters = known ? parameters_ : now;

    const int64_t batch = x.dims[0], steps = x.dims[1], channels = x.dims[2];
    const int64_t taps = weight.dims[2], keep = taps - 1, ring = state.dims[1] - keep;
    require_rows("CausalConv1d", {slots, lengths, accepted, batch, steps, state.dims[0], ring});
    const Tensor y = context.output(0, x.dims, 3), next = context.state_output(1, state);
    const int64_t tiles = (channels + kTile - 1) / kTile;
    context.parallel(batch * tiles, batch * steps * channels * taps, [&](size_t task) {
      const int64_t row = task / tiles, n = lengths[row];
      if (n == 0) return;
      const int64_t from = (task % tiles) * kTile, to = std::min(from + kTile, channels);
      float* slot = next.mutable_floats() + slots[row] * state.dims[1] * channels;
      const float* in = x.floats() + row * steps * channels;
      float* out = y.mutable_floats() + row * steps * channels;
      // The window after the accepted tokens, then the new ones. It is moved first, because the ring is overwritten.
      const bool fresh = past[row] == accepted[row];
      for (int64_t i = 0; i < keep; ++i) {
        const int64_t source = i + accepted[row];
        for (int64_t c = from; c < to; ++c) {
          slot[i * channels + c] = fresh && source < keep ? 0.0f : slot[source * channels + c];
        }
      }
      for (int64_t t = 0; t < n; ++t) {
        convolve(parameters, slot, in, out + t * channels, t, channels, from, to);
      }
      if (!stays_pending(n, ring)) {
        for (int64_t i = 0; i < keep; ++i) {
          const int64_t source = i + n;  // of window and new tokens in a row
          const float* token = source < keep ? slot + source * channels : in + (source - keep) * channels;
          std::memmove(slot + i * channels + from, token + from, (to - from) * sizeof(float));
        }
      } else {
        for (int64_t t = 0; t < n; ++t) {
          std::memcpy(slot + (keep + t) * channels + from, in + t * channels + from, (to - from) * sizeof(float));
        }
      }
    });
  }

 private:
  // Taps transposed to [W, C] and the bias, in float32.
  struct Parameters {
    Parameters() = default;
    Parameters(const Tensor& weight_in, const Tensor& bias_in) {
      if (!weight_in) return;
      const int64_t channels = weight_in.dims[0];
      taps = weight_in.dims[2];
      weight.resize(channels * taps);
      for (int64_t c = 0; c < channels; ++c) {
        for (int64_t k = 0; k < taps; ++k) weight[k * channels + c] = element(weight_in, c * taps + k);
      }
      has_bias = static_cast<bool>(bias_in);
      bias = bias_in ? to_floats(bias_in) : std::vector<float>(channels, 0.0f);
    }
    int64_t taps = 0;
    bool has_bias = false;
    std::vector<float> weight, bias;
  };

  static void convolve(const Parameters& p, const float* window, const float* in, float* out, int64_t t,
                       int64_t channels, int64_t from, int64_t to) {
    const int64_t taps = p.taps, keep = taps - 1;
    const auto source = [&](int64_t k) {
      return t + k < keep ? window + (t + k) * channels : in + (t + k - keep) * channels;
    };
    int64_t c = from;
    for (; c + kW <= to; c += kW) {
      F total = load<F>(p.bias.data() + c);
      for (int64_t k = 0; k < taps; ++k) {
        total = fma(load<F>(source(k) + c), load<F>(p.weight.data() + k * channels + c), total);
      }
      store(out + c, silu(total));
    }
    if (c < to) {
      float lanes[kW] = {};
      for (int64_t i = c; i < to; ++i) {
        lanes[i - c] = p.bias[i];
        for (int64_t k = 0; k < taps; ++k) lanes[i - c] += source(k)[i] * p.weight[k * channels + i];
      }
      store(lanes, silu(load<F>(lanes)));
      std::memcpy(out + c, lanes, (to - c) * sizeof(float));
    }
  }

  const Parameters parameters_;
};

const Registration<CausalConv1d> registration{
    {"nemo",
     "CausalConv1d",
     {abi::kRequired, abi::kRequired, abi::kOptional, abi::kRequired, abi::kRequired, abi::kRequired, abi::kRequired,
      abi::kRequired},
     2}};

}  // namespace
}  // namespace nemo

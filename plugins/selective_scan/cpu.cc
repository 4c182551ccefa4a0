// SPDX-License-Identifier: Apache-2.0
//
// SelectiveScan on the CPU; see schema.py.
//
// A task is some heads of one row of the batch. Its tokens, the accepted pending ones and then the new ones, are taken
// a chunk at a time: of every row of a head's state, up to eight vectors stay in registers while they pass over it.
// Every element of a state and of an output goes through the same operations in the same order however the tokens
// are divided into chunks and steps, so a step of many tokens and as many steps of one agree in every bit.

#include <algorithm>
#include <cmath>

#include "op.h"
#include "vec.h"

namespace nemo {
namespace {

constexpr int64_t kHeads = 4;            // of a task; they share B and C
constexpr int64_t kChunk = 16;           // tokens: their B and C stay in the first-level cache
constexpr int kVectors = 8;              // of a row of the state that are in registers at a time
constexpr int kRows = kW == 16 ? 2 : 1;  // of the state that are, as there are registers
constexpr int64_t kColumns = kVectors * kW;

int64_t vectors(int64_t n) { return (n + kW - 1) / kW; }
int64_t round_up(int64_t n) { return vectors(n) * kW; }

// max(v, 0) + log1p(exp(-|v|)), which neither overflows nor loses small values.
float softplus(float v) { return std::max(v, 0.0f) + std::log1p(std::exp(-std::fabs(v))); }

struct Sizes {
  int64_t batch, steps, slots, ring, heads, head_dim, width, groups;
  int64_t inner() const { return heads * head_dim; }
  int64_t group_width() const { return groups * width; }
  int64_t features() const { return inner() + group_width() + heads; }
};

// Some tokens of one head, as `advance` reads them. B and C are padded with zeros to whole vectors.
struct Chunk {
  int64_t replayed = 0, count = 0;  // pending tokens, which have no output, and all tokens
  float d[kChunk + kW], decay[kChunk + kW];
  float *b = nullptr, *c = nullptr, *dx = nullptr, *sums = nullptr;  // [count, padded N] twice, [count, P] twice

  void resize(const Sizes& sizes) {
    if (width == sizes.width && head_dim == sizes.head_dim) return;
    width = sizes.width, head_dim = sizes.head_dim;
    const int64_t padded = kChunk * round_up(width), outputs = round_up(kChunk * head_dim);
    memory.assign(2 * vectors(padded + outputs), F{});
    b = reinterpret_cast<float*>(memory.data()), c = b + padded, dx = c + padded, sums = dx + outputs;
  }

 private:
  int64_t width = 0, head_dim = 0;
  std::vector<F> memory;  // aligned, which halves the time of reading B and C
};

// Where the state of a head is read, and written after the replayed tokens and at the end; null for zeros and for
// nowhere.
struct Places {
  const float* from;
  float *middle, *end;
};

// Takes R rows of the state from row `p` on, V vectors of each from column `at` on, over a chunk. The last vectors
// have `tail` columns.
template <int V, int R>
void advance(const Sizes& sizes, Chunk& chunk, const Places& places, int64_t p, int64_t at, int64_t tail) {
  const int64_t width = sizes.width, padded = round_up(width), head_dim = sizes.head_dim, offset = p * width + at;
  F h[R * V];
  const auto columns = [&](int v) INLINED { return v + 1 < V ? kW : tail; };
  const auto write = [&](float* to) INLINED {
    unrolled<R * V>([&](auto i) INLINED {
      store_part(to + offset + i / V * width + i % V * kW, h[i], columns(i % V));
    });
  };
  unrolled<R * V>([&](auto i) INLINED {
    h[i] = places.from ? load_part(places.from + offset + i / V * width + i % V * kW, columns(i % V)) : F{};
  });
  const auto step = [&](int64_t t) INLINED {
    const float *b = chunk.b + t * padded + at, *dx = chunk.dx + t * head_dim + p;
    const F decay = splat(chunk.decay[t]);
    unrolled<V>([&](auto v) INLINED {
      const F in = load<F>(b + v * kW);
      unrolled<R>([&](auto r) INLINED { h[r * V + v] = fma(h[r * V + v], decay, splat(dx[r]) * in); });
    });
  };
  for (int64_t t = 0; t < chunk.replayed; ++t) step(t);
  if (places.middle) write(places.middle);
  for (int64_t t = chunk.replayed; t < chunk.count; ++t) {
    step(t);
    const float* c = chunk.c + t * padded + at;
    F y[R] = {};
    unrolled<V>([&](auto v) INLINED {
      const F out = load<F>(c + v * kW);
      unrolled<R>([&](auto r) INLINED { y[r] = fma(h[r * V + v], out, y[r]); });
    });
    unrolled<R>([&](auto r) INLINED { chunk.sums[t * head_dim + p + r] += sum(y[r]); });
  }
  if (places.end) write(places.end);
}

template <int V>
void advance_rows(const Sizes& sizes, Chunk& chunk, const Places& places, int64_t at, int64_t tail) {
  int64_t p = 0;
  for (; p + kRows <= sizes.head_dim; p += kRows) advance<V, kRows>(sizes, chunk, places, p, at, tail);
  for (; p < sizes.head_dim; ++p) advance<V, 1>(sizes, chunk, places, p, at, tail);
}

void advance(const Sizes& sizes, Chunk& chunk, const Places& places) {
  static constexpr decltype(&advance_rows<1>) kSteps[kVectors] = {
      advance_rows<1>, advance_rows<2>, advance_rows<3>, advance_rows<4>,
      advance_rows<5>, advance_rows<6>, advance_rows<7>, advance_rows<8>};
  for (int64_t at = 0; at < sizes.width; at += kColumns) {
    const int64_t columns = std::min(sizes.width - at, kColumns), last = vectors(columns) - 1;
    kSteps[last](sizes, chunk, places, at, columns - last * kW);
  }
}

struct SelectiveScan {
  explicit SelectiveScan(const Node& node)
      : lowest_(node.number("dt_min", 0.0f)),
        highest_(node.number("dt_max", INFINITY)),
        parameters_(node.constant(4), node.constant(5), node.constant(6)) {}

  void compute(Context& context) {
    Step step = prepare(context);
    const Sizes& s = step.sizes;
    // Constants of the graph, as these should be, were read when the session was made.
    step.parameters = parameters_.a.empty() ? &step.now : &parameters_;
    const int64_t per_group = s.heads / s.groups, parts = (per_group + kHeads - 1) / kHeads, tasks = s.groups * parts;
    int64_t tokens = 0;
    for (int64_t row = 0; row < s.batch; ++row) tokens += step.lengths[row] + step.accepted[row];
    const int64_t cost = 3 * tokens * s.inner() * s.width;
    context.parallel(s.batch * tasks, cost, [&](size_t task) {
      const int64_t group = task % tasks / parts * per_group, part = task % parts * kHeads;
      run(step, task / tasks, group + part, group + std::min(part + kHeads, per_group));
    });
    // Heads share the B of their group, so that of pending tokens is overwritten when all have read it.
    for (int64_t row = 0; row < s.batch; ++row) {
      for (int64_t t = 0; t < step.lengths[row] && stays_pending(step.lengths[row], s.ring); ++t) {
        std::memcpy(step.pending_token(row, t) + s.inner(), step.b + (row * s.steps + t) * s.group_width(),
                    s.group_width() * sizeof(float));
      }
    }
  }

 private:
  struct Parameters {
    Parameters() = default;
    Parameters(const Tensor& a_log, const Tensor& skip_in, const Tensor& bias_in) {
      if (!a_log || !skip_in || !bias_in) return;
      a = to_floats(a_log), skip = to_floats(skip_in), bias = to_floats(bias_in);
      for (float& v : a) v = -std::exp(v);
    }
    std::vector<float> a, skip, bias;
  };

  // Everything that the tasks of a step read and write.
  struct Step {
    Sizes sizes;
    Parameters now;
    const Parameters* parameters = nullptr;
    const float *x, *dt, *b, *c;
    const int64_t *slots, *past, *accepted, *lengths;
    float *y, *state, *pending;
    float* pending_token(int64_t row, int64_t t) const {
      return pending + (slots[row] * sizes.ring + t) * sizes.features();
    }
  };

  Step prepare(Context& context) const {
    Tensor in[13];
    for (size_t i = 0; i < 13; ++i) in[i] = context.input(i);
    const Tensor &x = in[0], &dt = in[1], &b = in[2], &c = in[3], &state = in[7], &pending = in[8];
    require(x.type == abi::kFloat && state.type == abi::kFloat, "SelectiveScan: only float32 activations and state");
    require(x.rank == 3 && b.rank == 3 && state.rank == 4 && pending.rank == 3, "SelectiveScan: ranks");
    Step step;
    Sizes& s = step.sizes;
    s = {x.dims[0], x.dims[1], state.dims[0], pending.dims[1], state.dims[1], state.dims[2], state.dims[3], 0};
    s.groups = s.width > 0 ? b.dims[2] / s.width : 0;
    require(s.groups > 0 && s.heads % s.groups == 0 && b.dims[2] == s.group_width(), "SelectiveScan: groups");
    require(x.dims[2] == s.inner() && pending.dims[2] == s.features(), "SelectiveScan: widths");
    require(dt.last() == s.heads && c.last() == s.group_width(), "SelectiveScan: widths");
    step.x = x.floats(), step.dt = dt.floats(), step.b = b.floats(), step.c = c.floats();
    step.slots = in[9].ints(), step.past = in[10].ints();
    step.accepted = in[11].ints(), step.lengths = in[12].ints();
    require_rows("SelectiveScan", {step.slots, step.lengths, step.accepted, s.batch, s.steps, s.slots, s.ring});
    if (parameters_.a.empty()) step.now = Parameters(in[4], in[5], in[6]);
    step.y = context.output(0, x.dims, 3).mutable_floats();
    step.state = context.state_output(1, state).mutable_floats();
    step.pending = context.state_output(2, pending).mutable_floats();
    return step;
  }

  // Heads from `first` to `last`, which belong to one group, of one row.
  void run(const Step& step, int64_t row, int64_t first, int64_t last) const {
    const Sizes& s = step.sizes;
    const int64_t n = step.lengths[row], accepted = step.accepted[row], total = accepted + n;
    if (n == 0) return;
    static thread_local Chunk chunk;
    static thread_local std::vector<float> drafted;  // the states after new tokens that may be rejected
    chunk.resize(s);
    const int64_t size = s.head_dim * s.width;
    float* slots = step.state + (step.slots[row] * s.heads + first) * size;
    const bool fresh = step.past[row] == accepted, commits = !stays_pending(n, s.ring);
    if (!commits) drafted.resize((last - first) * size);
    for (int64_t start = 0; start < total; start += kChunk) {
      chunk.count = std::min(kChunk, total - start);
      chunk.replayed = std::clamp<int64_t>(accepted - start, 0, chunk.count);
      const bool has_first_new = start <= accepted && accepted < start + chunk.count;
      const bool writes_accepted = !commits && has_first_new && (accepted > 0 || fresh);
      const bool ends = start + kChunk >= total;
      read_group(step, chunk, row, first / (s.heads / s.groups), start);
      for (int64_t head = first; head < last; ++head) {
        float* slot = slots + (head - first) * size;
        float* running = commits ? slot : drafted.data() + (head - first) * size;
        read_head(step, chunk, row, head, start);
        advance(s, chunk,
                {start > 0 ? running : fresh ? nullptr : slot, writes_accepted ? slot : nullptr,
                 ends && !commits ? nullptr : running});
        write_head(step, chunk, row, head, start);
      }
    }
  }

  // B and C of the tokens from `start` on.
  static void read_group(const Step& step, Chunk& chunk, int64_t row, int64_t group, int64_t start) {
    const Sizes& s = step.sizes;
    const int64_t padded = round_up(s.width), column = group * s.width;
    for (int64_t t = 0; t < chunk.count; ++t) {
      const int64_t at = (row * s.steps + start + t - step.accepted[row]) * s.group_width() + column;
      const bool pending = t < chunk.replayed;
      const float* b = pending ? step.pending_token(row, start + t) + s.inner() + column : step.b + at;
      std::memcpy(chunk.b + t * padded, b, s.width * sizeof(float));
      if (!pending) std::memcpy(chunk.c + t * padded, step.c + at, s.width * sizeof(float));
    }
  }

  // Their time steps and inputs.
  void read_head(const Step& step, Chunk& chunk, int64_t row, int64_t head, int64_t start) const {
    const Sizes& s = step.sizes;
    const Parameters& parameters = *step.parameters;
    for (int64_t t = 0; t < chunk.count; ++t) {
      const float* x;
      if (t < chunk.replayed) {
        x = step.pending_token(row, start + t);
        chunk.d[t] = x[s.inner() + s.group_width() + head];
      } else {
        const int64_t at = row * s.steps + start + t - step.accepted[row];
        x = step.x + at * s.inner();
        const float d = softplus(step.dt[at * s.heads + head] + parameters.bias[head]);
        chunk.d[t] = std::min(std::max(d, lowest_), highest_);
      }
      for (int64_t p = 0; p < s.head_dim; ++p) {
        chunk.dx[t * s.head_dim + p] = chunk.d[t] * x[head * s.head_dim + p];
      }
    }
    for (int64_t t = 0; t < chunk.count; t += kW) {
      store(chunk.decay + t, exp(load<F>(chunk.d + t) * splat(parameters.a[head])));
    }
    std::fill_n(chunk.sums, chunk.count * s.head_dim, 0.0f);
  }

  // The outputs of the new tokens. Those that stay pending take their places in the ring, except for B: what they
  // replace there was read by the chunks before or in this one.
  static void write_head(const Step& step, const Chunk& chunk, int64_t row, int64_t head, int64_t start) {
    const Sizes& s = step.sizes;
    const F skip = splat(step.parameters->skip[head]);
    for (int64_t t = chunk.replayed; t < chunk.count; ++t) {
      const int64_t token = start + t - step.accepted[row];
      const int64_t at = (row * s.steps + token) * s.inner() + head * s.head_dim;
      for (int64_t p = 0; p < s.head_dim; p += kW) {
        const int64_t n = s.head_dim - p;
        const F y = load_part(chunk.sums + t * s.head_dim + p, n);
        store_part(step.y + at + p, fma(skip, load_part(step.x + at + p, n), y), n);
      }
      if (!stays_pending(step.lengths[row], s.ring)) continue;
      float* pending = step.pending_token(row, token);
      std::memcpy(pending + head * s.head_dim, step.x + at, s.head_dim * sizeof(float));
      pending[s.inner() + s.group_width() + head] = chunk.d[t];
    }
  }

  const float lowest_, highest_;
  const Parameters parameters_;
};

const Registration<SelectiveScan> registration{
    {"nemo", "SelectiveScan", std::vector<int>(13, abi::kRequired), 3}};

}  // namespace
}  // namespace nemo

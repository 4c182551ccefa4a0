// SPDX-License-Identifier: Apache-2.0
//
// CachedAttention on the CPU; see schema.py. The arithmetic is in tile.h.

#include <algorithm>
#include <memory>

#include "op.h"
#include "tile.h"

namespace nemo {
namespace {

using namespace attention;

constexpr int64_t kTokens = 64;    // new tokens whose keys and values a task writes
constexpr size_t kFewBlocks = 32;  // of queries: fewer than these are divided along the context, for more threads

// Everything that the tasks of a step read and write.
struct Step {
  int64_t batch, steps, slots, heads, group, context, head_dim;
  int64_t half;  // of the components that are rotated
  const float *q, *k, *v, *cos, *sin;
  const int64_t *slot, *past, *lengths;
  std::vector<float> sinks;
  float *y, *keys, *values;

  int64_t cache_at(int64_t row, int64_t head, int64_t position) const {
    return ((slot[row] * heads + head) * context + position) * head_dim;
  }
  // Where a row's queries of a key/value head begin; `i` counts them in the order [token, head of the group].
  int64_t query_at(int64_t row, int64_t head, int64_t i) const {
    return (((row * steps + i / group) * heads + head) * group + i % group) * head_dim;
  }
  // Components i and half + i are those of a vector that is rotated; the others are copied.
  void rotate(const float* x, int64_t position, float* out) const {
    for (int64_t i = 0; i < half; i += kW) {
      const int64_t n = half - i, at = position * half + i;
      const F low = load_part(x + i, n), high = load_part(x + half + i, n);
      const F c = load_part(cos + at, n), s = load_part(sin + at, n);
      store_part(out + i, fma(low, c, -(high * s)), n);
      store_part(out + half + i, fma(high, c, low * s), n);
    }
    std::copy(x + 2 * half, x + head_dim, out + 2 * half);
  }
};

// Queries that are computed together, those from `from` to `to` of one row and key/value head in the order [token,
// head of the group], and the positions from `first` to `end` that some of them see.
struct Block {
  int64_t row, head, from, to, first, end;

  int64_t first_span() const { return first / kSpan; }
  int64_t spans() const { return (end - 1) / kSpan - first_span() + 1; }
  int64_t lanes() const { return round_up(to - from); }
};

// What a thread needs; it is kept from step to step.
struct Scratch {
  static Scratch& of(const Step& step) {
    static thread_local Scratch scratch;
    const int64_t result = Result::size(kLanes, step.head_dim);
    scratch.memory.resize((kLanes * (step.head_dim + kTile) + 2 * result + round_up(step.head_dim)) / kW);
    scratch.components = reinterpret_cast<float*>(scratch.memory.data());
    scratch.scores = scratch.components + kLanes * step.head_dim;
    scratch.total = scratch.scores + kLanes * kTile, scratch.later = scratch.total + result;
    scratch.rotated = scratch.later + result;
    return scratch;
  }

  std::vector<F> memory;  // aligned
  float *components, *scores, *total, *later, *rotated;
};

struct CachedAttention {
  explicit CachedAttention(const Node& node)
      : scale_(node.number("scale", 1.0f)),
        window_(node.integer("window", 0)),
        causal_(node.integer("causal", 1) != 0) {}

  void compute(Context& context) {
    const Step step = prepare(context);
    const int64_t parts = (step.steps + kTokens - 1) / kTokens;
    context.parallel(step.batch * parts, step.batch * step.steps * step.heads * step.head_dim,
                     [&](size_t task) { write_cache(step, task / parts, task % parts); });
    const std::vector<Block> blocks = blocks_of(step);
    if (blocks.size() >= kFewBlocks) {
      context.parallel(blocks.size(), cost_of(step, blocks), [&](size_t task) { run(step, blocks[task]); });
    } else {
      run_divided(context, step, blocks);
    }
  }

 private:
  Step prepare(Context& context) const {
    Tensor in[11];
    for (size_t i = 0; i < 11; ++i) in[i] = context.input(i);
    const Tensor &q = in[0], &k = in[1], &v = in[2], &keys = in[3], &values = in[4], &sinks = in[8];
    const Tensor &cos = in[9], &sin = in[10];
    require(q.type == abi::kFloat && keys.type == abi::kFloat, "CachedAttention: only float32 activations and caches");
    require(q.rank == 3 && k.rank == 3 && keys.rank == 4, "CachedAttention: ranks");
    require(k.size() == v.size() && keys.size() == values.size(), "CachedAttention: keys and values differ");
    Step step;
    step.batch = q.dims[0], step.steps = q.dims[1];
    step.slots = keys.dims[0], step.heads = keys.dims[1], step.context = keys.dims[2], step.head_dim = keys.dims[3];
    const int64_t width = step.heads * step.head_dim;
    require(width > 0 && k.dims[2] == width && q.dims[2] % width == 0, "CachedAttention: widths");
    require(step.context <= INT32_MAX, "CachedAttention: context");
    step.group = q.dims[2] / width;
    step.half = cos ? cos.last() : 0;
    require(!cos == !sin && cos.size() == sin.size() && 2 * step.half <= step.head_dim, "CachedAttention: cos and sin");
    step.q = q.floats(), step.k = k.floats(), step.v = v.floats();
    step.cos = cos.floats(), step.sin = sin.floats();
    step.slot = in[5].ints(), step.past = in[6].ints(), step.lengths = in[7].ints();
    require_rows("CachedAttention", {step.slot, step.lengths, nullptr, step.batch, step.steps, step.slots, 0});
    for (int64_t row = 0; row < step.batch; ++row) {
      if (step.lengths[row] == 0) continue;
      const int64_t end = step.past[row] + step.lengths[row];
      require(step.past[row] >= 0 && end <= step.context, "CachedAttention: more tokens than the cache has positions");
      require(!cos || end <= cos.dims[0], "CachedAttention: more tokens than the tables have positions");
    }
    if (sinks) step.sinks = to_floats(sinks);
    require(!sinks || sinks.size() == step.heads * step.group, "CachedAttention: sinks");
    step.y = context.output(0, q.dims, 3).mutable_floats();
    step.keys = context.state_output(1, keys).mutable_floats();
    step.values = context.state_output(2, values).mutable_floats();
    return step;
  }

  static void write_cache(const Step& step, int64_t row, int64_t part) {
    const int64_t stop = std::min((part + 1) * kTokens, step.lengths[row]);
    for (int64_t t = part * kTokens; t < stop; ++t) {
      const int64_t position = step.past[row] + t;
      for (int64_t head = 0; head < step.heads; ++head) {
        const int64_t from = ((row * step.steps + t) * step.heads + head) * step.head_dim;
        const int64_t to = step.cache_at(row, head, position);
        step.rotate(step.k + from, position, step.keys + to);
        std::copy_n(step.v + from, step.head_dim, step.values + to);
      }
    }
  }

  int64_t first_seen(int64_t position) const { return window_ > 0 ? std::max<int64_t>(position - window_ + 1, 0) : 0; }

  int64_t seen_end(const Step& step, int64_t row, int64_t position) const {
    return causal_ ? position + 1 : step.past[row] + step.lengths[row];
  }

  // Those with most positions come first, so that no thread begins a long one at the end.
  std::vector<Block> blocks_of(const Step& step) const {
    std::vector<Block> blocks;
    for (int64_t row = 0; row < step.batch; ++row) {
      const int64_t queries = step.lengths[row] * step.group;
      for (int64_t head = 0; head < step.heads; ++head) {
        for (int64_t from = 0; from < queries; from += kLanes) {
          const int64_t to = std::min(from + kLanes, queries), past = step.past[row];
          const int64_t oldest = past + from / step.group, newest = past + (to - 1) / step.group;
          blocks.push_back({row, head, from, to, first_seen(oldest), seen_end(step, row, newest)});
        }
      }
    }
    std::stable_sort(blocks.begin(), blocks.end(),
                     [](const Block& a, const Block& b) { return a.end - a.first > b.end - b.first; });
    return blocks;
  }

  Queries queries_of(const Step& step, const Block& block, Scratch& scratch) const {
    Queries queries;
    queries.count = block.to - block.from, queries.lanes = block.lanes(), queries.head_dim = step.head_dim;
    queries.components = scratch.components;
    for (int64_t i = 0; i < queries.lanes; ++i) {
      if (i >= queries.count) {
        queries.first[i] = queries.end[i] = 0;
        for (int64_t d = 0; d < step.head_dim; ++d) queries.components[d * queries.lanes + i] = 0.0f;
        continue;
      }
      const int64_t position = step.past[block.row] + (block.from + i) / step.group;
      queries.first[i] = static_cast<int32_t>(first_seen(position));
      queries.end[i] = static_cast<int32_t>(seen_end(step, block.row, position));
      step.rotate(step.q + step.query_at(block.row, block.head, block.from + i), position, scratch.rotated);
      for (int64_t d = 0; d < step.head_dim; ++d) {
        queries.components[d * queries.lanes + i] = scratch.rotated[d] * scale_;
      }
    }
    return queries;
  }

  static void attend_span(const Step& step, const Block& block, const Queries& queries, int64_t span, Scratch& scratch,
                          Result& result) {
    const int64_t cache = step.cache_at(block.row, block.head, 0);
    attend(queries, step.keys + cache, step.values + cache, std::max(block.first, span * kSpan),
           std::min(block.end, (span + 1) * kSpan), scratch.scores, result);
  }

  static int64_t cost_of(const Step& step, const std::vector<Block>& blocks) {
    int64_t cost = 0;
    for (const Block& block : blocks) cost += (block.end - block.first) * block.lanes() * step.head_dim * 2;
    return cost;
  }

  void run(const Step& step, const Block& block) const {
    Scratch& scratch = Scratch::of(step);
    const Queries queries = queries_of(step, block, scratch);
    Result total(scratch.total, queries.lanes), later(scratch.later, queries.lanes);
    for (int64_t i = 0; i < block.spans(); ++i) {
      attend_span(step, block, queries, block.first_span() + i, scratch, i == 0 ? total : later);
      if (i > 0) merge(block.lanes(), step.head_dim, later, total);
    }
    write(step, block, total);
  }

  // The same with a task for each span.
  void run_divided(Context& context, const Step& step, const std::vector<Block>& blocks) const {
    struct Piece {
      const Block* block;
      int64_t span, at;
    };
    std::vector<Piece> pieces;
    std::vector<size_t> first_pieces;
    int64_t size = 0;
    for (const Block& block : blocks) {
      first_pieces.push_back(pieces.size());
      for (int64_t i = 0; i < block.spans(); ++i) {
        pieces.push_back({&block, block.first_span() + i, size});
        size += Result::size(block.lanes(), step.head_dim);
      }
    }
    const std::unique_ptr<float[]> memory(new float[size]);
    const auto result = [&](const Piece& piece) { return Result(memory.get() + piece.at, piece.block->lanes()); };
    context.parallel(pieces.size(), cost_of(step, blocks), [&](size_t task) {
      const Piece& piece = pieces[task];
      Scratch& scratch = Scratch::of(step);
      const Queries queries = queries_of(step, *piece.block, scratch);
      Result into = result(piece);
      attend_span(step, *piece.block, queries, piece.span, scratch, into);
    });
    context.parallel(blocks.size(), pieces.size() * kLanes * step.head_dim, [&](size_t task) {
      const Piece* piece = pieces.data() + first_pieces[task];
      Result total = result(*piece);
      for (int64_t i = 1; i < blocks[task].spans(); ++i) {
        merge(blocks[task].lanes(), step.head_dim, result(piece[i]), total);
      }
      write(step, blocks[task], total);
    });
  }

  // The outputs: the values' sums over those of the softmax, which the sinks are part of.
  static void write(const Step& step, const Block& block, const Result& total) {
    for (int64_t i = 0; i < block.to - block.from; ++i) {
      const int64_t query = block.from + i;
      F factor = splat(1.0f), sum = splat(total.sum[i]);
      if (!step.sinks.empty()) {
        const F sink = splat(step.sinks[block.head * step.group + query % step.group]);
        const F maximum = splat(total.maximum[i]), base = larger(sink, maximum);
        factor = exp(maximum - base);
        sum = fma(sum, factor, exp(sink - base));
      }
      factor = factor / sum;
      const float* values = total.values + i * round_up(step.head_dim);
      float* y = step.y + step.query_at(block.row, block.head, query);
      for (int64_t d = 0; d < step.head_dim; d += kW) {
        store_part(y + d, load<F>(values + d) * factor, step.head_dim - d);
      }
    }
  }

  const float scale_;
  const int64_t window_;
  const bool causal_;
};

const Registration<CachedAttention> registration{
    {"nemo",
     "CachedAttention",
     {abi::kRequired, abi::kRequired, abi::kRequired, abi::kRequired, abi::kRequired, abi::kRequired, abi::kRequired,
      abi::kRequired, abi::kOptional, abi::kOptional, abi::kOptional},
     3}};

}  // namespace
}  // namespace nemo

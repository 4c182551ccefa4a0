// SPDX-License-Identifier: Apache-2.0
//
// Attention of some queries, which share a key/value head, over a range of positions.
//
// The queries are the lanes of vectors: heads of a group and tokens alike. A score is a sum over the components of a
// key, of the component times a vector of the queries' components, so no sum runs across lanes, and the softmax of
// all queries of a vector is one computation. Values are mixed with vectors along the head dimension.
//
// Positions are taken in tiles, with the softmax's maximum and sum carried from tile to tile (arXiv:1805.02867) within
// a span; spans begin anew and are merged in order. Tiles and spans lie at fixed positions, every sum runs in the
// order of positions, and a position that a query does not see adds exact zeros to it. So the result of a query does
// not depend on the queries beside it, nor on how a step's work is divided.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

namespace nemo::attention {

constexpr int64_t kLanes = 64;   // queries at a time, at most
constexpr int64_t kTile = 128;   // positions: the scores and a block of the values fit the first-level cache
constexpr int64_t kSpan = 1024;  // positions that one task takes where the work is divided along the context

// Blocks of accumulators, as there are registers: of vectors of queries by keys, and of vectors of values by queries.
constexpr int kAccumulators = kW == 16 ? 16 : 8;
constexpr int kVectors = kW == 16 ? 4 : 2;
constexpr int kRows = 4;

inline int64_t round_up(int64_t n) { return (n + kW - 1) / kW * kW; }

INLINE F larger(F a, F b) { return a > b ? a : b; }

// What a softmax's exponents are taken relative to: its maximum, or 0 where it has no terms.
INLINE F base_of(F maximum) { return maximum == splat(-INFINITY) ? F{} : maximum; }

// Queries and the positions from `first` to `end` that each sees. Components come first: [D, lanes].
struct Queries {
  int64_t count, lanes, head_dim;  // lanes: `count` rounded up; those past it are computed too, and not used
  float* components;
  int32_t first[kLanes], end[kLanes];

  bool all_see(int64_t from, int64_t to) const {
    for (int64_t i = 0; i < count; ++i) {
      if (first[i] > from || end[i] < to) return false;
    }
    return true;
  }
};

// The softmax over some positions: its maximum, its sum, and the values' sum that goes with them, [lanes, padded D].
struct Result {
  float *maximum, *sum, *values;

  static int64_t size(int64_t lanes, int64_t head_dim) { return lanes * (2 + round_up(head_dim)); }
  Result() = default;
  Result(float* memory, int64_t lanes) : maximum(memory), sum(memory + lanes), values(memory + 2 * lanes) {}
  void clear(int64_t lanes, int64_t head_dim) {
    std::fill_n(maximum, lanes, -INFINITY);
    std::fill_n(sum, lanes * (1 + round_up(head_dim)), 0.0f);
  }
};

// Scores of V vectors of queries with K keys.
template <int V, int K>
void score(const Queries& queries, int64_t lane, const float* keys, float* scores) {
  const int64_t head_dim = queries.head_dim, lanes = queries.lanes;
  F total[K * V] = {};
  for (int64_t d = 0; d < head_dim; ++d) {
    F query[V];
    unrolled<V>([&](auto v) INLINED { query[v] = load<F>(queries.components + d * lanes + lane + v * kW); });
    unrolled<K>([&](auto k) INLINED {
      const F key = splat(keys[k * head_dim + d]);
      unrolled<V>([&](auto v) INLINED { total[k * V + v] = fma(key, query[v], total[k * V + v]); });
    });
  }
  unrolled<K * V>([&](auto i) INLINED { store(scores + i / V * lanes + lane + i % V * kW, total[i]); });
}

template <int V>
int64_t score_lanes(const Queries& queries, int64_t lane, const float* keys, int64_t count, float* scores) {
  constexpr int kKeys = kAccumulators / V;
  for (; lane + V * kW <= queries.lanes; lane += V * kW) {
    int64_t j = 0;
    for (; j + kKeys <= count; j += kKeys) {
      score<V, kKeys>(queries, lane, keys + j * queries.head_dim, scores + j * queries.lanes);
    }
    for (; j < count; ++j) score<V, 1>(queries, lane, keys + j * queries.head_dim, scores + j * queries.lanes);
  }
  return lane;
}

// Hides the scores of positions that a query does not see.
inline void mask(const Queries& queries, int64_t from, int64_t count, float* scores) {
  for (int64_t lane = 0; lane < queries.lanes; lane += kW) {
    const I first = load<I>(queries.first + lane), end = load<I>(queries.end + lane);
    for (int64_t j = 0; j < count; ++j) {
      const int32_t position = static_cast<int32_t>(from + j);
      float* at = scores + j * queries.lanes + lane;
      store(at, ((first <= position) & (end > position)) ? load<F>(at) : splat(-INFINITY));
    }
  }
}

// Scores become weights relative to the new maximum; `factors` is what sums relative to the old one are to be
// multiplied by.
inline void weigh(int64_t lanes, int64_t count, float* scores, Result& result, float* factors) {
  for (int64_t lane = 0; lane < lanes; lane += kW) {
    const F before = load<F>(result.maximum + lane);
    F maximum = before;
    for (int64_t j = 0; j < count; ++j) maximum = larger(load<F>(scores + j * lanes + lane), maximum);
    const F base = base_of(maximum), factor = exp(before - base);
    F sum = load<F>(result.sum + lane) * factor;
    for (int64_t j = 0; j < count; ++j) {
      float* at = scores + j * lanes + lane;
      const F weight = exp(load<F>(at) - base);
      sum += weight;
      store(at, weight);
    }
    store(result.maximum + lane, maximum);
    store(result.sum + lane, sum);
    store(factors + lane, factor);
  }
}

// Adds V vectors of the weighted values, from column `at` on, to kRows queries' sums. The last one has `tail` columns.
template <int V>
void mix(const Queries& queries, int64_t row, int64_t at, int64_t tail, const float* weights, const float* factors,
         const float* values, int64_t count, float* sums) {
  const int64_t head_dim = queries.head_dim, padded = round_up(head_dim), lanes = queries.lanes;
  sums += row * padded + at, weights += row, factors += row, values += at;
  F total[kRows * V];
  unrolled<kRows * V>([&](auto i) INLINED {
    total[i] = load<F>(sums + i / V * padded + i % V * kW) * splat(factors[i / V]);
  });
  for (int64_t j = 0; j < count; ++j) {
    F value[V];
    unrolled<V>([&](auto v) INLINED {
      value[v] = load_part(values + j * head_dim + v * kW, v + 1 < V ? kW : tail);
    });
    unrolled<kRows>([&](auto r) INLINED {
      const F weight = splat(weights[j * lanes + r]);
      unrolled<V>([&](auto v) INLINED { total[r * V + v] = fma(weight, value[v], total[r * V + v]); });
    });
  }
  unrolled<kRows * V>([&](auto i) INLINED { store(sums + i / V * padded + i % V * kW, total[i]); });
}

// Attention over positions from `from` to `to`, which lie in one span and which some query sees. `keys` and `values`
// begin at position 0; `scores` has room for a tile.
inline void attend(const Queries& queries, const float* keys, const float* values, int64_t from, int64_t to,
                   float* scores, Result& result) {
  const int64_t head_dim = queries.head_dim;
  float factors[kLanes];
  result.clear(queries.lanes, head_dim);
  for (int64_t start = from, stop; start < to; start = stop) {
    stop = std::min(to, (start / kTile + 1) * kTile);
    const int64_t count = stop - start;
    const float *tile_keys = keys + start * head_dim, *tile_values = values + start * head_dim;
    int64_t lane = score_lanes<kVectors>(queries, 0, tile_keys, count, scores);
    if constexpr (kVectors > 2) lane = score_lanes<2>(queries, lane, tile_keys, count, scores);
    score_lanes<1>(queries, lane, tile_keys, count, scores);
    if (!queries.all_see(start, stop)) mask(queries, start, count, scores);
    weigh(queries.lanes, count, scores, result, factors);
    for (int64_t at = 0; at < head_dim;) {
      const int64_t left = head_dim - at;
      const int64_t vectors = left >= kVectors * kW ? kVectors : left >= 2 * kW ? 2 : 1;
      const auto step = vectors == kVectors ? mix<kVectors> : vectors == 2 ? mix<2> : mix<1>;
      const int64_t tail = std::min<int64_t>(left - (vectors - 1) * kW, kW);
      for (int64_t row = 0; row < queries.count; row += kRows) {
        step(queries, row, at, tail, scores, factors, tile_values, count, result.values);
      }
      at += vectors * kW;
    }
  }
}

// Adds the result over later positions to `total`.
inline void merge(int64_t lanes, int64_t head_dim, const Result& later, Result& total) {
  const int64_t padded = round_up(head_dim);
  float mine[kLanes], other[kLanes];
  for (int64_t lane = 0; lane < lanes; lane += kW) {
    const F a = load<F>(total.maximum + lane), b = load<F>(later.maximum + lane), maximum = larger(b, a);
    const F base = base_of(maximum), factor = exp(a - base), factor_later = exp(b - base);
    const F sum = fma(load<F>(later.sum + lane), factor_later, load<F>(total.sum + lane) * factor);
    store(total.maximum + lane, maximum);
    store(total.sum + lane, sum);
    store(mine + lane, factor);
    store(other + lane, factor_later);
  }
  for (int64_t row = 0; row < lanes; ++row) {
    for (int64_t at = row * padded; at < (row + 1) * padded; at += kW) {
      const F scaled = load<F>(total.values + at) * splat(mine[row]);
      store(total.values + at, fma(load<F>(later.values + at), splat(other[row]), scaled));
    }
  }
}

}  // namespace nemo::attention

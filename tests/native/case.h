// SPDX-License-Identifier: Apache-2.0
//
// A case: a node with its inputs, and what each element of its outputs must be. One generator an op.
//
// What does not matter by an op's description (tokens past a row's length, positions that no query sees, slots that
// no row names) is left as a tensor starts: NaN, and indices of -1.

#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fake_runtime.h"

namespace nemo::cases {

using abi::Value;

class Rng {
 public:
  explicit Rng(uint64_t seed) : engine_(seed) {}

  int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(engine_() % (high - low + 1)); }
  bool chance(int percent) { return between(1, 100) <= percent; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[between(0, static_cast<int64_t>(choices.size()) - 1)];
  }
  // Near enough to a normal distribution.
  float normal();
  // 0 .. n-1 in any order.
  std::vector<int64_t> permutation(int64_t n);

 private:
  std::mt19937_64 engine_;
};

enum class Rule : uint8_t { kAnything, kFinite, kUnchanged };

struct Output {
  std::vector<int64_t> dims;
  int alias = -1;  // the input that it may share a buffer with
  std::vector<Rule> rules;  // one an element

  Output(std::vector<int64_t> dims, int alias = -1);
  void set(int64_t from, int64_t count, Rule rule) { std::fill_n(rules.begin() + from, count, rule); }
};

struct Case {
  fake::Attributes attributes;
  std::vector<std::shared_ptr<Value>> inputs;  // null for absent ones
  std::vector<bool> constant;                  // whether an input is a constant of the graph
  std::vector<Output> outputs;
  std::string refused;  // part of the message with which the kernel must refuse it; empty if it must not

  void add(std::shared_ptr<Value> value, bool is_constant = false);
  // Leaves absent inputs at the end out, as a graph may.
  void trim();
};

struct Generator {
  const char* op;
  Case (*make)(Rng&);
  std::vector<Case> (*bad)(Rng&);  // cases that must be refused
};

std::vector<Generator> block_linear();
std::vector<Generator> routed_experts();
std::vector<Generator> causal_conv1d();
std::vector<Generator> selective_scan();
std::vector<Generator> cached_attention();

// Tensors.

std::shared_ptr<Value> tensor(Rng& rng, int type, std::vector<int64_t> dims);  // as it starts
std::shared_ptr<Value> normals(Rng& rng, std::vector<int64_t> dims, int type = abi::kFloat);
std::shared_ptr<Value> integers(Rng& rng, const std::vector<int64_t>& values);
void fill(Rng& rng, const Value& floats, int64_t from, int64_t count);
// [B, L, width] with the rows within `lengths`.
std::shared_ptr<Value> tokens(Rng& rng, int64_t batch, int64_t steps, int64_t width,
                              const std::vector<int64_t>& lengths);
Output token_output(int64_t batch, int64_t steps, int64_t width, const std::vector<int64_t>& lengths);

// Rows of a step of an op with slots. Rows without tokens have impossible values everywhere else.
struct Control {
  Control(Rng& rng, int64_t batch, int64_t steps, int64_t ring, int64_t room);
  bool fresh(size_t row) const { return past[row] == accepted[row]; }

  int64_t slot_count;
  std::vector<int64_t> slots, past, accepted, lengths;
};

std::vector<int64_t> random_lengths(Rng& rng, int64_t batch, int64_t steps);

}  // namespace nemo::cases

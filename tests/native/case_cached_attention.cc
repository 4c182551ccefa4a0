// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cmath>

#include "case.h"

namespace nemo::cases {
namespace {

struct Sizes {
  int64_t batch, steps, context, heads, group, head_dim, half, window;
  bool causal;
};

Sizes random_sizes(Rng& rng) {
  Sizes sizes{};
  sizes.context = rng.one_of<int64_t>({40, 128, 150, 300});
  sizes.batch = rng.between(0, 4);
  sizes.steps = rng.one_of<int64_t>({0, 1, 1, 2, 5, 9, 40, rng.chance(20) ? 100 : 3});
  sizes.heads = rng.chance(10) ? 12 : rng.between(1, 5);
  sizes.group = rng.between(1, 5);
  sizes.head_dim = rng.chance(50) ? rng.between(1, 80) : rng.one_of<int64_t>({1, 2, 8, 16, 64, 128});
  if (rng.chance(10)) {  // a context of several spans, as few queries and as many
    sizes.context = rng.between(2000, 2300), sizes.steps = rng.between(1, 9);
    sizes.batch = 3, sizes.heads = rng.one_of({1, 12}), sizes.head_dim = rng.between(1, 3);
  }
  sizes.context = std::max(sizes.context, sizes.steps);
  sizes.half = sizes.head_dim * rng.one_of<int64_t>({0, 0, 1, 3}) / 3 / 2;
  sizes.window = rng.one_of<int64_t>({0, 0, 1, 6, 200, 1100});
  sizes.causal = rng.chance(60);
  return sizes;
}

// Keys or values: numbers at the positions before the new ones that some query sees.
std::shared_ptr<Value> cache(Rng& rng, const Sizes& sizes, const Control& control) {
  auto value = tensor(rng, abi::kFloat, {control.slot_count, sizes.heads, sizes.context, sizes.head_dim});
  for (int64_t row = 0; row < sizes.batch; ++row) {
    if (control.lengths[row] == 0) continue;
    const int64_t past = control.past[row];
    const int64_t first = sizes.window > 0 ? std::max<int64_t>(past - sizes.window + 1, 0) : 0;
    for (int64_t head = 0; head < sizes.heads && first < past; ++head) {
      const int64_t at = (control.slots[row] * sizes.heads + head) * sizes.context + first;
      fill(rng, *value, at * sizes.head_dim, (past - first) * sizes.head_dim);
    }
  }
  return value;
}

Output cache_output(const Sizes& sizes, const Control& control, int alias) {
  Output output({control.slot_count, sizes.heads, sizes.context, sizes.head_dim}, alias);
  for (int64_t row = 0; row < sizes.batch; ++row) {
    if (control.lengths[row] == 0) continue;
    for (int64_t head = 0; head < sizes.heads; ++head) {
      const int64_t at = (control.slots[row] * sizes.heads + head) * sizes.context + control.past[row];
      output.set(at * sizes.head_dim, control.lengths[row] * sizes.head_dim, Rule::kFinite);
    }
  }
  return output;
}

// Sinks, and the tables of rotation: for the whole context or more, or only for the positions in use.
void add_options(Rng& rng, Case& made, const Sizes& sizes, const Control& control) {
  const int type = rng.one_of<int>({abi::kFloat, abi::kFloat16, abi::kBFloat16});
  made.add(rng.chance(50) ? normals(rng, {sizes.heads * sizes.group}, type) : nullptr, rng.chance(50));
  int64_t used = 0;
  for (int64_t row = 0; row < sizes.batch; ++row) {
    if (control.lengths[row] > 0) used = std::max(used, control.past[row] + control.lengths[row]);
  }
  const int64_t rows = rng.one_of({used, sizes.context, sizes.context + 3});
  for (int i = 0; i < 2; ++i) made.add(sizes.half > 0 ? normals(rng, {rows, sizes.half}) : nullptr, true);
  made.trim();
}

Case attention_of(Rng& rng, const Sizes& sizes, const Control& control) {
  const int64_t width = sizes.heads * sizes.head_dim;
  Case made;
  for (const int64_t w : {width * sizes.group, width, width}) {
    made.add(tokens(rng, sizes.batch, sizes.steps, w, control.lengths));
  }
  for (int i = 0; i < 2; ++i) made.add(cache(rng, sizes, control));
  for (const auto* values : {&control.slots, &control.past, &control.lengths}) made.add(integers(rng, *values));
  add_options(rng, made, sizes, control);
  made.attributes.numbers["scale"] = 1 / std::sqrt(static_cast<float>(sizes.head_dim));
  if (sizes.window > 0 || rng.chance(50)) made.attributes.integers["window"] = sizes.window;
  if (!sizes.causal || rng.chance(50)) made.attributes.integers["causal"] = sizes.causal;
  made.outputs = {token_output(sizes.batch, sizes.steps, width * sizes.group, control.lengths),
                  cache_output(sizes, control, 3), cache_output(sizes, control, 4)};
  return made;
}

Case attention(Rng& rng) {
  const Sizes sizes = random_sizes(rng);
  return attention_of(rng, sizes, Control(rng, sizes.batch, sizes.steps, 0, sizes.context));
}

std::vector<Case> bad_attention(Rng& rng) {
  const Sizes sizes{1, 3, 10, 2, 2, 6, 2, 0, true};
  Control control(rng, 1, 3, 0, 10);
  control.slot_count = 2, control.slots = {1}, control.past = {7}, control.accepted = {0}, control.lengths = {3};
  std::vector<Case> all;
  const auto add = [&](const char* refused) -> Case& {
    all.push_back(attention_of(rng, sizes, control));
    all.back().refused = refused;
    return all.back();
  };
  for (const int64_t wrong : {int64_t{-1}, int64_t{8}, int64_t{1} << 40}) {
    for (const auto& [input, refused] : {std::pair{5, "slots"}, {6, "the cache"}, {7, "lengths"}}) {
      add(refused).inputs[input]->as<int64_t>()[0] = wrong;
    }
  }
  const auto with_tables = [&](const char* refused, std::vector<int64_t> cos, std::vector<int64_t> sin) {
    Case& made = add(refused);
    made.inputs.resize(9), made.constant.resize(9);
    made.add(normals(rng, std::move(cos)));
    made.add(sin.empty() ? nullptr : normals(rng, std::move(sin)));
  };
  with_tables("the tables", {9, 2}, {9, 2});
  with_tables("cos and sin", {10, 4}, {10, 4});
  with_tables("cos and sin", {10, 2}, {10, 1});
  with_tables("cos and sin", {10, 2}, {});
  add("sinks").inputs[8] = normals(rng, {3});
  add("widths").inputs[0] = normals(rng, {1, 3, 13});
  add("widths").inputs[1] = normals(rng, {1, 3, 6}), all.back().inputs[2] = normals(rng, {1, 3, 6});
  add("keys and values").inputs[2] = normals(rng, {1, 2, 12});
  add("float32").inputs[3] = normals(rng, {2, 2, 10, 6}, abi::kFloat16);
  return all;
}

}  // namespace

std::vector<Generator> cached_attention() { return {{"nemo::CachedAttention", attention, bad_attention}}; }

}  // namespace nemo::cases

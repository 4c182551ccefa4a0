// SPDX-License-Identifier: Apache-2.0

#include "case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace nemo::cases {

float Rng::normal() {
  float total = 0;
  for (int i = 0; i < 4; ++i) total += static_cast<float>(between(-1000, 1000)) / 1000;
  return total * 0.866f;
}

std::vector<int64_t> Rng::permutation(int64_t n) {
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = n - 1; i > 0; --i) std::swap(order[i], order[between(0, i)]);
  return order;
}

Output::Output(std::vector<int64_t> dims_, int alias) : dims(std::move(dims_)), alias(alias) {
  int64_t n = 1;
  for (const int64_t d : dims) n *= d;
  rules.assign(n, alias < 0 ? Rule::kAnything : Rule::kUnchanged);
}

void Case::add(std::shared_ptr<Value> value, bool is_constant) {
  inputs.push_back(std::move(value));
  constant.push_back(is_constant);
}

void Case::trim() {
  while (!inputs.empty() && !inputs.back()) inputs.pop_back(), constant.pop_back();
}

std::shared_ptr<Value> tensor(Rng& rng, int type, std::vector<int64_t> dims) {
  return std::make_shared<Value>(type, std::move(dims), rng.between(0, 1));
}

void fill(Rng& rng, const Value& value, int64_t from, int64_t count) {
  for (int64_t i = from; i < from + count; ++i) {
    // Of the narrow types, numbers from 2^-6 to 2.
    const auto narrow = [&](int bits, int bias) {
      const int64_t exponent = bias + rng.between(-6, 0);
      return static_cast<uint16_t>(rng.between(0, 1) << 15 | exponent << bits | rng.between(0, (1 << bits) - 1));
    };
    if (value.type == abi::kFloat) value.as<float>()[i] = rng.normal();
    if (value.type == abi::kFloat16) value.as<uint16_t>()[i] = narrow(10, 15);
    if (value.type == abi::kBFloat16) value.as<uint16_t>()[i] = narrow(7, 127);
  }
}

std::shared_ptr<Value> normals(Rng& rng, std::vector<int64_t> dims, int type) {
  auto value = tensor(rng, type, std::move(dims));
  fill(rng, *value, 0, value->size());
  return value;
}

std::shared_ptr<Value> integers(Rng& rng, const std::vector<int64_t>& values) {
  auto value = tensor(rng, abi::kInt64, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), value->as<int64_t>());
  return value;
}

std::shared_ptr<Value> tokens(Rng& rng, int64_t batch, int64_t steps, int64_t width,
                              const std::vector<int64_t>& lengths) {
  auto value = tensor(rng, abi::kFloat, {batch, steps, width});
  for (int64_t row = 0; row < batch; ++row) fill(rng, *value, row * steps * width, lengths[row] * width);
  return value;
}

Output token_output(int64_t batch, int64_t steps, int64_t width, const std::vector<int64_t>& lengths) {
  Output output({batch, steps, width});
  for (int64_t row = 0; row < batch; ++row) output.set(row * steps * width, lengths[row] * width, Rule::kFinite);
  return output;
}

std::vector<int64_t> random_lengths(Rng& rng, int64_t batch, int64_t steps) {
  std::vector<int64_t> lengths(batch);
  const bool none = rng.chance(5);
  for (int64_t& n : lengths) n = none || rng.chance(15) ? 0 : rng.chance(30) ? steps : rng.between(0, steps);
  return lengths;
}

Control::Control(Rng& rng, int64_t batch, int64_t steps, int64_t ring, int64_t room)
    : slot_count(batch + rng.between(0, 2)), lengths(random_lengths(rng, batch, steps)) {
  const std::vector<int64_t> order = rng.permutation(slot_count);
  for (int64_t row = 0; row < batch; ++row) {
    const bool active = lengths[row] > 0;
    const int64_t taken = rng.between(0, ring), before = rng.between(0, std::max<int64_t>(room - steps - ring, 0));
    slots.push_back(active ? order[row] : rng.one_of<int64_t>({-1, order[row], slot_count, int64_t{1} << 40}));
    accepted.push_back(active ? taken : rng.one_of<int64_t>({-1, 0, ring + 1, int64_t{1} << 40}));
    past.push_back(active ? taken + (rng.chance(30) ? 0 : before) : rng.one_of<int64_t>({-1, 0, int64_t{1} << 40}));
  }
}

}  // namespace nemo::cases

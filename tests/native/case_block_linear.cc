// SPDX-License-Identifier: Apache-2.0

#include "weights.h"

namespace nemo::cases {
namespace {

struct Sizes {
  int64_t batch, steps, rows, columns;
};

// Mostly small; now and then weights of several tasks, or more tokens than are multiplied at a time.
Sizes random_sizes(Rng& rng) {
  const bool large = rng.chance(6);
  const int64_t steps = rng.chance(60) ? rng.between(0, 26) : rng.one_of<int64_t>({0, 1, 1, 2, 5, large ? 110 : 3});
  return {rng.chance(5) ? 0 : rng.between(1, 3), steps, large ? rng.between(250, 400) : rng.between(1, 70),
          large ? rng.between(100, 700) : rng.between(1, 150)};
}

// x and, as input 2, lengths; the weight's tensors come between and after.
Case with_tokens(Rng& rng, const Sizes& sizes, std::shared_ptr<Value> weight, bool is_constant) {
  Case made;
  const int64_t count = sizes.batch * sizes.steps;
  const bool flat = rng.chance(30), limited = !flat && rng.chance(70);
  const auto lengths = limited ? random_lengths(rng, sizes.batch, sizes.steps)
                               : std::vector<int64_t>(sizes.batch, sizes.steps);
  made.add(flat ? normals(rng, {count, sizes.columns})
                : tokens(rng, sizes.batch, sizes.steps, sizes.columns, lengths));
  made.add(std::move(weight), is_constant);
  made.add(limited ? integers(rng, lengths) : nullptr);
  made.outputs.push_back(token_output(sizes.batch, sizes.steps, sizes.rows, lengths));
  if (flat) made.outputs[0].dims = {count, sizes.rows};
  return made;
}

std::shared_ptr<Value> panels(Rng& rng, const Weight& weight) {
  auto value = tensor(rng, abi::kUint8, {static_cast<int64_t>(weight.panel_bytes())});
  weight.pack(value->as<uint8_t>());
  return value;
}

Case packed(Rng& rng) {
  fake::Attributes attributes;
  const std::string rounding = set_arithmetic(rng, attributes);
  const Format format = random_format(rng);
  Sizes sizes = random_sizes(rng);
  sizes.columns = width_for(format, rounding, sizes.columns);
  const Weight weight = random_weight(rng, format, sizes.rows, sizes.columns);
  Case made = with_tokens(rng, sizes, panels(rng, weight), true);
  attributes.texts["weight_format"] = info(format).name;
  attributes.integers = {{"rows", sizes.rows}, {"columns", sizes.columns}};
  made.attributes = attributes;
  made.add(rng.chance(70) ? scale(rng) : nullptr, true);
  made.add(rng.chance(70) ? scale(rng) : nullptr, true);
  made.trim();
  return made;
}

Case stored(Rng& rng) {
  fake::Attributes attributes;
  const std::string rounding = set_arithmetic(rng, attributes);
  const Format format = random_stored_format(rng);
  Sizes sizes = random_sizes(rng);
  sizes.columns = width_for(format, rounding, sizes.columns);
  const Weight weight = random_weight(rng, format, sizes.rows, sizes.columns);
  Case made = with_tokens(rng, sizes, weight.codes, rng.chance(50));
  if (rng.chance(80) || stored_name(format) != std::string("plain")) {
    attributes.texts["weight_format"] = stored_name(format);
  }
  made.attributes = attributes;
  made.add(format == Format::kNvfp4 ? weight.scales : format == Format::kFp8 ? scale(rng) : nullptr, true);
  made.add(format == Format::kNvfp4 ? scale(rng) : nullptr, true);
  made.add(rng.chance(70) ? scale(rng) : nullptr, true);
  made.trim();
  return made;
}

Case plain(Rng& rng, const char* op_format, std::vector<int64_t> x, int x_type, std::shared_ptr<Value> weight) {
  Case made;
  made.attributes.texts["weight_format"] = op_format;
  made.add(normals(rng, std::move(x), x_type));
  made.add(std::move(weight), true);
  made.outputs.emplace_back(std::vector<int64_t>{});
  return made;
}

std::vector<Case> bad(Rng& rng, bool is_packed) {
  const auto make = [&](const char* refused, std::vector<int64_t> x, int x_type = abi::kFloat,
                        const char* format = nullptr, int64_t columns = 5) {
    const Weight weight = random_weight(rng, Format::kF32, 3, columns);
    Case made = plain(rng, format ? format : is_packed ? "f32" : "plain", std::move(x), x_type,
                      is_packed ? panels(rng, weight) : weight.codes);
    if (is_packed) made.attributes.integers = {{"rows", 3}, {"columns", columns}};
    made.refused = refused;
    return made;
  };
  std::vector<Case> all;
  all.push_back(make("different widths", {2, 4}));
  all.push_back(make("different widths", {2, 6}));
  all.push_back(make("a scalar", {}, abi::kFloat, nullptr, 1));
  all.push_back(make("must be float32", {2, 5}, abi::kFloat16));
  all.push_back(make("no panel format q8", {2, 5}, abi::kFloat, "q8"));
  all.push_back(make("no precision", {2, 5}));
  all.back().attributes.texts["precision"] = "int3";
  all.push_back(make("no activation format", {2, 5}));
  all.back().attributes.texts["activation_format"] = "fp7";
  for (const int64_t length : {int64_t{-1}, int64_t{3}, int64_t{1} << 40}) {
    all.push_back(make("lengths", {2, 2, 5}));
    all.back().add(integers(rng, {1, length}));
  }
  return all;
}

std::vector<Case> bad_packed(Rng& rng) { return bad(rng, true); }

std::vector<Case> bad_stored(Rng& rng) {
  std::vector<Case> all = bad(rng, false);
  all.push_back(plain(rng, "plain", {2, 5}, abi::kFloat, normals(rng, {5})));
  all.back().refused = "must be a matrix";
  all.push_back(plain(rng, "plain", {1, 2}, abi::kFloat, tensor(rng, abi::kInt8, {3, 2})));
  all.back().refused = "a plain weight must be";
  return all;
}

}  // namespace

std::vector<Generator> block_linear() {
  return {{"nemo::BlockLinear", stored, bad_stored}, {"nemo.cpu::BlockLinear", packed, bad_packed}};
}

}  // namespace nemo::cases

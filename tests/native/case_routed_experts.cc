// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "weights.h"

namespace nemo::cases {
namespace {

struct Sizes {
  int64_t batch, steps, width, inner, experts, top_k;
};

Sizes random_sizes(Rng& rng, Format format, const std::string& rounding) {
  const bool large = rng.chance(4);
  Sizes sizes{};
  sizes.batch = rng.chance(5) ? 0 : rng.between(1, 3);
  sizes.steps = rng.one_of<int64_t>({0, 1, 1, 2, 5, 9, large ? 60 : 3});
  sizes.width = width_for(format, rounding, large ? rng.between(200, 300) : rng.between(1, 70));
  sizes.inner = width_for(format, rounding, large ? rng.between(250, 350) : rng.between(1, 70));
  sizes.experts = rng.between(1, 9);
  sizes.top_k = rng.between(1, std::min<int64_t>(sizes.experts, 4));
  return sizes;
}

// Chosen experts: distinct for a token; at times the same ones for all tokens, so that others have none.
std::shared_ptr<Value> choices(Rng& rng, const Sizes& sizes, const std::vector<int64_t>& lengths) {
  auto indices = tensor(rng, abi::kInt64, {sizes.batch, sizes.steps, sizes.top_k});
  const bool same = rng.chance(25);
  std::vector<int64_t> order = rng.permutation(sizes.experts);
  for (int64_t row = 0; row < sizes.batch; ++row) {
    for (int64_t t = 0; t < lengths[row]; ++t) {
      if (!same) order = rng.permutation(sizes.experts);
      std::copy_n(order.begin(), sizes.top_k, indices->as<int64_t>() + (row * sizes.steps + t) * sizes.top_k);
    }
  }
  return indices;
}

Case with_tokens(Rng& rng, const Sizes& sizes, const std::vector<int64_t>& lengths) {
  Case made;
  made.attributes.integers["num_experts"] = sizes.experts;
  made.add(tokens(rng, sizes.batch, sizes.steps, sizes.width, lengths));
  made.add(choices(rng, sizes, lengths));
  made.add(tokens(rng, sizes.batch, sizes.steps, sizes.top_k, lengths));
  made.add(integers(rng, lengths));
  made.outputs.push_back(token_output(sizes.batch, sizes.steps, sizes.width, lengths));
  return made;
}

std::vector<Weight> random_weights(Rng& rng, Format format, int64_t experts, int64_t rows, int64_t columns) {
  std::vector<Weight> all;
  for (int64_t e = 0; e < experts; ++e) all.push_back(random_weight(rng, format, rows, columns));
  return all;
}

std::shared_ptr<Value> stack(Rng& rng, const std::vector<Weight>& weights) {
  const int64_t bytes = static_cast<int64_t>(weights[0].panel_bytes());
  auto value = tensor(rng, abi::kUint8, {static_cast<int64_t>(weights.size()), bytes});
  for (size_t e = 0; e < weights.size(); ++e) weights[e].pack(value->as<uint8_t>() + e * bytes);
  return value;
}

void add_packed(Rng& rng, Case& made, Format format, const Sizes& sizes) {
  made.add(stack(rng, random_weights(rng, format, sizes.experts, sizes.inner, sizes.width)), true);
  made.add(stack(rng, random_weights(rng, format, sizes.experts, sizes.width, sizes.inner)), true);
  for (int i = 0; i < 4; ++i) made.add(rng.chance(70) ? scales(rng, {sizes.experts}) : nullptr, true);
  made.attributes.texts["weight_format"] = info(format).name;
  made.attributes.integers["width"] = sizes.width;
  made.attributes.integers["inner"] = sizes.inner;
  made.trim();
}

// Of each half: weights, block scales or scales, scales of those, input scales; each for all experts.
void add_stored(Rng& rng, Case& made, Format format, const Sizes& sizes) {
  const auto rounding = made.attributes.texts.find("activation_format");
  const bool rounds = rounding != made.attributes.texts.end() && rounding->second != "none";
  for (int half = 0; half < 2; ++half) {
    const int64_t rows = half == 0 ? sizes.inner : sizes.width, columns = half == 0 ? sizes.width : sizes.inner;
    const std::vector<Weight> weights = random_weights(rng, format, sizes.experts, rows, columns);
    const auto add_scale = [&](bool is_there) {
      for (int64_t e = 0; is_there && e < sizes.experts; ++e) made.add(scale(rng), true);
    };
    for (const Weight& weight : weights) made.add(weight.codes, true);
    if (format == Format::kNvfp4) {
      for (const Weight& weight : weights) made.add(weight.scales, true);
    }
    add_scale(format == Format::kFp8 || format == Format::kNvfp4);
    add_scale(rounds);
  }
  made.attributes.texts["weight_format"] = stored_name(format);
}

typedef void (*AddWeights)(Rng&, Case&, Format, const Sizes&);

Case make(Rng& rng, Format format, AddWeights add_weights) {
  fake::Attributes attributes;
  const std::string rounding = set_arithmetic(rng, attributes);
  const Sizes sizes = random_sizes(rng, format, rounding);
  Case made = with_tokens(rng, sizes, random_lengths(rng, sizes.batch, sizes.steps));
  made.attributes.texts = attributes.texts;
  add_weights(rng, made, format, sizes);
  return made;
}

Case packed(Rng& rng) { return make(rng, random_format(rng), add_packed); }
Case stored(Rng& rng) { return make(rng, random_stored_format(rng), add_stored); }

std::vector<Case> bad(Rng& rng, AddWeights add_weights) {
  const Sizes sizes{2, 3, 5, 7, 4, 2};
  const auto valid = [&](const char* refused) {
    Case made = with_tokens(rng, sizes, {3, 1});
    add_weights(rng, made, Format::kF32, sizes);
    made.refused = refused;
    return made;
  };
  std::vector<Case> all;
  for (const int64_t expert : {int64_t{-1}, int64_t{4}, int64_t{1} << 40}) {
    all.push_back(valid("not that of an expert"));
    all.back().inputs[1]->as<int64_t>()[3] = expert;
  }
  for (const int64_t length : {int64_t{-1}, int64_t{4}}) {
    all.push_back(valid("lengths"));
    all.back().inputs[3]->as<int64_t>()[1] = length;
  }
  all.push_back(valid("width differs"));
  all.back().inputs[0] = normals(rng, {2, 3, 6});
  all.push_back(valid("no choices"));
  all.back().inputs[1] = tensor(rng, abi::kInt64, {2, 3, 0});
  all.back().inputs[2] = normals(rng, {2, 3, 0});
  return all;
}

std::vector<Case> bad_packed(Rng& rng) { return bad(rng, add_packed); }
std::vector<Case> bad_stored(Rng& rng) { return bad(rng, add_stored); }

}  // namespace

std::vector<Generator> routed_experts() {
  return {{"nemo::RoutedExperts", stored, bad_stored}, {"nemo.cpu::RoutedExperts", packed, bad_packed}};
}

}  // namespace nemo::cases

// SPDX-License-Identifier: Apache-2.0
//
// The ops that keep pending tokens: CausalConv1d and SelectiveScan.

#include "case.h"

namespace nemo::cases {
namespace {

// Whether a row's new tokens go to the ring: a single one and more than it holds are committed at once.
bool is_kept(int64_t tokens, int64_t ring) { return tokens > 1 && tokens <= ring; }

int any_float(Rng& rng) { return rng.one_of<int>({abi::kFloat, abi::kFloat16, abi::kBFloat16}); }

// Rows of a slot of a state [S, rows, width] that the step reads; those that it writes.
void fill_rows(Rng& rng, const Value& state, int64_t slot, int64_t from, int64_t count) {
  const int64_t width = state.dims[2];
  fill(rng, state, (slot * state.dims[1] + from) * width, count * width);
}

void set_rows(Output& state, int64_t slot, int64_t from, int64_t count) {
  const int64_t width = state.dims[2];
  state.set((slot * state.dims[1] + from) * width, count * width, Rule::kFinite);
}

void add_control(Rng& rng, Case& made, const Control& control) {
  for (const auto* values : {&control.slots, &control.past, &control.accepted, &control.lengths}) {
    made.add(integers(rng, *values));
  }
}

// CausalConv1d.

struct Conv {
  int64_t batch, steps, channels, taps, ring;
};

Case conv_of(Rng& rng, const Conv& sizes, const Control& control) {
  const int64_t keep = sizes.taps - 1, rows = keep + sizes.ring;
  Case made;
  made.add(tokens(rng, sizes.batch, sizes.steps, sizes.channels, control.lengths));
  made.add(normals(rng, {sizes.channels, 1, sizes.taps}, any_float(rng)), rng.chance(60));
  made.add(rng.chance(70) ? normals(rng, {sizes.channels}, any_float(rng)) : nullptr, rng.chance(60));
  auto state = tensor(rng, abi::kFloat, {control.slot_count, rows, sizes.channels});
  Output next(state->dims, 3);
  for (int64_t row = 0; row < sizes.batch; ++row) {
    const int64_t n = control.lengths[row], slot = control.slots[row];
    if (n == 0) continue;
    if (!control.fresh(row)) fill_rows(rng, *state, slot, 0, keep);
    fill_rows(rng, *state, slot, keep, control.accepted[row]);
    set_rows(next, slot, 0, keep);
    if (is_kept(n, sizes.ring)) set_rows(next, slot, keep, n);
  }
  made.add(state);
  add_control(rng, made, control);
  made.outputs = {token_output(sizes.batch, sizes.steps, sizes.channels, control.lengths), next};
  return made;
}

Case conv(Rng& rng) {
  const int64_t channels = rng.chance(10) ? rng.one_of<int64_t>({511, 513, 1029}) : rng.between(1, 40);
  const Conv sizes{rng.between(0, 4), rng.one_of<int64_t>({0, 1, 1, 2, 3, 5, 9, 40}), channels, rng.between(1, 5),
                   rng.one_of<int64_t>({0, 1, 3, 5, 12})};
  return conv_of(rng, sizes, Control(rng, sizes.batch, sizes.steps, sizes.ring, 80));
}

std::vector<Case> bad_conv(Rng& rng) {
  const Conv sizes{1, 3, 5, 4, 2};
  Control control(rng, 1, 3, 2, 0);
  control.slot_count = 2, control.slots = {1}, control.past = {9}, control.accepted = {1}, control.lengths = {3};
  std::vector<Case> all;
  const auto add = [&](const char* refused) -> Case& {
    all.push_back(conv_of(rng, sizes, control));
    all.back().refused = refused;
    return all.back();
  };
  for (const int64_t wrong : {int64_t{-1}, int64_t{4}, int64_t{1} << 40}) {
    for (const auto& [input, refused] : {std::pair{4, "slots"}, {6, "accepted"}, {7, "lengths"}}) {
      add(refused).inputs[input]->as<int64_t>()[0] = wrong;
    }
  }
  add("a type that this kernel does not read").inputs[1] = tensor(rng, abi::kInt8, {5, 1, 4});
  add("channels differ").inputs[0] = normals(rng, {1, 3, 4});
  add("no room for the window").inputs[3] = normals(rng, {2, 2, 5});
  return all;
}

// SelectiveScan.

struct Scan {
  int64_t batch, steps, ring, groups, per_group, head_dim, width;

  int64_t heads() const { return groups * per_group; }
  int64_t inner() const { return heads() * head_dim; }
  int64_t group_width() const { return groups * width; }
};

void add_scan_state(Rng& rng, Case& made, const Scan& sizes, const Control& control) {
  const int64_t features = sizes.inner() + sizes.group_width() + sizes.heads(), size = sizes.inner() * sizes.width;
  auto state = tensor(rng, abi::kFloat, {control.slot_count, sizes.heads(), sizes.head_dim, sizes.width});
  auto pending = tensor(rng, abi::kFloat, {control.slot_count, sizes.ring, features});
  Output state_out(state->dims, 7), pending_out(pending->dims, 8);
  for (int64_t row = 0; row < sizes.batch; ++row) {
    const int64_t n = control.lengths[row], slot = control.slots[row], taken = control.accepted[row];
    if (n == 0) continue;
    if (!control.fresh(row)) fill(rng, *state, slot * size, size);
    fill_rows(rng, *pending, slot, 0, taken);
    for (int64_t t = 0; t < taken; ++t) {  // time steps are not negative
      float* d = pending->as<float>() + (slot * sizes.ring + t + 1) * features - sizes.heads();
      for (int64_t head = 0; head < sizes.heads(); ++head) d[head] *= d[head];
    }
    if (!is_kept(n, sizes.ring) || taken > 0 || control.fresh(row)) state_out.set(slot * size, size, Rule::kFinite);
    if (is_kept(n, sizes.ring)) set_rows(pending_out, slot, 0, n);
  }
  made.add(state);
  made.add(pending);
  made.outputs = {token_output(sizes.batch, sizes.steps, sizes.inner(), control.lengths), state_out, pending_out};
}

Case scan_of(Rng& rng, const Scan& sizes, const Control& control) {
  Case made;
  for (const int64_t width : {sizes.inner(), sizes.heads(), sizes.group_width(), sizes.group_width()}) {
    made.add(tokens(rng, sizes.batch, sizes.steps, width, control.lengths));
  }
  const bool is_constant = rng.chance(60);
  for (int i = 0; i < 3; ++i) made.add(normals(rng, {sizes.heads()}, any_float(rng)), is_constant || rng.chance(30));
  if (rng.chance(30)) made.attributes.numbers = {{"dt_min", 0.3f}, {"dt_max", 0.9f}};
  add_scan_state(rng, made, sizes, control);
  add_control(rng, made, control);
  return made;
}

Case scan(Rng& rng) {
  const Scan sizes{rng.between(0, 4),
                   rng.one_of<int64_t>({0, 1, 1, 2, 5, 9, 40}),
                   rng.one_of<int64_t>({0, 1, 3, 5, 35}),
                   rng.between(1, 3),
                   rng.between(1, 9),
                   rng.one_of<int64_t>({1, 2, 3, 5, 12}),
                   // Often the same, so that what a thread keeps is from sizes that differ in one alone.
                   rng.chance(50) ? rng.between(1, 150) : rng.one_of<int64_t>({16, 128})};
  return scan_of(rng, sizes, Control(rng, sizes.batch, sizes.steps, sizes.ring, 80));
}

std::vector<Case> bad_scan(Rng& rng) {
  const Scan sizes{1, 3, 2, 2, 2, 3, 5};
  Control control(rng, 1, 3, 2, 0);
  control.slot_count = 2, control.slots = {1}, control.past = {9}, control.accepted = {1}, control.lengths = {3};
  std::vector<Case> all;
  const auto add = [&](const char* refused) -> Case& {
    all.push_back(scan_of(rng, sizes, control));
    all.back().refused = refused;
    return all.back();
  };
  for (const int64_t wrong : {int64_t{-1}, int64_t{4}, int64_t{1} << 40}) {
    for (const auto& [input, refused] : {std::pair{9, "slots"}, {11, "accepted"}, {12, "lengths"}}) {
      add(refused).inputs[input]->as<int64_t>()[0] = wrong;
    }
  }
  add("widths").inputs[0] = normals(rng, {1, 3, 11});
  add("widths").inputs[1] = normals(rng, {1, 3, 3});
  add("widths").inputs[3] = normals(rng, {1, 3, 9});
  add("groups").inputs[2] = normals(rng, {1, 3, 11});
  add("ranks").inputs[8] = normals(rng, {2, 2});
  add("float32").inputs[7] = normals(rng, {2, 4, 3, 5}, abi::kFloat16);
  return all;
}

}  // namespace

std::vector<Generator> causal_conv1d() { return {{"nemo::CausalConv1d", conv, bad_conv}}; }
std::vector<Generator> selective_scan() { return {{"nemo::SelectiveScan", scan, bad_scan}}; }

}  // namespace nemo::cases

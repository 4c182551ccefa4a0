// SPDX-License-Identifier: Apache-2.0
//
// Runs every op of the library over random cases, for the sanitizers that it is compiled with:
//
//   driver [cases an op] [first seed]
//
// A case is computed by one thread, by several, in place, and twice at once by one kernel; all results must agree in
// every bit, be finite where something is computed, and be as before where nothing is. Numbers are compared with the
// references elsewhere.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "case.h"

namespace nemo {
namespace {

using abi::CustomOp;
using abi::Status;
using abi::Value;
using cases::Case;
using cases::Rule;
using fake::Pool;

typedef std::vector<std::shared_ptr<Value>> Values;

void check(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

void check(Status* status) {
  if (status == nullptr) return;
  const std::unique_ptr<Status> owned(status);
  throw std::runtime_error(owned->message);
}

// What the runtime would refuse to make a node of.
void check_signature(const CustomOp* op, const Case& made) {
  const size_t count = op->get_input_count(op), last = made.inputs.size() - 1;
  check(made.outputs.size() == op->get_output_count(op), "another number of outputs");
  const bool variadic = op->get_input_characteristic(op, count - 1) == abi::kVariadic;
  check(made.inputs.size() <= count || variadic, "too many inputs");
  for (size_t i = 0; i < count; ++i) {
    const bool there = i <= last && made.inputs[i];
    check(there || op->get_input_characteristic(op, i) == abi::kOptional, "an input is missing that is not optional");
  }
}

// A node of a session.
class Kernel {
 public:
  Kernel(const CustomOp* op, const Case& made) : op_(op) {
    // What a kernel keeps of these must be copies.
    const fake::Attributes attributes = made.attributes;
    abi::KernelInfo info{&attributes, {}};
    for (size_t i = 0; i < made.inputs.size(); ++i) {
      info.constants.push_back(made.constant[i] ? made.inputs[i].get() : nullptr);
    }
    check(op->create_kernel_v2(op, fake::api_table(), &info, &kernel_));
  }
  Kernel(const Kernel&) = delete;
  ~Kernel() { op_->destroy(kernel_); }

  // Outputs are apart from inputs, or in the buffers of those inputs that they may share.
  Values compute(const Case& made, Pool& pool, bool in_place) const {
    Values inputs = made.inputs;
    abi::KernelContext context{{}, Values(made.outputs.size()), &pool};
    for (size_t i = 0; in_place && i < made.outputs.size(); ++i) {
      const int alias = made.outputs[i].alias;
      if (alias >= 0) context.outputs[i] = inputs[alias] = std::make_shared<Value>(*inputs[alias]);
    }
    for (const auto& input : inputs) context.inputs.push_back(input.get());
    check(op_->compute_v2(kernel_, &context));
    return context.outputs;
  }

 private:
  const CustomOp* op_;
  void* kernel_ = nullptr;
};

bool same(const Value& a, size_t from, const Value& b, size_t size) {
  return std::memcmp(a.as<uint8_t>() + from, b.as<uint8_t>() + from, size) == 0;
}

std::string place(size_t output, size_t element) {
  return "output " + std::to_string(output) + ", element " + std::to_string(element);
}

void check_rules(const Case& made, const Values& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    const cases::Output& wanted = made.outputs[i];
    check(outputs[i] != nullptr && outputs[i]->dims == wanted.dims, "an output has another shape than it should");
    for (size_t e = 0; e < wanted.rules.size(); ++e) {
      if (wanted.rules[e] == Rule::kFinite && !std::isfinite(outputs[i]->as<float>()[e])) {
        throw std::runtime_error(place(i, e) + " is not finite");
      }
      if (wanted.rules[e] == Rule::kUnchanged && !same(*outputs[i], e * 4, *made.inputs[wanted.alias], 4)) {
        throw std::runtime_error(place(i, e) + " was changed");
      }
    }
  }
}

void check_equal(const Case& made, const Values& outputs, const Values& others, const char* how) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (size_t e = 0; e < made.outputs[i].rules.size(); ++e) {
      if (made.outputs[i].rules[e] == Rule::kAnything || same(*outputs[i], e * 4, *others[i], 4)) continue;
      throw std::runtime_error(place(i, e) + " differs " + how);
    }
  }
}

// Threads of sessions. They last, as do what kernels keep for a thread.
struct Pools {
  Pool one{1}, few{3}, many{4}, first{2}, second{2};
};

// Two computations of one kernel, each on threads of its own.
void run_twice(const Kernel& kernel, const Case& made, const Values& wanted, Pools& pools, bool in_place) {
  Values results[2];
  std::string problems[2];
  const auto run = [&](int i) {
    try {
      results[i] = kernel.compute(made, i == 0 ? pools.first : pools.second, in_place);
    } catch (const std::exception& error) {
      problems[i] = error.what();
    }
  };
  std::thread beside(run, 1);
  run(0);
  beside.join();
  for (int i = 0; i < 2; ++i) {
    check(problems[i].empty(), problems[i]);
    check_equal(made, results[i], wanted, "when computed twice at once");
  }
}

void run_case(const CustomOp* op, const Case& made, Pools& pools, bool twice_in_place) {
  check_signature(op, made);
  std::vector<Value> before;
  for (const auto& input : made.inputs) before.push_back(input ? *input : Value(abi::kInt8, {0}));
  const Kernel kernel(op, made);
  const Values wanted = kernel.compute(made, pools.one, false);
  check_rules(made, wanted);
  check_equal(made, kernel.compute(made, pools.many, false), wanted, "with several threads");
  check_equal(made, kernel.compute(made, pools.few, true), wanted, "in place");
  run_twice(kernel, made, wanted, pools, twice_in_place);
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i].bytes() == 0) continue;
    check(same(before[i], 0, *made.inputs[i], before[i].bytes()), "input " + std::to_string(i) + " was changed");
  }
}

void run_refused(const CustomOp* op, const Case& made, Pools& pools) {
  try {
    Kernel(op, made).compute(made, pools.few, false);
  } catch (const std::exception& error) {
    check(std::strstr(error.what(), made.refused.c_str()) != nullptr, "refused because: " + std::string(error.what()));
    return;
  }
  throw std::runtime_error("was not refused: " + made.refused);
}

std::vector<cases::Generator> generators() {
  std::vector<cases::Generator> all;
  for (auto* of : {cases::block_linear, cases::routed_experts, cases::causal_conv1d, cases::selective_scan,
                   cases::cached_attention}) {
    for (const cases::Generator& generator : of()) all.push_back(generator);
  }
  return all;
}

// Sessions register the library again while others run.
class Registrations {
 public:
  Registrations()
      : thread_([this] {
          while (!stop_.load(std::memory_order_relaxed)) {
            fake::register_ops();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }) {}
  ~Registrations() {
    stop_.store(true, std::memory_order_relaxed);
    thread_.join();
  }

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

int run_op(const cases::Generator& generator, const CustomOp* op, Pools& pools, uint64_t first, uint64_t count) {
  std::string label;
  try {
    for (uint64_t seed = first; seed < first + count; ++seed) {
      label = "seed " + std::to_string(seed);
      cases::Rng rng(seed);
      run_case(op, generator.make(rng), pools, seed % 2 == 0);
    }
    cases::Rng rng(first);
    const std::vector<Case> bad = generator.bad(rng);
    for (size_t i = 0; i < bad.size(); ++i) {
      label = "bad case " + std::to_string(i) + " (" + bad[i].refused + ")";
      run_refused(op, bad[i], pools);
    }
    std::printf("%s: %d cases, %d refused\n", generator.op, static_cast<int>(count), static_cast<int>(bad.size()));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s, %s: %s\n", generator.op, label.c_str(), error.what());
    return 1;
  }
}

int run(uint64_t count, uint64_t first) {
  std::map<std::string, const CustomOp*> ops = fake::register_ops();
  Pools pools;
  int failures = 0;
  {
    const Registrations beside;
    for (const cases::Generator& generator : generators()) {
      const auto op = ops.find(generator.op);
      if (op == ops.end()) {
        std::fprintf(stderr, "%s: is not in the library\n", generator.op);
        ++failures;
        continue;
      }
      failures += run_op(generator, op->second, pools, first, count);
      ops.erase(op);
    }
  }
  for (const auto& [name, op] : ops) std::fprintf(stderr, "%s: has no cases\n", name.c_str()), ++failures;
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace nemo

int main(int count, char** arguments) {
  const auto number = [&](int i, uint64_t fallback) -> uint64_t {
    return count > i ? std::strtoull(arguments[i], nullptr, 10) : fallback;
  };
  return nemo::run(number(1, 100), number(2, 1));
}

// SPDX-License-Identifier: Apache-2.0
//
// What the kernel of a custom op is written against: tensors, a context, the node, and its registration.
//
// A kernel is a class with a constructor from `Node` and `void compute(Context&)`; both throw `Invalid` for
// what a caller did wrong. `static const Registration<Kernel> name{...}` in its file makes the library offer it.

#pragma once

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_abi.h"

namespace nemo {

struct Invalid : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const char* what) {
  if (!holds) throw Invalid(what);
}

// What the rows of a step say, one number a row each. `accepted` and `ring` are of ops that keep pending tokens.
struct Rows {
  const int64_t *slots, *lengths, *accepted = nullptr;
  int64_t batch, steps, slot_count, ring = 0;
};

// Whether a row's new tokens stay pending, for the next step to commit as many of them as are accepted. A single one has no
// draft behind it, so that nothing can reject it; what is longer than the ring is part of a prompt.
inline bool stays_pending(int64_t tokens, int64_t ring) { return tokens > 1 && tokens <= ring; }

// Refuses rows that would reach outside their buffers.
void require_rows(const char* op, const Rows& rows);

constexpr int kMaxRank = 8;

// A view of a tensor. `data` is null for an optional input that is not there.
struct Tensor {
  void* data = nullptr;
  int type = abi::kAny;
  size_t rank = 0;
  int64_t dims[kMaxRank] = {};

  explicit operator bool() const { return data != nullptr || rank != 0; }
  int64_t size() const {
    int64_t n = 1;
    for (size_t i = 0; i < rank; ++i) n *= dims[i];
    return n;
  }
  // The product of all dimensions but the last.
  int64_t rows() const {
    int64_t n = 1;
    for (size_t i = 0; i + 1 < rank; ++i) n *= dims[i];
    return n;
  }
  int64_t last() const { return rank ? dims[rank - 1] : 1; }
  const float* floats() const { return static_cast<const float*>(data); }
  const int64_t* ints() const { return static_cast<const int64_t*>(data); }
  const uint8_t* bytes() const { return static_cast<const uint8_t*>(data); }
  float* mutable_floats() const { return static_cast<float*>(data); }
};

// Element `i` of a small float tensor stored as float32, bfloat16 or float16.
float element(const Tensor& tensor, int64_t i);
// All of it as float32.
std::vector<float> to_floats(const Tensor& tensor);

// A node: its attributes and constant inputs.
class Node {
 public:
  Node(abi::Api api, const abi::KernelInfo* info) : api_(api), info_(info) {}
  // The attribute, or `fallback` if the node has none of this name.
  int64_t integer(const char* name, int64_t fallback) const;
  float number(const char* name, float fallback) const;
  std::string text(const char* name, const char* fallback) const;
  // Input `i` if it is a constant of the graph, an empty tensor if not.
  Tensor constant(size_t i) const;

 private:
  bool ok(abi::Status* status) const;
  abi::Api api_;
  const abi::KernelInfo* info_;
};

// Multiplications of vectors that take a few microseconds, which waking threads and waiting for them takes too.
constexpr int64_t kWorthThreads = 1 << 18;

class Context {
 public:
  Context(abi::Api api, abi::KernelContext* context) : api_(api), context_(context) {}

  size_t input_count() const;
  // Input `i`; an empty tensor if it is optional and absent, or past the last one.
  Tensor input(size_t i) const;
  Tensor output(size_t i, const int64_t* dims, size_t rank) const;
  // An output of the shape of `like` that starts as a copy of it; free if the caller bound both to one buffer.
  Tensor state_output(size_t i, const Tensor& like) const;
  // The stream of the session's GPU that the op's work goes to; null on the CPU.
  void* stream() const;

  // Runs work(0) .. work(tasks - 1) in any order: on the session's threads, and waits for them; or here, if the cost of all
  // tasks together, in multiplications or the like, is less than that of waiting.
  template <class Work>
  void parallel(size_t tasks, int64_t cost, const Work& work) const {
    if (tasks <= 1 || cost < kWorthThreads) {
      for (size_t i = 0; i < tasks; ++i) work(i);
      return;
    }
    run_parallel([](void* user, size_t i) { (*static_cast<const Work*>(user))(i); }, tasks,
                 const_cast<Work*>(&work));
  }

 private:
  void run_parallel(void (*work)(void*, size_t), size_t tasks, void* user) const;
  abi::Api api_;
  abi::KernelContext* context_;
};

// What the runtime is told of an op.
struct Signature {
  const char* domain;
  const char* name;
  std::vector<int> input_characteristics;  // one an input; types are checked by the kernel
  size_t outputs;
};

// Every op of the library, in the order of initialisation.
struct Entry {
  abi::CustomOp op;  // first, so that the runtime's pointer to it is one to the entry
  Signature signature;
};
std::vector<Entry*>& entries();
Entry* make_entry(Signature signature);
abi::Status* failure(abi::Api api, const char* message);
extern abi::Api runtime;

template <class Kernel>
struct Registration {
  Entry* entry;

  explicit Registration(Signature signature) : entry(make_entry(std::move(signature))) {
    entry->op.create_kernel_v2 = [](const abi::CustomOp*, const void* const* table, const abi::KernelInfo* info,
                                    void** kernel) -> abi::Status* {
      const abi::Api api{table};
      try {
        *kernel = new Kernel(Node(api, info));
        return nullptr;
      } catch (const std::exception& error) {
        return failure(api, error.what());
      }
    };
    entry->op.compute_v2 = [](void* kernel, abi::KernelContext* context) -> abi::Status* {
      try {
        Context wrapped(runtime, context);
        static_cast<Kernel*>(kernel)->compute(wrapped);
        return nullptr;
      } catch (const std::exception& error) {
        return failure(runtime, error.what());
      }
    };
    entry->op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }
};

}  // namespace nemo

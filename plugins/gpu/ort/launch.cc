// SPDX-License-Identifier: Apache-2.0
//
// The op `nemo.gpu.Launch` of ONNX Runtime: one launch of one precompiled kernel.
//
// Its first input is the machine code, uint8, a constant in the CPU's memory; the others, and its outputs, are the
// kernel's tensors. Attributes (all strings and integers; program.h has the notation):
//
//   kernel         what messages call it, and what a host is told
//   entry          the function's name in the code
//   input_shapes   shapes of the kernel's inputs, which give the sizes
//   sizes          its 32-bit integers
//   output_shapes  shapes of its outputs, or the inputs whose buffers they share
//   grid           programs along x, y and z
//   threads        of a program
//   shared         bytes of dynamic shared memory
//   hidden         null pointers that follow the kernel's own parameters
//
// Parameters are passed in the order inputs, sizes, outputs, hidden. An output that shares an input's buffer starts as a
// copy of it, which is free if the caller has bound both to one address.
//
// There is one for the CUDA provider, which launches on the provider's stream. The one for the CPU provider gives the
// tensors to a function that nemo_gpu_set_host has named, so that a graph can be run where there is no GPU.

#include <cstring>
#include <limits>

#include "driver.h"
#include "op.h"
#include "program.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Runs a kernel on the CPU. `dims` are those of the inputs, then those of the outputs, one after the other; `tensors`
// likewise. Returns whether it succeeded.
using HostKernel = int (*)(const char* kernel, const int64_t* sizes, const int64_t* grid, const int64_t* dims,
                           void* const* tensors);

namespace nemo {
namespace {

HostKernel host = nullptr;

constexpr int kCpuInput = -2;  // of OrtMemType
constexpr int64_t kMostThreads = 1024, kMostShared = 1 << 20, kMostHidden = 16;

size_t element_size(int type) {
  switch (type) {
    case abi::kUint8:
    case abi::kInt8:
    case abi::kFloat8E4M3:
      return 1;
    case abi::kFloat16:
    case abi::kBFloat16:
      return 2;
    case abi::kFloat:
    case abi::kInt32:
      return 4;
    case abi::kInt64:
      return 8;
    default:
      throw Invalid("a tensor has a type that no kernel takes");
  }
}

uint32_t bounded(const Node& node, const char* name, int64_t low, int64_t high) {
  const int64_t value = node.integer(name, -1);
  if (value < low || value > high) throw Invalid(std::string("the attribute ") + name + " is missing or out of range");
  return static_cast<uint32_t>(value);
}

std::string text_of(const Node& node, const char* name) {
  const std::string value = node.text(name, "");
  if (value.empty()) throw Invalid(std::string("the attribute ") + name + " is missing");
  return value;
}

// What one launch is given.
struct Call {
  std::vector<int64_t> sizes, dims;
  std::vector<void*> tensors;  // inputs, then outputs
  int64_t grid[3];
};

class Launch {
 public:
  explicit Launch(const Node& node)
      : label_(text_of(node, "kernel")),
        entry_(text_of(node, "entry")),
        threads_(bounded(node, "threads", 1, kMostThreads)),
        shared_(bounded(node, "shared", 0, kMostShared)),
        hidden_(bounded(node, "hidden", 0, kMostHidden)) {
    inputs_ = read_patterns(text_of(node, "input_shapes"), names_, true);
    outputs_ = read_patterns(text_of(node, "output_shapes"), names_, false);
    sizes_ = read_expressions(node.text("sizes", ""), names_);
    grid_ = read_expressions(text_of(node, "grid"), names_);
    require(grid_.size() == 3, "a grid has three numbers");
    for (const Pattern& output : outputs_) {
      require(output.alias < static_cast<int>(inputs_.size()), "an output shares the buffer of an input that is not there");
    }
    const Tensor code = node.constant(0);
    require(code.data != nullptr && code.type == abi::kUint8, "the first input must be a constant of bytes: machine code");
    code_ = cuda::intern(code.data, static_cast<size_t>(code.size()));
  }

 protected:
  const std::string& label() const { return label_; }

  // Finds all sizes and has the outputs made. `copier` copies what shares a buffer and was not bound so.
  template <class Copier>
  Call prepare(Context& context, const Copier& copier) const {
    if (context.input_count() != inputs_.size() + 1) throw Invalid(label_ + " is given another number of inputs");
    Call call;
    std::vector<int64_t> values(names_.count(), Sizes::kUnbound);
    std::vector<Tensor> given;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      given.push_back(context.input(i + 1));
      bind(given[i], i, values);
      call.dims.insert(call.dims.end(), given[i].dims, given[i].dims + given[i].rank);
      call.tensors.push_back(given[i].data);
    }
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const Pattern& pattern = outputs_[i];
      int64_t dims[kMaxRank];
      size_t rank = pattern.dims.size();
      for (size_t axis = 0; axis < rank; ++axis) dims[axis] = pattern.dims[axis].value(values);
      if (pattern.alias >= 0) {
        const Tensor& source = given[static_cast<size_t>(pattern.alias)];
        rank = source.rank;
        std::copy(source.dims, source.dims + rank, dims);
      }
      const Tensor made = context.output(i, dims, rank);
      if (pattern.alias >= 0) {
        const Tensor& source = given[static_cast<size_t>(pattern.alias)];
        const size_t bytes = static_cast<size_t>(source.size()) * element_size(source.type);
        if (made.data != source.data && bytes > 0) copier(made.data, source.data, bytes);
      }
      call.dims.insert(call.dims.end(), dims, dims + rank);
      call.tensors.push_back(made.data);
    }
    for (const Expression& size : sizes_) call.sizes.push_back(size.value(values));
    for (size_t i = 0; i < 3; ++i) call.grid[i] = grid_[i].value(values);
    return call;
  }

  void launch(const Call& call, void* stream) {
    for (const int64_t side : call.grid) {
      if (side <= 0) return;  // nothing to do
      if (side > std::numeric_limits<int32_t>::max()) throw Invalid(label_ + ": the grid is too large");
    }
    std::vector<int32_t> sizes;
    for (const int64_t size : call.sizes) {
      if (size > std::numeric_limits<int32_t>::max()) throw Invalid(label_ + ": a size takes more than 32 bits");
      sizes.push_back(static_cast<int32_t>(size));
    }
    std::vector<void*> tensors = call.tensors;
    std::vector<void*> nulls(hidden_, nullptr), parameters;
    for (size_t i = 0; i < inputs_.size(); ++i) parameters.push_back(&tensors[i]);
    for (int32_t& size : sizes) parameters.push_back(&size);
    for (size_t i = inputs_.size(); i < tensors.size(); ++i) parameters.push_back(&tensors[i]);
    for (void*& null : nulls) parameters.push_back(&null);
    cuda::Function* function = cuda::load(code_, entry_, shared_, label_);
    const cuda::Shape shape{{call.grid[0], call.grid[1], call.grid[2]}, threads_, shared_};
    cuda::launch(function, shape, stream, parameters.data(), label_);
  }

 private:
  // Compares a tensor with its pattern, and takes the sizes that it is the first to give.
  void bind(const Tensor& tensor, size_t i, std::vector<int64_t>& values) const {
    const Pattern& pattern = inputs_[i];
    bool fits = tensor.rank == pattern.dims.size();
    for (size_t axis = 0; fits && axis < tensor.rank; ++axis) {
      const int name = pattern.dims[axis].lone();
      if (name >= 0 && values[static_cast<size_t>(name)] == Sizes::kUnbound) {
        values[static_cast<size_t>(name)] = tensor.dims[axis];
      }
      fits = pattern.dims[axis].value(values) == tensor.dims[axis];
    }
    if (!fits) throw Invalid(label_ + ": input " + std::to_string(i) + " has another shape than the kernel takes");
  }

  std::string label_, entry_;
  uint32_t threads_, shared_, hidden_;
  Sizes names_;
  std::vector<Pattern> inputs_, outputs_;
  std::vector<Expression> sizes_, grid_;
  const std::string* code_ = nullptr;
};

class DeviceLaunch : public Launch {
 public:
  using Launch::Launch;

  void compute(Context& context) {
    void* stream = context.stream();
    const Call call = prepare(
        context, [&](void* to, const void* from, size_t bytes) { cuda::copy(to, from, bytes, stream); });
    launch(call, stream);
  }
};

class HostLaunch : public Launch {
 public:
  using Launch::Launch;

  void compute(Context& context) {
    const Call call =
        prepare(context, [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });
    if (host != nullptr) {
      const int done = host(label().c_str(), call.sizes.data(), call.grid, call.dims.data(), call.tensors.data());
      if (!done) throw Invalid(label() + " failed on the host");
    } else if (cuda::is_driver_set()) {
      launch(call, nullptr);
    } else {
      throw Invalid(label() + " is a kernel for GPUs, and this session has no CUDA provider");
    }
  }
};

const Signature kSignature{"nemo.gpu", "Launch", {abi::kRequired, abi::kVariadic}, 1};

void complete(abi::CustomOp& op) {
  op.get_output_type = [](const abi::CustomOp*, size_t) -> int { return abi::kAny; };
  op.get_output_characteristic = [](const abi::CustomOp*, size_t) -> int { return abi::kVariadic; };
  op.get_variadic_output_homogeneity = [](const abi::CustomOp*) { return 0; };
  op.get_input_memory_type = [](const abi::CustomOp*, size_t i) { return i == 0 ? kCpuInput : 0; };
}

const struct Registered {
  Registered() {
    complete(on_device.entry->op);
    complete(on_host.entry->op);
    on_device.entry->op.get_execution_provider = [](const abi::CustomOp*) -> const char* {
      return "CUDAExecutionProvider";
    };
  }
  Registration<DeviceLaunch> on_device{kSignature};
  Registration<HostLaunch> on_host{kSignature};
} registered;

}  // namespace
}  // namespace nemo

// Names the function that runs kernels of sessions on the CPU; null for none. Not while a session runs.
EXPORT void nemo_gpu_set_host(HostKernel kernel) { nemo::host = kernel; }

// Takes a library for the CUDA driver, for sessions on the CPU too, unless they have a host; null for the usual one. Not
// while a session runs.
EXPORT void nemo_gpu_set_driver(const char* path) { nemo::cuda::set_driver(path); }

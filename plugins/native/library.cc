// SPDX-License-Identifier: Apache-2.0
//
// The library's entry point, and the parts of op.h that need no template.

#include <algorithm>
#include <utility>

#include "op.h"
#include "small_floats.h"

namespace nemo {

abi::Api runtime;

std::vector<Entry*>& entries() {
  static auto& all = *new std::vector<Entry*>;  // never destroyed: a session may outlive static objects
  return all;
}

namespace {

const Entry& entry_of(const abi::CustomOp* op) { return *reinterpret_cast<const Entry*>(op); }

int input_characteristic(const abi::CustomOp* op, size_t i) {
  return entry_of(op).signature.input_characteristics[i];
}

abi::CustomOp blank_op() {
  abi::CustomOp op;
  std::memset(&op, 0, sizeof op);
  op.version = abi::kVersion;
  op.get_name = [](const abi::CustomOp* op) { return entry_of(op).signature.name; };
  op.get_execution_provider = [](const abi::CustomOp*) -> const char* { return nullptr; };
  op.get_input_count = [](const abi::CustomOp* op) {
    return entry_of(op).signature.input_characteristics.size();
  };
  op.get_output_count = [](const abi::CustomOp* op) { return entry_of(op).signature.outputs; };
  op.get_input_type = [](const abi::CustomOp*, size_t) -> int { return abi::kAny; };
  op.get_output_type = [](const abi::CustomOp*, size_t) -> int { return abi::kFloat; };
  op.get_input_characteristic = input_characteristic;
  op.get_output_characteristic = [](const abi::CustomOp*, size_t) -> int { return abi::kRequired; };
  op.get_input_memory_type = [](const abi::CustomOp*, size_t) { return 0; };
  op.get_variadic_input_minimum = [](const abi::CustomOp*) { return 1; };
  op.get_variadic_input_homogeneity = [](const abi::CustomOp*) { return 0; };
  op.get_variadic_output_minimum = [](const abi::CustomOp*) { return 1; };
  op.get_variadic_output_homogeneity = [](const abi::CustomOp*) { return 1; };
  op.get_start_version = [](const abi::CustomOp*) { return 1; };
  op.get_end_version = [](const abi::CustomOp*) { return 1; };
  return op;
}

}  // namespace

Entry* make_entry(Signature signature) {
  entries().push_back(new Entry{blank_op(), std::move(signature)});
  return entries().back();
}

abi::Status* failure(abi::Api api, const char* message) {
  return api.call<abi::Status*>(abi::kCreateStatus, static_cast<int>(abi::kInvalidArgument), message);
}

namespace {

void check(abi::Api api, abi::Status* status) {
  if (status == nullptr) return;
  api.call<void>(abi::kReleaseStatus, status);
  throw Invalid("ONNX Runtime refused a call of a custom op");
}

struct Shape {
  ~Shape() {
    if (info != nullptr) api.call<void>(abi::kReleaseTensorTypeAndShapeInfo, info);
  }
  abi::Api api;
  abi::ShapeInfo* info = nullptr;
};

Tensor view(abi::Api api, const abi::Value* value) {
  Tensor tensor;
  check(api, api.call<abi::Status*>(abi::kGetTensorMutableData, const_cast<abi::Value*>(value), &tensor.data));
  Shape owned{api};
  check(api, api.call<abi::Status*>(abi::kGetTensorTypeAndShape, value, &owned.info));
  const abi::ShapeInfo* shape = owned.info;
  check(api, api.call<abi::Status*>(abi::kGetTensorElementType, shape, &tensor.type));
  check(api, api.call<abi::Status*>(abi::kGetDimensionsCount, shape, &tensor.rank));
  require(tensor.rank <= kMaxRank, "a tensor has more than 8 dimensions");
  check(api, api.call<abi::Status*>(abi::kGetDimensions, shape, static_cast<int64_t*>(tensor.dims), tensor.rank));
  return tensor;
}

}  // namespace

// Node.

bool Node::ok(abi::Status* status) const {
  if (status == nullptr) return true;
  api_.call<void>(abi::kReleaseStatus, status);
  return false;
}

int64_t Node::integer(const char* name, int64_t fallback) const {
  int64_t value = 0;
  return ok(api_.call<abi::Status*>(abi::kKernelInfoGetAttributeInt64, info_, name, &value)) ? value : fallback;
}

float Node::number(const char* name, float fallback) const {
  float value = 0;
  return ok(api_.call<abi::Status*>(abi::kKernelInfoGetAttributeFloat, info_, name, &value)) ? value : fallback;
}

std::string Node::text(const char* name, const char* fallback) const {
  size_t size = 0;
  char* nothing = nullptr;
  if (!ok(api_.call<abi::Status*>(abi::kKernelInfoGetAttributeString, info_, name, nothing, &size))) return fallback;
  std::string value(size, '\0');
  if (!ok(api_.call<abi::Status*>(abi::kKernelInfoGetAttributeString, info_, name, value.data(), &size))) {
    return fallback;
  }
  return value.c_str();  // without the terminator that `size` counts
}

Tensor Node::constant(size_t i) const {
  int is_constant = 0;
  const abi::Value* value = nullptr;
  if (!ok(api_.call<abi::Status*>(abi::kKernelInfoGetConstantInput, info_, i, &is_constant, &value))) return {};
  return is_constant && value != nullptr ? view(api_, value) : Tensor{};
}

// Context.

size_t Context::input_count() const {
  size_t count = 0;
  check(api_, api_.call<abi::Status*>(abi::kKernelContextGetInputCount, static_cast<const abi::KernelContext*>(context_),
                                &count));
  return count;
}

Tensor Context::input(size_t i) const {
  if (i >= input_count()) return {};
  const abi::Value* value = nullptr;
  check(api_, api_.call<abi::Status*>(abi::kKernelContextGetInput, static_cast<const abi::KernelContext*>(context_), i,
                                &value));
  return value == nullptr ? Tensor{} : view(api_, value);
}

Tensor Context::output(size_t i, const int64_t* dims, size_t rank) const {
  abi::Value* value = nullptr;
  check(api_, api_.call<abi::Status*>(abi::kKernelContextGetOutput, context_, i, dims, rank, &value));
  Tensor tensor;
  tensor.type = abi::kFloat;
  tensor.rank = rank;
  std::copy(dims, dims + rank, tensor.dims);
  check(api_, api_.call<abi::Status*>(abi::kGetTensorMutableData, value, &tensor.data));
  return tensor;
}

Tensor Context::state_output(size_t i, const Tensor& like) const {
  const Tensor out = output(i, like.dims, like.rank);
  if (out.data != like.data && like.size() > 0) std::memcpy(out.data, like.data, like.size() * sizeof(float));
  return out;
}

void* Context::stream() const {
  void* stream = nullptr;
  check(api_, api_.call<abi::Status*>(abi::kKernelContextGetGpuComputeStream,
                                static_cast<const abi::KernelContext*>(context_), &stream));
  return stream;
}

void Context::run_parallel(void (*work)(void*, size_t), size_t tasks, void* user) const {
  // As many batches as tasks: threads take them one by one, so a disturbed one does not hold up the others.
  check(api_, api_.call<abi::Status*>(abi::kKernelContextParallelFor, static_cast<const abi::KernelContext*>(context_),
                                work, tasks, tasks, user));
}

// Rows.

void require_rows(const char* op, const Rows& rows) {
  const auto within = [&](const char* what, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) throw Invalid(std::string(op) + ": " + what);
  };
  for (int64_t row = 0; row < rows.batch; ++row) {
    if (rows.lengths[row] == 0) continue;
    within("lengths", rows.lengths[row], 1, rows.steps);
    within("slots", rows.slots[row], 0, rows.slot_count - 1);
    if (rows.accepted != nullptr) within("accepted", rows.accepted[row], 0, rows.ring);
  }
}

// Small tensors.

float element(const Tensor& tensor, int64_t i) {
  switch (tensor.type) {
    case abi::kFloat:
      return tensor.floats()[i];
    case abi::kBFloat16:
      return from_bfloat16(static_cast<const uint16_t*>(tensor.data)[i]);
    case abi::kFloat16:
      return from_float16(static_cast<const uint16_t*>(tensor.data)[i]);
    default:
      throw Invalid("a tensor is stored in a type that this kernel does not read");
  }
}

std::vector<float> to_floats(const Tensor& tensor) {
  std::vector<float> values(tensor.size());
  for (size_t i = 0; i < values.size(); ++i) values[i] = element(tensor, static_cast<int64_t>(i));
  return values;
}

}  // namespace nemo

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace nemo {
namespace {

// A domain each for the ops' domain names. They must live as long as any session does, so they are never released.
std::vector<abi::CustomOpDomain*> make_domains() {
  std::vector<std::pair<std::string, abi::CustomOpDomain*>> made;
  for (const Entry* entry : entries()) {
    const char* name = entry->signature.domain;
    auto known = std::find_if(made.begin(), made.end(), [&](const auto& domain) { return domain.first == name; });
    if (known == made.end()) {
      abi::CustomOpDomain* domain = nullptr;
      check(runtime, runtime.call<abi::Status*>(abi::kCreateCustomOpDomain, name, &domain));
      known = made.insert(made.end(), {name, domain});
    }
    const abi::CustomOp* op = &entry->op;
    check(runtime, runtime.call<abi::Status*>(abi::kCustomOpDomainAdd, known->second, op));
  }
  std::vector<abi::CustomOpDomain*> domains;
  for (const auto& domain : made) domains.push_back(domain.second);
  return domains;
}

const std::vector<abi::CustomOpDomain*>& domains_for(const abi::ApiBase* base) {
  // Once: a session that is made registers the ops again while others run.
  static const std::vector<abi::CustomOpDomain*> domains = [&] {
    const abi::Api api{base->get_api(abi::kVersion)};
    require(api.table != nullptr, "the native kernels need ONNX Runtime 1.18 or later");
    runtime = api;
    return make_domains();
  }();
  return domains;
}

}  // namespace
}  // namespace nemo

EXPORT nemo::abi::Status* RegisterCustomOps(nemo::abi::SessionOptions* options, const nemo::abi::ApiBase* base) {
  using namespace nemo;
  try {
    for (abi::CustomOpDomain* domain : domains_for(base)) {
      if (auto* status = runtime.call<abi::Status*>(abi::kAddCustomOpDomain, options, domain)) return status;
    }
    return nullptr;
  } catch (const std::exception& error) {
    return failure(abi::Api{base->get_api(1)}, error.what());
  }
}

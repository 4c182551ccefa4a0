// SPDX-License-Identifier: Apache-2.0

#include "fake_runtime.h"

#include <array>
#include <cstdio>
#include <cstring>

extern "C" nemo::abi::Status* RegisterCustomOps(nemo::abi::SessionOptions* options, const nemo::abi::ApiBase* base);

namespace nemo::abi {

struct ShapeInfo {
  int type;
  std::vector<int64_t> dims;
};

struct CustomOpDomain {
  std::string name;
  std::vector<const CustomOp*> ops;
};

struct SessionOptions {
  std::vector<CustomOpDomain*> added;
};

Value::Value(int type, std::vector<int64_t> dims, size_t offset)
    : type(type), dims(std::move(dims)), offset(offset), base(nullptr), data(nullptr) {
  if (bytes() == 0) return;
  base = std::malloc(bytes() + offset * fake::size_of(type));
  data = static_cast<uint8_t*>(base) + offset * fake::size_of(type);
  std::memset(data, 0xFF, bytes());  // NaN in every floating-point type, an impossible index, length or position
}

Value::Value(const Value& other) : Value(other.type, other.dims, other.offset) {
  if (data != nullptr) std::memcpy(data, other.data, bytes());
}

int64_t Value::size() const {
  int64_t n = 1;
  for (const int64_t d : dims) n *= d;
  return n;
}

}  // namespace nemo::abi

namespace nemo::fake {

size_t size_of(int element_type) {
  switch (element_type) {
    case abi::kFloat:
      return 4;
    case abi::kFloat16:
    case abi::kBFloat16:
      return 2;
    case abi::kInt64:
      return 8;
    default:
      return 1;
  }
}

// The pool. No lock is shared by two workers: what one does before it gives up a lock would then count as done before
// what another does after it took the lock, and ThreadSanitizer would miss that their tasks touch the same memory.

void Gate::open() {
  const std::lock_guard<std::mutex> lock(mutex_);
  open_ = true;
  changed_.notify_one();
}

void Gate::pass() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return open_; });
  open_ = false;
}

Pool::Pool(size_t threads) {
  for (size_t i = 1; i < threads; ++i) workers_.push_back(std::make_unique<Worker>());
  for (size_t i = 0; i < workers_.size(); ++i) workers_[i]->thread = std::thread([this, i] { serve(i); });
}

Pool::~Pool() {
  work_ = nullptr;
  for (auto& worker : workers_) worker->start.open();
  for (auto& worker : workers_) worker->thread.join();
}

void Pool::serve(size_t number) {
  while (true) {
    workers_[number]->start.pass();
    if (work_ == nullptr) return;
    take(number + 1);
    workers_[number]->done.open();
  }
}

void Pool::take(size_t task) {
  while (task < tasks_) {
    work_(user_, task);
    task = next_.fetch_add(1, std::memory_order_relaxed);  // orders nothing else, for the same reason
  }
}

void Pool::run(void (*work)(void*, size_t), size_t tasks, void* user) {
  if (workers_.empty()) {
    while (tasks > 0) work(user, --tasks);
    return;
  }
  work_ = work, user_ = user, tasks_ = tasks;
  next_.store(workers_.size() + 1, std::memory_order_relaxed);
  for (auto& worker : workers_) worker->start.open();
  take(0);
  for (auto& worker : workers_) worker->done.pass();
}

// The functions of the interface.

namespace {

using namespace abi;

Status* refuse(const char* why) { return new Status{why}; }

Status* create_status(int, const char* message) { return new Status{message}; }
void release_status(Status* status) { delete status; }

// Domains live as long as the process: the library makes them once, whoever registers its ops.
std::vector<std::unique_ptr<CustomOpDomain>>& domains() {
  static std::vector<std::unique_ptr<CustomOpDomain>> all;
  return all;
}

Status* create_domain(const char* name, CustomOpDomain** out) {
  domains().push_back(std::make_unique<CustomOpDomain>(CustomOpDomain{name, {}}));
  *out = domains().back().get();
  return nullptr;
}

Status* domain_add(CustomOpDomain* domain, const CustomOp* op) {
  if (op->version != kVersion) return refuse("an op of another version of the interface");
  domain->ops.push_back(op);
  return nullptr;
}

Status* options_add(SessionOptions* options, CustomOpDomain* domain) {
  options->added.push_back(domain);
  return nullptr;
}

Status* mutable_data(Value* value, void** out) {
  *out = value->data;
  return nullptr;
}

Status* type_and_shape(const Value* value, ShapeInfo** out) {
  *out = new ShapeInfo{value->type, value->dims};
  return nullptr;
}

void release_shape(ShapeInfo* info) { delete info; }

Status* element_type(const ShapeInfo* info, int* out) {
  *out = info->type;
  return nullptr;
}

Status* dimensions_count(const ShapeInfo* info, size_t* out) {
  *out = info->dims.size();
  return nullptr;
}

Status* dimensions(const ShapeInfo* info, int64_t* out, size_t count) {
  if (count != info->dims.size()) return refuse("another number of dimensions");
  for (size_t i = 0; i < count; ++i) out[i] = info->dims[i];
  return nullptr;
}

template <class T>
Status* find(const std::map<std::string, T>& all, const char* name, T* out) {
  const auto found = all.find(name);
  if (found == all.end()) return refuse("no such attribute");
  *out = found->second;
  return nullptr;
}

Status* attribute_integer(const KernelInfo* info, const char* name, int64_t* out) {
  return find(info->attributes->integers, name, out);
}

Status* attribute_number(const KernelInfo* info, const char* name, float* out) {
  return find(info->attributes->numbers, name, out);
}

// `size` counts the terminator. Without `out`, it is only told.
Status* attribute_text(const KernelInfo* info, const char* name, char* out, size_t* size) {
  std::string text;
  if (Status* status = find(info->attributes->texts, name, &text)) return status;
  const size_t room = *size;
  *size = text.size() + 1;
  if (out == nullptr) return nullptr;
  if (room < *size) return refuse("no room for an attribute");
  std::memcpy(out, text.c_str(), *size);
  return nullptr;
}

Status* constant_input(const KernelInfo* info, size_t i, int* is_constant, const Value** out) {
  if (i >= info->constants.size()) return refuse("no such input");
  *out = info->constants[i];
  *is_constant = *out != nullptr;
  return nullptr;
}

Status* input_count(const KernelContext* context, size_t* out) {
  *out = context->inputs.size();
  return nullptr;
}

Status* input(const KernelContext* context, size_t i, const Value** out) {
  if (i >= context->inputs.size()) return refuse("no such input");
  *out = context->inputs[i];
  return nullptr;
}

Status* output(KernelContext* context, size_t i, const int64_t* dims, size_t rank, Value** out) {
  if (i >= context->outputs.size()) return refuse("no such output");
  const std::vector<int64_t> shape(dims, dims + rank);
  std::shared_ptr<Value>& value = context->outputs[i];
  if (!value) value = std::make_shared<Value>(kFloat, shape);
  if (value->dims != shape) return refuse("an output is bound to a tensor of another shape");
  *out = value.get();
  return nullptr;
}

Status* parallel_for(const KernelContext* context, void (*work)(void*, size_t), size_t total, size_t batches,
                     void* user) {
  if (batches != total) return refuse("tasks are expected to be taken one by one");
  context->pool->run(work, total, user);
  return nullptr;
}

void unexpected() {
  std::fprintf(stderr, "a function of the interface was called that the fake runtime does not have\n");
  std::abort();
}

const void* const* get_api(uint32_t version) { return version == kVersion ? api_table() : nullptr; }

}  // namespace

const void* const* api_table() {
  static const std::array<const void*, 300> table = [] {
    std::array<const void*, 300> all;
    const auto set = [&all](int at, auto function) { all[at] = reinterpret_cast<const void*>(function); };
    for (int i = 0; i < static_cast<int>(all.size()); ++i) set(i, &unexpected);
    set(kCreateStatus, &create_status);
    set(kCreateCustomOpDomain, &create_domain);
    set(kCustomOpDomainAdd, &domain_add);
    set(kAddCustomOpDomain, &options_add);
    set(kGetTensorMutableData, &mutable_data);
    set(kGetTensorElementType, &element_type);
    set(kGetDimensionsCount, &dimensions_count);
    set(kGetDimensions, &dimensions);
    set(kGetTensorTypeAndShape, &type_and_shape);
    set(kKernelInfoGetAttributeFloat, &attribute_number);
    set(kKernelInfoGetAttributeInt64, &attribute_integer);
    set(kKernelInfoGetAttributeString, &attribute_text);
    set(kKernelContextGetInputCount, &input_count);
    set(kKernelContextGetInput, &input);
    set(kKernelContextGetOutput, &output);
    set(kReleaseStatus, &release_status);
    set(kReleaseTensorTypeAndShapeInfo, &release_shape);
    set(kKernelInfoGetConstantInput, &constant_input);
    set(kKernelContextParallelFor, &parallel_for);
    return all;
  }();
  return table.data();
}

std::map<std::string, const CustomOp*> register_ops() {
  static const ApiBase base{&get_api, [] { return "fake"; }};
  SessionOptions options;
  const std::unique_ptr<Status> status(RegisterCustomOps(&options, &base));
  if (status) {
    std::fprintf(stderr, "registration: %s\n", status->message.c_str());
    std::abort();
  }
  std::map<std::string, const CustomOp*> ops;
  for (const CustomOpDomain* domain : options.added) {
    for (const CustomOp* op : domain->ops) ops[domain->name + "::" + op->get_name(op)] = op;
  }
  return ops;
}

}  // namespace nemo::fake

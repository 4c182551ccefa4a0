// SPDX-License-Identifier: Apache-2.0

#include "driver.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "op.h"

namespace nemo::cuda {

namespace {

constexpr int kMaxDynamicSharedSize = 8;      // of CUfunction_attribute
constexpr uint32_t kSharedWithoutAsking = 48 << 10;
constexpr int kNoBinaryForGpu = 209;          // of CUresult
constexpr int kInvalidPtx = 218, kInvalidSource = 300;

using Result = int;
using Address = uint64_t;

// The driver's functions, by the names that its library exports.
struct Driver {
  Result (*get_context)(void**);
  Result (*load_module)(void**, const void*);
  Result (*get_function)(Function**, void*, const char*);
  Result (*set_attribute)(Function*, int, int);
  Result (*launch)(Function*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void*, void**,
                   void**);
  Result (*copy)(Address, Address, size_t, void*);
  Result (*name_error)(Result, const char**);
};

std::mutex mutex;  // of all that follows
std::string chosen;
std::unique_ptr<Driver> driver;
std::map<std::tuple<void*, const std::string*, std::string>, Function*> functions;

const Driver& get_driver() {
  if (driver != nullptr) return *driver;
  const char* path = chosen.empty() ? "libcuda.so.1" : chosen.c_str();
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Invalid(std::string("the CUDA driver cannot be loaded: ") + dlerror());
  auto found = std::make_unique<Driver>();
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) throw Invalid(std::string(path) + " has no function " + name);
  };
  find(found->get_context, "cuCtxGetCurrent");
  find(found->load_module, "cuModuleLoadData");
  find(found->get_function, "cuModuleGetFunction");
  find(found->set_attribute, "cuFuncSetAttribute");
  find(found->launch, "cuLaunchKernel");
  find(found->copy, "cuMemcpyDtoDAsync_v2");
  find(found->name_error, "cuGetErrorName");
  driver = std::move(found);
  return *driver;
}

const Driver& locked_driver() {
  const std::lock_guard<std::mutex> lock(mutex);
  return get_driver();
}

void check(const Driver& api, Result result, const std::string& what) {
  if (result == 0) return;
  const char* name = nullptr;
  if (api.name_error(result, &name) != 0 || name == nullptr) name = "unknown error";
  const bool other = result == kNoBinaryForGpu || result == kInvalidPtx || result == kInvalidSource;
  const char* hint = other ? ": it was compiled for another GPU; build the engine for this one" : "";
  throw Invalid(what + ": " + name + " (" + std::to_string(result) + ")" + hint);
}

}  // namespace

void set_driver(const char* path) {
  const std::lock_guard<std::mutex> lock(mutex);
  chosen = path == nullptr ? "" : path;
  driver.reset();
  functions.clear();
}

bool is_driver_set() {
  const std::lock_guard<std::mutex> lock(mutex);
  return !chosen.empty();
}

const std::string* intern(const void* code, size_t size) {
  static auto& all = *new std::set<std::string>;  // never destroyed: sessions may outlive static objects
  const std::lock_guard<std::mutex> lock(mutex);
  return &*all.emplace(static_cast<const char*>(code), size).first;
}

Function* load(const std::string* code, const std::string& entry, uint32_t shared, const std::string& label) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Driver& api = get_driver();
  void* context = nullptr;
  check(api, api.get_context(&context), "the CUDA context cannot be had");
  require(context != nullptr, "there is no CUDA context in this thread");
  Function*& function = functions[{context, code, entry}];
  if (function == nullptr) {
    void* module = nullptr;  // never unloaded: that needs its context, which may be gone by then
    check(api, api.load_module(&module, code->data()), "the kernel " + label + " cannot be loaded");
    Function* loaded = nullptr;
    check(api, api.get_function(&loaded, module, entry.c_str()), "the kernel " + label + " has no entry " + entry);
    if (shared > kSharedWithoutAsking) {
      check(api, api.set_attribute(loaded, kMaxDynamicSharedSize, static_cast<int>(shared)),
            "the kernel " + label + " cannot have " + std::to_string(shared) + " bytes of shared memory");
    }
    function = loaded;
  }
  return function;
}

void launch(Function* function, const Shape& shape, void* stream, void** parameters, const std::string& label) {
  const Driver& api = locked_driver();
  const auto side = [&](int i) { return static_cast<uint32_t>(shape.grid[i]); };
  check(api,
        api.launch(function, side(0), side(1), side(2), shape.threads, 1, 1, shape.shared, stream, parameters, nullptr),
        "the kernel " + label + " cannot be launched");
}

void copy(void* to, const void* from, size_t size, void* stream) {
  const Driver& api = locked_driver();
  check(api, api.copy(reinterpret_cast<Address>(to), reinterpret_cast<Address>(from), size, stream),
        "a buffer cannot be copied");
}

}  // namespace nemo::cuda

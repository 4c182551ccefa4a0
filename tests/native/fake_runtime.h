// SPDX-License-Identifier: Apache-2.0
//
// A stand-in for ONNX Runtime behind the C interface of ort_abi.h, for sanitizers, which have to see every access.
//
// It differs from the runtime where that finds more errors: every tensor is an allocation of exactly its size, aligned
// as its elements need and no better; the data of an empty tensor is null; outputs start as NaN; functions that
// kernels should not need end the process; and the threads of a pool synchronize with nobody but the caller.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ort_abi.h"

namespace nemo::fake {

size_t size_of(int element_type);

// Something for one thread to wait for and another to open.
class Gate {
 public:
  void open();
  void pass();  // waits until it is open, and closes it

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

// The threads of a session. One call of `run` at a time.
class Pool {
 public:
  explicit Pool(size_t threads);  // the caller of `run` is one of them
  ~Pool();

  // Calls work(user, 0) .. work(user, tasks - 1). Each thread has a first task; then all take what is left. Alone, a
  // thread begins with the last task: any order is allowed.
  void run(void (*work)(void*, size_t), size_t tasks, void* user);

 private:
  struct Worker {
    Gate start, done;
    std::thread thread;
  };
  void serve(size_t number);
  void take(size_t task);

  std::vector<std::unique_ptr<Worker>> workers_;
  // The job. Workers read it after `start` was opened and before they open `done`.
  void (*work_)(void*, size_t) = nullptr;
  void* user_ = nullptr;
  size_t tasks_ = 0;
  std::atomic<size_t> next_{0};
};

struct Attributes {
  std::map<std::string, int64_t> integers;
  std::map<std::string, float> numbers;
  std::map<std::string, std::string> texts;
};

// What the library registered, by "domain::name".
std::map<std::string, const abi::CustomOp*> register_ops();

const void* const* api_table();

}  // namespace nemo::fake

// The types that the interface only names.
namespace nemo::abi {

struct Status {
  std::string message;
};

struct Value {
  Value(int type, std::vector<int64_t> dims, size_t offset = 0);
  Value(const Value& other);
  Value& operator=(const Value&) = delete;
  ~Value() { std::free(base); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  int64_t size() const;
  size_t bytes() const { return static_cast<size_t>(size()) * fake::size_of(type); }

  int type;
  std::vector<int64_t> dims;
  size_t offset;  // of the data in the allocation, in elements: 0 or 1, which aligns it as elements need and no better
  void* base;     // what was allocated; null if there are no elements
  void* data;
};

struct KernelInfo {
  const fake::Attributes* attributes;
  std::vector<const Value*> constants;  // null for inputs that are none
};

struct KernelContext {
  std::vector<const Value*> inputs;             // null for absent ones
  std::vector<std::shared_ptr<Value>> outputs;  // those that are bound before, and those that the kernel asked for
  fake::Pool* pool;
};

}  // namespace nemo::abi

// SPDX-License-Identifier: Apache-2.0
//
// The few functions of the CUDA driver that a launch takes. The driver is looked for when one is first made, so the
// library loads on machines without it.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nemo::cuda {

struct Function;

// Takes another library than libcuda.so.1 for the driver from now on; none again if `path` is null.
void set_driver(const char* path);
// Whether set_driver named one.
bool is_driver_set();

// How a kernel is launched.
struct Shape {
  int64_t grid[3];
  uint32_t threads;
  uint32_t shared;  // bytes of dynamic shared memory
};

// Machine code, kept for the rest of the process: equal code is one object.
const std::string* intern(const void* code, size_t size);

// The kernel of some code, loaded in the calling thread's context. Throws Invalid with the driver's reason, and
// `label` for who reads it.
Function* load(const std::string* code, const std::string& entry, uint32_t shared, const std::string& label);

void launch(Function* function, const Shape& shape, void* stream, void** parameters, const std::string& label);
void copy(void* to, const void* from, size_t size, void* stream);

}  // namespace nemo::cuda

// SPDX-License-Identifier: Apache-2.0
//
// The part of ONNX Runtime's C interface that a library of custom ops needs.
//
// No package ships ONNX Runtime's header, and the interface is stable: its tables of functions only grow at the
// end. So the functions are called by their position in `OrtApi`, and `OrtCustomOp` is declared as version 18 of
// the interface (ONNX Runtime 1.18) knows it. tests/test_native.py checks all of it against the runtime in use.

#pragma once

#include <cstddef>
#include <cstdint>

namespace nemo::abi {

struct Status;
struct Value;
struct KernelInfo;
struct KernelContext;
struct CustomOpDomain;
struct SessionOptions;
struct ShapeInfo;

constexpr uint32_t kVersion = 18;

// Positions in OrtApi.
enum Function : int {
  kCreateStatus = 0,
  kCreateCustomOpDomain = 26,
  kCustomOpDomainAdd = 27,
  kAddCustomOpDomain = 28,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kKernelInfoGetAttributeFloat = 85,
  kKernelInfoGetAttributeInt64 = 86,
  kKernelInfoGetAttributeString = 87,
  kKernelContextGetInputCount = 88,
  kKernelContextGetInput = 90,
  kKernelContextGetOutput = 91,
  kReleaseStatus = 93,
  kReleaseTensorTypeAndShapeInfo = 99,
  kKernelContextGetGpuComputeStream = 193,
  kKernelInfoGetConstantInput = 249,
  kKernelContextParallelFor = 274,
};

struct Api {
  const void* const* table = nullptr;

  template <class Result, class... Arguments>
  Result call(Function function, Arguments... arguments) const {
    typedef Result (*Pointer)(Arguments...);
    return reinterpret_cast<Pointer>(const_cast<void*>(table[function]))(arguments...);
  }
};

struct ApiBase {
  const void* const* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

enum ElementType : int {
  kAny = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kBFloat16 = 16,
  kFloat8E4M3 = 17,
};

enum Characteristic : int { kRequired = 0, kOptional = 1, kVariadic = 2 };

struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const void* const*, const KernelInfo*);
  const char* (*get_name)(const CustomOp*);
  const char* (*get_execution_provider)(const CustomOp*);
  int (*get_input_type)(const CustomOp*, size_t);
  size_t (*get_input_count)(const CustomOp*);
  int (*get_output_type)(const CustomOp*, size_t);
  size_t (*get_output_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  int (*get_input_characteristic)(const CustomOp*, size_t);
  int (*get_output_characteristic)(const CustomOp*, size_t);
  int (*get_input_memory_type)(const CustomOp*, size_t);
  int (*get_variadic_input_minimum)(const CustomOp*);
  int (*get_variadic_input_homogeneity)(const CustomOp*);
  int (*get_variadic_output_minimum)(const CustomOp*);
  int (*get_variadic_output_homogeneity)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const void* const*, const KernelInfo*, void**);
  Status* (*compute_v2)(void*, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, void*);
  int (*get_start_version)(const CustomOp*);
  int (*get_end_version)(const CustomOp*);
  size_t (*get_may_inplace)(int**, int**);
  void (*release_may_inplace)(int*, int*);
  size_t (*get_alias)(int**, int**);
  void (*release_alias)(int*, int*);
};

}  // namespace nemo::abi

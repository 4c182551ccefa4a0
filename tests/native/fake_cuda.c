// SPDX-License-Identifier: Apache-2.0
//
// The CUDA libraries that ONNX Runtime's CUDA provider is linked to, with nothing behind them: memory of the device is
// memory of the host, copies are made at once, kernels do nothing. The provider then starts, places nodes, plans memory
// and launches, all of which can be looked at; results mean nothing.
//
// tests/fake_provider.py compiles it once for each library, with LIBRARY_... defined for what is to be in it, and adds a
// function that returns 0 for every other name that the provider asks for. Copies and launches are counted in the file
// that FAKE_CUDA_LOG names, a line each.

#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void note(const char* line) {
  const char* name = getenv("FAKE_CUDA_LOG");
  if (name == NULL) return;
  FILE* file = fopen(name, "a");
  fprintf(file, "%s\n", line);
  fclose(file);
}

#ifdef LIBRARY_cudart

static void* get(size_t size) {
  void* memory = NULL;
  return posix_memalign(&memory, 4096, size ? size : 1) == 0 ? memory : NULL;
}

static int handle(void** made) {
  *made = get(8);
  return 0;
}

static void note_copy(size_t size, int kind) {
  static const char* kinds[] = {"host-host", "host-device", "device-host", "device-device", "any"};
  char line[64];
  snprintf(line, sizeof line, "copy %s %zu", kinds[kind], size);
  note(line);
}

static int sm(void) {
  const char* value = getenv("FAKE_CUDA_SM");
  return value != NULL ? atoi(value) : 90;
}

int cudaMalloc(void** memory, size_t size) { return (*memory = get(size)) == NULL; }
int cudaMallocHost(void** memory, size_t size) { return (*memory = get(size)) == NULL; }
int cudaHostAlloc(void** memory, size_t size, unsigned flags) { return (*memory = get(size)) == NULL; }
int cudaFree(void* memory) { return free(memory), 0; }
int cudaFreeHost(void* memory) { return free(memory), 0; }

int cudaMemcpy(void* to, const void* from, size_t size, int kind) {
  note_copy(size, kind);
  memmove(to, from, size);
  return 0;
}

int cudaMemcpyAsync(void* to, const void* from, size_t size, int kind, void* stream) {
  return cudaMemcpy(to, from, size, kind);
}

int cudaMemset(void* to, int value, size_t size) { return memset(to, value, size), 0; }
int cudaMemsetAsync(void* to, int value, size_t size, void* stream) { return memset(to, value, size), 0; }
int cudaGetDeviceCount(int* count) { return *count = 1, 0; }
int cudaGetDevice(int* device) { return *device = 0, 0; }
int cudaMemGetInfo(size_t* free_bytes, size_t* all) { return *free_bytes = *all = (size_t)8 << 30, 0; }
int cudaRuntimeGetVersion(int* version) { return *version = 13000, 0; }
int cudaDriverGetVersion(int* version) { return *version = 13000, 0; }

// The fields that the provider reads, by their places in cudaDeviceProp of CUDA 13.
int cudaGetDeviceProperties(char* properties, int device) {
  memset(properties, 0, 800);
  strcpy(properties, "Fake");
  *(size_t*)(properties + 288) = (size_t)8 << 30;  // totalGlobalMem
  *(size_t*)(properties + 296) = 48 << 10;         // sharedMemPerBlock
  const int32_t limits[] = {65536, 32};            // regsPerBlock, warpSize
  memcpy(properties + 304, limits, sizeof limits);
  const int32_t sides[] = {1024, 1024, 1024, 64, 2147483647, 65535, 65535};  // from maxThreadsPerBlock on
  memcpy(properties + 320, sides, sizeof sides);
  const int32_t version[] = {sm() / 10, sm() % 10};
  memcpy(properties + 360, version, sizeof version);
  *(int32_t*)(properties + 388) = 132;  // multiProcessorCount
  return 0;
}

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 75:  // cudaDevAttrComputeCapabilityMajor
      *value = sm() / 10;
      break;
    case 76:
      *value = sm() % 10;
      break;
    default:
      *value = 1024;
  }
  return 0;
}

int cudaStreamCreate(void** stream) { return handle(stream); }
int cudaStreamCreateWithFlags(void** stream, unsigned flags) { return handle(stream); }
int cudaEventCreate(void** event) { return handle(event); }
int cudaEventCreateWithFlags(void** event, unsigned flags) { return handle(event); }
int cudaStreamIsCapturing(void* stream, int* status) { return *status = 0, 0; }
int cudaStreamSynchronize(void* stream) { return note("wait"), 0; }
int cudaDeviceSynchronize(void) { return note("wait"), 0; }
int cudaLaunchHostFunc(void* stream, void (*work)(void*), void* user) { return work(user), 0; }
int cudaFuncGetAttributes(void* attributes, const void* function) { return memset(attributes, 0, 64), 0; }
const char* cudaGetErrorString(int error) { return "fake"; }
const char* cudaGetErrorName(int error) { return "fake"; }

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* function, int threads, size_t shared,
                                                           unsigned flags) {
  return *blocks = 1, 0;
}

int cudaPointerGetAttributes(void* attributes, const void* pointer) {
  memset(attributes, 0, 32);
  *(int*)attributes = 2;  // cudaMemoryTypeDevice
  return 0;
}

void** __cudaRegisterFatBinary(void* binary) {
  static void* handles[4];
  return handles;
}

int __cudaPopCallConfiguration(uint32_t* grid, uint32_t* block, size_t* shared, void** stream) {
  for (int i = 0; i < 3; ++i) grid[i] = block[i] = 1;
  *shared = 0;
  *stream = NULL;
  return 0;
}

#endif

#ifdef LIBRARY_cublas
int cublasCreate_v2(void** made) { return (*made = malloc(8)) == NULL; }
const char* cublasGetStatusString(int status) { return "fake"; }
#endif

#ifdef LIBRARY_cublasLt
int cublasLtCreate(void** made) { return (*made = malloc(8)) == NULL; }
#endif

#ifdef LIBRARY_cuda

int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
int cuModuleLoadData(void** module, const void* code) { return (*module = malloc(8)) == NULL; }
int cuModuleGetFunction(void** function, void* module, const char* name) { return (*function = strdup(name)) == NULL; }
int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }

int cuLaunchKernel(void* function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
                   uint32_t shared, void* stream, void** parameters, void** extra) {
  char line[256];
  snprintf(line, sizeof line, "launch %s %p", (const char*)function, stream);
  note(line);
  return 0;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void* stream) {
  note("copy device-device of a launch");
  memmove((void*)to, (const void*)from, size);
  return 0;
}

int cuGetErrorName(int result, const char** name) { return *name = "CUDA_ERROR_FAKE", 0; }

#endif

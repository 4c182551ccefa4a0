// SPDX-License-Identifier: Apache-2.0
//
// A CUDA driver that launches nothing and remembers what it is given. A caller first tells how many bytes each of the
// next launch's parameters has (fake_expect), and reads the record afterwards.

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { kParameters = 64 };

static struct Record {
  int32_t launches, modules, result, shared_attribute;
  uint32_t grid[3], block[3], shared;
  uint64_t stream, parameters[kParameters];
  char entry[128];
  uint8_t code[16];
} record;

static int count, sizes[kParameters];
static char loaded[kParameters][128];
static int entries;

struct Record* fake_record(void) { return &record; }

void fake_reset(void) { memset(&record, 0, sizeof record); }

void fake_expect(int parameters, const int* bytes) {
  count = parameters;
  memcpy(sizes, bytes, parameters * sizeof *bytes);
}

int cuCtxGetCurrent(void** context) {
  *context = &record;
  return 0;
}

int cuModuleLoadData(void** module, const void* code) {
  if (record.result != 0) return record.result;
  memcpy(record.code, code, sizeof record.code);
  ++record.modules;
  *module = &record;
  return 0;
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)module;
  snprintf(loaded[entries], sizeof loaded[0], "%s", name);
  *function = loaded[entries++ % kParameters];
  return 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  (void)function;
  record.shared_attribute = attribute == 8 ? value : -1;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  return 0;
}

int cuLaunchKernel(void* function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
                   uint32_t shared, void* stream, void** parameters, void** extra) {
  (void)extra;
  ++record.launches;
  snprintf(record.entry, sizeof record.entry, "%s", (const char*)function);
  record.grid[0] = gx, record.grid[1] = gy, record.grid[2] = gz;
  record.block[0] = bx, record.block[1] = by, record.block[2] = bz;
  record.shared = shared;
  record.stream = (uint64_t)stream;
  memset(record.parameters, 0, sizeof record.parameters);
  for (int i = 0; i < count; ++i) memcpy(&record.parameters[i], parameters[i], sizes[i]);
  return record.result;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void* stream) {
  (void)stream;
  memcpy((void*)to, (const void*)from, size);
  return 0;
}

int cuGetErrorName(int result, const char** name) {
  *name = result == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_UNKNOWN";
  return 0;
}

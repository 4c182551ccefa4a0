/* SPDX-License-Identifier: Apache-2.0
 *
 * The functions of a CUDA driver that sessions call, on memory of the host: what is asked is done at once, or noted
 * while a stream is being captured. A copy beyond an allocation ends the process.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Status;
enum { OK = 0, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CAPTURE = 901 };

typedef struct {
  size_t src_x, src_y;
  int src_kind;
  const void *src_host;
  uint64_t src_device;
  void *src_array;
  size_t src_pitch, dst_x, dst_y;
  int dst_kind;
  void *dst_host;
  uint64_t dst_device;
  void *dst_array;
  size_t dst_pitch, width, height;
} Copy2D;

typedef struct {
  char *to;
  const char *from;
  size_t to_pitch, from_pitch, width, height;
  int is_set;
  unsigned char value;
} Work;

typedef struct {
  Work work[64];
  int count;
} Graph;

enum { MOST = 256 };
static struct {
  uint64_t start;
  size_t size;
  void *raw;
} blocks[MOST];
static size_t total = 64 << 20, used;
static int capturing, broken;
static Graph noted;

static void require_inside(uint64_t start, size_t size) {
  for (int i = 0; i < MOST; i++)
    if (blocks[i].raw && start >= blocks[i].start && start + size <= blocks[i].start + blocks[i].size) return;
  fprintf(stderr, "%zu bytes at %llx are not allocated\n", size, (unsigned long long)start);
  abort();
}

static Status finish(Work w) {
  if (capturing) {
    noted.work[noted.count++] = w;
    return OK;
  }
  for (size_t i = 0; i < w.height; i++) {
    if (w.is_set)
      memset(w.to + i * w.to_pitch, w.value, w.width);
    else
      memcpy(w.to + i * w.to_pitch, w.from + i * w.from_pitch, w.width);
  }
  return OK;
}

static Status flat(void *to, const void *from, size_t n) {
  return finish((Work){.to = to, .from = from, .width = n, .height = 1});
}

static Status cuInit(unsigned flags) { return flags || getenv("FAKE_NO_GPU") ? NO_DEVICE : OK; }
static Status cuDeviceGetCount(int *n) { return *n = 2, OK; }
static Status cuDeviceGet(int *device, int ordinal) { return *device = ordinal, OK; }
static Status cuDeviceGetAttribute(int *value, int which, int device) {
  *value = which == 75 ? (device ? 12 : 8) : which == 76 ? 0 : -1; /* compute capability 8.0 and 12.0 */
  return OK;
}
static Status cuDeviceGetName(char *name, int size, int device) {
  snprintf(name, size, "Pretended %d", device);
  return OK;
}
static Status cuDevicePrimaryCtxRetain(void **context, int device) {
  return *context = (void *)(intptr_t)(device + 1), OK;
}
static Status cuCtxSetCurrent(void *context) { return context == (void *)2 ? OK : 201; }
static Status cuStreamCreate(void **stream, unsigned flags) { return *stream = (void *)(intptr_t)(40 + flags), OK; }
static Status cuStreamSynchronize(void *stream) { return capturing || stream != (void *)41; }
static Status cuMemGetInfo(size_t *free_, size_t *total_) { return *free_ = total - used, *total_ = total, OK; }
static Status cuMemAlloc(uint64_t *pointer, size_t size) {
  if (used + size > total) return OUT_OF_MEMORY;
  for (int i = 0; i < MOST; i++)
    if (!blocks[i].raw) {
      blocks[i].raw = aligned_alloc(256, (size + 255) / 256 * 256);
      memset(blocks[i].raw, 0x5a, size);
      *pointer = blocks[i].start = (uint64_t)blocks[i].raw;
      used += blocks[i].size = size;
      return OK;
    }
  abort();
}
static Status cuMemFree(uint64_t pointer) {
  for (int i = 0; i < MOST; i++)
    if (blocks[i].raw && blocks[i].start == pointer) {
      free(blocks[i].raw);
      blocks[i].raw = NULL;
      used -= blocks[i].size;
      return OK;
    }
  abort();
}
static int host_blocks;
static Status cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
  host_blocks++;
  return *pointer = malloc(size + flags), OK;
}
static Status cuMemFreeHost(void *pointer) { return host_blocks--, free(pointer), OK; }
static Status cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, void *stream) {
  require_inside(to, n);
  (void)stream;
  return finish((Work){.to = (char *)to, .width = n, .height = 1, .is_set = 1, .value = value});
}
static Status cuMemcpyHtoDAsync(uint64_t to, const void *from, size_t n, void *stream) {
  require_inside(to, n);
  (void)stream;
  return flat((void *)to, from, n);
}
static Status cuMemcpyDtoHAsync(void *to, uint64_t from, size_t n, void *stream) {
  require_inside(from, n);
  (void)stream;
  return flat(to, (void *)from, n);
}
static Status cuMemcpyDtoDAsync(uint64_t to, uint64_t from, size_t n, void *stream) {
  require_inside(to, n);
  require_inside(from, n);
  (void)stream;
  return flat((void *)to, (void *)from, n);
}
static Status cuMemcpy2DAsync(const Copy2D *c, void *stream) {
  int from = c->src_kind == 2, to = c->dst_kind == 2; /* whether that side is the device; 1 is the host */
  if ((!from && c->src_kind != 1) || (!to && c->dst_kind != 1) || (!from && !to)) abort();
  if (from) require_inside(c->src_device, c->src_pitch * (c->height - 1) + c->width);
  if (to) require_inside(c->dst_device, c->dst_pitch * (c->height - 1) + c->width);
  if (c->src_pitch < c->width || c->dst_pitch < c->width) abort();
  (void)stream;
  return finish((Work){.to = to ? (char *)c->dst_device : c->dst_host,
                       .from = from ? (char *)c->src_device : c->src_host,
                       .to_pitch = c->dst_pitch,
                       .from_pitch = c->src_pitch,
                       .width = c->width,
                       .height = c->height});
}
static Status cuStreamBeginCapture(void *stream, int mode) {
  (void)stream;
  broken = mode != 1; /* thread local */
  noted.count = 0;
  return capturing = 1, OK;
}
static Status cuStreamEndCapture(void *stream, Graph **graph) {
  (void)stream;
  capturing = 0;
  if (broken || getenv("FAKE_NO_CAPTURE")) return *graph = NULL, INVALID_CAPTURE;
  *graph = malloc(sizeof noted);
  **graph = noted;
  return OK;
}
static Status cuGraphInstantiateWithFlags(Graph **made, Graph *graph, unsigned long long flags) {
  if (flags) abort();
  *made = malloc(sizeof noted);
  **made = *graph;
  return OK;
}
static Status cuGraphDestroy(Graph *graph) { return free(graph), OK; }
static Status cuGraphExecDestroy(Graph *graph) { return free(graph), OK; }
static Status cuGraphLaunch(Graph *graph, void *stream) {
  (void)stream;
  for (int i = 0; i < graph->count; i++) finish(graph->work[i]);
  return OK;
}

#define ENTRY(name) \
  { #name, (void *)name }
static const struct {
  const char *name;
  void *function;
} table[] = {
    ENTRY(cuInit), ENTRY(cuDeviceGetCount), ENTRY(cuDeviceGet), ENTRY(cuDeviceGetAttribute),
    ENTRY(cuDeviceGetName), ENTRY(cuDevicePrimaryCtxRetain), ENTRY(cuCtxSetCurrent), ENTRY(cuStreamCreate),
    ENTRY(cuStreamSynchronize), ENTRY(cuMemGetInfo), ENTRY(cuMemAlloc), ENTRY(cuMemFree), ENTRY(cuMemHostAlloc),
    ENTRY(cuMemFreeHost), ENTRY(cuMemsetD8Async), ENTRY(cuMemcpyHtoDAsync), ENTRY(cuMemcpyDtoHAsync),
    ENTRY(cuMemcpyDtoDAsync), ENTRY(cuMemcpy2DAsync), ENTRY(cuStreamBeginCapture), ENTRY(cuStreamEndCapture),
    ENTRY(cuGraphInstantiateWithFlags), ENTRY(cuGraphDestroy), ENTRY(cuGraphExecDestroy), ENTRY(cuGraphLaunch),
};

Status cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
  (void)version, (void)flags;
  *function = NULL;
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (!strcmp(table[i].name, name)) *function = table[i].function;
  if (found) *found = *function ? 0 : 1;
  return *function ? OK : 500;
}
Status cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
Status cuDriverGetVersion(int *version) { return *version = 13000, OK; }
int fake_host_blocks(void) { return host_blocks; }
size_t fake_used(void) { return used; }

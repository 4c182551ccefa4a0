// SPDX-License-Identifier: Apache-2.0
// An allocator for the process that builds a plan: the addresses that a thread gets depend on what that thread did
// before, and on nothing else.
//
// The library orders some entries of a plan by addresses. glibc's allocator gives a thread whichever arena is free,
// which hangs on when other threads ended. Here the n-th thread of the process has the n-th region of the address
// space. Blocks are of certain sizes, and a freed one waits for the next of its size in the thread that freed it; of
// large ones the memory goes back to the system, and the addresses wait.

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::uintptr_t kFirst = 0x1000'0000'0000;  // far from where programs and libraries are loaded
constexpr std::size_t kRegionBytes = std::size_t{1} << 40;
constexpr int kRegions = 64;  // threads beyond share the last
constexpr std::size_t kGrowth = std::size_t{64} << 20;
constexpr std::size_t kAlignment = 16, kPage = 4096;
constexpr std::size_t kLarge = std::size_t{1} << 20;
constexpr std::size_t kSmallest = 1024;  // up to here sizes are multiples of kAlignment, then eight to a doubling
constexpr int kExact = kSmallest / kAlignment;
constexpr int kClasses = kExact + 1 + 8 * 30;

// Lies before what a caller gets; `offset` is how far behind the block's begin that is.
struct Header {
  std::uint32_t size_class;
  std::uint32_t unused;
  std::size_t offset;
};
static_assert(sizeof(Header) == kAlignment);

struct Block {
  Block* next;
};

struct Region {
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::uintptr_t next = 0, mapped = 0;
  Block* freed[kClasses] = {};
};

Region regions[kRegions];
std::atomic<int> started{0};
__attribute__((tls_model("initial-exec"))) thread_local int region_index = 0;

class Held {
 public:
  explicit Held(Region& region) : region_(region) {
    while (region_.busy.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  ~Held() { region_.busy.clear(std::memory_order_release); }

 private:
  Region& region_;
};

int class_of(std::size_t bytes) {
  if (bytes <= kSmallest) return static_cast<int>((bytes + kAlignment - 1) / kAlignment);
  int exponent = 63 - __builtin_clzll(bytes - 1);
  std::size_t step = (bytes - 1 - (std::size_t{1} << exponent)) >> (exponent - 3);
  return kExact + 1 + 8 * (exponent - 10) + static_cast<int>(step);
}

std::size_t bytes_of(int size_class) {
  if (size_class <= kExact) return static_cast<std::size_t>(size_class) * kAlignment;
  int exponent = 10 + (size_class - kExact - 1) / 8;
  std::size_t step = static_cast<std::size_t>((size_class - kExact - 1) % 8 + 1);
  return (std::size_t{1} << exponent) + (step << (exponent - 3));
}

Header& header_of(void* given) { return static_cast<Header*>(given)[-1]; }

std::size_t usable(void* given) {
  const Header& header = header_of(given);
  return bytes_of(static_cast<int>(header.size_class)) - header.offset;
}

// A block from the region's unused end; null if the system gives no more.
std::uintptr_t fresh_block(Region& region, int index, std::size_t bytes) {
  if (!region.next) region.next = region.mapped = kFirst + kRegionBytes * static_cast<std::size_t>(index);
  std::uintptr_t limit = kFirst + kRegionBytes * static_cast<std::size_t>(index + 1);
  if (bytes > limit - region.next) return 0;
  if (region.next + bytes > region.mapped) {
    std::size_t more = (region.next + bytes - region.mapped + kGrowth - 1) / kGrowth * kGrowth;
    void* wanted = reinterpret_cast<void*>(region.mapped);
    void* got = mmap(wanted, more, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != wanted) {
      if (got != MAP_FAILED) munmap(got, more);
      return 0;
    }
    region.mapped += more;
  }
  std::uintptr_t block = region.next;
  region.next += bytes;
  return block;
}

void* allocate(std::size_t size, std::size_t alignment, bool* is_fresh = nullptr) {
  std::size_t room = alignment > kAlignment ? alignment : 0;
  if (size > kRegionBytes || room > kRegionBytes) {
    errno = ENOMEM;
    return nullptr;
  }
  int size_class = class_of(size + room + sizeof(Header));
  std::uintptr_t block;
  {
    Region& region = regions[region_index];
    Held held(region);
    Block*& first = region.freed[size_class];
    block = reinterpret_cast<std::uintptr_t>(first);
    if (is_fresh) *is_fresh = !first;
    if (first) {
      first = first->next;
    } else {
      block = fresh_block(region, region_index, bytes_of(size_class));
    }
  }
  if (!block) {
    errno = ENOMEM;
    return nullptr;
  }
  std::uintptr_t given = block + sizeof(Header);
  if (room) given = (given + alignment - 1) / alignment * alignment;
  void* result = reinterpret_cast<void*>(given);
  header_of(result) = {static_cast<std::uint32_t>(size_class), 0, given - block};
  return result;
}

struct Start {
  void* (*function)(void*);
  void* argument;
  int index;
};

void* run(void* given) {
  Start start = *static_cast<Start*>(given);
  region_index = start.index;
  return start.function(start.argument);
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void* malloc(std::size_t size) { return allocate(size, kAlignment); }

EXPORTED void free(void* given) {
  if (!given) return;
  int saved = errno;
  Header header = header_of(given);
  int size_class = static_cast<int>(header.size_class);
  std::uintptr_t block = reinterpret_cast<std::uintptr_t>(given) - header.offset;
  std::size_t bytes = bytes_of(size_class);
  if (bytes >= kLarge) {
    std::uintptr_t begin = (block + sizeof(Block) + kPage - 1) / kPage * kPage;
    std::uintptr_t end = (block + bytes) / kPage * kPage;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }
  Region& region = regions[region_index];
  Held held(region);
  Block* freed = reinterpret_cast<Block*>(block);
  freed->next = region.freed[size_class];
  region.freed[size_class] = freed;
  errno = saved;
}

EXPORTED void* calloc(std::size_t count, std::size_t size) {
  std::size_t bytes;
  if (__builtin_mul_overflow(count, size, &bytes)) {
    errno = ENOMEM;
    return nullptr;
  }
  bool is_fresh = false;
  void* given = allocate(bytes, kAlignment, &is_fresh);
  if (given && !is_fresh) std::memset(given, 0, bytes);
  return given;
}

EXPORTED void* realloc(void* given, std::size_t size) {
  if (!given) return malloc(size);
  if (!size) {
    free(given);
    return nullptr;
  }
  std::size_t held = usable(given);
  if (size <= held) return given;
  void* moved = malloc(size);
  if (!moved) return nullptr;
  std::memcpy(moved, given, held);
  free(given);
  return moved;
}

EXPORTED void* memalign(std::size_t alignment, std::size_t size) { return allocate(size, alignment); }

EXPORTED void* aligned_alloc(std::size_t alignment, std::size_t size) { return allocate(size, alignment); }

EXPORTED int posix_memalign(void** given, std::size_t alignment, std::size_t size) {
  if (alignment % sizeof(void*) || !alignment || (alignment & (alignment - 1))) return EINVAL;
  int saved = errno;
  void* found = allocate(size, alignment);
  errno = saved;
  if (!found) return ENOMEM;
  *given = found;
  return 0;
}

EXPORTED void* valloc(std::size_t size) { return allocate(size, kPage); }

EXPORTED void* pvalloc(std::size_t size) { return allocate((size + kPage - 1) / kPage * kPage, kPage); }

EXPORTED std::size_t malloc_usable_size(void* given) { return given ? usable(given) : 0; }

EXPORTED int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*),
                            void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const Create create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  int index = started.fetch_add(1) + 1;
  auto* start = static_cast<Start*>(malloc(sizeof(Start)));
  if (!start) return EAGAIN;
  *start = {function, argument, index < kRegions ? index : kRegions - 1};
  int error = create(thread, attributes, run, start);  // `start` is never freed: by which thread would matter
  if (error) free(start);
  return error;
}

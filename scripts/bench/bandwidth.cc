// SPDX-License-Identifier: Apache-2.0
//
// Memory bandwidth for reading: a buffer far larger than any cache, in huge pages, split among the threads.
// Prints the median of several passes in GB/s for each number of threads given.

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = size_t{2} << 30, kHuge = size_t{2} << 20;
constexpr int kPasses = 9;

typedef uint64_t Vector __attribute__((vector_size(64)));

double seconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

void read(const char* from, size_t bytes) {
  Vector sums[4] = {};
  for (size_t i = 0; i + 256 <= bytes; i += 256) {
    for (int j = 0; j < 4; ++j) sums[j] ^= *reinterpret_cast<const Vector*>(from + i + 64 * j);
  }
  volatile uint64_t sink = (sums[0] ^ sums[1] ^ sums[2] ^ sums[3])[0];
  (void)sink;
}

}  // namespace

int main(int count, char** arguments) {
  char* raw = static_cast<char*>(
      mmap(nullptr, kBytes + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (raw == MAP_FAILED) return 1;
  char* data = raw + (kHuge - reinterpret_cast<uintptr_t>(raw) % kHuge);
  madvise(data, kBytes, MADV_HUGEPAGE);
  std::memset(data, 1, kBytes);
  for (int i = 1; i < count; ++i) {
    const int threads = std::atoi(arguments[i]);
    const size_t share = kBytes / threads / 4096 * 4096;
    std::vector<double> speeds;
    for (int pass = 0; pass < kPasses; ++pass) {
      const double start = seconds();
      std::vector<std::thread> running;
      for (int t = 0; t < threads; ++t) running.emplace_back(read, data + t * share, share);
      for (auto& thread : running) thread.join();
      speeds.push_back(share * threads / (seconds() - start) / 1e9);
    }
    std::sort(speeds.begin(), speeds.end());
    std::printf("%d %.2f\n", threads, speeds[kPasses / 2]);
  }
  return 0;
}

// SPDX-License-Identifier: Apache-2.0
//
// Which of the libraries this processor can run.

#define EXPORT extern "C" __attribute__((visibility("default")))

// `set` is a position in INSTRUCTION_SETS of __init__.py.
EXPORT int nemo_supports(int set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool avx512vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool avx512bf16 = avx512vnni && __builtin_cpu_supports("avx512bf16");
  const bool all[] = {true, avx2, avx512, avx512vnni, avx512bf16};
  return all[set];
#else
  return set == 0;
#endif
}

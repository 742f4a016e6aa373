/* The name of the best variant of products.c that this processor can run; empty: none.
 *
 * Neither a constructor nor an ifunc: musl and macOS have no ifunc, and a name can be compared and printed by Python.
 * WITH_name is 1 for each variant that the compiler could build, and 0 for the others.
 */
#if defined(__x86_64__)
const char *muonmesh_variant(void) {
  __builtin_cpu_init(); /* asks XGETBV too: where the kernel does not save ZMM registers, there is no AVX-512 */
  int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if WITH_avx512bf16
  if (wide && __builtin_cpu_supports("avx512bf16")) return "avx512bf16";
#endif
  if (WITH_avx512 && wide) return "avx512";
  if (WITH_avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
  return ""; /* without a fused multiply-add the bits would be others */
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
const char *muonmesh_variant(void) {
  const unsigned long bf16 = 1ul << 14; /* HWCAP2_BF16 */
  return WITH_bf16 && (getauxval(26 /* AT_HWCAP2 */) & bf16) ? "bf16" : "neon";
}
#elif defined(__aarch64__) && defined(__APPLE__)
#include <stddef.h>
#include <sys/sysctl.h>
const char *muonmesh_variant(void) {
  int found = 0;
  size_t size = sizeof found;
  return WITH_bf16 && !sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, NULL, 0) && found ? "bf16" : "neon";
}
#endif

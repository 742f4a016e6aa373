/* The name of the best variant of products.c that this processor can run; empty: none. amx is not among them: its bits are
 * others, so it is taken where it is asked for.
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

/* Why this process cannot run the variant amx; empty: it can. This asks the kernel for the registers of its tiles, once a
 * process: threads and forked processes have them too. */
#if defined(__x86_64__) && defined(__linux__) && WITH_amx
#include <cpuid.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
const char *muonmesh_tiles(void) {
  enum { XGETBV = 1 << 27, BF16 = 1 << 22, TILE = 1 << 24, TILES = 3 << 17, REQUEST = 0x1023, DATA = 18 };
  static char refused[160];
  unsigned a, b, c, d, saved, upper;
  if (strcmp(muonmesh_variant(), "avx512bf16") || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & BF16) || !(d & TILE))
    return "a processor without the instructions AMX-TILE and AMX-BF16";
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & XGETBV)) return "a kernel that saves no registers of AMX";
  __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  if ((saved & TILES) != TILES) return "a kernel that saves no registers of AMX";
  if (syscall(SYS_arch_prctl, REQUEST, DATA) == 0) return ""; /* ARCH_REQ_XCOMP_PERM of XTILEDATA */
  if (errno == ENOSPC) return "a thread whose stack for signals (sigaltstack) is too small for the registers of AMX";
  snprintf(refused, sizeof refused, "a kernel that refuses the registers of AMX (arch_prctl: %s)", strerror(errno));
  return refused;
}
#else
const char *muonmesh_tiles(void) { return "a library that was built without AMX"; }
#endif

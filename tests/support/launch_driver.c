/* A libcuda.so.1 without a device: every call succeeds at once, and a launch writes down what it was given.

   Triton's own driver and launcher run over it, so a test sees what a GPU would be told, and a benchmark what it costs. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuInit) NOTHING(cuCtxSetCurrent) NOTHING(cuDevicePrimaryCtxRelease) NOTHING(cuDevicePrimaryCtxRelease_v2)
NOTHING(cuCtxPushCurrent_v2) NOTHING(cuLinkAddData_v2) NOTHING(cuLinkComplete) NOTHING(cuLinkCreate_v2)
NOTHING(cuLaunchCooperativeKernel) NOTHING(cuModuleUnload) NOTHING(cuFuncSetAttribute) NOTHING(cuFuncSetCacheConfig)
NOTHING(cuCtxSetLimit) NOTHING(cuTensorMapEncodeTiled) NOTHING(cuTensorMapEncodeIm2col) NOTHING(cuMemFree_v2)

#define POINTER(name) int name(void **out) { *out = (void *)1; return 0; }
POINTER(cuCtxGetCurrent) POINTER(cuCtxPopCurrent_v2) POINTER(cuDevicePrimaryCtxRetain) POINTER(cuMemAlloc_v2)

#define NUMBER(name, value) int name(int *out) { *out = value; return 0; }
NUMBER(cuDriverGetVersion, 13000) NUMBER(cuDeviceGetCount, 2) NUMBER(cuCtxGetDevice, 0)
NUMBER(cuOccupancyMaxActiveBlocksPerMultiprocessor, 1) NUMBER(cuOccupancyMaxActiveClusters, 1)

int cuGetErrorString(int error, const char **text) { *text = "none"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "none"; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuPointerGetAttribute(void *out, int attribute, uint64_t pointer) { *(uint64_t *)out = pointer; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }

int cuDeviceGetAttribute(int *value, int attribute, int device) { /* of an H100, where Triton asks */
  *value = attribute == 97 ? 232448 : attribute == 10 ? 32 : attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 76 ? 0 : 49152;
  return 0;
}

static uint64_t modules = 0;
int cuModuleLoadData(void **module, const void *image) { *module = (void *)++modules; return 0; }
int cuModuleLoad(void **module, const char *path) { *module = (void *)++modules; return 0; }
int cuModuleLoadDataEx(void **module, const void *image) { *module = (void *)++modules; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }

/* What a test reads: how many launches, and of the last one the grid, the threads, the kernel and its parameters. */
uint64_t launches = 0, last_programs = 0, last_threads = 0, last_function = 0, last_stream = 0;
int watched = 0; /* parameters to copy */
unsigned char parameters[64][8];

struct config { unsigned gx, gy, gz, bx, by, bz, shared; void *stream, *attributes; unsigned count; };
int cuLaunchKernelEx(const struct config *config, void *function, void **given, void **extra) {
  launches++;
  last_programs = (uint64_t)config->gx * config->gy * config->gz;
  last_threads = config->bx;
  last_function = (uint64_t)(uintptr_t)function;
  last_stream = (uint64_t)(uintptr_t)config->stream;
  for (int i = 0; i < watched; i++) memcpy(parameters[i], given[i], 8);
  return 0;
}

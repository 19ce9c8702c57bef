// The management library, as far as torch asks it: how many devices there are, and what else runs there (nothing).
#include <stdlib.h>

enum { OK = 0, NOT_SUPPORTED = 3 };
int nvmlInit(void) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlDeviceGetCount_v2(int *n) {
  const char *text = getenv("LOWTIDE_NULL_COUNT");
  *n = text ? atoi(text) : 1;
  return OK;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
  *device = (void *)1;
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *n, void *processes) {
  *n = 0;
  return OK;
}
int nvmlDeviceGetGpuFabricInfoV(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }
int nvmlSystemGetCudaDriverVersion_v2(void) { return NOT_SUPPORTED; }

// A stand-in for the CUDA runtime and driver: enough for torch's caching allocator to run without a GPU.
// Memory is addresses only; an event is passed when its stream is told so or somebody waits for it.
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPointByVersion
#undef cudaStreamGetCaptureInfo

#define DEVICES 2
#define MIB (1ull << 20)
typedef struct Seg { uint64_t at, size; int dev; struct Seg *next; } Seg;
static Seg *segs;             // cudaMalloc and address reservations, by address
static uint64_t used[DEVICES], total[DEVICES];
static __thread int device_now;
static uint64_t tickets = 1;
typedef struct { uint64_t ticket; uintptr_t stream; } Ev;
typedef struct { uintptr_t stream; uint64_t done; } Done;
static Done done[4096];
static int ndone;

static void boot(void) {
  if (total[0]) return;
  const char *s = getenv("FAKE_CUDA_MEMORY");
  for (int i = 0; i < DEVICES; i++) total[i] = s ? strtoull(s, 0, 10) : 80ull << 30;
}
void fake_set_memory(int dev, uint64_t bytes) { boot(); total[dev] = bytes; }
uint64_t fake_used(int dev) { return used[dev]; }
static Done *of(uintptr_t stream) {
  for (int i = 0; i < ndone; i++) if (done[i].stream == stream) return &done[i];
  done[ndone].stream = stream; done[ndone].done = 0;
  return &done[ndone++];
}
void fake_stream_done(uintptr_t stream) { of(stream)->done = tickets; }

static uint64_t place(uint64_t size, uint64_t align, uint64_t base) {
  uint64_t at = base;
  Seg **p = &segs;
  size = (size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
  for (; *p; p = &(*p)->next) {
    if ((*p)->at + (*p)->size <= at) continue;
    if ((*p)->at >= at + size) break;
    at = ((*p)->at + (*p)->size + align - 1) / align * align;
  }
  Seg *s = malloc(sizeof *s);
  s->at = at; s->size = size; s->dev = device_now; s->next = *p; *p = s;
  return at;
}
static Seg *take(uint64_t at) {
  for (Seg **p = &segs; *p; p = &(*p)->next)
    if ((*p)->at == at) { Seg *s = *p; *p = s->next; return s; }
  return 0;
}

cudaError_t cudaMalloc(void **p, size_t size) {
  boot();
  if (used[device_now] + size > total[device_now]) { *p = 0; return cudaErrorMemoryAllocation; }
  *p = (void *)place(size, 2 * MIB, 0x7f0000000000ull);
  used[device_now] += size;
  return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
  if (!p) return cudaSuccess;
  Seg *s = take((uint64_t)p);
  if (!s) { fprintf(stderr, "standin: bad free %p\n", p); abort(); }
  used[s->dev] -= s->size;
  free(s);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { boot(); *t = total[device_now]; *f = *t - used[device_now]; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *n) { *n = DEVICES; return cudaSuccess; }
cudaError_t cudaGetDevice(int *d) { *d = device_now; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { device_now = d; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  boot();
  memset(p, 0, sizeof *p);
  strcpy(p->name, "no GPU");
  p->totalGlobalMem = 80ull << 30;
  p->major = 9; p->minor = 0; p->multiProcessorCount = 132; p->warpSize = 32; p->maxThreadsPerMultiProcessor = 2048;
  p->pciBusID = d;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  *v = a == cudaDevAttrComputeCapabilityMajor ? 9 : a == cudaDevAttrMultiProcessorCount ? 132 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *c, int a, int b) { *c = 0; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int a, unsigned b) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { for (int i = 0; i < ndone; i++) done[i].done = tickets; return cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
  static uintptr_t next = 0x5500000000; *s = (cudaStream_t)(next += 0x100); return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { of((uintptr_t)s)->done = tickets; return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = calloc(1, sizeof(Ev)); return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  Ev *v = (Ev *)e; v->ticket = ++tickets; v->stream = (uintptr_t)s; return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) {
  Ev *v = (Ev *)e; return of(v->stream)->done >= v->ticket ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  Ev *v = (Ev *)e; Done *d = of(v->stream); if (d->done < v->ticket) d->done = v->ticket; return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) { memset(a, 0, sizeof *a); return cudaErrorInvalidValue; }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { *p = malloc(n); return cudaSuccess; }
cudaError_t cudaFreeHost(void *p) { free(p); return cudaSuccess; }

// The driver: virtual ranges and pages of memory.
CUresult fake_cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t a, CUdeviceptr at, unsigned long long f) {
  *p = place(n, 2 * MIB, 0x300000000000ull); return CUDA_SUCCESS;
}
CUresult fake_cuMemAddressFree(CUdeviceptr p, size_t n) { free(take(p)); return CUDA_SUCCESS; }
typedef struct { uint64_t size; int dev; } Page;
CUresult fake_cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *prop, unsigned long long f) {
  int dev = prop->location.id;
  if (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
  boot();
  if (used[dev] + n > total[dev]) return CUDA_ERROR_OUT_OF_MEMORY;
  used[dev] += n;
  Page *g = malloc(sizeof *g); g->size = n; g->dev = dev; *h = (CUmemGenericAllocationHandle)g;
  return CUDA_SUCCESS;
}
CUresult fake_cuMemRelease(CUmemGenericAllocationHandle h) { Page *g = (Page *)h; used[g->dev] -= g->size; free(g); return CUDA_SUCCESS; }
CUresult fake_cuMemMap(CUdeviceptr p, size_t n, size_t o, CUmemGenericAllocationHandle h, unsigned long long f) { return CUDA_SUCCESS; }
CUresult fake_cuMemUnmap(CUdeviceptr p, size_t n) { return CUDA_SUCCESS; }
CUresult fake_cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *d, size_t c) { return CUDA_SUCCESS; }
CUresult fake_cuDeviceGetAttribute(int *v, int a, int d) { *v = 0; return CUDA_SUCCESS; }
CUresult fake_cuDeviceGet(int *v, int d) { *v = d; return CUDA_SUCCESS; }
CUresult fake_cuGetErrorString(CUresult r, const char **s) { *s = "standin"; return CUDA_SUCCESS; }
CUresult fake_cuNothing(void) { return CUDA_SUCCESS; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags, enum cudaDriverEntryPointQueryResult *q) {
  char full[128];
  snprintf(full, sizeof full, "fake_%s", name);
  *f = dlsym(RTLD_DEFAULT, full);
  if (!*f) *f = (void *)fake_cuNothing;
  if (q) *q = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
  *c = cudaStreamCaptureStatusNone; return cudaSuccess;
}

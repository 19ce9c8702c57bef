// CUDA's runtime and driver for a device that is not there. Memory is addresses: they are handed out and taken back, and
// the device is full when as much is out as it has. Kernels are not run; a copy to the host is answered with zeros, one
// of a single byte with 1 (but where it asks whether any of something is), unless `null_on_read` says otherwise. Streams lag behind the host for as long as they may:
// an event has passed once somebody waited for it, for what it came after, or for its stream.
//
// The numbers and structures are those of CUDA 12 and 13, restated.
#define _GNU_SOURCE
#include "null.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MIB (1ull << 20)
#define MAX_DEVICES 16
#define BASE 0x200000000000ull      // where the device's addresses begin; nothing of the host comes so low
#define RESERVED 0x300000000000ull  // address ranges without memory
#define END 0x400000000000ull
enum { INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_READY = 600 };
enum { UNREGISTERED, HOST, DEVICE };  // cudaMemoryType

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static __thread int device_now;

// ---- what the device is -------------------------------------------------------------------------------------------

static struct {
  char name[128];
  int major, minor, multiprocessors, threads, blocks, shared, shared_optin, l2, bus_bits, clock_khz, memory_khz, count;
  unsigned long long memory, context;  // bytes of the device, and of them what a process has before it asks
} gpu = {"no GPU", 9, 0, 132, 2048, 32, 233472, 232448, 52428800, 5120, 1980000, 0, 1, 80ull << 30, 0};
static unsigned long long total[MAX_DEVICES], used[MAX_DEVICES];

unsigned long long null_setting(const char *key, unsigned long long otherwise) {
  char name[64];
  snprintf(name, sizeof name, "LOWTIDE_NULL_%s", key);
  const char *text = getenv(name);
  return text ? strtoull(text, 0, 10) : otherwise;
}
static int binary;  // the capability that torch's kernels for this device were compiled for, as 90
__attribute__((constructor)) void null_boot(void) {
  const char *name = getenv("LOWTIDE_NULL_NAME");
  if (name) snprintf(gpu.name, sizeof gpu.name, "%s", name);
  gpu.major = null_setting("MAJOR", gpu.major);
  gpu.minor = null_setting("MINOR", gpu.minor);
  gpu.multiprocessors = null_setting("MULTIPROCESSORS", gpu.multiprocessors);
  gpu.threads = null_setting("THREADS", gpu.threads);
  gpu.blocks = null_setting("BLOCKS", gpu.blocks);
  gpu.shared = null_setting("SHARED_BYTES", gpu.shared);
  gpu.shared_optin = null_setting("BLOCK_SHARED_BYTES", gpu.shared_optin);
  gpu.l2 = null_setting("L2", gpu.l2);
  gpu.memory_khz = 1000 * null_setting("MEMORY_MHZ", 2619);
  gpu.count = null_setting("COUNT", gpu.count);
  binary = null_setting("BINARY", 10 * gpu.major + gpu.minor);
  if (gpu.count > MAX_DEVICES) gpu.count = MAX_DEVICES;
  gpu.memory = null_setting("MEMORY", gpu.memory);
  gpu.context = null_setting("CONTEXT", gpu.context);
  for (int i = 0; i < MAX_DEVICES; i++) total[i] = gpu.memory, used[i] = gpu.context;
  // So that no memory of the host comes to lie there, and a read of it by the host is a fault and no silence.
  mmap((void *)BASE, END - BASE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
}

// ---- what Python asks and sets ------------------------------------------------------------------------------------

static char missing[4096], assumed[1024];  // names, one a line
static void note(char *list, size_t size, const char *name) {
  LOCKED(lock);
  size_t n = strlen(name), have = strlen(list);
  for (char *at = list; (at = strstr(at, name)); at += n)
    if ((at == list || at[-1] == '\n') && at[n] == '\n') return;
  if (have + n + 2 < size) sprintf(list + have, "%s\n", name);
}
int null_missing(const char *function) {
  note(missing, sizeof missing, function);
  return NOT_SUPPORTED;
}
void null_assumed(const char *subject) { note(assumed, sizeof assumed, subject); }
const char *null_missing_names(void) { return missing; }
const char *null_assumed_names(void) { return assumed; }
void null_set_memory(int device, unsigned long long size) { total[device] = size; }

// Bytes that the host reads, what each would be, where, from where, what message is there -> what each of them is; < 0: it is done.
static int (*on_read)(unsigned long long, int, void *, const void *, int);
void null_on_read(void *callback) { on_read = callback; }

void *null_handle(void) {
  static uintptr_t next = 0x550000000000;
  return (void *)__sync_add_and_fetch(&next, 0x100);
}
static int new_handle(void **out) {
  *out = null_handle();
  return OK;
}

// ---- addresses ----------------------------------------------------------------------------------------------------

typedef struct Range { uint64_t at, size; int device; struct Range *next; } Range;
static Range *reserved, *pinned;  // addresses without memory, and of the host's pinned memory
// The driver cuts memory from chunks. Where it lies decides which of two free blocks of one size torch's allocator takes.
typedef struct Chunk { uint64_t at, end; int device; Range *ranges; struct Chunk *next, *below; } Chunk;
static Chunk *newest, *highest;

static uint64_t rounded(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
static void insert(Range **p, uint64_t at, uint64_t size) {
  while (*p && (*p)->at < at) p = &(*p)->next;
  Range *r = malloc(sizeof *r);
  *r = (Range){at, size, device_now, *p};
  *p = r;
}
static Chunk *chunk_of(uint64_t size) {  // below the highest of the gaps that hold it wherever it is aligned, as Linux's mmap
  Chunk **p = &highest, *c = malloc(sizeof *c);
  // 32 MiB on an H200 and on another's H100. Others, of older GPUs, had one segment after the other.
  uint64_t end = RESERVED, unit = gpu.major >= 9 ? 32 * MIB : 1ull << 40;
  size = rounded(size, unit);
  for (; *p && end - (*p)->end < size + unit - 4096; p = &(*p)->below) end = (*p)->at;
  *c = (Chunk){(end - size) / unit * unit, (end - size) / unit * unit + size, device_now, 0, newest, *p};
  return newest = *p = c;
}
// Seen on an H200 with driver 580 (traces/gallery/h200): of the newest chunk that has room the smallest hole, the lowest
// of several; else a new chunk. 159 of 160 random requests lay where this puts them.
static uint64_t place(uint64_t size) {
  uint64_t room = rounded(size, 2 * MIB), found = 0, best = ~0ull;
  static int begun[MAX_DEVICES];
  Chunk *in = 0;
  LOCKED(lock);
  if (gpu.major >= 9 && !begun[device_now]++) {  // the context has most of two chunks
    in = chunk_of(1), insert(&in->ranges, in->at, 8 * MIB);
    in = chunk_of(1), insert(&in->ranges, in->at, 30 * MIB);
  }
  for (Chunk *c = newest; c && !found; c = c->next) {
    uint64_t at = c->at;
    for (Range *r = c->ranges;; r = r->next) {
      uint64_t hole = (r ? r->at : c->end) - at;
      if (hole >= room && (gpu.major < 9 ? !found : c->device == device_now && hole < best)) best = hole, found = at, in = c;
      if (!r) break;
      at = rounded(r->at + r->size, 2 * MIB);
    }
  }
  if (!found) in = chunk_of(room), found = in->at;
  insert(&in->ranges, found, size);
  return found;
}
static Range take(Range **list, uint64_t at) {  // device -1: it is not there
  LOCKED(lock);
  while (*list && (*list)->at != at) list = &(*list)->next;
  Range *r = *list, found = r ? *r : (Range){0, 0, -1, 0};
  if (r) *list = r->next;
  free(r);
  return found;
}
static Range take_back(uint64_t at) {  // and the chunk, once it is empty
  LOCKED(lock);
  Chunk **c = &newest, **p = &highest;
  while (*c && at - (*c)->at >= (*c)->end - (*c)->at) c = &(*c)->next;
  Chunk *in = *c;
  Range found = in ? take(&in->ranges, at) : (Range){0, 0, -1, 0};
  if (!in || in->ranges) return found;
  while (*p != in) p = &(*p)->below;
  *p = in->below, *c = in->next;
  free(in);
  return found;
}
static int claim(int device, uint64_t size) {
  LOCKED(lock);
  int fits = used[device] <= total[device] && size <= total[device] - used[device];
  if (fits) used[device] += size;
  return fits;
}
int null_claim(int64_t size, int device) {
  if (device < 0) device = device_now;
  LOCKED(lock);
  used[device] += size;
  return device;
}
static int on_device(const void *p) { return (uint64_t)p >= BASE && (uint64_t)p < END; }

static __thread int last_error;
static int failed(int error) { return last_error = error; }

int cudaMalloc(void **p, size_t size) {
  *p = 0;
  if (!claim(device_now, size)) return failed(OUT_OF_MEMORY);
  *p = (void *)place(size);
  return OK;
}
int cudaFree(void *p) {
  if (!p) return OK;
  Range r = take_back((uint64_t)p);
  if (r.device < 0) return failed(INVALID_VALUE);
  null_claim(-(int64_t)r.size, r.device);
  return OK;
}
int cudaMemGetInfo(size_t *unused, size_t *all) {
  *all = gpu.memory;
  *unused = used[device_now] < total[device_now] ? total[device_now] - used[device_now] : 0;
  return OK;
}
int cudaHostRegister(void *p, size_t size, unsigned flags) {
  LOCKED(lock);
  insert(&pinned, (uint64_t)p, size);
  return OK;
}
int cudaHostAlloc(void **p, size_t size, unsigned flags) {
  if (posix_memalign(p, 4096, size ? size : 1)) return failed(OUT_OF_MEMORY);
  return cudaHostRegister(*p, size, flags);
}
int cudaMallocHost(void **p, size_t size) { return cudaHostAlloc(p, size, 0); }
int cudaFreeHost(void *p) {
  if (p && take(&pinned, (uint64_t)p).device >= 0) free(p);
  return OK;
}
int cudaHostUnregister(void *p) { return take(&pinned, (uint64_t)p).device < 0 ? failed(INVALID_VALUE) : OK; }

typedef struct { int type, device; void *on_device, *on_host; long reserved[8]; } PointerAttributes;
int cudaPointerGetAttributes(PointerAttributes *out, const void *p) {
  int is_pinned = 0;
  LOCKED(lock);
  for (Range *r = pinned; r && !is_pinned; r = r->next) is_pinned = (uint64_t)p - r->at < r->size;
  memset(out, 0, offsetof(PointerAttributes, reserved));
  out->type = on_device(p) ? DEVICE : is_pinned ? HOST : UNREGISTERED;
  out->device = device_now;
  if (out->type) out->on_device = (void *)p;
  if (out->type != DEVICE) out->on_host = (void *)p;
  return OK;
}
int cudaGetSymbolAddress(void **p, const void *symbol) {
  *p = (void *)(END - 0x100000000ull + ((uint64_t)symbol & 0xffffff00));
  return OK;
}

// ---- streams and events -------------------------------------------------------------------------------------------

typedef struct { uint64_t ticket; uintptr_t stream; } Event;
typedef struct Stream { uintptr_t id; uint64_t done; int capturing, priority, waits; Event after[64]; struct Stream *next; } Stream;
static Stream *streams;
static uint64_t tickets = 1;  // the device's work, in the order in which it was asked for

static Stream *stream_of(uintptr_t id) {
  LOCKED(lock);
  if (id == 1 || id == 2) id = 0;  // the legacy and the thread's default stream
  for (Stream *s = streams; s; s = s->next)
    if (s->id == id) return s;
  Stream *s = calloc(1, sizeof *s);
  s->id = id;
  s->next = streams;
  return streams = s;
}
static void finish(Stream *s, uint64_t ticket) {  // with what the stream waited for
  LOCKED(lock);
  if (s->done >= ticket) return;
  s->done = ticket;
  for (int i = 0; i < s->waits; i++) finish(stream_of(s->after[i].stream), s->after[i].ticket);
}
static int finished(uintptr_t stream) {
  finish(stream_of(stream), tickets);
  return OK;
}
void null_stream_done(unsigned long long stream) { finished(stream); }
int cudaDeviceSynchronize(void) {
  for (Stream *s = streams; s; s = s->next) finish(s, tickets);
  return OK;
}
int cudaStreamCreateWithPriority(void **s, unsigned flags, int priority) {
  *s = null_handle();
  stream_of((uintptr_t)*s)->priority = priority;
  return OK;
}
int cudaStreamCreateWithFlags(void **s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
int cudaStreamCreate(void **s) { return cudaStreamCreateWithPriority(s, 0, 0); }
int cudaStreamDestroy(void *s) { return OK; }
int cudaStreamSynchronize(void *s) { return finished((uintptr_t)s); }
int cudaStreamQuery(void *s) { return OK; }
int cudaStreamGetPriority(void *s, int *priority) {
  *priority = stream_of((uintptr_t)s)->priority;
  return OK;
}
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return OK;
}
int cudaEventCreateWithFlags(Event **e, unsigned flags) {
  *e = calloc(1, sizeof **e);
  return OK;
}
int cudaEventCreate(Event **e) { return cudaEventCreateWithFlags(e, 0); }
int cudaEventDestroy(Event *e) {
  free(e);
  return OK;
}
int cudaEventRecord(Event *e, void *stream) {
  e->ticket = __sync_add_and_fetch(&tickets, 1);
  e->stream = (uintptr_t)stream;
  return OK;
}
int cudaEventRecordWithFlags(Event *e, void *stream, unsigned flags) { return cudaEventRecord(e, stream); }
int cudaEventQuery(Event *e) {
  return stream_of(e->stream)->done >= e->ticket ? OK : NOT_READY;
}
int cudaEventSynchronize(Event *e) {
  finish(stream_of(e->stream), e->ticket);
  return OK;
}
int cudaStreamWaitEvent(void *stream, Event *e, unsigned flags) {
  LOCKED(lock);
  Stream *s = stream_of((uintptr_t)stream);
  int i = 0;
  while (i < s->waits && s->after[i].stream != e->stream) i++;
  if (i < 64) {  // a wait for a 65th stream is forgotten, and that stream seems to lag
    if (i == s->waits) s->after[s->waits++] = *e;
    if (s->after[i].ticket < e->ticket) s->after[i].ticket = e->ticket;
  }
  return OK;
}
int cudaEventElapsedTime(float *ms, Event *a, Event *b) {  // 5 us for each thing that was asked for between them
  *ms = b->ticket > a->ticket ? 0.005f * (b->ticket - a->ticket) : 0.005f;
  return OK;
}
int cudaLaunchHostFunc(void *s, void (*function)(void *), void *data) {
  function(data);
  return OK;
}
int cudaStreamAddCallback(void *s, void (*function)(void *, int, void *), void *data, unsigned flags) {
  function(s, OK, data);
  return OK;
}

// ---- graphs: what is captured is memory alone ----------------------------------------------------------------------

int cudaStreamIsCapturing(void *s, int *status) {
  *status = stream_of((uintptr_t)s)->capturing != 0;
  return OK;
}
int cudaStreamGetCaptureInfo(void *s, int *status, unsigned long long *id, void **graph, void **nodes, void **edges, size_t *n) {
  int number = stream_of((uintptr_t)s)->capturing;
  *status = number != 0;
  if (id) *id = number;
  if (graph && number) *graph = null_handle();
  if (nodes) *nodes = 0;
  if (edges) *edges = 0;
  if (n) *n = 0;
  return OK;
}
int cudaStreamGetCaptureInfo_v2(void *s, int *status, unsigned long long *id, void **graph, void **nodes, size_t *n) {
  return cudaStreamGetCaptureInfo(s, status, id, graph, nodes, 0, n);
}
int cudaStreamGetCaptureInfo_v3(void *s, int *status, unsigned long long *id, void **graph, void **nodes, void **edges, size_t *n) {
  return cudaStreamGetCaptureInfo(s, status, id, graph, nodes, edges, n);
}
int cudaStreamBeginCapture(void *s, int mode) {
  static int captures;
  stream_of((uintptr_t)s)->capturing = __sync_add_and_fetch(&captures, 1);
  return OK;
}
int cudaStreamEndCapture(void *s, void **graph) {
  stream_of((uintptr_t)s)->capturing = 0;
  return new_handle(graph);
}
int cudaThreadExchangeStreamCaptureMode(int *mode) { return OK; }
int cudaGraphInstantiate(void **exec, void *graph, unsigned long long flags) { return new_handle(exec); }
int cudaGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { return new_handle(exec); }
int cudaGraphLaunch(void *exec, void *s) { return OK; }
int cudaGraphDestroy(void *graph) { return OK; }
int cudaGraphExecDestroy(void *exec) { return OK; }
int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
  *count = nodes ? 0 : 1;  // not empty, but nothing that can be looked at
  return OK;
}

// ---- copies: what the host reads is told to be --------------------------------------------------------------------

// What the host wrote is known until a kernel runs; what another rank gave in a `message`, Python hears if the host reads it.
typedef struct Known { uint64_t at; size_t size; int message; struct Known *next; char data[]; } Known;
static Known *known;
static size_t known_bytes;
static void forget(uint64_t at, size_t size) {  // under the lock: what lies there, even in part
  for (Known **p = &known, *k; (k = *p);)
    if (k->at < at + size && at < k->at + k->size) {
      *p = k->next;
      known_bytes -= k->size;
      free(k);
    } else p = &k->next;
}
int null_read(const void *from, void *data, size_t size) {
  uint64_t at = (uint64_t)from;
  LOCKED(lock);
  Known *k = known;
  while (k && !(k->at <= at && at + size <= k->at + k->size)) k = k->next;
  if (k && !k->message) memcpy(data, k->data + (at - k->at), size);
  return !k ? 0 : k->message ? -k->message : 1;
}
void null_write(void *to, const void *data, size_t size) {
  Known *k = data && size <= KEPT ? malloc(sizeof *k + size) : 0;
  if (k) {
    *k = (Known){(uint64_t)to, size};
    memcpy(k->data, data, size);
  }
  LOCKED(lock);
  if (known_bytes > 256 * KEPT) forget(0, SIZE_MAX);
  forget((uint64_t)to, size);
  if (k) {
    k->next = known;
    known = k;
    known_bytes += size;
  }
}
void null_told(void *at, const void *nothing, size_t size, int message) {
  LOCKED(lock);
  null_write(at, nothing, size);
  known->message = message;
}
static int copy(void *to, const void *from, size_t size) {  // within the device
  char *data = size <= KEPT ? malloc(size) : 0;
  null_write(to, data && null_read(from, data, size) > 0 ? data : 0, size);
  free(data);
  return OK;
}

static __thread const void *last_kernel;
static const char *name_of(const void *kernel);
static void answer(void *to, const void *from, size_t size) {
  int found = null_read(from, to, size);
  if (found > 0) return;
  const char *kernel = name_of(last_kernel);  // any() is a reduction by "or", of one value a copy as bool
  int byte = size == 1 && !strstr(kernel, "or_kernel_cuda") && !strstr(kernel, "direct_copy_kernel_cuda");
  if (!on_read || (byte = on_read(size, byte, to, from, -found)) >= 0) memset(to, byte, size);
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  __sync_add_and_fetch(&tickets, 1);
  if (!size) return OK;
  if (on_device(to)) {
    if (on_device(from)) return copy(to, from, size);
    null_write(to, from, size);
    return OK;
  }
  if (on_device(from)) answer(to, from, size);
  else memmove(to, from, size);
  return OK;
}
int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  finished(0);
  return cudaMemcpyAsync(to, from, size, kind, 0);
}
int cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, void *stream) {
  return cudaMemcpyAsync(to, from, size, 4, stream);
}
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
  __sync_add_and_fetch(&tickets, 1);
  if (on_device(to)) {
    null_write(to, 0, to_pitch * height);
    return OK;
  }
  for (size_t i = 0; i < height; i++) {
    char *row = (char *)to + i * to_pitch;
    if (on_device(from)) answer(row, (const char *)from + i * from_pitch, width);
    else memmove(row, (const char *)from + i * from_pitch, width);
  }
  return OK;
}
int cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) { return OK; }
int cudaMemsetAsync(void *p, int value, size_t size, void *stream) {
  char *data = on_device(p) && size <= KEPT ? malloc(size) : 0;
  if (!on_device(p) || data) memset(data ? data : p, value, size);
  if (on_device(p)) null_write(p, data, size);
  free(data);
  return OK;
}
int cudaMemset(void *p, int value, size_t size) { return cudaMemsetAsync(p, value, size, 0); }

// ---- kernels -------------------------------------------------------------------------------------------------------

typedef struct { unsigned x, y, z; } Dim3;
static int launched(const void *kernel, void **args) {
  last_kernel = kernel;
  // What fills (void of a number of elements, a FillFunctor and a pointer) changes nothing else; an element has 16 bytes at most.
  const char *fills = known ? strstr(name_of(kernel), "FillFunctor") : 0;
  if (fills && strstr(fills, "St5arrayIPcLm1EE") && strstr(fills, "EEviT0_T1_")) null_write(*(void **)args[2], 0, 16ull * *(int *)args[0]);
  else if (known) null_write(0, 0, SIZE_MAX);
  __sync_add_and_fetch(&tickets, 1);
  return OK;
}
int cudaLaunchKernel(const void *f, Dim3 grid, Dim3 block, void **args, size_t shared, void *s) { return launched(f, args); }
int __cudaLaunchKernel(void *f, Dim3 grid, Dim3 block, void **args, size_t shared, void *s) { return launched(f, args); }
int cudaLaunchCooperativeKernel(const void *f, Dim3 grid, Dim3 block, void **args, size_t shared, void *s) { return launched(f, args); }
int cudaLaunchKernelExC(const void *config, const void *f, void **args) { return launched(f, args); }
unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, void *s) { return 0; }
int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, void **s) {
  *grid = *block = (Dim3){1, 1, 1};
  *shared = 0;
  *s = 0;
  return OK;
}
void **__cudaRegisterFatBinary(void *binary) {
  static void *one[4];
  return one;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 0; }
// Which kernel a host function stands for, by its mangled name; open addressing, for torch's 100,000.
static struct { const void *host; const char *name; } *kernels;
static size_t kernel_room, kernel_count;
static size_t slot_of(const void *host) {
  size_t k = ((uint64_t)host >> 4) * 0x9e3779b97f4a7c15ull >> 20;
  while (kernels[k %= kernel_room].host && kernels[k].host != host) k++;
  return k;
}
static const char *name_of(const void *kernel) {
  LOCKED(lock);
  const char *name = kernel_room && kernel ? kernels[slot_of(kernel)].name : 0;
  return name ? name : "";
}
void __cudaRegisterFunction(void **h, const char *host, char *dev, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {
  LOCKED(lock);
  if (2 * kernel_count >= kernel_room) {
    size_t room = kernel_room;
    __typeof__(kernels) old = kernels;
    kernel_room = room ? 2 * room : 1 << 16;
    kernels = calloc(kernel_room, sizeof *kernels);
    for (size_t i = 0; i < room; i++)
      if (old[i].host) kernels[slot_of(old[i].host)] = old[i];
    free(old);
  }
  size_t k = slot_of(host);
  kernel_count += !kernels[k].host;
  kernels[k].host = host;
  kernels[k].name = name;
}
void __cudaRegisterVar(void **h, char *host, char *dev, const char *name, int ext, size_t size, int constant, int global) {}
int __cudaGetKernel(const void **kernel, const void *f) {
  *kernel = f;
  return OK;
}
typedef struct {
  size_t shared, constant, local;
  int max_threads, registers, ptx, binary, cache, max_dynamic_shared;
} FuncAttributes;
int cudaFuncGetAttributes(FuncAttributes *out, const void *f) {
  *out = (FuncAttributes){.max_threads = 1024, .registers = 32, .ptx = binary, .binary = binary, .max_dynamic_shared = gpu.shared_optin};
  return OK;
}
int cudaFuncSetAttribute(const void *f, int attribute, int value) { return OK; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int threads, size_t shared, unsigned flags) {
  int fit = gpu.threads / (threads > 0 ? threads : 1);  // as a kernel of at most 32 registers a thread
  if (fit > gpu.blocks) fit = gpu.blocks;
  if (shared && fit > (int)(gpu.shared / (shared + 1024))) fit = gpu.shared / (shared + 1024);
  *blocks = fit > 0 ? fit : 1;
  return OK;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *f, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, f, threads, shared, 0);
}

// ---- the device's properties ---------------------------------------------------------------------------------------

int cudaGetDeviceCount(int *n) {
  *n = gpu.count;
  return OK;
}
int cudaGetDevice(int *device) {
  *device = device_now;
  return OK;
}
int cudaSetDevice(int device) {
  if (device < 0 || device >= gpu.count) return failed(101);  // cudaErrorInvalidDevice
  device_now = device;
  return OK;
}
int cudaDriverGetVersion(int *v) {
  *v = null_setting("CUDA", 13000);
  return OK;
}
int cudaRuntimeGetVersion(int *v) { return cudaDriverGetVersion(v); }
int cudaDeviceCanAccessPeer(int *can, int a, int b) {
  *can = 0;
  return OK;
}
int cudaProfilerStart(void) { return OK; }
int cudaProfilerStop(void) { return OK; }
int cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, size, "0000:%02x:00.0", device + 1);
  return OK;
}
static int attribute(int which) {
  switch (which) {
    case 1: case 2: case 3: return 1024;  // threads of a block, and its first two dimensions
    case 4: return 64;
    case 5: case 11: return 2147483647;  // the first dimension of a grid, a copy's pitch
    case 6: case 7: return 65535;
    case 8: return 49152;
    case 9: case 12: case 82: return 65536;  // constant memory; registers of a block, of a multiprocessor
    case 10: return 32;
    case 13: return gpu.clock_khz;
    case 14: return 512;
    case 16: return gpu.multiprocessors;
    case 19: case 31: case 40: case 41: case 78: case 83: case 90: case 95: case 99: case 102: case 115: return 1;
    case 36: return gpu.memory_khz;
    case 37: return gpu.bus_bits;
    case 38: return gpu.l2;
    case 39: return gpu.threads;
    case 75: return gpu.major;
    case 76: return gpu.minor;
    case 81: return gpu.shared;
    case 97: return gpu.shared_optin;
    case 106: return gpu.blocks;
    case 111: return gpu.major >= 8 ? 1024 : 0;
    case 120: return gpu.major >= 9;
    default: return 0;  // what a device may have or not, and this one has not
  }
}
int cudaDeviceGetAttribute(int *value, int which, int device) {
  *value = attribute(which);
  return OK;
}

void null_describe(char *text, size_t size) {
  snprintf(text, size,
           "{\"deviceName\":\"%s\",\"deviceVer\":%d,\"driverVer\":%d,\"cudaDeviceId\":0,\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,"
           "\"maxGridSize\":[2147483647,65535,65535],\"maxBlockSize\":[1024,1024,64],\"maxThreadsPerBlock\":1024,\"warpSize\":32,"
           "\"regsPerBlock\":65536,\"maxRegistersPerSM\":65536,\"multiProcessorCount\":%d,\"smCountOrigin\":0,\"maxThreadsPerSM\":%d,\"maxCtasPerSM\":%d,"
           "\"maxSharedMemoryPerBlock\":49152,\"maxSharedMemoryPerBlockOptin\":%d,\"reservedSharedMemoryPerBlock\":%d,"
           "\"smClockRateKHz\":%d,\"memClockRateKHz\":%d,\"l2CacheSize\":%d,\"totalGlobalMem\":%llu}",
           gpu.name, 100 * gpu.major + 10 * gpu.minor, (int)null_setting("CUDA", 13000), gpu.multiprocessors, gpu.threads, gpu.blocks,
           gpu.shared_optin, attribute(111), gpu.clock_khz, gpu.memory_khz, gpu.l2, gpu.memory);
}

// cudaDeviceProp: CUDA 13 left out eight members of CUDA 12, and has the old name for the function again.
#if CUDA_MAJOR < 13
#define OLD(member) member
#define cudaGetDeviceProperties cudaGetDeviceProperties_v2
#else
#define OLD(member)
#endif
typedef struct {
  char name[256], uuid[16], luid[8];
  unsigned luid_mask;
  size_t memory, shared;
  int registers, warp;
  size_t pitch;
  int threads, block[3], grid[3];
  OLD(int clock;)
  size_t constant;
  int major, minor;
  size_t texture_alignment, texture_pitch;
  OLD(int overlap;)
  int multiprocessors;
  OLD(int timeout;)
  int integrated, map_host;
  OLD(int compute_mode;)
  int texture_1d, texture_1d_mipmap;
  OLD(int texture_1d_linear;)
  int textures_and_surfaces[37];
  size_t surface_alignment;
  int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines, unified;
  OLD(int memory_clock;)
  int bus_bits, l2, persisting_l2, threads_per_multiprocessor, priorities, l1_global, l1_local;
  size_t shared_per_multiprocessor;
  int registers_per_multiprocessor, managed, multi_gpu, multi_gpu_group, native_atomics;
  OLD(int double_ratio;)
  int pageable, concurrent_managed, preemption, registered_pointer, cooperative;
  OLD(int cooperative_devices;)
  size_t shared_optin;
  int pageable_tables, direct_managed, blocks_per_multiprocessor, window;
  size_t shared_reserved;
  int host_register, the_rest[70];
} Properties;
_Static_assert(offsetof(Properties, multiprocessors) == (CUDA_MAJOR < 13 ? 388 : 384), "where it begins to differ");
_Static_assert(offsetof(Properties, l2) == (CUDA_MAJOR < 13 ? 616 : 596), "its middle");
_Static_assert(offsetof(Properties, shared_optin) == (CUDA_MAJOR < 13 ? 696 : 672), "its end");
int cudaGetDeviceProperties(Properties *p, int device) {
  memset(p, 0, offsetof(Properties, host_register));
  snprintf(p->name, sizeof p->name, "%s", gpu.name);
  p->uuid[0] = device + 1;
  p->memory = gpu.memory;
  p->shared = 49152;
  p->registers = p->registers_per_multiprocessor = 65536;
  p->warp = 32;
  p->pitch = 2147483647;
  p->threads = p->block[0] = p->block[1] = 1024;
  p->block[2] = 64;
  p->grid[0] = 2147483647;
  p->grid[1] = p->grid[2] = 65535;
  p->constant = 65536;
  p->major = gpu.major;
  p->minor = gpu.minor;
  p->texture_alignment = p->surface_alignment = 512;
  p->texture_pitch = 32;
  p->multiprocessors = gpu.multiprocessors;
  p->map_host = p->concurrent_kernels = p->unified = p->priorities = p->managed = p->cooperative = 1;
  p->pci_bus = device + 1;
  p->copy_engines = 3;
  p->bus_bits = gpu.bus_bits;
  p->l2 = gpu.l2;
  p->threads_per_multiprocessor = gpu.threads;
  p->shared_per_multiprocessor = gpu.shared;
  p->shared_optin = gpu.shared_optin;
  p->blocks_per_multiprocessor = gpu.blocks;
  p->shared_reserved = attribute(111);
  return OK;
}

// ---- errors --------------------------------------------------------------------------------------------------------

int cudaGetLastError(void) {
  int error = last_error;
  last_error = OK;
  return error;
}
int cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(int error) {
  static __thread char text[4500];
  switch (error) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NOT_READY: return "device not ready";
    case NOT_SUPPORTED: break;
    default: return snprintf(text, sizeof text, "error %d of the null driver", error), text;
  }
  snprintf(text, sizeof text, "the null driver was asked for what it has not: %s", missing);
  for (char *c = text; *c; c++) if (*c == '\n') *c = ' ';
  return text;
}
const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : error == NOT_SUPPORTED ? "cudaErrorNotSupported" : "cudaError"; }

// ---- the driver ----------------------------------------------------------------------------------------------------

int cuInit(unsigned flags) { return OK; }
int cuDriverGetVersion(int *v) { return cudaDriverGetVersion(v); }
int cuGetErrorString(int error, const char **text) {
  *text = cudaGetErrorString(error);
  return OK;
}
int cuGetErrorName(int error, const char **text) {
  *text = cudaGetErrorName(error);
  return OK;
}
int cuDeviceGet(int *out, int device) {
  *out = device;
  return OK;
}
int cuDeviceGetCount(int *n) { return cudaGetDeviceCount(n); }
int cuDeviceGetName(char *text, int size, int device) {
  snprintf(text, size, "%s", gpu.name);
  return OK;
}
int cuDeviceGetAttribute(int *value, int which, int device) { return cudaDeviceGetAttribute(value, which, device); }
int cuDeviceTotalMem_v2(size_t *size, int device) {
  *size = gpu.memory;
  return OK;
}
int cuMemGetInfo_v2(size_t *unused, size_t *all) { return cudaMemGetInfo(unused, all); }
int cuCtxGetCurrent(void **context) {
  *context = (void *)0x550000000100;
  return OK;
}
int cuCtxSetCurrent(void *context) { return OK; }
int cuCtxGetDevice(int *device) { return cudaGetDevice(device); }
int cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
int cuDevicePrimaryCtxRetain(void **context, int device) { return cuCtxGetCurrent(context); }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return OK;
}
int cuPointerGetAttribute(void *out, int which, uint64_t p) {
  if (which == 2) *(unsigned *)out = on_device((void *)p) ? 2 : 1;  // memory type
  else if (which == 3) *(uint64_t *)out = p;                        // device pointer
  else if (which == 9) *(int *)out = device_now;                    // ordinal
  else return null_missing("cuPointerGetAttribute of another kind");
  return OK;
}

typedef struct { uint64_t size; int device; } Pages;
int cuMemAddressReserve(uint64_t *p, size_t size, size_t alignment, uint64_t at, unsigned long long flags) {
  LOCKED(lock);
  *p = RESERVED;
  for (Range *r = reserved; r && r->at < *p + rounded(size, 2 * MIB); r = r->next) *p = rounded(r->at + r->size, 2 * MIB);
  insert(&reserved, *p, size);
  return OK;
}
int cuMemAddressFree(uint64_t p, size_t size) {
  take(&reserved, p);
  return OK;
}
int cuMemCreate(Pages **pages, size_t size, const int *properties, unsigned long long flags) {
  int handle_type = properties[1], device = properties[3];  // of type, handle types, location {kind, number}
  if (handle_type == 8) return NOT_SUPPORTED;               // fabric handles, for several machines: torch asks and does without
  if (!claim(device, size)) return OUT_OF_MEMORY;
  *pages = malloc(sizeof **pages);
  **pages = (Pages){size, device};
  return OK;
}
int cuMemRelease(Pages *pages) {
  null_claim(-(int64_t)pages->size, pages->device);
  free(pages);
  return OK;
}
int cuMemMap(uint64_t p, size_t size, size_t offset, void *pages, unsigned long long flags) { return OK; }
int cuMemUnmap(uint64_t p, size_t size) { return OK; }
int cuMemSetAccess(uint64_t p, size_t size, const void *access, size_t count) { return OK; }
int cuMemGetAllocationGranularity(size_t *size, const void *properties, int option) {
  *size = 2 * MIB;
  return OK;
}

int cuModuleLoadData(void **module, const void *image) { return new_handle(module); }
int cuModuleLoadDataEx(void **m, const void *image, unsigned n, int *options, void **values) { return new_handle(m); }
int cuModuleLoad(void **module, const char *file) { return new_handle(module); }
int cuModuleUnload(void *module) { return OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return new_handle(function); }
int cuLinkCreate_v2(unsigned n, int *options, void **values, void **state) { return new_handle(state); }
int cuLinkAddData_v2(void *s, int type, void *data, size_t size, const char *name, unsigned n, int *o, void **v) { return OK; }
int cuLinkComplete(void *state, void **image, size_t *size) {
  static char nothing[64];
  *image = nothing;
  *size = sizeof nothing;
  return OK;
}
int cuLinkDestroy(void *state) { return OK; }
int cuFuncGetAttribute(int *value, int which, void *function) {
  *value = which == 0 ? 1024 : which == 4 ? 32 : 0;  // threads of a block, registers of a thread
  return OK;
}
int cuFuncSetAttribute(void *function, int which, int value) { return OK; }
int cuFuncSetCacheConfig(void *function, int config) { return OK; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s, void **args, void **extra) { return launched(0, 0); }
int cuLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *s, void **args) { return launched(0, 0); }
int cuLaunchKernelEx(const void *config, void *f, void **args, void **extra) { return launched(0, 0); }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *f, int threads, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, f, threads, shared);
}
int cuLogsRegisterCallback(void *callback, void *data, void **out) { return new_handle(out); }
int cuLogsUnregisterCallback(void *callback) { return OK; }
int cuTensorMapEncodeTiled(void *map) { return OK; }
int cuTensorMapEncodeIm2col(void *map) { return OK; }
int cuOccupancyMaxActiveClusters(int *clusters, void *f, const void *config) {
  *clusters = gpu.multiprocessors / 8;  // of eight blocks each
  return OK;
}
int cuStreamIsCapturing(void *s, int *status) { return cudaStreamIsCapturing(s, status); }
int cuCtxSetLimit(int limit, size_t value) { return OK; }
int cuCtxGetLimit(size_t *value, int limit) {
  *value = 0;
  return OK;
}

int cuLibraryLoadData(void **library, const void *code, int *o, void **v, unsigned n, int *lo, void **lv, unsigned ln) { return new_handle(library); }
int cuLibraryGetKernel(void **kernel, void *library, const char *name) { return new_handle(kernel); }
int cuLibraryUnload(void *library) { return OK; }
int cuKernelGetAttribute(int *value, int which, void *kernel, int device) { return cuFuncGetAttribute(value, which, kernel); }
int cuKernelSetAttribute(int which, int value, void *kernel, int device) { return OK; }
// cuDNN's run-time compiler wants these to be there, and calls none of them.
#define LACKING(name) int name(void) { return null_missing(#name); }
LACKING(cuCtxPopCurrent) LACKING(cuCtxPushCurrent) LACKING(cuStreamGetCtx) LACKING(cuLinkCreate) LACKING(cuLinkAddData)
LACKING(cuLibraryLoadFromFile) LACKING(cuOccupancyMaxPotentialClusterSize)
int cuGetExportTable(const void **table, const void *id) {
  *table = 0;
  return 500;  // CUDA_ERROR_NOT_FOUND
}

// torch looks up all that it may ever call, so that a function is missing is said when it is called: by one of these.
static char sought[64][96];
#define THUNK(k) static int thunk##k(void) { return null_missing(sought[k]); }
#define EIGHT(F, t) F(t##0) F(t##1) F(t##2) F(t##3) F(t##4) F(t##5) F(t##6) F(t##7)
#define ALL(F) EIGHT(F, 0) EIGHT(F, 01) EIGHT(F, 02) EIGHT(F, 03) EIGHT(F, 04) EIGHT(F, 05) EIGHT(F, 06) EIGHT(F, 07)
ALL(THUNK)
#define NAMED(k) thunk##k,
static int (*const thunks[])(void) = {ALL(NAMED)};
static void *lacking(const char *name) {
  size_t k = 0;
  while (k < 63 && sought[k][0] && strcmp(sought[k], name)) k++;
  snprintf(sought[k], sizeof sought[k], "%s", k < 63 ? name : "a function of the driver");
  return (void *)thunks[k];
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *result) {
  char full[160];
  *function = dlsym(RTLD_DEFAULT, name);
  snprintf(full, sizeof full, "%s_v2", name);
  if (!*function) *function = dlsym(RTLD_DEFAULT, full);
  if (!*function) *function = lacking(name);
  if (result) *result = 0;
  return OK;
}
int cudaGetDriverEntryPoint(const char *name, void **f, unsigned long long flags, int *result) {
  return cudaGetDriverEntryPointByVersion(name, f, 0, flags, result);
}

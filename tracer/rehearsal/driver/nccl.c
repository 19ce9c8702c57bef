// NCCL for the one rank that is here. Each communicator keeps its own size and rank; the ranks that are not here hold
// what this rank holds, as far as that is known. Communicators take memory of the device by a table: what NCCL allocates
// depends on the links between GPUs, of which there are none. The numbers and structures are those of NCCL 2.23 to 2.30.
#include "null.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUM, PRODUCT, NONE = -1 };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
enum { NO_COLOR = -1, MEM_TOTAL = 3 };
static const unsigned char SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // ncclDataType_t

typedef struct Comm { int ranks, rank, device, born, died; int64_t bytes; uint64_t peers; struct Comm *next; } Comm;
static Comm *comms;  // all that were ever made, the last first
static int changes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- communicators -------------------------------------------------------------------------------------------------

static void grow(Comm *c, int64_t bytes) {
  c->bytes += bytes;
  c->device = null_claim(bytes, c->device);
}
static int made_on(int device, Comm **out, int ranks, int rank) {
  Comm *c = *out = malloc(sizeof *c);
  *c = (Comm){ranks, rank, device};
  grow(c, null_setting(ranks > 2 ? "NCCL_MORE" : ranks == 2 ? "NCCL_TWO" : "NCCL_ONE", 0));
  LOCKED(lock);
  c->born = ++changes;
  c->next = comms;
  comms = c;
  return OK;
}
int ncclCommDestroy(Comm *c) {
  if (!c || c->died) return OK;
  LOCKED(lock);
  c->died = ++changes;
  null_claim(-c->bytes, c->device);
  return OK;
}
// "ranks bytes born died" of each, a line each; for Python.
void null_communicators(char *text, size_t room) {
  *text = 0;
  LOCKED(lock);
  for (Comm *c = comms; c && room > 80; c = c->next) {
    int n = snprintf(text, room, "%d %lld %d %d\n", c->ranks, (long long)c->bytes, c->born, c->died);
    text += n;
    room -= n;
  }
}
// How many ranks the next split gives, which depends on what the others say.
static int split_ranks;
void null_split_ranks(int ranks) { split_ranks = ranks; }

typedef struct { char text[128]; } UniqueId;
int ncclGetUniqueId(UniqueId *id) {
  memset(id, 0, sizeof *id);
  return OK;
}
int ncclCommGetUniqueId(Comm *c, UniqueId *id) { return ncclGetUniqueId(id); }
int ncclCommInitRank(Comm **c, int n, UniqueId id, int rank) { return made_on(-1, c, n, rank); }
int ncclCommInitRankConfig(Comm **c, int n, UniqueId id, int rank, void *config) { return made_on(-1, c, n, rank); }
int ncclCommInitRankScalable(Comm **c, int n, int rank, int ids, UniqueId *id, void *config) { return made_on(-1, c, n, rank); }
int ncclCommInitAll(Comm **c, int n, const int *devices) {
  for (int k = 0; k < n; k++) made_on(devices ? devices[k] : k, &c[k], n, k);
  return OK;
}
int ncclCommSplit(Comm *c, int color, int key, Comm **out, void *config) {
  *out = 0;
  if (color == NO_COLOR) return OK;
  if (!split_ranks) null_missing("ncclCommSplit into ranks that nobody told");
  return made_on(-1, out, split_ranks ? split_ranks : c->ranks, key);
}
int ncclCommShrink(Comm *c, int *without, int count, Comm **out, void *config, int flags) {
  int before = 0;
  for (int k = 0; k < count; k++) before += without[k] < c->rank;
  return made_on(-1, out, c->ranks - count, c->rank - before);
}
int ncclCommGrow(Comm *c, int n, const UniqueId *id, int rank, Comm **out, void *config) { return made_on(-1, out, n, c ? c->rank : rank); }
int ncclCommAbort(Comm *c) { return ncclCommDestroy(c); }
int ncclCommCount(const Comm *c, int *n) {
  *n = c->ranks;
  return OK;
}
int ncclCommUserRank(const Comm *c, int *rank) {
  *rank = c->rank;
  return OK;
}
int ncclCommGetAsyncError(Comm *c, int *error) { return *error = OK; }
int ncclCommMemStats(Comm *c, int which, uint64_t *value) {
  *value = which == MEM_TOTAL ? c->bytes : 0;
  return OK;
}

// ---- memory --------------------------------------------------------------------------------------------------------

int cudaMalloc(void **p, size_t size);
int cudaFree(void *p);
int ncclMemAlloc(void **p, size_t size) { return cudaMalloc(p, (size + (2 << 20) - 1) >> 21 << 21) ? 1 : OK; }  // whole pages
int ncclMemFree(void *p) { return cudaFree(p) ? 1 : OK; }
int ncclCommRegister(Comm *c, void *buffer, size_t size, void **handle) {
  *handle = buffer;
  return OK;
}
int ncclCommWindowRegister(Comm *c, void *buffer, size_t size, void **window, int flags) { return ncclCommRegister(c, buffer, size, window); }
int ncclWinGetUserPtr(Comm *c, void *window, void **buffer) { return ncclCommRegister(c, window, 0, buffer); }

// ---- collectives ---------------------------------------------------------------------------------------------------

// Reduce `data` with as many as it as there are ranks; 0 if nobody knows what comes out.
static int reduced(void *data, size_t count, int type, int op, int ranks) {
  if (op != SUM && op != PRODUCT) return op < 5;  // the highest, the lowest and the mean of equals; what users made is not known
#define ALL(T)                                                   \
  for (size_t i = 0; i < count; i++) {                           \
    T one = ((T *)data)[i], sum = one;                           \
    for (int k = 1; k < ranks; k++) op ? (sum *= one) : (sum += one); \
    ((T *)data)[i] = sum;                                        \
  }                                                              \
  return 1
  switch (type) {
    case INT8: case UINT8: ALL(uint8_t);
    case INT32: case UINT32: ALL(uint32_t);
    case INT64: case UINT64: ALL(uint64_t);
    case FLOAT32: ALL(float);
    case FLOAT64: ALL(double);
    default: return 0;
  }
}
// What comes out is `copies` of what this rank gives, reduced.
static int collect(const char *from, void *to, size_t count, int type, int op, int copies, int ranks) {
  size_t size = count * SIZES[type];
  char *data = size * copies <= KEPT ? malloc(size * copies + 1) : 0;
  int known = data && null_read(from, data, size) > 0 && (op == NONE || reduced(data, count, type, op, ranks));
  for (int k = 1; known && k < copies; k++) memcpy(data + k * size, data, size);
  null_write(to, known ? data : 0, size * copies);
  free(data);
  return OK;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *c, void *s) { return collect(from, to, count, type, op, 1, c->ranks); }
int ncclReduceScatter(const char *from, void *to, size_t count, int type, int op, Comm *c, void *s) {
  return collect(from + c->rank * count * SIZES[type], to, count, type, op, 1, c->ranks);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, Comm *c, void *s) {
  return c->rank == root ? collect(from, to, count, type, op, 1, c->ranks) : OK;
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *c, void *s) { return collect(from, to, count, type, NONE, 1, 0); }
int ncclBcast(void *at, size_t count, int type, int root, Comm *c, void *s) { return OK; }
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *c, void *s) { return collect(from, to, count, type, NONE, c->ranks, 0); }
int ncclGather(const void *from, void *to, size_t count, int type, int root, Comm *c, void *s) {
  return c->rank == root ? collect(from, to, count, type, NONE, c->ranks, 0) : OK;
}
int ncclScatter(const char *from, void *to, size_t count, int type, int root, Comm *c, void *s) {
  if (c->rank == root) return collect(from + c->rank * count * SIZES[type], to, count, type, NONE, 1, 0);
  null_write(to, 0, count * SIZES[type]);
  return OK;
}
static void meet(Comm *c, int peer) {  // the first message to or from a rank connects the two
  uint64_t bit = 1ull << (peer & 63);
  if (peer == c->rank || c->peers & bit) return;
  c->peers |= bit;
  grow(c, null_setting("NCCL_PEER", 0));
}
int ncclAlltoAll(const char *from, void *to, size_t count, int type, Comm *c, void *s) {
  for (int peer = 0; peer < c->ranks; peer++) meet(c, peer);
  return collect(from + c->rank * count * SIZES[type], to, count, type, NONE, c->ranks, 0);
}
// In an exchange within a group everybody sends this rank as much as it sends itself, and the same.
static __thread struct { void *at; size_t count; int type; } awaited[4096], to_itself;
static __thread int depth, waiting;
int ncclSend(void *from, size_t count, int type, int peer, Comm *c, void *s) {
  meet(c, peer);
  if (peer == c->rank) to_itself.at = from, to_itself.count = count;
  return OK;
}
int ncclRecv(void *to, size_t count, int type, int peer, Comm *c, void *s) {
  meet(c, peer);
  null_write(to, 0, count * SIZES[type]);
  if (depth && waiting < 4096) awaited[waiting].at = to, awaited[waiting].count = count, awaited[waiting++].type = type;
  return OK;
}
int ncclGroupStart(void) {
  depth++;
  return OK;
}
int ncclGroupEnd(void) {
  if (--depth > 0) return OK;
  for (int k = 0; k < waiting; k++)
    if (to_itself.at && awaited[k].count == to_itself.count) collect(to_itself.at, awaited[k].at, awaited[k].count, awaited[k].type, NONE, 1, 0);
  depth = waiting = 0;
  to_itself.at = 0;
  return OK;
}
int ncclGroupSimulateEnd(void *out) { return ncclGroupEnd(); }  // the time stays as torch has set it: not known
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int where, Comm *c) {
  *op = 5;  // the first after NCCL's own
  return OK;
}

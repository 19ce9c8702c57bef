// What of cuBLAS, cuDNN and cuFFT answers something. Functions that only compute, or set what nobody asks for,
// are made by tracer/rehearsal/stubs.py, as are those that nobody wrote yet, which say so.
#define _GNU_SOURCE
#include "null.h"
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static void *loaded(const char *library, const char *function) {  // the real one, where torch has loaded the library
  return (library = dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) ? dlsym((void *)library, function) : 0;
}

// ---- cuBLAS: torch itself allocates its workspaces ------------------------------------------------------------------

int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
int cublasGetVersion_v2(void *handle, int *version) {
  size_t (*real)(void) = loaded("libcublasLt.so.13", "cublasLtGetVersion") ?: loaded("libcublasLt.so.12", "cublasLtGetVersion");
  *version = real ? (int)real() : 130000;
  return OK;
}
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *preference, int asked, Heuristic *out, int *found) {
  memset(out, 0, sizeof *out);
  *found = 1;
  return OK;
}
int cublasLtCreate(void **handle) {
  *handle = null_handle();
  return OK;
}
int cublasLtDestroy(void *handle) { return OK; }
// cuDNN's engines look cuBLASLt's functions up in the library itself, which has no device: they get ours, as torch does.
__attribute__((optimize("O2"))) void *dlsym(void *library, const char *name) {  // a jump at its end keeps who asks
  static void *(*real)(void *, const char *);
  if (!real && !(real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"))) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");  // Arm's
  void *ours = strncmp(name, "cublasLt", 8) ? 0 : real(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name);
  return ours ? ours : real(library, name);
}

// ---- cuDNN: handles and their streams -------------------------------------------------------------------------------

static struct { void *handle, *stream; } streams[64];  // torch has one handle a thread
int cudnnSetStream(void *handle, void *stream) {
  size_t k = 0;
  while (k < 63 && streams[k].handle && streams[k].handle != handle) k++;
  streams[k].handle = handle;
  streams[k].stream = stream;
  return OK;
}
int cudnnGetStream(void *handle, void **stream) {
  *stream = 0;
  for (size_t k = 0; k < 64; k++)
    if (streams[k].handle == handle) *stream = streams[k].stream;
  return OK;
}

// ---- cuDNN's graphs: the real library, told of the device ----------------------------------------------------------------

// From 9.8 on cuDNN plans for a device that is described to it in JSON ("deviceless ahead-of-time compilation" in its
// documentation): descriptors, heuristics, engines and workspaces are its own. What asks for the device is told of it, handles,
// which only a device has, are left out, and nothing is executed.
static int no_cudnn() { return null_missing("cuDNN 9.8 or later"); }
static int (*real(const char *function))() {
  int (*found)() = (int (*)())loaded("libcudnn.so.9", function);
  return found ? found : no_cudnn;
}
enum { HANDLE = 0, CHAR = 24, DESCRIPTOR = 15 };                              // cudnnBackendAttributeType_t
enum { ENGINE = 2, HEURISTICS = 4, PLAN = 5, DEVICE = 38, DEVICE_JSON = 2702 };  // descriptors; an attribute

typedef struct Open { void *descriptor; int attribute; struct Open *next; } Open;  // made, not finalized, wants the device
static Open *open_descriptors;
static pthread_mutex_t cudnn_lock = PTHREAD_MUTEX_INITIALIZER;

static void *device(void) {
  static void *one;
  char text[2048];
  LOCKED(cudnn_lock);
  if (!one && real("cudnnBackendCreateDescriptor")(DEVICE, &one) == OK) {
    null_describe(text, sizeof text);
    real("cudnnBackendSetAttribute")(one, DEVICE_JSON, CHAR, (int64_t)strlen(text), text);
    if (real("cudnnBackendFinalize")(one) != OK) null_missing("cuDNN for this GPU");
  }
  return one;
}
int cudnnBackendCreateDescriptor(int type, void **descriptor) {
  int status = real("cudnnBackendCreateDescriptor")(type, descriptor);
  int attribute = type == ENGINE ? 1307 : type == HEURISTICS ? 204 : type == PLAN ? 407 : 0;  // CUDNN_ATTR_..._DEVICEPROP
  if (status || !attribute) return status;
  Open *o = malloc(sizeof *o);
  LOCKED(cudnn_lock);
  *o = (Open){*descriptor, attribute, open_descriptors};
  open_descriptors = o;
  return OK;
}
static int closed(void *descriptor) {  // what it wants the device by, or 0; once
  Open **p = &open_descriptors;
  LOCKED(cudnn_lock);
  while (*p && (*p)->descriptor != descriptor) p = &(*p)->next;
  Open *o = *p;
  int attribute = o ? o->attribute : 0;
  if (o) *p = o->next;
  free(o);
  return attribute;
}
int cudnnBackendSetAttribute(void *descriptor, int name, int type, int64_t count, const void *values) {
  return type == HANDLE ? OK : real("cudnnBackendSetAttribute")(descriptor, name, type, count, values);
}
int cudnnBackendFinalize(void *descriptor) {
  int attribute = closed(descriptor);
  void *of = attribute ? device() : 0;
  if (attribute) real("cudnnBackendSetAttribute")(descriptor, attribute, DESCRIPTOR, (int64_t)1, &of);
  return real("cudnnBackendFinalize")(descriptor);
}
int cudnnBackendDestroyDescriptor(void *descriptor) {
  closed(descriptor);
  return real("cudnnBackendDestroyDescriptor")(descriptor);
}
// From Hopper on engines split their work by how many clusters of blocks run at once, for which cuDNN asks a device how its
// multiprocessors are grouped. The description has no word for it, so they are as on an H200 (traces/gallery/h200): by 16,
// but one group of 14 and one of what is left.
int _ZN8mb_tools11hasValidVSLERKSt5arrayIiLm24EE(int groups[24]) {
  int left = null_setting("MULTIPROCESSORS", 132);
  for (int k = 0; k < 24 && left > 0; left -= groups[k++]) groups[k] = left >= 32 ? 16 : left > 14 ? 14 : left;
  return groups[0] > 0;
}
int cudnnBackendExecute(void *handle, void *plan, void *arguments) { return OK; }

// ---- cuDNN's older functions: batch norm, recurrent nets, CTC ---------------------------------------------------------

static int made(void **descriptor, size_t size) {
  *descriptor = calloc(1, size);
  return OK;
}
static int destroyed(void *descriptor) {
  free(descriptor);
  return OK;
}
static int none(size_t *size, const char *subject) {
  null_assumed(subject);
  *size = 0;
  return OK;
}
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int mode, int ops, void *x, void *z, void *y, void *scale, void *act, size_t *size) {
  return none(size, "cuDNN's batch norm");
}
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int mode, int ops, void *x, void *y, void *dy, void *dz, void *dx, void *scale, void *act, size_t *size) {
  return none(size, "cuDNN's batch norm");
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int mode, int ops, void *act, void *x, size_t *size) {
  return none(size, "cuDNN's batch norm");
}
int cudnnGetCTCLossWorkspaceSize(void *h, void *p, void *g, const int *l, const int *ll, const int *il, int algo, void *d, size_t *size) {
  return none(size, "cuDNN's CTC loss");
}
int cudnnGetCTCLossWorkspaceSize_v8(void *h, int algo, void *d, void *p, void *g, size_t *size) { return none(size, "cuDNN's CTC loss"); }
int cudnnDropoutGetStatesSize(void *h, size_t *size) {  // one for each thread that the device holds, as on an H200
  *size = 24 * null_setting("MULTIPROCESSORS", 0) * null_setting("THREADS", 0);
  return OK;
}

typedef struct { int cell, bias, both_ways, type, input, hidden, projection, layers; } Rnn;
typedef struct { int type, longest, batch, width; } RnnData;
int cudnnCreateRNNDescriptor(void **r) { return made(r, sizeof(Rnn)); }
int cudnnDestroyRNNDescriptor(void *r) { return destroyed(r); }
int cudnnCreateRNNDataDescriptor(void **r) { return made(r, sizeof(RnnData)); }
int cudnnDestroyRNNDataDescriptor(void *r) { return destroyed(r); }
int cudnnSetRNNDescriptor_v8(Rnn *r, int algo, int cell, int bias, int direction, int input_mode, int type, int precision, int math, int input, int hidden, int projection, int layers, void *dropout, unsigned flags) {
  *r = (Rnn){cell, bias, direction, type, input, hidden, projection, layers};
  return OK;
}
int cudnnSetRNNDataDescriptor(RnnData *r, int type, int layout, int longest, int batch, int size, const int *lengths, void *fill) {
  *r = (RnnData){type, longest, batch, size};
  return OK;
}
static size_t item(int type) { return type == 1 || type == 6 ? 8 : type == 2 || type == 9 ? 2 : 4; }  // cudnnDataType_t
// cuDNN alone knows workspace and reserve, and has published neither. Assumed, by an LSTM on an H200 (traces/gallery/h200): for
// backward the gates of each step, layer and direction, the cell of an LSTM, the state of others, and what goes from layer to
// layer; while it runs, the gates. By cell: relu, tanh, LSTM, GRU.
static const int GATES[] = {1, 1, 4, 3}, RESERVED[] = {2, 2, 5, 4};
static int gates(const Rnn *r) { return GATES[r->cell]; }
// The weights of one layer and direction: `gates` matrices for the input, as many for the state, a projection.
static int64_t columns(const Rnn *r, int layer, int of_state) {
  int ways = r->both_ways ? 2 : 1, out = r->projection > 0 ? r->projection : r->hidden;
  return of_state ? out : layer < ways ? r->input : (int64_t)out * ways;
}
static int64_t matrices(const Rnn *r, int layer) {
  int64_t projected = r->projection > 0 && r->projection != r->hidden ? (int64_t)r->projection * r->hidden : 0;
  return (int64_t)gates(r) * r->hidden * (columns(r, layer, 0) + columns(r, layer, 1)) + projected;
}
static int64_t before(const Rnn *r, int layer) {  // elements of the matrices of the layers before it
  int64_t sum = 0;
  for (int i = 0; i < layer; i++) sum += matrices(r, i);
  return sum;
}
int cudnnGetRNNWeightSpaceSize(void *h, const Rnn *r, size_t *size) {
  int all = r->layers * (r->both_ways ? 2 : 1);
  *size = item(r->type) * (before(r, all) + (r->bias ? (int64_t)all * 2 * gates(r) * r->hidden : 0));
  return OK;
}
int cudnnGetRNNWeightParams(void *h, const Rnn *r, int layer, size_t size, const char *weights, int which, void *matrix, char **matrix_at, void *bias, char **bias_at) {
  int g = gates(r), all = r->layers * (r->both_ways ? 2 : 1), projection = which == 2 * g, of_state = which >= g;
  int64_t at = before(r, layer) + (int64_t)r->hidden * (which < g ? which * columns(r, layer, 0) : g * columns(r, layer, 0) + (which - g) * columns(r, layer, 1));
  int rows[3] = {1, projection ? r->projection : r->hidden, projection ? r->hidden : (int)columns(r, layer, of_state)}, vector[3] = {1, r->hidden, 1};
  int64_t bias_place = before(r, all) + ((int64_t)layer * 2 * g + which) * r->hidden;
  // torch asks for one of the two at a time.
  if (matrix) real("cudnnSetTensorNdDescriptor")(matrix, r->type, 3, rows, rows);
  if (matrix_at) *matrix_at = projection && (r->projection <= 0 || r->projection == r->hidden) ? 0 : (char *)weights + item(r->type) * at;
  if (bias) real("cudnnSetTensorNdDescriptor")(bias, r->type, 3, vector, vector);
  if (bias_at) *bias_at = r->bias && !projection ? (char *)weights + item(r->type) * bias_place : 0;
  return OK;
}
int cudnnGetRNNTempSpaceSizes(void *h, const Rnn *r, int training, const RnnData *x, size_t *workspace, size_t *reserve) {
  null_assumed("cuDNN's recurrent nets");
  size_t states = (size_t)x->longest * x->batch * (r->both_ways ? 2 : 1) * r->hidden * item(r->type);
  if (workspace) *workspace = states * r->layers * gates(r);
  if (reserve) *reserve = training ? states * (r->layers * (RESERVED[r->cell] + 1) - 1) : 0;
  return OK;
}

// ---- CUPTI and cuFFT -----------------------------------------------------------------------------------------------------------

int cuptiGetVersion(unsigned *version) {
  *version = 10000 * CUDA_MAJOR;
  return OK;
}
int cuptiGetResultString(int result, const char **text) {
  *text = "the null driver has nothing to trace";
  return OK;
}
int cufftCreate(int *plan) {
  static int next;
  *plan = ++next;
  return OK;
}

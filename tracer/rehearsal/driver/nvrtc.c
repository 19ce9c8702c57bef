// The run-time compiler. Nothing is compiled, since nothing runs: a name and a byte of code are all that torch looks at.
#include <stddef.h>

enum { OK = 0 };
int nvrtcVersion(int *major, int *minor) {
  *major = CUDA_MAJOR;
  return *minor = OK;
}
int nvrtcCreateProgram(void **program, const char *text, const char *name, int n, const char **headers, const char **names) {
  static char one;
  *program = &one;
  return OK;
}
int nvrtcDestroyProgram(void **program) { return OK; }
int nvrtcAddNameExpression(void *program, const char *expression) { return OK; }
int nvrtcCompileProgram(void *program, int n, const char **options) { return OK; }
int __nvrtcCPEx() { return OK; }  // by which cuDNN 9.19 compiles attention
int nvrtcGetPTXSize(void *program, size_t *size) {
  *size = 1;
  return OK;
}
int nvrtcGetCUBINSize(void *program, size_t *size) { return nvrtcGetPTXSize(program, size); }
int nvrtcGetProgramLogSize(void *program, size_t *size) { return nvrtcGetPTXSize(program, size); }
int nvrtcGetPTX(void *program, char *text) { return *text = 0; }
int nvrtcGetCUBIN(void *program, char *code) { return *code = 0; }
int nvrtcGetProgramLog(void *program, char *text) { return *text = 0; }
int nvrtcGetLoweredName(void *program, const char *expression, const char **name) {
  *name = "kernel";
  return OK;
}
const char *nvrtcGetErrorString(int error) { return "no error"; }

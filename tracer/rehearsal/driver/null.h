// What the parts of the null driver share: how a function says that it is not there, and how handles are made.
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define OK 0
#define NOT_SUPPORTED 801  // cudaErrorNotSupported; the libraries take anything but 0 for an error

// Remember that `function` was asked for and is not there; returns NOT_SUPPORTED.
int null_missing(const char *function);
// Remember that what `subject` says is by a rule and not known: "cuDNN workspaces".
void null_assumed(const char *subject);
// What the host wrote into the device's memory and no kernel may have changed; 0 if it is not known, less if to another rank.
int null_read(const void *at, void *data, size_t size);
// That memory is `data` from now on; 0: nobody knows what.
void null_write(void *at, const void *data, size_t size);
enum { KEPT = 1 << 18 };  // the largest piece that is remembered
// Take so many bytes of a device (-1: the current one), or give them back, whether it has them or not; its number.
int null_claim(int64_t size, int device);
// A number of the environment's, as LOWTIDE_NULL_<key>.
unsigned long long null_setting(const char *key, unsigned long long otherwise);
// A new number that stands for something of the device: a handle, a graph, a module.
void *null_handle(void);
// Describe the device as cuDNN's JSON has it.
void null_describe(char *text, size_t size);
// Hold the mutex until the block ends.
#define LOCKED(mutex) __attribute__((cleanup(null_release))) pthread_mutex_t *held = null_hold(&mutex)
static pthread_mutex_t *null_hold(pthread_mutex_t *mutex) {
  pthread_mutex_lock(mutex);
  return mutex;
}
static void null_release(pthread_mutex_t **held) { pthread_mutex_unlock(*held); }

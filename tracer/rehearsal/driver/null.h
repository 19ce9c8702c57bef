// What the parts of the null driver share: how a function says that it is not there, and how handles are made.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define OK 0
#define NOT_SUPPORTED 801  // cudaErrorNotSupported; the libraries take anything but 0 for an error

// Remember that `function` was asked for and is not there; returns NOT_SUPPORTED.
int null_missing(const char *function);
// Remember that what `subject` says is by a rule and not known: "cuDNN workspaces".
void null_assumed(const char *subject);
// Copy within the device.
int null_copy(void *to, const void *from, size_t size);
// A new number that stands for something of the device: a handle, a graph, a module.
void *null_handle(void);
// The function of that name in the library that this driver stands before; 0 if there is none.
void *null_real(const char *function);

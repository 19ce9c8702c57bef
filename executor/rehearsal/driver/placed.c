// torch's pluggable allocator, by a table: one arena, in which every request of an iteration has its place.
//
// What stays lies below, each in the first gap; above lies what the table names, where the table says. A request is the
// first of the table's next rows that asks for as much. One that is in no row, or whose place another block has, goes
// below, or where there is no room beside the arena. No two blocks ever share a byte, whatever the table says.
#include "null.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SMALL (1 << 20)
enum { ASKED = -2 };  // an offset: of a row that was asked for
enum { NEAR_SMALL = 4, NEAR = 64 };  // rows by which a request may come early or late: small ones are all alike
typedef unsigned long long u64;
enum { PEAK, PEAK_ASIDE, PLACED, STAYING, UNLISTED, TAKEN, UNASKED, FIGURES };  // those of the record `Placed`
typedef struct { u64 at, size; } Block;

int cudaMalloc(void **p, size_t size);
int cudaFree(void *p);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static u64 arena, arena_bytes, below, there, aside, figures[FIGURES];
static Block *live;  // in the arena, by address
static size_t count, room;
static u64 *sizes;
static long long *offsets;  // -1: it stays, below
static size_t rows, furthest;

const u64 *placed_figures(void) { return figures; }
int placed_arena(u64 size, u64 residents) {
  void *p;
  arena_bytes = size, below = residents;
  if (cudaMalloc(&p, size)) return 0;
  arena = (u64)p;
  return 1;
}
void placed_begin(size_t n, const u64 *size, const long long *offset) {  // an iteration begins, by this table
  pthread_mutex_lock(&lock);
  for (size_t k = 0; k < rows; k++) figures[UNASKED] += offsets[k] != ASKED;
  sizes = realloc(sizes, (n + 1) * sizeof *sizes);
  offsets = realloc(offsets, (n + 1) * sizeof *offsets);
  memcpy(sizes, size, n * sizeof *sizes);
  memcpy(offsets, offset, n * sizeof *offsets);
  rows = n, furthest = 0;
  pthread_mutex_unlock(&lock);
}

static void peak(int figure, u64 now) {
  if (now > figures[figure]) figures[figure] = now;
}
static size_t row_for(u64 size) {  // rows: there is none
  size_t near = size <= SMALL ? NEAR_SMALL : NEAR, end = furthest + near < rows ? furthest + near : rows;
  for (size_t k = furthest > near ? furthest - near : 0; k < end; k++)
    if (offsets[k] != ASKED && sizes[k] == size) return k;
  return rows;
}
static size_t after(u64 at) {  // how many blocks begin before it
  size_t low = 0, high = count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (live[middle].at < at) low = middle + 1; else high = middle;
  }
  return low;
}
static int is_free(u64 at, u64 size) {
  size_t k = after(at);
  return at + size <= arena_bytes && (k == count || at + size <= live[k].at) && (!k || live[k - 1].at + live[k - 1].size <= at);
}
static u64 gap_below(u64 size) {  // arena_bytes: there is none
  u64 at = 0;
  for (size_t k = 0; k < count && live[k].at < at + size; k++) at = live[k].at + live[k].size;
  return at + size <= below ? at : arena_bytes;
}
static void *take(u64 at, u64 size) {
  size_t k = after(at);
  if (count == room) live = realloc(live, (room = 2 * room + 64) * sizeof *live);
  memmove(live + k + 1, live + k, (count++ - k) * sizeof *live);
  live[k] = (Block){at, size};
  return (void *)(arena + at);
}
static u64 rounded(u64 size) { return size ? (size + 511) / 512 * 512 : 512; }

void *placed_malloc(size_t asked, int device, void *stream) {
  if (!asked) return 0;
  u64 size = rounded(asked), at;
  void *p = 0;
  pthread_mutex_lock(&lock);
  size_t k = row_for(size);
  long long offset = k < rows ? offsets[k] : -1;
  if (k < rows) {
    offsets[k] = ASKED;
    if (k >= furthest) furthest = k + 1;
  }
  int fits = offset >= 0 && is_free(offset, size);
  figures[fits ? PLACED : offset >= 0 ? TAKEN : k < rows ? STAYING : UNLISTED]++;
  at = fits ? offset : gap_below(size);
  if (at < arena_bytes) p = take(at, size);
  else if (!cudaMalloc(&p, size)) peak(PEAK_ASIDE, aside += size);
  if (p) peak(PEAK, there += size);
  pthread_mutex_unlock(&lock);
  return p;
}
void placed_free(void *p, size_t asked, int device, void *stream) {
  u64 at = (u64)p - arena, size = rounded(asked);
  if (!p) return;
  pthread_mutex_lock(&lock);
  there -= size;
  if ((u64)p < arena || at >= arena_bytes) {
    aside -= size;
    cudaFree(p);
  } else {
    size_t k = after(at);
    memmove(live + k, live + k + 1, (--count - k) * sizeof *live);
  }
  pthread_mutex_unlock(&lock);
}

"""Turn changes of ranges of steps into the highest peak; and the heap and the look-ups that flips need."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.kernels.compiled import compiled
from simulator.kernels.flip_index import BLOCK, NEVER


@compiled
def highest_in(peaks: Any, highest: Any, begin: int, end: int) -> Any:
    """The highest of peaks[begin:end]; -1 if there are none."""
    most = np.int64(-1)
    t = begin
    while t < end and t % BLOCK:
        most = max(most, peaks[t])
        t += 1
    while t + BLOCK <= end:
        most = max(most, highest[t // BLOCK])
        t += BLOCK
    while t < end:
        most = max(most, peaks[t])
        t += 1
    return most


@compiled
def push(heap: Any, size: int, key: int) -> None:
    """Add to a heap of that size, smallest first."""
    k = size
    while k and heap[(k - 1) // 2] > key:
        heap[k] = heap[(k - 1) // 2]
        k = (k - 1) // 2
    heap[k] = key


@compiled
def pop(heap: Any, size: int) -> Any:
    """Take the smallest from a heap of that size."""
    least = heap[0]
    key = heap[size - 1]
    k = 0
    while 2 * k + 1 < size - 1:
        child = 2 * k + 1
        if child + 1 < size - 1 and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[k] = heap[child]
        k = child
    heap[k] = key
    return least


@compiled
def next_touch(touch: Any, begin: int, end: int, c: int) -> Any:
    """The first op of touch[begin:end], which rises, that comes after c; NEVER if none does."""
    stop = end
    while begin < end:
        middle = (begin + end) // 2
        if touch[middle] > c:
            end = middle
        else:
            begin = middle + 1
    return touch[begin] if begin < stop else NEVER


@compiled
def op_at(seq: Any, k: int) -> Any:
    """The op of a step, run again or not."""
    return seq[k] if seq[k] >= 0 else ~seq[k]


@compiled
def change(changes: Any, n: int, begin: int, end: int, live: int, point: int) -> int:
    """Note that steps begin to end - 1 hold so much more, beyond themselves or not; returns the number of notes."""
    changes[0, n], changes[1, n], changes[2, n] = begin, live, point
    changes[0, n + 1], changes[1, n + 1], changes[2, n + 1] = end, -live, -point
    return n + 2


@compiled
def gather(found: Any, n: int, seen: Any, now: int, ids: Any, begin: int, end: int) -> int:
    """Add ids[begin:end] to found[:n] unless they are in it; returns the new number."""
    for j in range(begin, end):
        x = ids[j]
        if seen[x] != now:
            seen[x] = now
            found[n] = x
            n += 1
    return n


@compiled
def highest_under(
    forward: int, seq: Any, peaks: Any, highest: Any, live_at: Any, segment_at: Any, rise: Any, heap: Any, walk_c: Any,
    walk_at: Any, n_walks: int, n_steps: int, step_op: Any, gained: Any, released: Any, takes: Any, changes: Any,
    n_changes: int,
) -> Any:  # fmt: skip
    """The highest peak of the unchanged steps under the changes, and of the walked ones."""
    total = peaks.shape[0]
    for k in range(n_changes):
        push(heap, k, (changes[0, k] << 20) | k)
    left = n_changes
    most = np.int64(-1)
    t = w = 0
    live = point = np.int64(0)
    while True:
        t_change = heap[0] >> 20 if left else total
        t_walk = forward + segment_at[walk_c[w] - forward] if w < n_walks else total
        until = min(t_change, t_walk)
        if until > t:
            top = highest_in(peaks, highest, t, until)
            if top >= 0:
                most = max(most, top + live + point)
            t = until
        if left and t_change <= t_walk:
            k = pop(heap, left) & 0xFFFFF
            left -= 1
            live += changes[1, k]
            point += changes[2, k]
        elif w < n_walks:
            now = live_at[t_walk] + live
            stop = walk_at[w + 1] if w + 1 < n_walks else n_steps
            for k in range(walk_at[w], stop):
                most = max(most, now + rise[step_op[k]] - takes[k])
                now += gained[k] - released[k]
            t = forward + segment_at[walk_c[w] - forward + 1]
            w += 1
        else:
            return most


@compiled
def kept_under(
    forward: int, kept: Any, rerun_bytes: Any, walk_c: Any, n_walks: int, step_op: Any, n_steps: int, in_walk: Any,
    now: int,
) -> Any:  # fmt: skip
    """How much more libraries keep because of reruns than before the changes; see `flip_index.index`."""
    n_segments = kept.shape[0] - 2
    before, left = kept[n_segments], kept[n_segments + 1]
    most = np.int64(0)
    for k in range(n_steps):
        if step_op[k] < forward:
            most = max(most, rerun_bytes[step_op[k]])
    for w in range(n_walks):
        left -= kept[walk_c[w] - forward] == before
    if left:
        return max(most, before) - before
    for m in range(n_segments):
        if in_walk[forward + m] != now:
            most = max(most, kept[m])
    return most - before


@compiled
def end_at(x: int, k: int, nbytes: Any, overwrites: Any, step_op: Any, released: Any, takes: Any) -> None:
    """Storage x goes with walked step k, which may take it over."""
    released[k] += nbytes[x]
    if overwrites[step_op[k]] == x:
        takes[k] = nbytes[x]


@compiled
def move_point(changes: Any, n: int, before: int, now: int, nbytes: int) -> int:
    """Note that not step `before` takes over so many bytes, but step `now` (-1: none); returns the number of notes."""
    if before != now:
        if before >= 0:
            n = change(changes, n, before, before + 1, 0, nbytes)
        if now >= 0:
            n = change(changes, n, now, now + 1, 0, -nbytes)
    return n

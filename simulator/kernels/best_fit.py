"""Turn a stream of requests into what CUDA's caching allocator has reserved, under torch's default settings: compiled.

The rules, and what they count and ignore, are those of `simulator.allocator.caching` for one stream, without
expandable segments, size limits or a limit on memory. A test compares the two on random streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from simulator.kernels.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Longs = NDArray[np.int64]

MIB: Final = 1 << 20
LEAST: Final = 512  # every block is a multiple of it
SMALL: Final = (
    MIB  # blocks up to this size have a pool of their own; larger rests than this are split off large blocks
)
SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
LARGE_REQUEST: Final = (
    10 * MIB
)  # from here on a request gets a segment of its own size, in steps of SMALL_SEGMENT
# Rows of `block`.
ADDRESS: Final = 0
SIZE: Final = 1
BEFORE: Final = 2  # the block before it in its segment; -1
BEHIND: Final = 3
REQUESTED: Final = 4
FREE: Final = 5  # whether it is in a pool
# Entries of `sums`.
ALLOCATED: Final = 0
ASKED: Final = 1
RESERVED: Final = 2
PEAKS: Final = 3  # and the three peaks
END: Final = 6  # of the addresses given out
SEGMENTS: Final = 7


@compiled
def _place(block: Longs, pool: Longs, count: int, size: int, address: int) -> int:
    """The first position in a pool, sorted by size and address, that is not before this size and address."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        b = pool[middle]
        if block[SIZE, b] < size or (block[SIZE, b] == size and block[ADDRESS, b] < address):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _insert(block: Longs, pools: Longs, counts: Longs, p: int, b: int) -> None:
    at = _place(block, pools[p], counts[p], block[SIZE, b], block[ADDRESS, b])
    for k in range(counts[p], at, -1):
        pools[p, k] = pools[p, k - 1]
    pools[p, at] = b
    counts[p] += 1
    block[FREE, b] = 1


@compiled
def _remove(block: Longs, pools: Longs, counts: Longs, p: int, b: int) -> None:
    at = _place(block, pools[p], counts[p], block[SIZE, b], block[ADDRESS, b])
    counts[p] -= 1
    for k in range(at, counts[p]):
        pools[p, k] = pools[p, k + 1]
    block[FREE, b] = 0


@compiled
def _malloc(block: Longs, pools: Longs, counts: Longs, spare: Longs, sums: Longs, nbytes: int) -> int:
    size = LEAST if nbytes < LEAST else -(-nbytes // LEAST) * LEAST
    p = 0 if size <= SMALL else 1
    at = _place(block, pools[p], counts[p], size, -1)
    if at < counts[p]:
        b = int(pools[p, at])
        counts[p] -= 1
        for k in range(at, counts[p]):
            pools[p, k] = pools[p, k + 1]
        block[FREE, b] = 0
    else:
        if p == 0:
            segment = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        spare[0] -= 1
        b = int(spare[spare[0]])
        block[ADDRESS, b], block[SIZE, b] = sums[END], segment
        block[BEFORE, b] = block[BEHIND, b] = -1
        block[FREE, b] = 0
        sums[END] += segment
        sums[SEGMENTS] += 1
        sums[RESERVED] += segment
        sums[PEAKS + RESERVED] = max(sums[PEAKS + RESERVED], sums[RESERVED])
    rest = block[SIZE, b] - size
    if (p == 0 and rest >= LEAST) or rest > SMALL:
        spare[0] -= 1
        r = spare[spare[0]]
        block[ADDRESS, r], block[SIZE, r] = block[ADDRESS, b] + size, rest
        block[BEFORE, r], block[BEHIND, r] = b, block[BEHIND, b]
        if block[BEHIND, b] >= 0:
            block[BEFORE, block[BEHIND, b]] = r
        block[BEHIND, b] = r
        block[SIZE, b] = size
        _insert(block, pools, counts, p, r)
    block[REQUESTED, b] = nbytes
    sums[ALLOCATED] += block[SIZE, b]
    sums[ASKED] += nbytes
    sums[PEAKS + ALLOCATED] = max(sums[PEAKS + ALLOCATED], sums[ALLOCATED])
    sums[PEAKS + ASKED] = max(sums[PEAKS + ASKED], sums[ASKED])
    return b


@compiled
def _free(block: Longs, pools: Longs, counts: Longs, spare: Longs, sums: Longs, p: int, b: int) -> None:
    sums[ALLOCATED] -= block[SIZE, b]
    sums[ASKED] -= block[REQUESTED, b]
    x = block[BEFORE, b]
    if x >= 0 and block[FREE, x]:
        _remove(block, pools, counts, p, x)
        block[ADDRESS, b] = block[ADDRESS, x]
        block[SIZE, b] += block[SIZE, x]
        block[BEFORE, b] = block[BEFORE, x]
        if block[BEFORE, b] >= 0:
            block[BEHIND, block[BEFORE, b]] = b
        spare[spare[0]] = x
        spare[0] += 1
    x = block[BEHIND, b]
    if x >= 0 and block[FREE, x]:
        _remove(block, pools, counts, p, x)
        block[SIZE, b] += block[SIZE, x]
        block[BEHIND, b] = block[BEHIND, x]
        if block[BEHIND, b] >= 0:
            block[BEFORE, block[BEHIND, b]] = b
        spare[spare[0]] = x
        spare[0] += 1
    _insert(block, pools, counts, p, b)


@compiled
def best_fit(
    residents: Longs,
    blocks: Longs,
    sizes: Longs,
    once: Longs,  # [k, 2]
    count: int,  # of the blocks that one iteration asks for
    rows: Longs,  # out, [iteration, 8]: allocated, requested, reserved, their peaks
) -> tuple[int, int, bool]:
    """(iterations, segments, whether the last iteration asked for no new one) of `allocator.requests.Requests`."""
    iterations = rows.shape[0]
    # Each request makes at most two blocks, and what is never given back stays.
    room = 2 * (residents.shape[0] + once.shape[0] + iterations * count) + 2
    block = np.empty((6, room), np.int64)
    pools = np.empty((2, room), np.int64)
    counts = np.zeros(2, np.int64)
    spare = np.empty(room + 1, np.int64)  # where the next entry goes, and the numbers of no block
    spare[0] = room + 1
    for k in range(room):
        spare[k + 1] = room - 1 - k
    sums = np.zeros(8, np.int64)
    held, pool_of = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64)
    for k in range(residents.shape[0]):
        _malloc(block, pools, counts, spare, sums, residents[k])
    steady = False
    ran = 0
    while ran < iterations and not steady:
        before = sums[SEGMENTS]
        for k in range(3):
            sums[PEAKS + k] = sums[k]
        due = 0 if ran == 0 else once.shape[0]
        for k in range(blocks.shape[0]):
            while due < once.shape[0] and once[due, 0] == k:
                _malloc(block, pools, counts, spare, sums, once[due, 1])
                due += 1
            b = blocks[k]
            if b >= 0:
                held[b] = _malloc(block, pools, counts, spare, sums, sizes[k])
                pool_of[b] = 0 if sizes[k] <= SMALL else 1
            else:
                _free(block, pools, counts, spare, sums, pool_of[~b], held[~b])
        while due < once.shape[0]:
            _malloc(block, pools, counts, spare, sums, once[due, 1])
            due += 1
        steady = ran > 0 and sums[SEGMENTS] == before
        for k in range(6):
            rows[ran, k] = sums[k]
        ran += 1
    return ran, sums[SEGMENTS], steady

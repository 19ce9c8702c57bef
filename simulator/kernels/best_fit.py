"""What CUDA's caching allocator reserves for a stream of requests, under torch's default settings.

The rules, and what they count and ignore, are those of `simulator.allocator.caching` for one stream, without
expandable segments, size limits or a limit on memory. A test compares the two on random streams.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from simulator.kernels.compiled import compiled, inner
from simulator.kernels.records import table

MIB: Final = 1 << 20
LEAST: Final = 512  # every block is a multiple of it
SMALL: Final = MIB  # blocks up to this size have a pool of their own; larger rests are split off large blocks
SMALL_SEGMENT: Final = 2 * MIB
LARGE_SEGMENT: Final = 20 * MIB
LARGE_REQUEST: Final = (
    10 * MIB
)  # from here on a request has a segment of its own size, in steps of SMALL_SEGMENT
BLOCK: Final = table(
    [
        ("address", np.int64),
        ("nbytes", np.int64),
        ("before", np.int64),  # the block before it in its segment; -1
        ("behind", np.int64),
        ("requested", np.int64),
        ("free", np.int64),  # whether it is in a pool
    ]
)
SUMS: Final = table(
    [
        ("allocated", np.int64),
        ("requested", np.int64),
        ("reserved", np.int64),
        ("peak_allocated", np.int64),
        ("peak_requested", np.int64),
        ("peak_reserved", np.int64),
        ("end", np.int64),  # of the addresses given out
        ("segments", np.int64),
    ]
)


class Memory(NamedTuple):
    """What is allocated and what is free: work space."""

    blocks: Any  # [block] of BLOCK
    pools: Any  # [2, block]: free blocks by size and address, small ones and large ones
    counts: Any  # [2]: how many
    spare: Any  # [block + 1]: where the next entry goes, and the numbers of no block
    sums: Any  # [1] of SUMS
    held: Any  # [request]: its block
    pool_of: Any  # [request]


def memory(requests: int, in_turn: int) -> Memory:
    """Work space for so many requests in all, so many of them of one iteration; each makes at most two blocks."""
    room = 2 * requests + 2
    spare = np.concatenate(([room + 1], np.arange(room - 1, -1, -1)))
    return Memory(
        blocks=np.empty(room, BLOCK),
        pools=np.empty((2, room), np.int64),
        counts=np.zeros(2, np.int64),
        spare=spare,
        sums=np.zeros(1, SUMS),
        held=np.empty(in_turn + 1, np.int64),
        pool_of=np.empty(in_turn + 1, np.int64),
    )


@inner
def _place(block: Any, pool: Any, count: int, size: int, address: int) -> int:
    """The first position in a pool, sorted by size and address, that is not before this size and address."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        b = pool[middle]
        if block[b].nbytes < size or (block[b].nbytes == size and block[b].address < address):
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _insert(m: Any, p: int, b: int) -> None:
    block, pools, counts = m.blocks, m.pools, m.counts
    at = _place(block, pools[p], counts[p], block[b].nbytes, block[b].address)
    for k in range(counts[p], at, -1):
        pools[p, k] = pools[p, k - 1]
    pools[p, at] = b
    counts[p] += 1
    block[b].free = 1


@inner
def _remove(m: Any, p: int, b: int) -> None:
    block, pools, counts = m.blocks, m.pools, m.counts
    at = _place(block, pools[p], counts[p], block[b].nbytes, block[b].address)
    counts[p] -= 1
    for k in range(at, counts[p]):
        pools[p, k] = pools[p, k + 1]
    block[b].free = 0


@inner
def _malloc(m: Any, nbytes: int) -> int:
    block, pools, counts, spare, sums = m.blocks, m.pools, m.counts, m.spare, m.sums[0]
    size = LEAST if nbytes < LEAST else -(-nbytes // LEAST) * LEAST
    p = 0 if size <= SMALL else 1
    at = _place(block, pools[p], counts[p], size, -1)
    if at < counts[p]:
        b = int(pools[p, at])
        counts[p] -= 1
        for k in range(at, counts[p]):
            pools[p, k] = pools[p, k + 1]
        block[b].free = 0
    else:
        if p == 0:
            segment = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        spare[0] -= 1
        b = int(spare[spare[0]])
        block[b].address, block[b].nbytes = sums.end, segment
        block[b].before = block[b].behind = -1
        block[b].free = 0
        sums.end += segment
        sums.segments += 1
        sums.reserved += segment
        sums.peak_reserved = max(sums.peak_reserved, sums.reserved)
    rest = block[b].nbytes - size
    if (p == 0 and rest >= LEAST) or rest > SMALL:
        spare[0] -= 1
        r = spare[spare[0]]
        block[r].address, block[r].nbytes = block[b].address + size, rest
        block[r].before, block[r].behind = b, block[b].behind
        if block[b].behind >= 0:
            block[block[b].behind].before = r
        block[b].behind = r
        block[b].nbytes = size
        _insert(m, p, r)
    block[b].requested = nbytes
    sums.allocated += block[b].nbytes
    sums.requested += nbytes
    sums.peak_allocated = max(sums.peak_allocated, sums.allocated)
    sums.peak_requested = max(sums.peak_requested, sums.requested)
    return b


@inner
def _free(m: Any, p: int, b: int) -> None:
    block, spare, sums = m.blocks, m.spare, m.sums[0]
    sums.allocated -= block[b].nbytes
    sums.requested -= block[b].requested
    x = block[b].before
    if x >= 0 and block[x].free:
        _remove(m, p, x)
        block[b].address = block[x].address
        block[b].nbytes += block[x].nbytes
        block[b].before = block[x].before
        if block[b].before >= 0:
            block[block[b].before].behind = b
        spare[spare[0]] = x
        spare[0] += 1
    x = block[b].behind
    if x >= 0 and block[x].free:
        _remove(m, p, x)
        block[b].nbytes += block[x].nbytes
        block[b].behind = block[x].behind
        if block[b].behind >= 0:
            block[block[b].behind].before = b
        spare[spare[0]] = x
        spare[0] += 1
    _insert(m, p, b)


@compiled
def best_fit(
    residents: Any,
    blocks: Any,
    sizes: Any,
    once: Any,  # [k, 2]
    rows: Any,  # out, [iteration] of SUMS
    m: Any,
) -> tuple[int, bool]:
    """(iterations, whether the last one asked for no new segment) of `allocator.requests.Requests`."""
    sums = m.sums[0]
    for k in range(residents.shape[0]):
        _malloc(m, residents[k])
    steady = False
    ran = 0
    while ran < rows.shape[0] and not steady:
        before = sums.segments
        sums.peak_allocated, sums.peak_requested, sums.peak_reserved = (
            sums.allocated,
            sums.requested,
            sums.reserved,
        )
        due = 0 if ran == 0 else once.shape[0]
        for k in range(blocks.shape[0]):
            while due < once.shape[0] and once[due, 0] == k:
                _malloc(m, once[due, 1])
                due += 1
            b = blocks[k]
            if b >= 0:
                m.held[b] = _malloc(m, sizes[k])
                m.pool_of[b] = 0 if sizes[k] <= SMALL else 1
            else:
                _free(m, int(m.pool_of[~b]), int(m.held[~b]))
        while due < once.shape[0]:
            _malloc(m, once[due, 1])
            due += 1
        steady = ran > 0 and sums.segments == before
        rows[ran] = sums
        ran += 1
    return ran, steady

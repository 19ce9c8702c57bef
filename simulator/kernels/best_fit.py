"""What CUDA's caching allocator reserves for a stream of requests, where there is memory enough.

The rules, and what they count and ignore, are those of `simulator.allocator.caching` for one stream, under any settings
but without a limit on memory. A test compares the two on random streams.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from simulator.kernels.compiled import inner
from simulator.kernels.records import long, table

MIB: Final = 1 << 20
MOST: Final = 1 << 62
LEAST: Final = 512  # every block is a multiple of it
SMALL: Final = MIB  # blocks up to this size have a pool of their own; larger rests are split off large blocks
SMALL_SEGMENT: Final = 2 * MIB
# From here on a request has a segment of its own size, in steps of SMALL_SEGMENT.
LARGE_REQUEST: Final = 10 * MIB
BLOCK: Final = table(
    [
        ("address", np.int64),
        ("nbytes", np.int64),
        ("before", np.int64),  # the block before it in its segment; -1
        ("behind", np.int64),
        ("requested", np.int64),
        ("free", np.int64),  # whether it is in a pool
        ("rank", np.int64),  # which of equally large free blocks is taken: the one of the lowest
    ]
)
# What settings say; bytes.
RULES: Final = table(
    [
        ("max_split", np.int64),
        ("max_non_split_rounding", np.int64),
        ("large_segment", np.int64),
        ("expandable", np.int64),
        ("older_first", np.int64),  # whether a block's rank is its age, not its address
        ("divisions", np.int64),  # whether requests are rounded to parts of powers of two
        ("ahead", np.int64),  # asked for and given back before the first iteration
    ]
)
RANGE: Final = 1 << 42  # the addresses of each pool's expandable range
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
        ("made", np.int64),  # blocks, ever
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
    ranges: Any  # [2, 3]: of each pool's expandable range: the last mapped block, its end, the rank of what follows; -1
    rules: Any  # [1] of RULES
    divisions: Any  # [interval]: of powers of two, from 1 MiB on


def memory(requests: int, rules: Any, divisions: Any) -> Memory:
    """Work space for so many requests, of which each makes at most two blocks."""
    room = 2 * requests + 2
    return Memory(
        blocks=np.empty(room, BLOCK),
        pools=np.empty((2, room), np.int64),
        counts=np.zeros(2, np.int64),
        spare=np.zeros(room + 1, np.int64),
        sums=np.zeros(1, SUMS),
        held=np.empty(requests + 1, np.int64),
        pool_of=np.empty(requests + 1, np.int64),
        ranges=np.zeros((2, 3), np.int64),
        rules=rules,
        divisions=divisions,
    )


@inner
def _clear(m: Any) -> None:
    """Nothing is allocated, and nothing reserved."""
    m.counts[0] = m.counts[1] = 0
    room = m.blocks.shape[0]
    m.spare[0] = room + 1
    for k in range(room):
        m.spare[k + 1] = room - 1 - k
    sums = m.sums[0]
    sums.allocated = sums.requested = sums.reserved = sums.end = sums.segments = sums.made = 0
    sums.peak_allocated = sums.peak_requested = sums.peak_reserved = 0
    for p in range(2):
        m.ranges[p, 0], m.ranges[p, 1], m.ranges[p, 2] = -1, p * RANGE, -1


@inner
def _place(block: Any, pool: Any, count: int, size: int, rank: int) -> Any:
    """The first position in a pool, sorted by size and rank, that is not before this size and rank."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        b = pool[middle]
        if block[b].nbytes < size or (block[b].nbytes == size and block[b].rank < rank):
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _insert(m: Any, p: int, b: int) -> None:
    block, pools, counts = m.blocks, m.pools, m.counts
    at = _place(block, pools[p], counts[p], block[b].nbytes, block[b].rank)
    for k in range(counts[p], at, -1):
        pools[p, k] = pools[p, k - 1]
    pools[p, at] = b
    counts[p] += 1
    block[b].free = 1


@inner
def _remove(m: Any, p: int, b: int) -> None:
    block, pools, counts = m.blocks, m.pools, m.counts
    at = _place(block, pools[p], counts[p], block[b].nbytes, block[b].rank)
    counts[p] -= 1
    for k in range(at, counts[p]):
        pools[p, k] = pools[p, k + 1]
    block[b].free = 0


@inner
def _rounded(m: Any, nbytes: int) -> Any:
    """The bytes of the block for a request."""
    if nbytes < LEAST:
        return LEAST
    if m.rules[0].divisions:
        bits = 0
        while nbytes >> bits:
            bits += 1
        parts = m.divisions[min(max(bits - 21, 0), m.divisions.shape[0] - 1)]
        if parts > 1 and nbytes > LEAST * parts:
            if not nbytes & (nbytes - 1):
                return nbytes
            part = (1 << (bits - 1)) // parts
            return -(-nbytes // part) * part
    return -(-nbytes // LEAST) * LEAST


@inner
def _new_rank(m: Any) -> Any:
    m.sums[0].made += 1
    return long(m.sums[0].made)


@inner
def _unused(m: Any, address: int, nbytes: int, before: int, behind: int) -> Any:
    """A block in no pool, the youngest."""
    m.spare[0] -= 1
    b = m.spare[m.spare[0]]
    x = m.blocks[b]
    x.address, x.nbytes, x.before, x.behind, x.free = address, nbytes, before, behind, 0
    x.rank = _new_rank(m) if m.rules[0].older_first else address
    return long(b)


@inner
def _reserve(m: Any, nbytes: int) -> None:
    sums = m.sums[0]
    sums.segments += 1
    sums.reserved += nbytes
    sums.peak_reserved = max(sums.peak_reserved, sums.reserved)


@inner
def _segment(m: Any, p: int, size: int) -> Any:
    """A block that is a segment of its own, for a request of that size."""
    sums = m.sums[0]
    if p == 0:
        segment = long(SMALL_SEGMENT)
    elif size < LARGE_REQUEST:
        segment = long(m.rules[0].large_segment)
    else:
        segment = long(-(-size // SMALL_SEGMENT) * SMALL_SEGMENT)
    b = _unused(m, long(sums.end), segment, long(-1), long(-1))
    sums.end += segment
    _reserve(m, segment)
    return b


@inner
def _grown(m: Any, p: int, size: int) -> Any:
    """The end of the pool's expandable range as a block of that size at least, outside the pool."""
    block, tail = m.blocks, long(m.ranges[p, 0])
    free = tail >= 0 and block[tail].free
    have = long(block[tail].nbytes) if free else long(0)
    if have >= size:
        _remove(m, p, tail)
        return tail
    page = long(SMALL_SEGMENT) if p == 0 else long(m.rules[0].large_segment)
    length = -(-(size - have) // page) * page
    b = _unused(m, long(m.ranges[p, 1]), length, tail, long(-1))
    if m.rules[0].older_first:  # of what was not mapped, the front is the older
        rest = long(block[b].rank)
        if m.ranges[p, 2] < 0:
            m.ranges[p, 2] = rest
            rest = _new_rank(m)
        block[b].rank, m.ranges[p, 2] = m.ranges[p, 2], rest
    if tail >= 0:
        block[tail].behind = b
    m.ranges[p, 0] = b
    m.ranges[p, 1] += length
    _reserve(m, length)
    if free:
        _remove(m, p, tail)
        _swallow_before(m, b)
    return b


@inner
def _swallow_before(m: Any, b: int) -> None:
    """Take in the block before, which is in no pool."""
    block, x = m.blocks, long(m.blocks[b].before)
    block[b].address = block[x].address
    if not m.rules[0].older_first:
        block[b].rank = block[b].address
    block[b].nbytes += block[x].nbytes
    block[b].before = block[x].before
    if block[b].before >= 0:
        block[block[b].before].behind = b
    m.spare[m.spare[0]] = x
    m.spare[0] += 1


@inner
def _found(m: Any, p: int, size: int) -> Any:
    """The best fitting free block, taken from its pool; -1: there is none."""
    block, pools, counts, rules = m.blocks, m.pools, m.counts, m.rules[0]
    at = _place(block, pools[p], counts[p], size, long(-1))
    if at == counts[p]:
        return long(-1)
    if rules.expandable and pools[p, at] == m.ranges[p, 0] and at + 1 < counts[p]:
        at += 1  # the one that can grow comes last
    b = long(pools[p, at])
    if size < rules.max_split:
        if block[b].nbytes >= rules.max_split:
            return long(-1)
    elif block[b].nbytes >= size + rules.max_non_split_rounding:
        return long(-1)
    counts[p] -= 1
    for k in range(at, counts[p]):
        pools[p, k] = pools[p, k + 1]
    block[b].free = 0
    return b


@inner
def malloc(m: Any, nbytes: int) -> Any:
    """The block for a request."""
    block, sums, rules = m.blocks, m.sums[0], m.rules[0]
    size = _rounded(m, nbytes)
    p = 0 if size <= SMALL else 1
    b = _found(m, p, size)
    if b < 0:
        b = _grown(m, p, size) if rules.expandable else _segment(m, p, size)
    rest = block[b].nbytes - size
    if rest >= LEAST if p == 0 or rules.expandable else rest > SMALL and size < rules.max_split:
        r = _unused(m, long(block[b].address + size), long(rest), b, long(block[b].behind))
        if rules.older_first:
            block[b].rank, block[r].rank = block[r].rank, block[b].rank
        if block[b].behind >= 0:
            block[block[b].behind].before = r
        elif rules.expandable:
            m.ranges[p, 0] = r
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
def free(m: Any, p: int, b: int) -> None:
    """Give a block of that pool back."""
    block, spare, sums = m.blocks, m.spare, m.sums[0]
    sums.allocated -= block[b].nbytes
    sums.requested -= block[b].requested
    x = block[b].before
    if x >= 0 and block[x].free:
        _remove(m, p, x)
        _swallow_before(m, b)
    x = block[b].behind
    if x >= 0 and block[x].free:
        _remove(m, p, x)
        block[b].nbytes += block[x].nbytes
        block[b].behind = block[x].behind
        if block[b].behind >= 0:
            block[block[b].behind].before = b
        if m.ranges[p, 0] == x:
            m.ranges[p, 0] = b
        spare[spare[0]] = x
        spare[0] += 1
    _insert(m, p, b)


@inner
def play(
    residents: Any, blocks: Any, sizes: Any, n: int, once: Any, rows: Any, most_bytes: int, m: Any
) -> Any:
    """(iterations, whether the last one asked for no new segment) of the first n of `allocator.requests.Requests`.

    Args:
        once: [k, 2].
        rows: out, [iteration] of SUMS.
        most_bytes: it ends when more is reserved.
    """
    sums = m.sums[0]
    _clear(m)
    moved = long(0)
    for k in range(residents.shape[0]):
        if residents[k] < 0:
            free(m, int(m.pool_of[~residents[k]]), int(m.held[~residents[k]]))
        else:
            m.held[moved] = malloc(m, residents[k])
            m.pool_of[moved] = 0 if residents[k] <= SMALL else 1
            moved += 1
    steady = False
    ran = long(0)
    while ran < rows.shape[0] and not steady:
        before = sums.segments
        sums.peak_allocated, sums.peak_requested, sums.peak_reserved = (
            sums.allocated,
            sums.requested,
            sums.reserved,
        )
        due = long(0) if ran == 0 else long(once.shape[0])
        if ran == 0 and m.rules[0].ahead:
            free(m, 0 if m.rules[0].ahead <= SMALL else 1, malloc(m, m.rules[0].ahead))
        for k in range(n):
            while due < once.shape[0] and once[due, 0] == k:
                malloc(m, once[due, 1])
                due += 1
            b = blocks[k]
            if b >= 0:
                m.held[b] = malloc(m, sizes[k])
                m.pool_of[b] = 0 if sizes[k] <= SMALL else 1
                if sums.reserved > most_bytes:
                    rows[ran] = sums
                    return ran + 1, False
            else:
                free(m, int(m.pool_of[~b]), int(m.held[~b]))
        while due < once.shape[0]:
            malloc(m, once[due, 1])
            due += 1
        steady = ran > 0 and sums.segments == before
        rows[ran] = sums
        ran += 1
    return ran, steady

"""The scratch that CUB's algorithms ask for: sorting pairs by their keys, finding unique ones, and running sums.

The rules are those of CCCL's dispatch_radix_sort.cuh (InvokeOnesweep), dispatch_unique_by_key.cuh and
dispatch_scan.cuh in `cub/device/dispatch`, every part rounded up as `cub/util_temporary_storage.cuh` does; how many
items a block takes is read off what torch's wheels ask for on the null driver.
"""

from __future__ import annotations

from typing import Final

ALIGNMENT: Final = 256
DIGIT_BITS: Final = 8
# Bytes of a key, and of a value -> pairs that one block sorts alone; and, by compute capability from which on, pairs of
# a tile, in sorting and in finding those that differ from the one before.
ALONE: Final = {4: 4864, 8: 2304}
TILE: Final = {4: ((90, 6528), (80, 6528), (0, 11776)), 8: ((90, 4608), (80, 3840), (0, 2816))}
UNIQUE: Final = {
    4: ((90, 7168), (81, 704), (80, 2816), (0, 704)),
    8: ((90, 4864), (81, 320), (80, 1344), (0, 320)),
}
SCAN_THREADS: Final = 128
PADDING: Final = 32  # states of tiles that are not there


def radix_sort(n: int, key_bytes: int, bits: int, sm: int) -> int:
    """Bytes of scratch to sort n pairs, whose values are as large as their keys, by the lowest bits of the keys.

    Args:
        key_bytes: of a key, 4 or 8.
        bits: of the keys that differ.
        sm: compute capability, as 90.
    """
    if n <= ALONE[key_bytes]:
        return 1
    passes = -(-bits // DIGIT_BITS)
    bins, counters = passes * 8 << DIGIT_BITS, 4 * passes
    look_back = _tiles(n, TILE[key_bytes], sm) * 4 << DIGIT_BITS
    second = (n * key_bytes, n * key_bytes) if passes > 1 else ()
    return _together(bins, look_back, *second, counters)


def unique_by_key(n: int, key_bytes: int, sm: int) -> int:
    """Bytes of scratch to find the first of equal keys among n sorted ones; the arguments are those of `radix_sort`."""
    return _together(16 * (_tiles(n, UNIQUE[key_bytes], sm) + PADDING), 1)


def scan(n: int, item_bytes: int) -> int:
    """Bytes of scratch for the running sums of n numbers."""
    tiles = -(-n // (SCAN_THREADS * min(30, 60 // item_bytes))) + PADDING
    # The state of a tile is one word with its sum, except that sums of 16 bits stand by themselves.
    states = (4 * tiles, 2 * tiles, 2 * tiles) if item_bytes == 2 else (2 * max(4, item_bytes) * tiles,)
    return _together(*states, 1)


def _tiles(n: int, sizes: tuple[tuple[int, int], ...], sm: int) -> int:
    return -(-n // next(items for least, items in sizes if sm >= least))


def _together(*parts: int) -> int:
    return sum(-(-p // ALIGNMENT) * ALIGNMENT for p in parts) + ALIGNMENT - 1

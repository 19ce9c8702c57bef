"""Where each block of one iteration would lie in one pool, if all requests are known beforehand.

A schedule fixes every request, so addresses can be planned offline, where the caching allocator must choose without
knowing what comes. What stays for ever lies at the bottom; the others are placed one after the other, each in the
smallest gap that is free for as long as it lives, or else on top.

Source: TFLite's GreedyBySizePlanner (Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net
Inference", greedy by size) and tinygrad's memory planner, which do so; here other orders are tried
where that leaves gaps.

Counts: blocks as torch rounds them, library workspaces and the optimizer's state from the first iteration on. Ignores:
that a driver maps memory in pages; side streams.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from simulator.allocator.requests import Requests

ALIGN_BYTES: Final = 512
CLOSE: Final = 0.005  # a pool within so much of what no placement can go below is good enough
PATIENCE: Final = 16  # orders made one from the other; if they do not gain as much together, no more are


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Blocks of one iteration: bytes, and the requests from which to before which each is there."""

    sizes: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    resident_bytes: int = 0  # there throughout

    @property
    def peak_bytes(self) -> int:
        """The most that is there at once; no placement takes less."""
        return self.peak[1]

    @property
    def peak(self) -> tuple[int, int]:
        """The request at which most is there, and how much."""
        changes: dict[int, int] = {}
        for n, begin, end in zip(self.sizes, self.begins, self.ends, strict=True):
            changes[begin] = changes.get(begin, 0) + n
            changes[end] = changes.get(end, 0) - n
        live = highest = where = 0
        for at in sorted(changes):
            live += changes[at]
            if live > highest:
                highest, where = live, at
        return where, highest + self.resident_bytes


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The blocks and their offsets, in bytes from the pool's start."""

    blocks: Lifetimes
    offsets: tuple[int, ...]

    @cached_property
    def pool_bytes(self) -> int:
        """What the pool takes."""
        tops = (o + n for o, n in zip(self.offsets, self.blocks.sizes, strict=True))
        return max(tops, default=self.blocks.resident_bytes)

    @cached_property
    def fragmentation(self) -> float:
        """The pool over the most that is there at once, less one."""
        peak = self.blocks.peak_bytes
        return self.pool_bytes / peak - 1 if peak else 0.0

    def to_json(self) -> dict[str, float]:
        """As `simulate` and `execute` say it."""
        share = round(100 * self.fragmentation, 4)
        return {
            "pool_bytes": self.pool_bytes,
            "peak_bytes": self.blocks.peak_bytes,
            "fragmentation_percent": share,
        }


def lifetimes(requests: Requests) -> Lifetimes:
    """The blocks of a later iteration, each rounded as torch does; what is never given back is there to the end."""
    size: dict[int, int] = {}
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for k, (block, n) in enumerate(zip(requests.blocks, requests.sizes, strict=True)):
        if block >= 0:
            size[block], begin[block] = rounded(n), k
        else:
            end[~block] = k
    moved = [n for n in requests.residents if n >= 0]
    back = {~n for n in requests.residents if n < 0}
    stays = [*(n for k, n in enumerate(moved) if k not in back), *(n for _, n in requests.once)]
    if requests.first is not None:  # gradients that stay
        left = lifetimes(replace(requests.first, residents=(), once=()))
        stays += [n for n, e in zip(left.sizes, left.ends, strict=True) if e == len(requests.first.blocks)]
    return Lifetimes(
        sizes=tuple(size.values()),
        begins=tuple(begin.values()),
        ends=tuple(end.get(b, len(requests.blocks)) for b in size),
        resident_bytes=sum(map(rounded, stays)),
    )


def place(blocks: Lifetimes) -> Placement:
    """The least pool of several orders, and of some made from the best of them.

    The largest first; those first that are there at the peak, the largest or the longest of them; as they come; those
    first that take most bytes for longest. Then, from the best, those first that came to lie where no placement needs
    to reach (Joslin and Clements 1999, "Squeaky Wheel Optimization").
    """
    sizes = np.array(blocks.sizes, np.int64)
    begins, ends = np.array(blocks.begins, np.int64), np.array(blocks.ends, np.int64)
    at, peak_bytes = blocks.peak
    early = (begins > at) | (ends <= at)
    orders = [
        np.lexsort((begins, begins - ends, -sizes)),
        np.lexsort((begins, -sizes, early)),
        np.lexsort((-sizes, begins - ends, early)),
        np.lexsort((-sizes, begins)),
        np.lexsort((begins, -sizes * (ends - begins))),
    ]

    def pooled(order: NDArray[np.int64]) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
        offsets = _placed(sizes, begins, ends, order, blocks.resident_bytes)
        return int((offsets + sizes).max(initial=blocks.resident_bytes)), order, offsets

    close = CLOSE * peak_bytes
    best = pooled(orders[0])
    for order in orders[1:]:
        if best[0] > peak_bytes + close:
            best = min(best, pooled(order), key=lambda made: made[0])
    last, gained_from, turns = best, best[0], 0
    while best[0] > peak_bytes + close and turns < PATIENCE:
        _, order, offsets = last
        high = (offsets + sizes > peak_bytes)[order]
        last = pooled(np.concatenate((order[high], order[~high])))
        best, turns = min(best, last, key=lambda made: made[0]), turns + 1
        if best[0] <= gained_from - close:
            gained_from, turns = best[0], 0
    return Placement(blocks=blocks, offsets=tuple(best[2].tolist()))


def _placed(
    sizes: NDArray[np.int64],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    order: NDArray[np.int64],
    base: int,
) -> NDArray[np.int64]:
    """Offsets, block by block in this order, each in the smallest gap that fits, the lowest of equal ones."""
    n = len(sizes)
    offsets = np.zeros(n, np.int64)
    # What is placed so far, by offset: where, up to where, from when, until when.
    low, high = np.zeros(n, np.int64), np.zeros(n, np.int64)
    first, last = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for count, b in enumerate(order):
        there = (first[:count] < ends[b]) & (last[:count] > begins[b])
        lows, highs = low[:count][there], high[:count][there]
        tops = np.concatenate(([base], np.maximum.accumulate(highs)))  # below each, and below nothing
        gaps = lows - tops[:-1]
        fits = np.flatnonzero(gaps >= sizes[b])
        offset = tops[fits[np.argmin(gaps[fits])]] if len(fits) else tops[-1]
        offset = max(offset, base)
        at = int(np.searchsorted(low[:count], offset))
        for column, value in ((low, offset), (high, offset + sizes[b]), (first, begins[b]), (last, ends[b])):
            column[at + 1 : count + 1] = column[at:count].copy()
            column[at] = value
        offsets[b] = offset
    return offsets


def rounded(nbytes: int) -> int:
    """Bytes of the block that such a request gets."""
    return max(ALIGN_BYTES, -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES)

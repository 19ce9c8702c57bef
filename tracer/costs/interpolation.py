"""What an op should cost at one size, by what it was measured to cost at others, where sizes scale together.

Growing the batch moves every size of a call along a straight line: shapes, strides and tensors' bytes are affine in the
batch size. So are the allocations inside most ops. A call is estimated from two measured ones if it lies on the line
through them, and from one if every size that differs has the same ratio to the measured one: its time then grows in
proportion but for what calling any op takes.

Counts: allocations and times as affine functions of the position on that line. Ignores: kernels that a library chooses
by size; so two measured calls that allocate in another pattern are never joined.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Final

from tracer.costs.signature import ITEM_BYTES, numbers_of, structure_of
from traces.records.device_profile import Entry

_TENSOR: Final = re.compile(r"(\w+)\[([\d,]*)\|[\d,]*\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a call should cost."""

    events: tuple[int, ...]
    time_ns: int


@dataclass(frozen=True, slots=True)
class _Point:
    sizes: tuple[int, ...]
    tensors: tuple[int, ...]  # bytes of each tensor, which end `sizes` too
    entry: Entry


class Index:
    """A profile's entries by structure: calls that differ in sizes alone lie together."""

    def __init__(self, entries: Iterable[tuple[str, Entry]]) -> None:
        self._points: dict[str, list[_Point]] = {}
        for key, entry in entries:
            point = _Point(_sizes(key), _tensor_bytes(key), entry)
            self._points.setdefault(_family(key), []).append(point)
        self.estimate = cache(self._estimate)  # most calls of a model stand in it many times

    def _estimate(
        self, key: str, rule: tuple[int, ...] | None = None, *, call_ns: int = 0
    ) -> Estimate | None:
        """The cost of a call that was not measured; None if the measured ones do not say.

        Two points between which the call lies are taken before two beside it, and near ones before far ones.

        Args:
            key: the call.
            rule: its allocations by rule, if one knows it; see `_scaled`.
            call_ns: what an op takes on the device however small it is.
        """
        points = self._points.get(_family(key), [])
        wanted, tensors = _sizes(key), _tensor_bytes(key)
        best: tuple[tuple[bool, int, tuple[int, ...], tuple[int, ...]], Estimate] | None = None
        for direction, group in _lines(points, wanted).items():
            width = max(map(abs, direction))
            for (s, a), (t, b) in itertools.combinations(group, 2):
                rank = ((s > 0) == (t > 0), width * max(abs(s), abs(t)), a.sizes, b.sizes)
                if best is None or rank < best[0]:
                    made = _between(a.entry, b.entry, Fraction(s, s - t))
                    if made is not None:
                        best = (rank, made)
        if best is not None:
            return best[1]
        ratios = [(r, p) for p in points if (r := _ratio(p.sizes, wanted)) is not None]
        if not ratios:
            return None
        ratio, point = min(ratios, key=lambda x: max(x[0], 1 / x[0]))
        return _scaled(point, tensors, ratio, call_ns, rule)


def _family(key: str) -> str:
    """Calls that may be joined: of one structure, and of one kernel where torch is known to choose it by the batch.

    On the CPU a convolution of one image and one of 16 images or more may take another kernel than those between
    (`use_mkldnn` in aten/src/ATen/native/Convolution.cpp).
    """
    if key.startswith("aten.convolution") and (found := _TENSOR.search(key)):
        batch = int(found.group(2).partition(",")[0] or 0)
        return f"{min(batch, 2) if batch < 16 else 16} {structure_of(key)}"
    return structure_of(key)


@cache
def _tensor_bytes(key: str) -> tuple[int, ...]:
    out = []
    for dtype, shape in _TENSOR.findall(key):
        out.append(math.prod(int(n) for n in shape.split(",") if n) * ITEM_BYTES.get(dtype, 1))
    return tuple(out)


@cache
def _sizes(key: str) -> tuple[int, ...]:
    return (*numbers_of(key), *_tensor_bytes(key))


def _lines(
    points: Iterable[_Point], wanted: Sequence[int]
) -> dict[tuple[int, ...], list[tuple[int, _Point]]]:
    """The straight lines through the wanted sizes on which points lie: direction -> points, each with its place.

    A point's place is how many directions it is away from the wanted sizes, negative on the other side. All points of
    a line have one direction (in lowest terms, its first step upward), so they are found in one pass.
    """
    lines: dict[tuple[int, ...], list[tuple[int, _Point]]] = {}
    for point in points:
        steps = [a - b for a, b in zip(point.sizes, wanted, strict=True)]
        place = math.gcd(*steps)
        if not place:
            continue  # the call itself, whose measurement did not fit the step
        if next(n for n in steps if n) < 0:
            place = -place
        lines.setdefault(tuple(n // place for n in steps), []).append((place, point))
    return lines


def _between(a: Entry, b: Entry, share: Fraction) -> Estimate | None:
    if len(a.events) != len(b.events) or any(
        (x > 0) != (y > 0) for x, y in zip(a.events, b.events, strict=True)
    ):
        return None
    events = tuple(round(x + share * (y - x)) for x, y in zip(a.events, b.events, strict=True))
    if any((e > 0) != (x > 0) for e, x in zip(events, a.events, strict=True)):
        return None
    return Estimate(events=events, time_ns=max(1, round(a.time_ns + share * (b.time_ns - a.time_ns))))


def _ratio(measured: Sequence[int], wanted: Sequence[int]) -> Fraction | None:
    """The one ratio of every size that differs; None if there is none."""
    ratio: Fraction | None = None
    for m, w in zip(measured, wanted, strict=True):
        if m == w:
            continue
        if m <= 0 or w <= 0:
            return None
        if ratio is None:
            ratio = Fraction(w, m)
        elif w * ratio.denominator != ratio.numerator * m:
            return None
    return ratio


def _scaled(
    point: _Point, tensors: Sequence[int], ratio: Fraction, call_ns: int, rule: Sequence[int] | None
) -> Estimate:
    """One measured call scaled: what has the size of a tensor that stays as it is (a weight) stays, the rest grows; of
    its time, what the call itself takes stays.

    A weight in a library's own layout has the size of no tensor. So where a rule lists the same allocations, and says
    of each either what was measured or that scaled, the rule is right about this call.
    """
    stays = {m for m, w in zip(point.tensors, tensors, strict=True) if m == w}
    grows = {m for m, w in zip(point.tensors, tensors, strict=True) if m != w}
    events = tuple(
        e if abs(e) in stays and abs(e) not in grows else round(e * ratio) for e in point.entry.events
    )
    both = [{e, round(e * ratio)} for e in point.entry.events]
    if rule is not None and len(rule) == len(both) and all(r in b for r, b in zip(rule, both, strict=True)):
        events = tuple(rule)
    stays_ns = min(call_ns, point.entry.time_ns)
    return Estimate(events=events, time_ns=max(1, round(stays_ns + (point.entry.time_ns - stays_ns) * ratio)))

"""From output: the backward of an activation takes its output in place of its input, with the same result in every bit.

torch saves the input x of a few pointwise functions y = f(x) whose backward only asks on which side of a border x lies,
which y says as well. A step that saves y for the next layer in any case then does without x: nothing runs again, and
nothing is copied. What else needs x recomputes it. For planners and bounds that know of no such op, the trace is made
another in which ops take what is offered (`taken`), or neither value (`relaxed`); a plan for `taken` is judged on the
step itself, since it may take some and not others.

The table has what was found bit-equal for all inputs, NaN and -0.0 and the borders among them (the test runs through
every number of the 16-bit types): f maps each side to itself and the border to the border. Not in it: hardsigmoid,
whose y rounds to 1 already below x = 3, and elu, selu, softplus, gelu, silu, whose backward computes with x.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from simulator.core.facts import Facts
from traces.records.plan import SAVE, Action
from traces.records.trace import Trace, uses_of

KIND: Final = "from_output"
# An in-place activation's input is copied for backward.
COPIES: Final = ("aten.clone.default", "aten.detach.default")
Borders = tuple[float, ...]
F = TypeVar("F", bound=Facts)
# Backward -> forward, and, of their arguments after x, the borders that both compare with; None: y does not tell.
TABLE: Final[dict[str, tuple[str, Callable[[list[Any], list[Any]], Borders | None]]]] = {
    # x > 0 exactly where y > 0: below, the slope is not negative.
    "aten.leaky_relu_backward.default": (
        "aten.leaky_relu.default",
        lambda forward, backward: () if forward[0] == backward[0] >= 0 else None,
    ),
    # x <= low where y <= low, x >= high where y >= high (relu6 is hardtanh from 0 to 6).
    "aten.hardtanh_backward.default": (
        "aten.hardtanh.default",
        lambda forward, back: tuple(forward) if forward == back and forward[0] <= forward[1] else None,
    ),
    # What is not above the threshold becomes a value that is not, either.
    "aten.threshold_backward.default": (
        "aten.threshold.default",
        lambda forward, backward: tuple(forward) if forward[0] == backward[0] >= forward[1] else None,
    ),
    # What lies within lambda becomes 0, which does, too; with a negative lambda nothing does.
    "aten.hardshrink_backward.default": (
        "aten.hardshrink.default",
        lambda forward, backward: tuple(forward) if forward == backward else None,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """How backward does without a storage: its ops take another value in its place, at no cost."""

    storage: int
    payload: int  # the storage behind the other value
    # The op, the op whose value it takes in the trace, and the op whose value it takes instead.
    swaps: tuple[tuple[int, int, int], ...]


def swaps(facts: Facts) -> Mapping[int, Swap]:
    """Return what can be swapped, by storage; worked out once."""
    return facts.once(swaps, lambda f: {swap.storage: swap for swap in _offered(f)})


def _offered(facts: Facts) -> Iterator[Swap]:
    """A swap for each candidate that some backward op of the table may do without."""
    trace, candidates = facts.trace, frozenset(facts.candidates)
    made: dict[tuple[str, int], list[int]] = {}  # target, and the op whose value it takes -> ops of forward
    for f in range(facts.forward_end):
        if trace.ops.inputs[f]:
            made.setdefault((trace.ops.target[f], _original(trace, trace.ops.inputs[f][0])), []).append(f)
    found: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}  # x -> y, and who takes it
    for b in range(facts.forward_end, len(trace.ops)):
        target = TABLE.get(trace.ops.target[b], ("",))[0]
        for j in trace.ops.inputs[b] if target else ():
            for f in made.get((target, _original(trace, j)), ()):
                x, y = _storages(facts, b, j, f)
                if x in candidates and y == found.setdefault(x, (y, []))[0]:
                    found[x][1].append((b, j, f))
                    break
    for x, (y, which) in found.items():
        yield Swap(storage=x, payload=y, swaps=tuple(which))


def _original(trace: Trace, op: int) -> int:
    """The op whose value an op passes on, if it is a copy; else itself."""
    while trace.ops.target[op] in COPIES and trace.ops.inputs[op]:
        op = trace.ops.inputs[op][0]
    return op


def _storages(facts: Facts, b: int, j: int, f: int) -> tuple[int, int]:
    """The storages of x and y if backward op b may take the value of f in place of its input j; else -1."""
    ops, sts = facts.trace.ops, facts.trace.storages
    if j >= facts.forward_end or len(facts.creates[f]) != 1:
        return -1, -1
    behind = set(ops.reads[j]) if facts.is_view[j] else set(facts.creates[j])
    x, y = [s for s in ops.reads[b] if s in behind], facts.creates[f][0]
    forward, backward = _arguments(ops.arguments[f])[1:], _arguments(ops.arguments[b])[2:]
    borders = TABLE[ops.target[b]][1](forward, backward) if forward and backward else None
    if borders is None or len(x) != 1 or not all(_exact(v, sts.dtype[y]) for v in borders):
        return -1, -1
    same = (sts.dtype[x[0]], sts.nbytes[x[0]]) == (sts.dtype[y], sts.nbytes[y])
    return (x[0], y) if same else (-1, -1)


def _arguments(text: str) -> list[Any]:
    return list(json.loads(text)) if text else []


def _exact(number: float, dtype: str) -> bool:
    """Return whether a type has this number itself: else forward may round it, and backward compare."""
    if dtype in ("float32", "float64"):
        return True  # both round it alike
    if dtype == "float16":
        return bool(abs(number) <= 65504 and struct.unpack("e", struct.pack("e", number))[0] == number)
    if dtype == "bfloat16":
        bits = struct.pack(">f", number)
        return bool(bits[2:] == b"\0\0" and struct.unpack(">f", bits)[0] == number)
    return False


# As another trace


def taken(problem: F) -> tuple[F, tuple[Swap, ...]]:
    """The problem in which each swap that costs nothing is made, and these; the same one without any.

    A swap costs nothing where backward reads the other value in any case, nothing else of backward reads the storage,
    and in forward only the ops that make the other value do: then saving the one takes as many bytes as the other, and
    one is enough.
    """
    return problem.once(taken, _taken)


def relaxed(problem: F) -> F:
    """The problem in which no op that could take another value reads the storage or that value: a bound of it holds
    for every plan of the problem, whichever is taken."""
    return problem.once(relaxed, lambda p: _swapped(p, tuple(swaps(p).values()), relax=True))


def with_swaps(made: Iterable[Swap], actions: Collection[Action]) -> tuple[Action, ...]:
    """A plan for `taken` as one for the problem itself: what was evicted or only recomputed there is swapped."""
    by_storage = {a.storage: a for a in actions}
    for r in made:
        known = by_storage.get(r.storage, Action(storage=r.storage, retain=False))
        if known.recipe != SAVE:
            by_storage[r.storage] = replace(known, recipe=KIND)
    return tuple(by_storage[s] for s in sorted(by_storage))


def _taken(problem: F) -> tuple[F, tuple[Swap, ...]]:
    made = tuple(r for r in swaps(problem).values() if _costs_nothing(problem, r))
    return _swapped(problem, made, relax=False), made


def _costs_nothing(problem: Facts, swap: Swap) -> bool:
    ops, sts = problem.trace.ops, problem.trace.storages
    swapped = {i for i, _, _ in swap.swaps}
    makers = {instead for _, _, instead in swap.swaps}
    readers = {i for i in range(len(ops)) if swap.storage in ops.reads[i] and not problem.is_view[i]}
    later = (i for i in range(problem.forward_end, len(ops)) if i not in swapped)
    elsewhere = any(swap.payload in ops.reads[i] for i in later)
    equal = sts.nbytes[swap.storage] == sts.nbytes[swap.payload]
    return problem.saved_by_default[swap.payload] and equal and elsewhere and readers <= swapped | makers


def _swapped(problem: F, made: Collection[Swap], *, relax: bool) -> F:
    """The problem whose ops take what the swaps offer; `relax`: whose ops take neither; the same one without any."""
    if not made:
        return problem
    trace, ops = problem.trace, problem.trace.ops
    reads, inputs, overwrites = list(ops.reads), list(ops.inputs), list(ops.overwrites)
    for r in made:
        for i, value, instead in r.swaps:
            new_value, new_storage = ([], []) if relax else ([instead], [r.payload])
            inputs[i] = _put(inputs[i], value, new_value)
            reads[i] = _put(reads[i], r.storage, new_storage)
            if overwrites[i] == r.storage:
                overwrites[i] = -1
    ops = replace(ops, reads=tuple(reads), inputs=tuple(inputs), overwrites=tuple(overwrites))
    sts = trace.storages
    columns = {
        column: tuple(
            new if p >= 0 else old  # a library's workspace is used by ops that do not read it
            for p, new, old in zip(sts.producer, uses, getattr(sts, column), strict=True)
        )
        for column, uses in uses_of(ops, len(sts)).items()
    }
    swapped = replace(trace, ops=ops, storages=replace(sts, **columns))  # type: ignore[arg-type]
    return type(problem)(swapped, problem.constraints)


def _put(ids: tuple[int, ...], old: int, new: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(x for i in ids for x in (new if i == old else [i])))

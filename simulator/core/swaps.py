"""Swaps as another trace: for planners and bounds that know of no op that takes another value than the trace says.

Counts: reads, lifetimes and takeovers as they are once ops take what swaps offer (`taken`), or take neither value
(`relaxed`). Ignores: that a plan may take some and not others; so a plan for `taken` is judged on the step itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from simulator.core.from_output import KIND, Swap, swaps
from simulator.core.problem import Problem
from traces.records.plan import SAVE, Action
from traces.records.trace import Trace, uses_of


def taken(problem: Problem) -> tuple[Problem, tuple[Swap, ...]]:
    """The problem in which each swap that costs nothing is made, and these; the same one without any.

    A swap costs nothing where backward reads the other value in any case, nothing else of backward reads the storage,
    and in forward only the ops that make the other value do: then saving the one takes as many bytes as the other, and
    one is enough.
    """
    return problem.once(taken, _taken)


def relaxed(problem: Problem) -> Problem:
    """The problem in which no op that could take another value reads the storage or that value: a bound of it holds
    for every plan of the problem, whichever is taken."""
    return problem.once(relaxed, _relaxed)


def with_swaps(made: Iterable[Swap], actions: Collection[Action]) -> tuple[Action, ...]:
    """A plan for `taken` as one for the problem itself: what was evicted or only recomputed there is swapped."""
    by_storage = {a.storage: a for a in actions}
    for r in made:
        known = by_storage.get(r.storage, Action(storage=r.storage, retain=False))
        if known.recipe != SAVE:
            by_storage[r.storage] = replace(known, recipe=KIND)
    return tuple(by_storage[s] for s in sorted(by_storage))


def _taken(problem: Problem) -> tuple[Problem, tuple[Swap, ...]]:
    made = tuple(r for r in swaps(problem).values() if _costs_nothing(problem, r))
    if not made:
        return problem, ()
    return Problem(_swapped(problem.trace, made, relax=False), problem.constraints), made


def _relaxed(problem: Problem) -> Problem:
    made = list(swaps(problem).values())
    if not made:
        return problem
    return Problem(_swapped(problem.trace, made, relax=True), problem.constraints)


def _costs_nothing(problem: Problem, swap: Swap) -> bool:
    ops, sts = problem.trace.ops, problem.trace.storages
    swapped = {i for i, _, _ in swap.swaps}
    makers = {instead for _, _, instead in swap.swaps}
    readers = {i for i in range(len(ops)) if swap.storage in ops.reads[i] and not problem.is_view[i]}
    elsewhere = any(
        swap.payload in ops.reads[i] and i not in swapped for i in range(problem.forward_end, len(ops))
    )
    equal = sts.nbytes[swap.storage] == sts.nbytes[swap.payload]
    return problem.saved_by_default[swap.payload] and equal and elsewhere and readers <= swapped | makers


def _swapped(trace: Trace, made: Iterable[Swap], *, relax: bool) -> Trace:
    """The trace whose ops take what the swaps offer; `relax`: whose ops take neither."""
    ops = trace.ops
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
    return replace(trace, ops=ops, storages=replace(sts, **columns))  # type: ignore[arg-type]


def _put(ids: tuple[int, ...], old: int, new: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(x for i in ids for x in (new if i == old else [i])))

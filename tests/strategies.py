"""Hypothesis strategies: random training steps with every feature that a trace can have, and actions for them."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from simulator.core.problem import Problem
from simulator.core.schedule import build
from tests.exhaust import Facts
from tests.tiny import Op, trace
from traces.records.plan import RECOMPUTE, SAVE, Action
from traces.records.trace import BACKWARD, EAGER, FORWARD, GRADIENT, OPTIMIZER, RANDOM, Trace

SIZES = st.sampled_from([0, 4, 8, 12, 16, 20, 64])
# Made once: making a strategy takes as long as drawing from it, and a trace draws a hundred times.
YES_OR_NO = st.booleans()
UP_TO = {n: st.integers(0, n) for n in (1, 2, 3, 7, 9)}
FROM_ONE = {n: st.integers(1, n) for n in (2, 3)}
FORWARD_FLAGS = st.sampled_from([0, 0, 0, 0, RANDOM])
BACKWARD_FLAGS = st.sampled_from([0, 0, 0, 0, 0, 0, EAGER])
OPTIMIZER_FLAGS = st.sampled_from([0, EAGER])


@st.composite
def traces(draw: st.DrawFn, max_forward: int = 9, max_backward: int = 9) -> Trace:
    """A valid trace: views, several outputs, random and eager ops, holds, measured events, overwrites, an optimizer."""
    resident = {f"w{k}": draw(SIZES) for k in range(draw(FROM_ONE[2]))}
    ops: list[Op] = []
    readable = list(resident)  # names of values that the next op may read
    base: dict[str, str] = {w: w for w in resident}  # value -> its storage's name
    made: dict[str, int] = {}  # storage name -> op

    def add(phase: str, flags: int, k: int) -> None:
        reads = tuple(draw(st.lists(st.sampled_from(readable), min_size=1, max_size=3, unique=True)))
        i = len(ops)
        if phase != OPTIMIZER and draw(UP_TO[3]) == 0:
            name = f"v{i}"
            ops.append(Op(phase, {}, reads[:1], view=name, time_ns=draw(UP_TO[1]), module=f"layer.{k // 3}"))
            base[name] = base[reads[0]]
            readable.append(name)
            return
        makes = {f"s{i}_{n}": draw(SIZES) for n in range(draw(FROM_ONE[3]))}
        events: tuple[int, ...] = ()
        total = sum(makes.values())
        if draw(YES_OR_NO):
            scratch = draw(SIZES)
            events = (scratch, total, -scratch) if draw(YES_OR_NO) else (total + scratch, -scratch)
        overwritable = [r for r in reads if base[r] not in resident]
        overwrites = draw(st.sampled_from(overwritable)) if overwritable and draw(YES_OR_NO) else ""
        ops.append(
            Op(
                phase,
                makes,
                reads,
                time_ns=draw(UP_TO[9]),
                flags=flags,
                events=events,
                overwrites=overwrites,
                module=f"layer.{k // 3}",
            )
        )
        for name in makes:
            base[name] = name
            made[name] = i
            readable.append(name)

    for k in range(draw(st.integers(1, max_forward))):
        add(FORWARD, draw(FORWARD_FLAGS), k)
    if draw(YES_OR_NO):
        add(FORWARD, EAGER, 0)
    for k in range(draw(st.integers(1, max_backward))):
        add(BACKWARD, draw(BACKWARD_FLAGS), k)
    for k in range(draw(UP_TO[2])):
        add(OPTIMIZER, draw(OPTIMIZER_FLAGS), k)
    hold = {}
    for name, op in made.items():
        if draw(UP_TO[7]) == 0:
            hold[name] = draw(st.integers(op, len(ops) - 1))
    gradients = {n: GRADIENT for n, i in made.items() if ops[i].phase == BACKWARD}
    return trace(ops, resident, hold, gradients)


def goes_after(of: Trace, s: int) -> list[int]:
    """The ops after which a plan may evict a storage: once it exists, and no more is done to it by the user's code."""
    ops, sts = of.ops, of.storages
    forward = sum(1 for p in ops.phase if p == FORWARD)
    outside = [
        sts.hold[s] - 1,
        *(i - 1 for i in range(forward) if ops.flags[i] & EAGER and s in ops.reads[i]),
    ]
    return [c for c in range(sts.producer[s], len(ops)) if c >= forward or c > max(outside)]


@st.composite
def actions(draw: st.DrawFn, of: Trace, *, rich: bool = True) -> tuple[Action, ...]:
    """Valid actions for a trace: recomputed candidates and links, retained, evicted again and not, and saved links;
    `rich`: saved values may be evicted as well, and any value while forward runs."""
    facts = Facts(of)
    out = []
    for s in range(len(of.storages)):
        if not facts.returns[s] or (facts.saved[s] and (facts.outside[s] or not of.storages.nbytes[s])):
            continue
        kinds = [None, RECOMPUTE] if facts.saved[s] else [None, None, RECOMPUTE, SAVE]
        kind = draw(st.sampled_from([*kinds, *([SAVE] if rich else [])]))
        if facts.outside[s] and kind == RECOMPUTE:
            kind = None
        if kind is None:
            continue
        after = [c for c in goes_after(of, s) if rich or c >= facts.turn]
        evictions = []
        if after and not facts.outside[s] and (kind == RECOMPUTE or rich):
            evictions = draw(st.lists(st.sampled_from(after), max_size=2, unique=True))
        retain = draw(YES_OR_NO) if kind == RECOMPUTE or evictions else True
        out.append(Action(storage=s, recipe=kind, retain=retain, evict_after=tuple(sorted(evictions))))
    return tuple(out)


@st.composite
def traces_with_actions(draw: st.DrawFn, *, rich: bool = True) -> tuple[Trace, tuple[Action, ...]]:
    of = draw(traces())
    return of, draw(actions(of, rich=rich))


def random_actions(trace: Trace, rng: random.Random) -> tuple[Action, ...]:
    """Actions of every kind, on about half of what can have one.

    Candidates are recomputed, or saved and evicted after ops that read them, in forward and backward; some are
    retained once they are back, some not; links of chains likewise; and some values that backward does not read are
    saved.
    """
    problem = Problem(trace)
    ops, sts = trace.ops, trace.storages
    readers: dict[int, list[int]] = {}
    for i in range(len(ops)):
        for s in ops.reads[i]:
            readers.setdefault(s, []).append(i)
    eager = [i for i in range(problem.forward_end) if ops.flags[i] & EAGER]

    def some_of(s: int) -> tuple[int, ...]:
        """Readers after which it goes; not in forward where the user's code holds or reads it later."""
        until = max([sts.hold[s] - 1, *(i - 1 for i in eager if s in ops.reads[i])])
        mine = [i for i in readers.get(s, ()) if i >= problem.forward_end or i > until]
        return tuple(i for i in mine if rng.random() < 0.3)

    actions = []
    for s in problem.candidates:
        if rng.random() < 0.6:
            recipe = RECOMPUTE if rng.random() < 0.6 else SAVE
            actions.append(
                Action(storage=s, recipe=recipe, retain=rng.random() < 0.6, evict_after=some_of(s))
            )
    for s, producer in enumerate(sts.producer):
        if problem.saved_by_default[s] or problem.pinned[s] or not 0 <= producer < trace.meta.forward_ops:
            continue
        draw = rng.random()
        if draw < 0.15:
            actions.append(
                Action(storage=s, recipe=SAVE, evict_after=some_of(s) if problem.rebuildable[s] else ())
            )
        elif draw < 0.4 and problem.rebuildable[s]:
            actions.append(Action(storage=s, recipe=RECOMPUTE, evict_after=some_of(s)))
    build(problem, actions)  # every such plan is possible
    return tuple(actions)

"""Hypothesis strategies: random training steps with every feature that a trace can have, and actions for them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from tests.exhaust import Facts
from tests.tiny import Op, trace
from traces.plan import RECOMPUTE, SAVE, Action
from traces.trace import BACKWARD, EAGER, FORWARD, GRADIENT, OPTIMIZER, RANDOM, Trace

SIZES = st.sampled_from([0, 4, 8, 12, 16, 20, 64])


@st.composite
def traces(draw: st.DrawFn, max_forward: int = 9, max_backward: int = 9) -> Trace:
    """A valid trace: views, several outputs, random and eager ops, holds, measured events, overwrites, an optimizer."""
    resident = {f"w{k}": draw(SIZES) for k in range(draw(st.integers(1, 2)))}
    ops: list[Op] = []
    readable = list(resident)  # names of values that the next op may read
    base: dict[str, str] = {w: w for w in resident}  # value -> its storage's name
    made: dict[str, int] = {}  # storage name -> op

    def add(phase: str, flags: int, k: int) -> None:
        reads = tuple(draw(st.lists(st.sampled_from(readable), min_size=1, max_size=3, unique=True)))
        i = len(ops)
        if phase != OPTIMIZER and draw(st.integers(0, 3)) == 0:
            name = f"v{i}"
            ops.append(
                Op(phase, {}, reads[:1], view=name, time_ns=draw(st.integers(0, 1)), module=f"layer.{k // 3}")
            )
            base[name] = base[reads[0]]
            readable.append(name)
            return
        makes = {f"s{i}_{n}": draw(SIZES) for n in range(draw(st.integers(1, 3)))}
        events: tuple[int, ...] = ()
        total = sum(makes.values())
        if draw(st.booleans()):
            scratch = draw(SIZES)
            events = (scratch, total, -scratch) if draw(st.booleans()) else (total + scratch, -scratch)
        overwritable = [r for r in reads if base[r] not in resident]
        overwrites = draw(st.sampled_from(overwritable)) if overwritable and draw(st.booleans()) else ""
        ops.append(
            Op(
                phase,
                makes,
                reads,
                time_ns=draw(st.integers(0, 9)),
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
        add(FORWARD, draw(st.sampled_from([0, 0, 0, 0, RANDOM])), k)
    if draw(st.booleans()):
        add(FORWARD, EAGER, 0)
    for k in range(draw(st.integers(1, max_backward))):
        add(BACKWARD, draw(st.sampled_from([0, 0, 0, 0, 0, 0, EAGER])), k)
    for k in range(draw(st.integers(0, 2))):
        add(OPTIMIZER, draw(st.sampled_from([0, EAGER])), k)
    hold = {}
    for name, op in made.items():
        if draw(st.integers(0, 7)) == 0:
            hold[name] = draw(st.integers(op, len(ops) - 1))
    gradients = {n: GRADIENT for n, i in made.items() if ops[i].phase == BACKWARD}
    return trace(ops, resident, hold, gradients)


@st.composite
def traces_with_reruns(draw: st.DrawFn, max_forward: int = 9, max_backward: int = 9) -> Trace:
    """A trace, some of whose ops make a library keep bytes once they run again: of two targets, views included."""
    of = draw(traces(max_forward, max_backward))
    targets = st.sampled_from(["aten.test.default", "aten.mm.default", "aten.addmm.default"])
    target = tuple(draw(st.lists(targets, min_size=len(of.ops), max_size=len(of.ops))))
    kept = {name: draw(SIZES) for name in ("aten.mm.default", "aten.addmm.default")}
    return replace(of, ops=replace(of.ops, target=target), meta=replace(of.meta, rerun_workspaces=kept))


@st.composite
def actions(draw: st.DrawFn, of: Trace, *, repeats: bool = True) -> tuple[Action, ...]:
    """Valid actions for a trace: recomputed candidates and links, shared, dropped and not, and saved links."""
    facts = Facts(of)
    backward = st.integers(facts.turn, max(facts.turn, len(of.ops) - 1))
    out = []
    for s in range(len(of.storages)):
        if not facts.returns[s] or (facts.saved[s] and (facts.outside[s] or not of.storages.nbytes[s])):
            continue
        kinds = [None, RECOMPUTE] if facts.saved[s] else [None, None, RECOMPUTE, SAVE]
        kind = draw(st.sampled_from(kinds))
        if facts.outside[s] and kind == RECOMPUTE:
            kind = None
        if kind == RECOMPUTE:
            drops = draw(st.lists(backward, max_size=2, unique=True)) if repeats else []
            out.append(Action(storage=s, share=draw(st.booleans()), drop_after=tuple(sorted(drops))))
        elif kind == SAVE:
            out.append(Action(storage=s, action=SAVE))
    return tuple(out)


@st.composite
def traces_with_actions(draw: st.DrawFn, *, reruns: bool = False) -> tuple[Trace, tuple[Action, ...]]:
    of = draw(traces_with_reruns() if reruns else traces())
    return of, draw(actions(of))

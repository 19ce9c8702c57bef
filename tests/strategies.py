"""Random training steps with every feature that a trace can have, and actions for them.

Hypothesis draws lengths and a seed, and `random` the rest, in a fifth of the time.
"""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from simulator.core.problem import Problem
from simulator.core.schedule import build
from tests.exhaust import Facts
from tests.tiny import Op, trace
from traces.records.plan import RECOMPUTE, SAVE, Action
from traces.records.trace import BACKWARD, EAGER, FORWARD, GRADIENT, OPTIMIZER, RANDOM, Trace

SIZES = (0, 4, 8, 12, 16, 20, 64)
SEEDS = st.integers(0, 2**32 - 1)


def traces(max_forward: int = 9, max_backward: int = 9) -> st.SearchStrategy[Trace]:
    return st.builds(trace_of, st.integers(1, max_forward), st.integers(1, max_backward), SEEDS)


def traces_with_actions(*, rich: bool = True) -> st.SearchStrategy[tuple[Trace, tuple[Action, ...]]]:
    return st.builds(lambda of, seed: (of, actions(of, Random(seed), rich=rich)), traces(), SEEDS)


def trace_of(forward: int, backward: int, seed: int) -> Trace:
    """A valid trace: views, several outputs, random and eager ops, holds, measured events, overwrites, an optimizer."""
    draw = Random(seed)
    chained = draw.randint(0, 1)  # each op reads what the one before made, as in training, and others
    resident = {f"w{k}": draw.choice(SIZES) for k in range(draw.randint(1, 2))}
    ops: list[Op] = []
    readable = list(resident)  # names of values that the next op may read
    base: dict[str, str] = {w: w for w in resident}  # value -> its storage's name
    made: dict[str, int] = {}  # storage name -> op

    def add(phase: str, flags: int, k: int) -> None:
        reads = tuple(draw.sample(readable, draw.randint(1, min(3, len(readable)))))
        if chained and readable[-1] not in reads:
            reads = (readable[-1], *reads[:2])
        i, module = len(ops), f"layer.{k // 3}"
        if phase != OPTIMIZER and draw.randint(0, 3) == 0:
            name = f"v{i}"
            ops.append(Op(phase, {}, reads[:1], view=name, time_ns=draw.randint(0, 1), module=module))
            base[name] = base[reads[0]]
            readable.append(name)
            return
        makes = {f"s{i}_{n}": draw.choice(SIZES) for n in range(draw.randint(1, 3))}
        events: tuple[int, ...] = ()
        total = sum(makes.values())
        if draw.randint(0, 1):
            scratch = draw.choice(SIZES)
            events = draw.choice(((scratch, total, -scratch), (total + scratch, -scratch)))
        overwritable = [r for r in reads if base[r] not in resident]
        told = {"time_ns": draw.randint(0, 9), "flags": flags, "events": events, "module": module}
        takes = draw.choice(overwritable) if overwritable and draw.randint(0, 1) else ""
        ops.append(Op(phase, makes, reads, overwrites=takes, **told))
        for name in makes:
            base[name] = name
            made[name] = i
            readable.append(name)

    for k in range(forward):
        add(FORWARD, draw.choice((0, 0, 0, 0, RANDOM)), k)
    if draw.randint(0, 1):
        add(FORWARD, EAGER, 0)
    for k in range(backward):
        add(BACKWARD, draw.choice((0, 0, 0, 0, 0, 0, EAGER)), k)
    for k in range(draw.randint(0, 2)):
        add(OPTIMIZER, draw.choice((0, EAGER)), k)
    hold = {name: draw.randint(op, len(ops) - 1) for name, op in made.items() if draw.randint(0, 7) == 0}
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


def actions(of: Trace, draw: Random, *, rich: bool = True) -> tuple[Action, ...]:
    """Valid actions for a trace: recomputed candidates and links, retained, evicted again and not, and saved links;
    `rich`: saved values may be evicted as well, and any value while forward runs."""
    facts = Facts(of)
    out = []
    for s in range(len(of.storages)):
        if not facts.returns[s] or (facts.saved[s] and (facts.outside[s] or not of.storages.nbytes[s])):
            continue
        kinds = [None, RECOMPUTE] if facts.saved[s] else [None, None, RECOMPUTE, SAVE]
        kind = draw.choice([*kinds, *([SAVE] if rich else [])])
        if facts.outside[s] and kind == RECOMPUTE:
            kind = None
        if kind is None:
            continue
        after = [c for c in goes_after(of, s) if rich or c >= facts.turn]
        evictions = []
        if after and not facts.outside[s] and (kind == RECOMPUTE or rich):
            evictions = draw.sample(after, draw.randint(0, min(2, len(after))))
        retain = bool(draw.randint(0, 1)) if kind == RECOMPUTE or evictions else True
        out.append(Action(storage=s, recipe=kind, retain=retain, evict_after=tuple(sorted(evictions))))
    return tuple(out)


def random_actions(trace: Trace, rng: Random) -> tuple[Action, ...]:
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
            retain, evicted = rng.random() < 0.6, some_of(s)
            actions.append(Action(storage=s, recipe=recipe, retain=retain, evict_after=evicted))
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

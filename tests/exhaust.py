"""Every plan that the simulator can express for a tiny trace, and the least time that one within each budget adds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product

from simulator.core.graph import Graph, analyse
from simulator.core.replay import run
from simulator.core.schedule import build
from tests.tiny import Op, trace
from traces.errors import PlanError
from traces.plan import RECOMPUTE, SAVE, Action
from traces.trace import BACKWARD, EAGER, FORWARD, OPTIMIZER, RANDOM, Trace

Choice = Action | None


def choices(of: Trace, graph: Graph, *, drops: int) -> list[list[Choice]]:
    """What can happen to each storage from forward; with `drops`, also every set of up to so many drop_after."""
    turn, n = graph.first_backward_op, len(of.ops)
    candidates = set(graph.candidates)
    out: list[list[Choice]] = []
    for s in range(len(of.storages)):
        if not 0 <= of.storages.producer[s] < turn:
            continue
        mine: list[Choice] = [None]
        link = graph.rebuildable[s] and not graph.wanted[s] and not graph.pinned[s]
        if s in candidates or link:
            mine.append(Action(storage=s, action=RECOMPUTE, share=True))
            if s in candidates:  # a link that is not shared is one without an action
                mine.append(Action(storage=s, action=RECOMPUTE, share=False))
            mine += [
                Action(storage=s, action=RECOMPUTE, share=True, drop_after=chosen)
                for k in range(1, drops + 1)
                for chosen in combinations(range(turn, n - 1), k)
            ]
        if not graph.wanted[s] and not graph.pinned[s]:
            mine.append(Action(storage=s, action=SAVE))
        if len(mine) > 1:
            out.append(mine)
    return out


def frontier(
    of: Trace, graph: Graph | None = None, *, drops: int = 0, most: int = 4_000
) -> dict[int, int] | None:
    """Peak -> the least added time of a plan with that peak, over all plans; None if there are more than `most`."""
    graph = graph or analyse(of)
    options = choices(of, graph, drops=drops)
    count = 1
    for mine in options:
        count *= len(mine)
    if count > most:
        return None
    best: dict[int, int] = {}
    for chosen in product(*options):
        try:
            timeline = run(of, build(of, [a for a in chosen if a is not None], graph), graph)
        except PlanError:
            continue
        peak, added = timeline.peak_allocated_bytes, timeline.step_time_ns - of.time_ns
        best[peak] = min(added, best.get(peak, added))
    return best


def optimum(front: dict[int, int], budget_bytes: int) -> int | None:
    """The least added time within a budget; None if no plan fits."""
    return min((t for peak, t in front.items() if peak <= budget_bytes), default=None)


def budgets(front: dict[int, int]) -> Iterator[int]:
    """Budgets at, just below and between the peaks that plans reach."""
    peaks = sorted(front)
    seen = {p + d for p in peaks for d in (-1, 0)} | {(a + b) // 2 for a, b in pairwise(peaks)}
    return iter(sorted(seen))


def draw_trace(seed: int) -> Trace:
    """A small training step from a seed, shaped so that memory is tight after the turn: forward, loss, backward.

    Views, several outputs, random, eager and in-place ops, workspaces, holds, links that only chains need.
    """
    draw = random.Random(seed)
    sizes = (4, 8, 12, 20, 40, 64)
    resident = {"w": draw.choice(sizes)}
    ops: list[Op] = []
    readable = ["w"]
    forward: list[str] = []
    made: dict[str, int] = {}
    base = {"w": "w"}

    def add(phase: str, reads: tuple[str, ...], flags: int) -> None:
        i = len(ops)
        if draw.random() < 0.12 and phase != OPTIMIZER:
            ops.append(Op(phase, {}, reads[:1], view=f"v{i}", time_ns=draw.randrange(2)))
            base[f"v{i}"] = base[reads[0]]
            names = [f"v{i}"]
        else:
            makes = {f"s{i}_{k}": draw.choice(sizes) for k in range(draw.choice((1, 1, 1, 2)))}
            total, scratch = sum(makes.values()), draw.choice((0, 0, 8, 40))
            events = (
                () if not scratch else draw.choice(((scratch, total, -scratch), (total + scratch, -scratch)))
            )
            mine = [r for r in reads if base[r] != "w"]
            takes = draw.choice(mine) if mine and draw.random() < 0.2 else ""
            ops.append(
                Op(
                    phase,
                    makes,
                    reads,
                    time_ns=draw.randrange(1, 10),
                    flags=flags,
                    events=events,
                    overwrites=takes,
                )
            )
            for name in makes:
                base[name], made[name] = name, i
            names = list(makes)
        readable.extend(names)
        if phase == FORWARD:
            forward.extend(names)

    for k in range(draw.randrange(2, 7)):
        reads = {readable[-1], *draw.sample(readable, k=min(len(readable), draw.choice((0, 1, 1))))}
        add(FORWARD, tuple(sorted(reads)), RANDOM if k and draw.random() < 0.1 else 0)
    if draw.random() < 0.3:
        add(FORWARD, (readable[-1],), EAGER)
    for k in range(draw.randrange(1, 7)):
        back = forward[-1 - min(k, len(forward) - 1)] if draw.random() < 0.7 else draw.choice(forward)
        reads = {readable[-1], back} if draw.random() < 0.9 else {readable[-1]}
        add(BACKWARD, tuple(sorted(reads)), EAGER if draw.random() < 0.08 else 0)
    if draw.random() < 0.3:
        add(OPTIMIZER, (readable[-1],), EAGER)
    hold = {s: draw.randrange(i, len(ops)) for s, i in made.items() if draw.random() < 0.1}
    return trace(ops, resident, hold)

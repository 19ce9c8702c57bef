"""Tiles and recomputation together against every plan of every number of tiles: the bound is never above the best of
them, and no plan is worse than without tiles."""

from __future__ import annotations

import random
from dataclasses import replace

from simulator.bounds import Instants, bounder_of
from simulator.core.limits import Levers, Limits
from simulator.core.problem import Problem
from simulator.levers import tile
from simulator.planners import plan_with
from simulator.planners.outcome import Infeasible
from simulator.prediction.levers import changed_steps, lower_bound, plan_with_levers
from tests.exhaust import budgets, frontier, optimum
from tests.tiny import bwd, fwd, trace
from tests.walked import rewritten
from traces.records.plan import Plan
from traces.records.trace import EAGER, PRODUCT, ROWS, SUM, Result, Stretch, Trace

ANY, NONE = Levers(allow="fp"), Levers(allow="bit")


def drawn(seed: int) -> Trace:
    """A step of one to three layers and a loss head with rows, of sizes and times that are drawn."""
    draw = random.Random(seed)
    layers, rows = draw.randint(1, 3), draw.choice((2, 4, 8))
    wide, narrow = rows * draw.choice((4, 16, 48)), rows * draw.choice((1, 2, 8))
    size = [draw.choice((4, 16, 64, 128)) for _ in range(layers - 1)] + [narrow]

    def ns() -> int:
        return draw.randint(1, 30)

    ops, of = [], "w"
    for k in range(layers):
        ops.append(fwd({f"a{k}": size[k]}, of, "w", time_ns=ns()))
        of = f"a{k}"
    ops += [
        fwd({"z": wide}, of, "w", time_ns=ns(), events=(wide,)),
        fwd({"loss": 4}, "z", time_ns=ns()),
        bwd({"g": 4}, "loss", time_ns=ns(), flags=EAGER),
        bwd({"gz": wide}, "g", "z", time_ns=ns()),
        bwd({"ga": narrow}, "gz", "w", time_ns=ns()),
        bwd({"gw": 8}, "gz", of, time_ns=ns()),
    ]
    back = "ga"
    for k in reversed(range(layers)):
        ops.append(bwd({f"g{k}": size[k]}, back, f"a{k}", time_ns=ns()))
        back = f"g{k}"
    made = trace(ops, {"w": 8})
    n, z = layers, layers + 1  # the head's first op; its storage
    stretch = Stretch(
        storage=z,
        rows=rows,
        body=((n, ROWS), (n + 1, SUM), (n + 3, ROWS), (n + 4, ROWS), (n + 5, PRODUCT)),
        inputs=((n - 1, z - 1), (-1, 0)),
        losses=(Result(op=n + 1, storage=z + 1, grows=SUM),),
        gradients=(
            Result(op=n + 4, storage=z + 4, grows=ROWS),
            Result(op=n + 5, storage=z + 5, grows=PRODUCT),
        ),
    )
    meta = replace(made.meta, forward_ops=n + 2, first_backward_graph_op=n + 3, stretches=(stretch,))
    return replace(made, meta=meta)


def test_the_bound_holds_for_every_plan_of_every_number_of_tiles() -> None:
    by_tiles = 0  # budgets at which tiles are the best or the only way
    for seed in range(60):
        of = drawn(seed)
        problem = Problem(of)
        fronts = {}  # peak -> least time of the whole step, of each number of tiles
        for rewrites in ((), *((r,) for r in tile.offer(Problem(of)))):
            step = rewritten(of, rewrites)
            front = frontier(step, drops=0, anywhere=True)
            assert front is not None
            fronts[rewrites] = {peak: step.time_ns - of.time_ns + ns for peak, ns in front.items()}
        of_all = {p: min(f[p] for f in fronts.values() if p in f) for f in fronts.values() for p in f}
        assert bounder_of(changed_steps(problem, 1, ANY)[0].problem).floor.peak_bytes <= min(of_all)
        for budget in budgets(of_all):
            least, without = optimum(of_all, budget), optimum(fronts[()], budget)
            by_tiles += least is not None and (without is None or least < without)
            bound = lower_bound(problem, budget, ANY)
            if least is not None:
                assert bound.feasible, (seed, budget)
                assert bound.added_time_ns <= least, (seed, budget)
    assert by_tiles >= 60  # or the comparison says little


def test_a_plan_with_more_levers_is_never_worse() -> None:
    better = 0
    for seed in range(12):
        of = drawn(seed)
        problem = Problem(of)
        least = min(
            p for s in changed_steps(problem, 1 << 40, ANY) for p in (Instants(s.problem).floor.peak_bytes,)
        )
        whole = problem.saved.timeline.peak_allocated_bytes
        for budget in range(least, whole + 1, max(1, (whole - least) // 6)):
            ns = [_time_ns(problem, budget, levers) for levers in (NONE, ANY)]
            if ns[0] is not None:
                assert ns[1] is not None, (seed, budget)
                assert ns[1] <= ns[0], (seed, budget)
            better += ns[1] is not None and ns[1] != ns[0]
    assert better >= 12


def _time_ns(problem: Problem, budget: int, levers: Levers) -> int | None:
    def make(step: Problem) -> Plan:
        return plan_with("search", step, budget, Limits(seconds=0.1))

    try:
        plan = plan_with_levers(problem, budget, levers, make, helps=True)
    except Infeasible:
        return None
    return int(plan.predicted["plan"]["step_time_ns"])

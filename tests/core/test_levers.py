"""A stretch in tiles, byte by byte; and which changes of a step a plan takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.allocator.device import DeviceMemory
from simulator.core.limits import Levers, Limits
from simulator.core.problem import Problem
from simulator.core.rewrites import rewritten, rewritten_problem, tile
from simulator.planners import plan_with
from simulator.planners.outcome import Infeasible
from simulator.studies.levers import changed_steps, lower_bound, plan_with_levers, study
from simulator.studies.max_batch import MaxBatch, Request, max_batch
from tests.tiny import bwd, fwd, trace
from traces.errors import PlanError, SpecError
from traces.records.plan import EXACT, FP, Plan, Rewrite
from traces.records.stretch import PRODUCT, ROWS, SUM, Result, Stretch
from traces.records.trace import EAGER, Trace

SECONDS = Limits(seconds=0.2)


def head(batch: int = 1) -> Trace:
    """Of each example x of 8 bytes (4 rows), z = x w of 400; loss of 4; g of 4; backward: gz of 400, gx of 8; gw of 8;
    w has 8."""
    made = trace(
        [
            fwd({"x": 8 * batch}, "w", time_ns=100),
            fwd({"z": 400 * batch}, "x", "w", time_ns=100, events=(400 * batch,)),
            fwd({"loss": 4}, "z", time_ns=100),
            bwd({"g": 4}, "loss", time_ns=10, flags=EAGER),
            bwd({"gz": 400 * batch}, "g", "z", time_ns=100),
            bwd({"gx": 8 * batch}, "gz", "w", time_ns=100),
            bwd({"gw": 8}, "gz", "x", time_ns=100),
            bwd({"gv": 8}, "gx", "gw", time_ns=100),
        ],
        {"w": 8},
    )
    stretch = Stretch(
        storage=2,
        rows=4 * batch,
        body=((1, ROWS), (2, SUM), (4, ROWS), (5, ROWS), (6, PRODUCT)),
        inputs=((0, 1), (-1, 0)),
        losses=(Result(op=2, storage=3, grows=SUM),),
        gradients=(Result(op=5, storage=6, grows=ROWS), Result(op=6, storage=7, grows=PRODUCT)),
    )
    meta = replace(
        made.meta, batch_size=batch, forward_ops=3, first_backward_graph_op=4, stretches=(stretch,)
    )
    return replace(made, meta=meta)


def in_tiles(number: int) -> Rewrite:
    return Rewrite(kind="tile", storage=2, number=number)


def test_two_tiles_byte_by_byte() -> None:
    of = rewritten(head(), [in_tiles(2)])
    assert of.ops.target[1] == "lowtide.tiles_2"
    assert [of.ops.name[i] for i in of.ops.inputs[4]] == [of.ops.name[1], of.ops.name[2]]  # the tiles and g
    # The factor 4, gx whole 8; first tile: z 200, loss 4 stays, gz 200, z goes, gx 4 is copied and goes, gw 8 stays,
    # gz goes; second and last: z 200, loss 4 is added and goes, gz 200, z goes, gx 4, gw is added in place, gz goes.
    tiles = (4, 8, 200, 4, 200, -200, 4, -4, 8, -200, 200, 4, -4, 200, -200, 4, -4, -200, -4)
    assert of.ops.events[1] == tiles
    peaks = Problem(of).saved.timeline.peak_bytes
    # w 8; x 16; in the tiles 16 + 4 + 8 + 4 + 8 + 200 + 200 at most, in the second, whose loss is not yet added then.
    assert peaks[:2] == (16, 16 + 4 + 8 + 4 + 8 + 200 + 200)
    # Then w, loss, gx and gw are there (28; x went with the tiles), and g beside them; loss goes with it, and gx and gw
    # are multiplied in place; at last g is gone, and gv there.
    assert peaks[2:] == (32, 28, 28, 32)
    assert Problem(head()).saved.timeline.peak_allocated_bytes == 8 + 8 + 400 + 4 + 400


def test_times_are_those_of_the_ops_and_of_what_each_further_tile_adds() -> None:
    of = rewritten(head(), [in_tiles(4)])
    # Five ops of 100 ns; three further tiles, each with five of the least (10 ns) and the pass that adds gw up (10).
    assert of.ops.time_ns[1] == 500 + 3 * (5 * 10 + 10)


def test_there_are_no_more_tiles_than_rows() -> None:
    assert rewritten(head(), [in_tiles(5)]) == rewritten(head(), [in_tiles(4)])


def test_what_cannot_be_made_in_tiles_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be made in 0 tiles"):
        rewritten(head(), [in_tiles(0)])
    with pytest.raises(PlanError, match="storage 1 cannot be made"):
        rewritten(head(), [replace(in_tiles(2), storage=1)])
    with pytest.raises(PlanError, match="unknown rewrite 'fold'"):
        rewritten(head(), [replace(in_tiles(2), kind="fold")])


def planned(of: Trace, budget_bytes: int, allow: str) -> Plan:
    return plan_with_levers(
        Problem(of),
        budget_bytes,
        Levers(allow=allow),
        lambda p: plan_with("search", p, budget_bytes, SECONDS),
    )


def test_a_plan_takes_what_is_allowed_and_no_more() -> None:
    of = head()
    with pytest.raises(Infeasible, match="With --allow fp the lever tile lowers"):
        planned(of, 500, "bit")
    with pytest.raises(Infeasible) as refused:
        planned(of, 30, "fp")
    assert "--allow" not in str(refused.value)
    plan = planned(of, 500, "fp")
    assert [r.number for r in plan.rewrites] == [2]
    assert (plan.exactness, plan.meta) == (FP, of.meta)
    assert [r.number for r in planned(of, 300, "fp").rewrites] == [4]
    free = planned(of, 900, "fp")
    assert (free.rewrites, free.exactness) == ((), EXACT)


def test_the_bound_is_that_of_the_cheapest_way() -> None:
    problem = Problem(head())
    for budget in (300, 500, 900):
        bound = lower_bound(problem, budget, Levers(allow="fp"))
        plan = planned(problem.trace, budget, "fp")
        step = rewritten_problem(problem, plan.rewrites).replay(plan.actions).timeline
        assert bound.feasible
        assert problem.trace.time_ns + bound.added_time_ns <= step.step_time_ns
        for rewrite in tile.offer(problem):  # no number of tiles beats it
            q = rewritten_problem(problem, (rewrite,))
            if q.saved.timeline.peak_allocated_bytes <= budget:
                assert q.trace.time_ns >= problem.trace.time_ns + bound.added_time_ns


def test_levers_that_are_none_are_refused() -> None:
    with pytest.raises(SpecError, match="--levers fold"):
        changed_steps(Problem(head()), 500, Levers(allow="fp", kinds=("fold",)))
    with pytest.raises(SpecError, match="--allow sometimes"):
        Levers(allow="sometimes")


def test_the_study_says_how_far_each_lever_reaches() -> None:
    found = study(Problem(head()), "head", 500)
    alone, tiled = found.rows
    assert (alone.lever, alone.bound_overhead_percent) == ("recompute", None)
    assert (tiled.lever, tiled.exactness, tiled.rewrites) == ("tile", FP, 1)
    assert tiled.floor_bytes < alone.floor_bytes
    assert tiled.bound_overhead_percent is not None


def test_a_larger_batch_fits_with_the_loss_head_in_tiles(tmp_path: Path) -> None:
    def largest(allow: str) -> MaxBatch:
        device = DeviceMemory(name="d", kind="cpu", memory_bytes=2000)
        asked = Request(
            model="m", device=device, directory=tmp_path, overhead_percent=200.0, planner="search", limits=SECONDS,
            levers=Levers(allow=allow),
        )  # fmt: skip
        return max_batch(asked, head, lambda line: None)

    # Without: w 8, x 8, z and gz 400 each, loss or g 4: 820 for one example, 1,636 for two.
    assert largest("bit").with_plan == 2
    found = largest("fp")
    assert found.with_plan > 8
    assert found.to_json()["allow"] == "fp"

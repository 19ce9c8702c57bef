"""A stretch in tiles, byte by byte; and which changes of a step a plan takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulator.allocator.device import DeviceMemory
from simulator.bounds import bounder_of
from simulator.core.limits import Levers, Limits
from simulator.core.problem import Problem
from simulator.levers import rewritten_problem, tile
from simulator.levers.edit import Editing
from simulator.planners import plan_with
from simulator.planners.outcome import Infeasible
from simulator.prediction import levers
from simulator.prediction.levers import Changed, changed_steps, climb, lower_bound, plan_with_levers
from simulator.studies.max_batch import MaxBatch, max_batch
from simulator.studies.tracing import Traced
from tests.tiny import bwd, fwd, trace
from tests.walked import rewritten
from traces.errors import PlanError, SpecError, TraceError
from traces.records.plan import EXACT, FP, Plan, Rewrite
from traces.records.store import load
from traces.records.trace import EAGER, PRODUCT, ROWS, SUM, Part, Result, Stretch, Trace

SECONDS = Limits(seconds=0.2)


def head(batch: int = 1) -> Trace:
    """Of each example x of 8 bytes (4 rows), z = x w of 400; loss of 4; g of 4; backward: gz of 400, gx of 8; gw of 8;
    w has 8."""
    made = trace(
        [
            fwd({"x": 8 * batch}, "w", time_ns=100),
            fwd({"z": 400 * batch}, "x", "w", time_ns=100, events=(400 * batch,)),
            fwd({"loss": 4}, "z", time_ns=100, bytes_moved=400),
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
    at = replace(made.meta, batch_size=batch, forward_ops=3, first_backward_graph_op=4, stretches=(stretch,))
    return replace(made, meta=at)


def in_tiles(number: int) -> Rewrite:
    return Rewrite(kind="tile", storage=2, number=number)


def test_a_small_stretch_is_not_offered_and_may_be_made_all_the_same() -> None:
    """As a plan of larger sizes has it."""
    of = head()
    nbytes = (*of.storages.nbytes[:-1], 400 * tile.SHARE)
    assert len(list(tile.offer(Problem(replace(of, storages=replace(of.storages, nbytes=nbytes)))))) == 2
    wider = replace(of, storages=replace(of.storages, nbytes=(*nbytes[:-1], nbytes[-1] + tile.SHARE)))
    assert not list(tile.offer(Problem(wider)))
    assert rewritten(wider, [in_tiles(2)]).ops.target[1] == "lowtide.tiles_2"


def test_two_tiles_byte_by_byte() -> None:
    of = rewritten(head(), [in_tiles(2)])
    assert of.ops.target[1] == "lowtide.tiles_2"
    assert [of.ops.name[i] for i in of.ops.inputs[4]] == [of.ops.name[1], of.ops.name[2]]  # the tiles and g
    # The factor 4, gx whole 8; first tile: z 200, loss 4 stays, gz 200, z goes, gx 4 is copied and goes, gw 8 stays,
    # gz goes; second and last: z 200, loss 4 is added and goes, gz 200, z goes, gx 4, gw is added in place, gz goes.
    # A zero says that one of two equally large blocks goes that is not the younger.
    tiles = (4, 8, 200, 4, 200, 0, -200, 4, -4, 8, -200, 200, 4, -4, 200, 0, -200, 4, -4, -200, 0, -4)
    assert of.ops.events[1] == tiles
    peaks = Problem(of).saved.timeline.peak_bytes
    # w 8; x 16; in the tiles 16 + 4 + 8 + 4 + 8 + 200 + 200 at most, in the second, whose loss is not yet added then.
    assert peaks[:2] == (16, 16 + 4 + 8 + 4 + 8 + 200 + 200)
    # Then w, loss, gx and gw are there (28; x went with the tiles), and g beside them; loss goes with it, and gx and gw
    # are multiplied in place; at last g is gone, and gv there.
    assert peaks[2:] == (32, 28, 28, 32)
    assert Problem(head()).saved.timeline.peak_allocated_bytes == 8 + 8 + 400 + 4 + 400


def test_a_librarys_workspace_is_as_large_in_every_tile() -> None:
    of = head()
    target = tuple("aten.mm.default" if i in (1, 6) else x for i, x in enumerate(of.ops.target))
    events = tuple({1: (400, 60, -60), 6: (8, 60, -60)}.get(i, x) for i, x in enumerate(of.ops.events))
    ops, meta = replace(of.ops, target=target, events=events), replace(of.meta, device="cuda")
    tiles = rewritten(replace(of, ops=ops, meta=meta), [in_tiles(2)]).ops.events[1]
    assert [tiles.count(n) for n in (60, -60, 30)] == [4, 4, 0]  # of z and of gw, which is added to in place
    on_cpu = rewritten(replace(of, ops=ops), [in_tiles(2)]).ops.events[1]
    assert on_cpu.count(30) == 4


def test_times_are_those_of_the_ops_and_of_what_each_further_tile_adds() -> None:
    of = rewritten(head(), [in_tiles(4)])
    # Passes run at 4 bytes a ns. Five ops of 100 ns, gx is put together (8 bytes read and written: 4 ns); three further
    # tiles, each with five of the least (10 ns) and the passes that add up gw, in its product, and loss (2 * 8 and
    # 3 * 4 bytes: 7).
    assert of.ops.time_ns[1] == 500 + 4 + 3 * (5 * 10 + 7)
    assert of.ops.time_ns[4] == 4  # and gx is multiplied


def test_there_are_no_more_tiles_than_rows() -> None:
    assert rewritten(head(), [in_tiles(5)]) == rewritten(head(), [in_tiles(4)])


def test_what_cannot_be_made_in_tiles_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be made in 0 tiles"):
        rewritten(head(), [in_tiles(0)])
    with pytest.raises(PlanError, match="storage 1 cannot be made"):
        rewritten(head(), [replace(in_tiles(2), storage=1)])
    with pytest.raises(PlanError, match="unknown rewrite 'fold'"):
        rewritten(head(), [replace(in_tiles(2), kind="fold")])


def block(layers: int = 1) -> Trace:
    """In each layer, of x of 8 bytes (4 rows), z = x w of 400 and y of 8; w has 8. Then a loss of 4, and back: gy of 8
    to gz of 400, gx of 8 and gw of 8."""
    ops, back, stretches = [fwd({"x0": 8}, time_ns=100)], [], []
    for k in range(layers):
        ops += [
            fwd({f"z{k}": 400}, f"x{k}", "w", time_ns=100, bytes_moved=400),
            fwd({f"x{k + 1}": 8}, f"z{k}", time_ns=100),
        ]
        back += [
            bwd({f"gz{k}": 400}, f"gx{k + 1}", f"z{k}", time_ns=100),
            bwd({f"gx{k}": 8}, f"gz{k}", "w", time_ns=100),
            bwd({f"gw{k}": 8}, f"gz{k}", f"x{k}", time_ns=100),
        ][::-1]
    n = len(ops)
    ops += [
        fwd({"loss": 4}, f"x{layers}", time_ns=100, flags=EAGER),
        bwd({f"gx{layers}": 8}, "loss", time_ns=10, flags=EAGER),
    ]
    made = trace(ops + back[::-1], {"w": 8})
    s = {name: k for k, name in enumerate(made.storages.name)}
    for k in range(layers):
        z, gz = 2 * k + 1, n + 2 + 3 * (layers - 1 - k)
        gradients = (
            Result(op=gz + 1, storage=s[f"gx{k}"], grows=ROWS),
            Result(op=gz + 2, storage=s[f"gw{k}"], grows=PRODUCT),
        )
        given = ((z - 1, s[f"x{k}"]), (-1, s["w"]))
        stretches.append(
            Stretch(
                storage=s[f"z{k}"],
                rows=4,
                body=((z, ROWS), (z + 1, ROWS)),
                inputs=given,
                losses=(Result(op=z + 1, storage=s[f"x{k + 1}"], grows=ROWS),),
                gradients=(),
                backward=Part(
                    body=((z, ROWS), (gz, ROWS), (gz + 1, ROWS), (gz + 2, PRODUCT)),
                    inputs=(*given, (gz - 1, s[f"gx{k + 1}"])),
                    results=gradients,
                ),
            )
        )
    meta = replace(
        made.meta, batch_size=1, forward_ops=n, first_backward_graph_op=n + 2, stretches=tuple(stretches)
    )
    return replace(made, meta=meta)


def test_a_stretch_with_a_backward_of_its_own_byte_by_byte() -> None:
    of = rewritten(block(), [in_tiles(2)])
    assert of.ops.target[1] == of.ops.target[4] == "lowtide.tiles_2"
    # y whole 8; in each tile z 200, y 4, z goes, y is copied and goes.
    assert of.ops.events[1] == (8, *(200, 4, -200, -4) * 2)
    # gx whole 8; z again 200, gz 200, z goes, gx 4 is copied and goes, gw 8 stays, gz goes; then gw is added in place.
    again = (200, 200, 0, -200, 4, -4)
    assert of.ops.events[4] == (8, *again, 8, -200, *again, -200)
    # w and x 16; y 8, and z 200 and y 4 of a tile; loss 4, then y goes; gy 8, then loss goes; at last gx 8, gw 8, and
    # z and gz of the second tile.
    assert Problem(of).saved.timeline.peak_bytes == (16, 24 + 204, 28, 28, 24 + 8 + 8 + 400)
    # The forward's call runs again where y is recomputed: nothing in it is done for good.
    assert of.ops.flags[1] == of.ops.flags[4] == 0
    # Two ops of 100 ns, y put together in 4 ns, and two of the least (10 ns) for the second tile; then four ops.
    assert (of.ops.time_ns[1], of.ops.time_ns[4]) == (200 + 4 + 2 * 10, 400 + 4 + 4 * 10 + 4)


def test_layers_that_are_alike_run_in_one_number_of_tiles() -> None:
    of = block(3)
    assert len(of.meta.stretches) == 3
    # With everything saved, three z of 400 are there; of the last layer's tiles in four, z and gz of 100 each.
    plan = planned(of, 500, "fp")
    assert len(plan.rewrites) == 3
    assert len({r.number for r in plan.rewrites}) == 1
    assert "that were tried" in lower_bound(Problem(of), 500, Levers(allow="fp")).reason


def planned(of: Trace, budget_bytes: int, allow: str) -> Plan:
    return plan_with_levers(
        Problem(of),
        budget_bytes,
        Levers(allow=allow),
        lambda p: plan_with("search", p, budget_bytes, SECONDS),
        helps=True,
    )


def test_a_plan_takes_what_is_allowed_and_no_more() -> None:
    of = head()
    with pytest.raises(Infeasible, match=r"--allow fp \(tile\) lowers"):
        planned(of, 500, "bit")
    with pytest.raises(Infeasible) as refused:
        planned(of, 30, "fp")
    assert "--allow" not in str(refused.value)
    # Refused is the step with the lowest peak, and it is said which one that is.
    assert "That is with tile beside recomputation." in str(refused.value)
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


@pytest.mark.parametrize(("kind", "allow", "needed"), [("tile", "bit", "fp"), ("int8", "fp", "approximate")])
def test_a_lever_that_is_named_and_not_allowed_is_no_silence(kind: str, allow: str, needed: str) -> None:
    with pytest.raises(SpecError, match=f"--levers {kind} needs --allow {needed}; now it is --allow {allow}"):
        changed_steps(Problem(head()), 500, Levers(allow=allow, kinds=("bits", kind)))


def test_a_larger_batch_fits_with_the_loss_head_in_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Traced, "each", lambda self, sizes, say: [head(n) for n in sizes])

    def largest(allow: str) -> MaxBatch:
        device = DeviceMemory(name="d", kind="cpu", memory_bytes=2000)
        words = {"seconds": SECONDS.seconds, "allow": allow, "budget_overhead_percent": 200.0}
        return max_batch("m", device, directory=tmp_path, **words)

    # Without: w 8, x 8, z and gz 400 each, loss or g 4: 820 for one example, 1,636 for two.
    assert largest("bit").with_plan == 2
    found = largest("fp")
    assert found.with_plan > 8


def test_a_changed_step_that_contradicts_itself_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    edit = tile.edit

    def wrong(editing: Editing, rewrite: Rewrite) -> None:
        edit(editing, rewrite)
        editing.order[0].time_ns = -1

    monkeypatch.setattr(tile, "edit", wrong)
    problem = Problem(head())
    for make in (
        lambda: rewritten_problem(problem, [in_tiles(2)]),
        lambda: plan_with_levers(
            problem, 800, Levers(allow="fp"), lambda step: plan_with("search", step, 800), helps=True
        ),
    ):
        with pytest.raises(TraceError, match="negative time"):
            make()


def test_of_steps_of_the_same_kinds_the_first_that_has_a_plan_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By rising bound, in parts of 10,000 ns / 2,000; of those within one part the one that changes less."""
    step = head()
    problem = Problem(replace(step, ops=replace(step.ops, time_ns=(10_000, *[0] * (len(step.ops) - 1)))))
    bound = bounder_of(problem).bound(1 << 30)
    changes = ((8, 0), (4, 1), (2, 2), (0, 9))  # tiles, and what is added at least
    steps = [
        Changed(
            rewrites=(in_tiles(number),) if number else (),
            problem=Problem(problem.trace),
            bound=replace(bound, added_time_ns=added),
        )
        for number, added in changes
    ]
    monkeypatch.setattr(levers, "changed_steps", lambda *_: steps)
    asked: list[int] = []

    def make(of: Problem) -> Plan:
        asked.append(next(k for k, x in enumerate(steps) if x.problem is of))
        if asked == [2]:
            raise Infeasible("", {"lowest_peak_bytes": 1})
        return Plan(meta=of.trace.meta, predicted={"plan": {"step_time_ns": 10_000 + 20}})

    assert plan_with_levers(problem, 1, Levers(allow="fp"), make, helps=True).rewrites[0].number == 4
    assert asked == [2, 1, 3]


def test_a_choice_is_given_up_where_another_is_better_without_it() -> None:
    first, second = (Rewrite(kind="bits", storage=s) for s in range(2))
    worth = {(): 0, (first,): 2, (first, second): 3, (second,): 4}
    assert climb([[(first,)], [(second,)]], worth.__getitem__) == (second,)
    worth[second,] = 1
    assert climb([[(first,)], [(second,)]], worth.__getitem__) == (first, second)


def test_of_rungs_that_change_one_value_the_first_that_is_made_stands() -> None:
    packed, copied = (Rewrite(kind=kind, storage=0) for kind in ("bits", "offload"))
    assert climb([[(copied,)], [(packed,)]], lambda rewrites: packed in rewrites) == (packed,)


@pytest.mark.parametrize("kinds", [None, ()])
def test_a_bound_over_rewrites_says_that_not_all_of_them_were_tried(kinds: tuple[()] | None) -> None:
    """Also where the step as it is has the least: what was not tried may be cheaper."""
    problem = Problem(load("bert-base"))
    budget_bytes = problem.saved.timeline.peak_allocated_bytes * 8 // 10
    found = levers.lower_bound(problem, budget_bytes, Levers(kinds=kinds))
    assert found.tried == (kinds is None)
    assert ("that were tried" in found.least()) == (kinds is None)

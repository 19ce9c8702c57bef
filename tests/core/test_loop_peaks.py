"""What the untouched loop needs, first and beside the planned step: on tiny traces with the bytes worked out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulator import simulate as simulated
from simulator.prediction.loop_peaks import LoopPeaks, planned_peaks, untouched_peaks
from tests.commands import simulate
from tests.tiny import bwd, fwd, opt, trace
from traces.records.plan import RECOMPUTE, Action, Plan
from traces.records.store import save
from traces.records.trace import OPTIMIZER_STATE, Trace, Untouched

MIB = 1 << 20


def loop(unit: int, *, device: str = "cpu", counted_bytes: int = 0) -> Trace:
    """Parameter w 4, optimizer state m 8, y 50, its gradient g 50 (takes over y's memory), w's d 4; in units.

    op            there while it runs                       in the graph   with no memory taken over
    y (forward)   w 4, m 8, y 50                                      62   62
    g (backward)  w 4, m 8, y 50, g 50                                62   112
    d (backward)  w 4, m 8, g 50, d 4                                 66   66
    step          w 4, m 8, d 4, and a temporary of 20                36   36

    In the first iteration m is made when the step begins: 4 + 50 + 50 = 104 is then the most.
    """
    ops = [
        fwd({"y": 50 * unit}, "w"),
        bwd({"g": 50 * unit}, "y", overwrites="y"),
        bwd({"d": 4 * unit}, "g"),
        opt({"t": 20 * unit}, "d", "m"),
    ]
    made = trace(ops, {"w": 4 * unit, "m": 8 * unit}, categories={"m": OPTIMIZER_STATE})
    return replace(made, meta=replace(made.meta, device=device, untouched_peak_bytes=counted_bytes))


def allocated(found: LoopPeaks) -> tuple[list[int | None], dict[str, int | None]]:
    return (
        [f.peak_allocated_bytes for f in found.iterations],
        {phase: f.peak_allocated_bytes for phase, f in found.phases.items()},
    )


def test_first_and_steady_iteration_and_each_phase() -> None:
    c = simulated(loop(1))
    assert allocated(untouched_peaks(c)) == ([104, 112], {"forward": 62, "backward": 112, "optimizer": 36})
    assert allocated(planned_peaks(c)) == ([58, 66], {"forward": 62, "backward": 66, "optimizer": 36})
    assert all(f.peak_block_bytes is f.peak_reserved_bytes is None for f in untouched_peaks(c).iterations)


def test_what_the_trace_counted_is_the_peak() -> None:
    """120, 8 more than the 112 of the graph: 8 more where the peak is; 60, less: nothing is higher."""
    more = untouched_peaks(simulated(loop(1, counted_bytes=120)))
    assert allocated(more) == ([112, 120], {"forward": 62, "backward": 120, "optimizer": 36})
    less = untouched_peaks(simulated(loop(1, counted_bytes=60)))
    assert allocated(less) == ([60, 60], {"forward": 60, "backward": 60, "optimizer": 36})


def test_on_a_gpu_blocks_and_reserved_too() -> None:
    """In MiB: w, m and d come from segments of 20, y and g have segments of 50 of their own, t one of 20.

    Forward reserves 20 (w, then m) + 50 (y); backward 50 more for g; the optimizer's t fits a free segment of 50.
    In the first iteration m is made behind w and d in the segment of 20: nothing more is reserved.
    """
    found = untouched_peaks(simulated(loop(MIB, device="cuda")))
    assert allocated(found)[0][0] == 104 * MIB
    assert {f.peak_reserved_bytes for f in found.iterations} == {120 * MIB}
    assert [f.peak_block_bytes for f in (found.iterations[0], found.steady)] == [104 * MIB, 112 * MIB]
    assert {p: f.peak_block_bytes for p, f in found.phases.items()} == {
        "forward": 62 * MIB,
        "backward": 112 * MIB,
        "optimizer": 36 * MIB,
    }
    # What the trace counted is more than is reserved: no less is reserved than is allocated.
    more = untouched_peaks(simulated(loop(MIB, device="cuda", counted_bytes=130 * MIB)))
    assert more.steady.headline() == {
        "peak_allocated_bytes": 130 * MIB,
        "peak_block_bytes": 130 * MIB,
        "peak_reserved_bytes": 130 * MIB,
        "step_time_ns": None,
    }


def test_what_the_untouched_loop_asks_decides_by_phase_too() -> None:
    """w 4 stays. Forward asks for 60, and gives it back in backward when that has 30; the step makes m 8 once, and 10.

    In MiB, first iteration: 64, 94 and 4 + 8 + 10 = 22. Steady, with m: 72, 102 and 22. The graph knows of none.
    """
    asked = Untouched(
        block=(0, 1, ~0, ~1, -1, 2, ~2),
        nbytes=(60 * MIB, 30 * MIB, 0, 0, 8 * MIB, 10 * MIB, 0),
        once=(0, 0, 0, 0, 1, 0, 0),
        phase=("forward", *["backward"] * 3, *["optimizer"] * 3),
    )
    found = untouched_peaks(
        simulated(replace(loop(MIB, device="cuda", counted_bytes=102 * MIB), untouched=asked))
    )
    assert [f.peak_block_bytes for f in (found.iterations[0], found.steady)] == [94 * MIB, 102 * MIB]
    assert {p: f.peak_block_bytes for p, f in found.phases.items()} == {
        "forward": 72 * MIB,
        "backward": 102 * MIB,
        "optimizer": 22 * MIB,
    }


def test_a_step_without_ops_has_its_residents() -> None:
    empty = untouched_peaks(simulated(trace([], {"w": 4})))
    assert allocated(empty) == ([4, 4], {})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_answer_says_it_first_and_beside_it_the_plan(tmp_path: Path, device: str) -> None:
    path = save(loop(MIB, device=device), tmp_path / "t")
    said = json.loads(simulate(path, "--json", "-q").stdout)
    c = simulated(str(path))
    assert said["untouched"] == untouched_peaks(c).to_json()
    assert said["untouched"]["peak_allocated_bytes"] == 112 * MIB
    assert said["untouched"]["iterations"][0]["peak_allocated_bytes"] == 104 * MIB
    assert said["untouched"]["phases"]["optimizer"]["peak_allocated_bytes"] == 36 * MIB
    assert said["plan"]["phases"]["backward"]["peak_allocated_bytes"] == 66 * MIB
    assert said["baseline"]["peak_allocated_bytes"] == 66 * MIB

    lines = simulate(path, "-q").stdout.splitlines()
    assert lines[1] == "budget   none; 100 % is 66.00 MiB, the captured graph with everything saved"
    assert lines[2].startswith("time ")
    at = next(k for k, line in enumerate(lines) if line.startswith("untouched"))
    assert ("reserved" if device == "cuda" else "allocated") in lines[at - 1]
    assert lines[at].split()[:3] == ["untouched", "112.00", "MiB"]
    assert lines[at + 1].split()[:5] == ["untouched,", "first", "iteration", "104.00", "MiB"]
    assert not any("untouched model needs" in line for line in lines)  # the figures say so
    planned = simulate(path, "-q", "--budget", "100%", "--budget-of", "allocated").stdout.splitlines()
    assert "66.00 MiB of allocated memory; the plan needs 66.00 MiB (100.0 %)" in planned[1]
    assert any(line.split()[:3] == ["planned", "66.00", "MiB"] for line in planned)


def test_of_an_infeasible_budget_the_untouched_loop_is_still_said(tmp_path: Path) -> None:
    said = json.loads(simulate(save(loop(1), tmp_path / "t"), "--budget", "10", "--json", "-q").stdout)
    assert (said["feasible"], said["untouched"]["peak_allocated_bytes"]) == (False, 112)


def test_phases_of_ops_that_run_again_are_those_in_which_they_run() -> None:
    """y is made again for g: w 4, m 8, x 20 and y 50 while y's op runs in backward, then g 50 takes y's memory over."""
    made = trace(
        [
            fwd({"x": 20}, "w"),
            fwd({"y": 50}, "x"),
            fwd({"z": 1}, "y"),
            bwd({"g": 50}, "x", "y", overwrites="y"),
        ],
        {"w": 4},
    )
    y = made.storages.name.index("y")
    plan = Plan(meta=made.meta, actions=(Action(storage=y, recipe=RECOMPUTE),))
    found = planned_peaks(simulated(made, plan))
    assert {*found.phases} == {"forward", "backward"}
    # Forward: w 4, x 20, y 50, z 1. Backward: w, x and y alone, since z is gone.
    assert allocated(found)[1] == {"forward": 75, "backward": 74}

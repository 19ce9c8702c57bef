"""Approximate plans: only by errors that were measured on this very step, and within the one that is allowed."""

from __future__ import annotations

import json
from dataclasses import replace
from math import hypot, inf
from pathlib import Path

import pytest

from simulator.bounds import bounder_of
from simulator.core.limits import Levers
from simulator.core.problem import Problem
from simulator.levers import LEVERS
from simulator.levers.edit import Editing, parts
from simulator.planners.outcome import Infeasible
from simulator.prediction import ask as api
from simulator.prediction.levers import changed_steps
from tests.commands import simulate
from tests.tiny import bwd, fwd, trace
from traces.errors import SpecError
from traces.records.gradient_errors import GradientErrors, Part
from traces.records.plan import Plan, Rewrite
from traces.records.store import save
from traces.records.trace import EFFECT, Trace

N = 1 << 16
KINDS = ("int8", "fp8_e4m3")


def step() -> Trace:
    """Eight saved values of 4 N bytes, which no op may make again, and each of which one op of backward reads."""
    ops = [fwd({"x0": 4 * N}, "w", time_ns=1000, flags=EFFECT)]
    ops += [fwd({f"x{k}": 4 * N}, f"x{k - 1}", time_ns=1000, flags=EFFECT) for k in range(1, 8)]
    ops += [bwd({"g7": 4 * N}, "x7", time_ns=1000)]
    ops += [bwd({f"g{k}": 4 * N}, f"g{k + 1}", f"x{k}", time_ns=1000) for k in reversed(range(7))]
    made = trace(ops, {"w": 4 * N})
    n = len(made.storages.name)
    sts = replace(made.storages, dtype=("float32",) * n, shape=((64, N // 64),) * n)
    made = replace(made, storages=sts, ops=replace(made.ops, bytes_moved=(8 * N,) * len(ops)))
    return Editing(made).trace()  # with the fingerprints of what it is now


def errors(made: Trace, *kinds: str, each: float = 0.004) -> GradientErrors:
    found = [
        Part(kind=kind, storages=tuple(r.storage for r in part), error=each)
        for kind in kinds
        for part in parts(list(LEVERS[kind].offer(Problem(made))))
    ]
    return GradientErrors(fingerprint=made.meta.graph_fingerprint, parts=tuple(found))


def planned(made: Trace, most: float | None, **more: object) -> Plan:
    given = {"errors": errors(made, *KINDS), **more}
    return api.plan(made, "75%", allow="approximate", max_gradient_error=most, **given)


def test_a_plan_stays_within_the_error_that_is_allowed() -> None:
    made = step()
    free = planned(made, None)
    taken = len(free.rewrites) // 2  # parts of two values
    assert taken >= 2
    assert free.stated_error == pytest.approx(0.004 * taken**0.5)
    assert {r.error for r in free.rewrites} == {free.stated_error}
    assert planned(made, 0.004 * taken**0.5 + 1e-9).rewrites == free.rewrites
    with pytest.raises(Infeasible):
        planned(made, 0.004 * taken**0.5 - 1e-9)


def test_what_was_not_measured_is_not_taken() -> None:
    made = step()
    problem = Problem(made)
    known = errors(made, "int8")
    first = replace(known, parts=known.parts[:1])
    least = [
        bounder_of(
            changed_steps(problem, 1, Levers(allow="approximate", errors=e))[0].problem
        ).floor.peak_bytes
        for e in (known, first, replace(first, parts=(replace(first.parts[0], error=2.0),)))
    ]
    assert least[0] < least[1] < least[2] == bounder_of(problem).floor.peak_bytes
    assert known.of([Rewrite(kind="int4", storage=known.parts[0].storages[0])]) == inf


def test_errors_add_in_squares_each_part_once() -> None:
    known = errors(step(), *KINDS)
    a, b = known.parts[0], known.parts[1]
    both = [Rewrite(kind="int8", storage=s) for s in (*a.storages, b.storages[0])]
    assert known.of(both) == pytest.approx(hypot(0.004, 0.004))
    other = Rewrite(kind="fp8_e4m3", storage=a.storages[0])
    assert known.of([*both, other]) == pytest.approx(hypot(0.004, 0.004, 0.004))


def test_a_plan_without_measured_errors_is_refused_with_the_command_that_measures_them() -> None:
    made = step()
    with pytest.raises(SpecError, match=r"execute errors TRACE -o errors\.json --levers int8"):
        planned(made, 0.01, errors=None, levers=["int8"])
    with pytest.raises(SpecError, match="not known: measure it"):
        planned(made, 0.01, levers=["int4"])
    with pytest.raises(SpecError, match="measured on another step"):
        planned(made, 0.01, errors=replace(errors(made, "int8"), fingerprint="other"))
    with pytest.raises(SpecError, match="of plans with --allow approximate"):
        api.plan(made, "75%", max_gradient_error=0.01)
    for bad in (0.0, -1.0, inf, float("nan")):
        with pytest.raises(SpecError, match="--max-gradient-error"):
            planned(made, bad)


def test_the_command_takes_a_file_of_errors(tmp_path: Path) -> None:
    made = step()
    save(made, tmp_path / "trace")
    file = errors(made, "int8").save(tmp_path / "errors.json")
    assert GradientErrors.load(file) == errors(made, "int8")
    words = (tmp_path / "trace", "--budget", "75%", "--allow", "approximate", "--errors", file)
    done = simulate(*words, "--max-gradient-error", "0.01", "--json", "-q")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["plan"]
    shown = simulate(*words, "-q")
    assert "relative error of the gradient" in shown.stdout
    refused = simulate(*words, "--max-gradient-error", "0.0001", "-q")
    assert refused.exit_code == 1

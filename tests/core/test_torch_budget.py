"""torch's activation_memory_budget as a peer: what torch saves is what we read, replay, and call right or wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from simulator.cli.main import main
from simulator.core.problem import Problem
from simulator.studies.torch_budget import actions_for, plans
from tests.tiny import bwd, fwd, trace
from traces.errors import PlanError
from traces.records.plan import RECOMPUTE, SAVE
from traces.records.saved_sets import SavedSet, SavedSets
from traces.records.store import load, save
from traces.records.trace import RANDOM, Trace


def choice(
    saved: tuple[int, ...], recomputed: tuple[int, ...] = (), random: tuple[int, ...] = ()
) -> SavedSet:
    return SavedSet(
        label="dp-0.5",
        settings={"budget": 0.5, "solver": "dp"},
        solve_seconds=0.1,
        saved=saved,
        recomputed=recomputed,
        recomputed_ops=len(recomputed),
        random_again=random,
    )


def sets_of(record: Trace, *chosen: SavedSet) -> SavedSets:
    return SavedSets(trace=record.meta, source="torch", capture_seconds=1.0, sets=chosen)


def links() -> Trace:
    """Storages 0 w, 1 a, 2 r (random), 3 b, 4 c; backward reads b, c and r, and a only through b."""
    return trace(
        [
            fwd({"a": 8}, "w", time_ns=5),
            fwd({"r": 2}, "a", flags=RANDOM),
            fwd({"b": 16}, "a", "r", time_ns=7),
            fwd({"c": 16}, "a", time_ns=9),
            bwd({"gc": 4}, "c"),
            bwd({"gb": 4}, "b", "gc", "r"),
        ],
        {"w": 8},
    )


def test_what_torch_saves_is_saved_and_the_rest_is_recomputed_once() -> None:
    record = links()
    problem = Problem(record)
    # Torch saves a and r and makes b and c again.
    actions = actions_for(problem, choice((1, 2), (3, 4)))
    assert {(a.storage, a.recipe, a.retain) for a in actions} == {
        (1, SAVE, True), (3, RECOMPUTE, True), (4, RECOMPUTE, True)
    }  # fmt: skip
    (p,) = plans(problem, sets_of(record, choice((1, 2), (3, 4))))
    assert p.plan.recomputed == {3, 4}
    assert p.plan.budget_bytes is None
    # b and c run again: 7 + 9 of 1 + 5 + 7 + 9 + 1 + 1.
    assert p.timeline.step_time_ns - record.time_ns == 16
    # While gc runs: w, a, r, c and gc. As much while b runs again: w, a, r, gc and b.
    assert p.timeline.peak_allocated_bytes == 8 + 8 + 2 + 16 + 4


def test_a_link_that_torch_makes_again_is_made_once_for_all() -> None:
    record = links()
    (p,) = plans(Problem(record), sets_of(record, choice((2,), (1, 3, 4))))
    # a is wanted by c and, one op later, by b. Without sharing it would run twice.
    assert [record.ops.name[i] for i, again in zip(p.timeline.op, p.timeline.recompute, strict=True) if again] == [
        "a", "c", "b"
    ]  # fmt: skip


def test_what_lowtide_may_not_run_again_is_saved_and_the_plan_is_called_invalid() -> None:
    record = links()
    (p,) = plans(Problem(record), sets_of(record, choice((1,), (2, 3, 4), random=(1,))))
    assert not p.choice.valid
    assert p.plan.recomputed == {3, 4}  # and r, storage 2, is there


def test_sets_of_another_trace_are_refused() -> None:
    record = links()
    other = replace(record.meta, fingerprint="another")
    with pytest.raises(PlanError, match="another"):
        plans(Problem(record), SavedSets(trace=other, source="torch", capture_seconds=0.0, sets=()))
    with pytest.raises(PlanError, match="does not have"):
        plans(Problem(record), sets_of(record, choice((99,))))


def test_saved_sets_come_back_as_they_were_written(tmp_path: Path) -> None:
    record = links()
    sets = sets_of(record, choice((1, 2), (3, 4)), choice((1,), (2, 3, 4), random=(1,)))
    assert SavedSets.load(sets.save(tmp_path / "s.json")) == sets


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a JSON file"),
        ("{}", "holds no saved sets"),
        ('{"record": "saved sets", "saved_version": 9}', "version 9"),
        ('{"record": "saved sets", "saved_version": 1}', "malformed"),
    ],
)
def test_damaged_saved_sets_are_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(PlanError, match=says):
        SavedSets.load(tmp_path / "s.json")
    with pytest.raises(PlanError, match="no such saved sets"):
        SavedSets.load(tmp_path / "none.json")


def test_compare_takes_torchs_plans_and_none_with_wrong_gradients_is_feasible(tmp_path: Path) -> None:
    record = links()
    directory = save(record, tmp_path / "t")
    right, wrong = choice((1, 2), (3, 4)), choice((1,), (2, 3, 4), random=(1,))
    # The first plan comes twice, and peaks at 38 bytes; so does the second, with r kept.
    file = sets_of(load(directory), right, replace(right, label="dp-0.6"), wrong).save(tmp_path / "s")
    words = ["compare", str(directory), "--planners", "save-all", "--saved", str(file), "-q"]
    result = CliRunner().invoke(main, [*words, "--budget", "40", "--json"])
    assert result.exit_code == 0, result.output
    keep, first, second = json.loads(result.stdout)["planners"]
    assert (keep["feasible"], keep["peer"]) == (False, False)
    assert (first["planner"], first["feasible"], first["peer"]) == ("torch dp-0.5", True, True)
    assert first["message"] == "the same plan for dp-0.6"
    assert (second["feasible"], second["peak_allocated_bytes"]) == (False, 38)
    assert "wrong gradients" in second["message"]
    shown = CliRunner().invoke(main, [*words, "--budget", "40"]).stdout
    assert "over the budget" not in shown
    assert "over the budget" in CliRunner().invoke(main, [*words, "--budget", "37"]).stdout

"""torch's activation_memory_budget as a peer: what torch saves is what we read, replay, and call right or wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tracer.cli.main
from simulator.cli.main import main
from simulator.core.graph import analyse
from simulator.studies.torch_budget import actions_for, ask_torch, plans
from tests.tiny import bwd, fwd, trace
from traces.errors import LowtideError, PlanError
from traces.plan import RECOMPUTE, SAVE
from traces.saved_sets import SavedSet, SavedSets
from traces.store import load, save
from traces.trace import RANDOM, Trace


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
    graph = analyse(record)
    # Torch saves a and r and makes b and c again.
    actions = actions_for(record, graph, choice((1, 2), (3, 4)))
    assert {(a.storage, a.action, a.share) for a in actions} == {
        (1, SAVE, True), (3, RECOMPUTE, True), (4, RECOMPUTE, True)
    }  # fmt: skip
    (p,) = plans(record, sets_of(record, choice((1, 2), (3, 4))), graph)
    assert p.plan.recomputed == {3, 4}
    assert p.plan.budget_bytes is None
    # b and c run again: 7 + 9 of 1 + 5 + 7 + 9 + 1 + 1.
    assert p.timeline.step_time_ns - record.time_ns == 16
    # While gc runs: w, a, r, c and gc. As much while b runs again: w, a, r, gc and b.
    assert p.timeline.peak_allocated_bytes == 8 + 8 + 2 + 16 + 4


def test_a_link_that_torch_makes_again_is_made_once_for_all() -> None:
    record = links()
    (p,) = plans(record, sets_of(record, choice((2,), (1, 3, 4))))
    # a is wanted by c and, one op later, by b. Without sharing it would run twice.
    assert [record.ops.name[i] for i, again in zip(p.timeline.op, p.timeline.recompute, strict=True) if again] == [
        "a", "c", "b"
    ]  # fmt: skip


def test_what_lowtide_may_not_run_again_is_saved_and_the_plan_is_called_invalid() -> None:
    record = links()
    (p,) = plans(record, sets_of(record, choice((1,), (2, 3, 4), random=(1,))))
    assert not p.choice.valid
    assert p.saved_instead == 1
    assert p.plan.recomputed == {3, 4}  # and r, storage 2, is there


def test_sets_of_another_trace_are_refused() -> None:
    record = links()
    other = replace(record.meta, fingerprint="another")
    with pytest.raises(PlanError, match="another"):
        plans(record, SavedSets(trace=other, source="torch", capture_seconds=0.0, sets=()))
    with pytest.raises(PlanError, match="does not have"):
        plans(record, sets_of(record, choice((99,))))


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
    with pytest.raises(PlanError, match="no such file"):
        SavedSets.load(tmp_path / "none.json")


def test_a_label_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    """Plans are written to files that are named by it."""
    chosen = choice((1, 2))
    path = sets_of(links(), chosen).save(tmp_path / "s.json")
    path.write_text(path.read_text().replace(json.dumps(chosen.label), '"../../plan"'))
    with pytest.raises(PlanError, match="no name for a file"):
        SavedSets.load(path)


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


def test_the_former_command_names_the_one_that_answers_now() -> None:
    result = CliRunner().invoke(main, ["torch-budget", "resnet152"])
    assert result.exit_code == 2
    assert "simulate compare" in result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# With torch


def small(p: float = 0.0) -> Any:
    """Three blocks of linear, GELU, dropout and layer norm, and a batch norm, whose buffers forward overwrites."""
    from torch import nn

    layers: list[nn.Module] = [nn.BatchNorm1d(16)]
    for _ in range(3):
        layers += [nn.Linear(16, 16), nn.GELU(), nn.Dropout(p), nn.LayerNorm(16)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


BUILD = """
from tests.core.test_torch_budget import small
import torch
def build(dropout: float = 0.0):
    return small(dropout), (torch.randn(32, 16), torch.randn(32, 4)), torch.nn.functional.mse_loss, None
"""


def under_torch(budget: float, solver: str, p: float) -> tuple[list[int], list[Any]]:
    """The sizes of the storages that torch itself saves of `small`, parameters and inputs left out, and its gradients.

    By torch.compile with its partitioner and no compiler behind it; saved tensors are seen by autograd's own hook.
    """
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, y = small(p), torch.randn(32, 16), torch.randn(32, 4)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x, y)}
    seen: dict[int, tuple[int, Any]] = {}

    def pack(t: Any) -> Any:
        storage = t.untyped_storage()
        seen[storage.data_ptr()] = (storage.nbytes(), t)
        return t

    backend = aot_autograd(
        fw_compiler=lambda g, _: make_boxed_func(g), partition_fn=min_cut_rematerialization_partition
    )
    with config.patch(
        activation_memory_budget=budget,
        activation_memory_budget_solver=solver,
        cse=False,
        enable_autograd_cache=False,
    ):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = compiled(x)
        sizes = sorted(n for at, (n, _) in seen.items() if at not in own)
        torch.nn.functional.mse_loss(out, y).backward()
    return sizes, [p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def build_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("model") / "small_build.py"
    file.write_text(BUILD)
    return file


def recorded(build_file: Path, dropout: float) -> Any:
    from tracer.build.step import load_spec
    from tracer.record.step import trace_step
    from traces.devices import device

    return trace_step(load_spec(f"{build_file}:build", {"dropout": dropout}), device("cpu"))


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize(("budget", "solver"), [(0.0, "dp"), (0.4, "dp"), (0.4, "greedy"), (1.0, "dp")])
def test_the_saved_set_is_torchs_own_and_wrong_gradients_are_known(
    build_file: Path, budget: float, solver: str, dropout: float
) -> None:
    torch = pytest.importorskip("torch")
    from tracer.record.torch_budget import Setting, saved_set

    r = recorded(build_file, dropout)
    found = saved_set(r.program, r.trace, Setting(budget=budget, solver=solver), r.graph_ops)
    sizes, gradients = under_torch(budget, solver, dropout)
    nbytes = r.trace.storages.nbytes
    assert sorted(nbytes[s] for s in found.saved) == sizes
    _, right = under_torch(1.0, solver, dropout)
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients, right, strict=True))
    assert found.valid == same
    assert found.valid == (dropout == 0.0 or budget == 1.0)


def test_the_replay_runs_as_many_ops_again_as_torchs_backward(build_file: Path) -> None:
    pytest.importorskip("torch")
    from tracer.record.torch_budget import Setting, saved_set

    r = recorded(build_file, 0.0)
    before = str(r.program.captured.graph_module.graph)
    for budget in (0.0, 0.2, 0.5):
        found = saved_set(r.program, r.trace, Setting(budget=budget), r.graph_ops)
        (p,) = plans(r.trace, sets_of(r.trace, found))
        assert p.timeline.recomputed_ops == found.recomputed_ops > 0
        assert p.saved_instead == 0
    assert str(r.program.captured.graph_module.graph) == before


def test_the_trace_s_times_can_stand_for_torchs_estimate(build_file: Path) -> None:
    pytest.importorskip("torch")
    from tracer.record.torch_budget import Setting, saved_set

    r = recorded(build_file, 0.0)
    # All of the time in the second linear layer: torch now saves its output first.
    (dear,) = [
        i for i, op in enumerate(r.program.rows) if op.module == "5" and op.target == "aten.addmm.default"
    ]
    times = [1] * len(r.trace.ops)
    times[dear] = 10**9
    record = replace(r.trace, ops=replace(r.trace.ops, time_ns=tuple(times)))
    found = saved_set(r.program, record, Setting(budget=0.15, runtime="times"), r.graph_ops)
    by_flops = saved_set(r.program, record, Setting(budget=0.15), r.graph_ops)
    made = {s for s, p in enumerate(record.storages.producer) if p == dear}
    assert made & set(found.saved)
    assert not made & set(by_flops.saved)


def test_ask_torch_goes_through_the_command_and_checks_the_graph(build_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    record = recorded(build_file, 0.0).trace
    sets = ask_torch(record, [0.0, 1.0], ["dp"])
    assert [s.label for s in sets.sets] == ["dp-0", "dp-1"]
    assert sets.trace.fingerprint == record.meta.fingerprint
    changed = replace(record, meta=replace(record.meta, graph_fingerprint="0" * 16))
    with pytest.raises(LowtideError, match="another graph than the trace"):
        ask_torch(changed, [1.0], ["dp"])


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--budgets", "2"], "shares between 0 and 1"), (["--solvers", "best"], "no solver 'best'")],
)
def test_trace_torch_budget_refuses_what_torch_does_not_know(
    tmp_path: Path, words: list[str], says: str
) -> None:
    pytest.importorskip("torch")
    directory = save(links(), tmp_path / "t")
    result = CliRunner().invoke(tracer.cli.main.trace, ["torch-budget", str(directory), *words])
    assert result.exit_code == 2
    assert says in result.stderr


def test_ilp_without_scipy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import tracer.record.torch_budget as module
    from traces.errors import EnvironmentProblem

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="pip install scipy"):
        module.Setting(budget=0.5, solver="ilp").check()

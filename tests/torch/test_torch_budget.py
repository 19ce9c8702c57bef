"""torch's activation_memory_budget: what we say that it saves is what it saves."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from simulator.core.problem import Problem  # noqa: E402
from tests.bench.baselines import torch_budget as command  # noqa: E402
from tests.bench.baselines.saved_by_torch import Setting, saved_set  # noqa: E402
from tests.bench.baselines.saved_sets import SavedSets, plans  # noqa: E402
from tests.tiny import fwd  # noqa: E402
from tests.tiny import trace as tiny_trace  # noqa: E402
from tracer.record.step import trace_step  # noqa: E402
from tracer.step.step import load_spec  # noqa: E402
from traces.devices import device  # noqa: E402
from traces.errors import EnvironmentProblem  # noqa: E402
from traces.records.store import save  # noqa: E402
from traces.records.trace import Trace  # noqa: E402


def small(p: float = 0.0) -> Any:
    """Three blocks of linear, GELU, dropout and layer norm, and a batch norm, whose buffers forward overwrites."""
    layers: list[nn.Module] = [nn.BatchNorm1d(16)]
    for _ in range(3):
        layers += [nn.Linear(16, 16), nn.GELU(), nn.Dropout(p), nn.LayerNorm(16)]
    return nn.Sequential(*layers, nn.Linear(16, 4))


BUILD = """
from tests.torch.test_torch_budget import small
import torch
def build(dropout: float = 0.0):
    return small(dropout), (torch.randn(32, 16), torch.randn(32, 4)), torch.nn.functional.mse_loss, None
"""


@cache
def under_torch(budget: float, solver: str, p: float) -> tuple[list[int], list[Any]]:
    """The sizes of the storages that torch itself saves of `small`, parameters and inputs left out, and its gradients.

    By torch.compile with its partitioner and no compiler behind it; saved tensors are seen by autograd's own hook.
    """
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


@cache
def recorded(build_file: Path, dropout: float) -> Any:
    return trace_step(load_spec(f"{build_file}:build", {"dropout": dropout}), device("cpu"))


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize(("budget", "solver"), [(0.0, "dp"), (0.4, "dp"), (0.4, "greedy"), (1.0, "dp")])
def test_the_saved_set_is_torchs_own_and_wrong_gradients_are_known(
    build_file: Path, budget: float, solver: str, dropout: float
) -> None:
    r = recorded(build_file, dropout)
    found = saved_set(r.program, Setting(budget=budget, solver=solver), r.graph_ops)
    sizes, gradients = under_torch(budget, solver, dropout)
    nbytes = r.trace.storages.nbytes
    assert sorted(nbytes[s] for s in found.saved) == sizes
    _, right = under_torch(1.0, "dp", dropout)  # there is nothing to solve
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(gradients, right, strict=True))
    assert found.valid == same
    assert found.valid == (dropout == 0.0 or budget == 1.0)


def test_the_replay_runs_as_many_ops_again_as_torchs_backward(build_file: Path) -> None:
    r = recorded(build_file, 0.0)
    before = str(r.program.captured.graph_module.graph)
    for budget in (0.0, 0.2, 0.5):
        found = saved_set(r.program, Setting(budget=budget), r.graph_ops)
        sets = SavedSets(trace=r.trace.meta, source="torch", capture_seconds=1.0, sets=(found,))
        (p,) = plans(Problem(r.trace), sets)
        assert p.timeline.recomputed_ops == found.recomputed_ops > 0
    assert str(r.program.captured.graph_module.graph) == before


def test_the_command_asks_torch_and_checks_the_graph(build_file: Path, tmp_path: Path) -> None:
    record = recorded(build_file, 0.0).trace

    def ask(of: Trace, budgets: str) -> Result:
        words = [str(save(of, tmp_path / of.meta.graph_fingerprint)), "--budgets", budgets]
        return CliRunner().invoke(command.main, [*words, "-o", str(tmp_path / "saved.json")])

    assert ask(record, "0,1").exit_code == 0
    sets = SavedSets.load(tmp_path / "saved.json")
    assert [s.label for s in sets.sets] == ["dp-0", "dp-1"]
    assert sets.trace.fingerprint == record.meta.fingerprint
    refused = ask(replace(record, meta=replace(record.meta, graph_fingerprint="0" * 16)), "1")
    assert refused.exit_code == 2
    assert "another graph than the trace" in refused.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--budgets", "2"], "shares between 0 and 1"), (["--solvers", "best"], "no solver 'best'")],
)
def test_the_command_refuses_what_torch_does_not_know(tmp_path: Path, words: list[str], says: str) -> None:
    directory = save(tiny_trace([fwd({"a": 8}, "w")], {"w": 8}), tmp_path / "t")
    result = CliRunner().invoke(command.main, [str(directory), *words])
    assert result.exit_code == 2
    assert says in result.stderr


def test_ilp_without_scipy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="pip install scipy"):
        command.check_solver("ilp")

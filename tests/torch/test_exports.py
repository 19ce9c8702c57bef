"""What a plan comes to in other tools' words: as exported, gradients are eager's and the peak is what was counted."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from executor.cli.main import execute
from executor.exports import exports
from simulator.prediction import ask as simulator
from tests.torch.steps import peaks, recorded
from tracer.step.loop import TrainingStep
from tracer.step.step import BuildStep, load_spec
from traces.errors import PlanError
from traces.records.plan import Plan, Rewrite

NET = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.layers = nn.ModuleList(Block(32) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

def build():
    model = Net()
    return model, torch.randn(256, 16), lambda x: x.square().mean(), torch.optim.AdamW(model.parameters())
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("net") / "net.py"
    file.write_text(NET)
    return f"{file}:build"


@pytest.fixture(scope="module")
def plan(net: str) -> Plan:
    return simulator.plan(recorded(load_spec(net)).trace, "70%", seconds=1)


@pytest.fixture(scope="module")
def made(plan: Plan) -> dict[str, Any]:
    return exports(plan)


def ran(build: BuildStep, change: Callable[[nn.Module], Any]) -> tuple[list[torch.Tensor], int]:
    """Gradients after two steps of the model as `change` leaves it, and the steady peak in bytes."""
    made: list[TrainingStep] = []

    def changed(device: str) -> TrainingStep:
        made.append(build.make(device))
        change(made[-1].model)
        return made[-1]

    steady = max(peaks(replace(build, make=changed))[1:])
    return [p.grad for p in made[-1].model.parameters()], steady


def test_exports_run_as_they_are_counted(net: str, plan: Plan, made: dict[str, Any], tmp_path: Path) -> None:
    build, file = load_spec(net), tmp_path / "sac.py"
    file.write_text(made["policy"])
    eager, eager_bytes = ran(build, lambda model: None)
    gradients, peak_bytes = ran(build, runpy.run_path(str(file))["apply"])
    assert all(torch.equal(a, b) for a, b in zip(eager, gradients, strict=True))
    assert peak_bytes < eager_bytes
    # The states of the generator, 5,056 bytes that checkpoint holds for each block, are among them.
    assert peak_bytes == made["policy_peak_bytes"]
    assert made["every_n_layers"][2] == ["layers.0", "layers.2"]
    assert "'aten." in made["policy"]  # what the plan saves in blocks


def test_the_command_writes_the_policy_and_says_each_peak(
    plan: Plan, made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("executor.exports.exports", lambda given, model: made if given == plan else {})
    plan.save("plan.json")
    result = CliRunner().invoke(execute, ["export", "plan.json", "--trust", "-o", "sac.py", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [*answer["every_n_layers"]] == [*"1234"]
    assert answer["policy_peak_bytes"] > 0
    assert Path("sac.py").read_text() == answer["policy"]
    told = CliRunner().invoke(execute, ["export", "plan.json", "--trust"]).stdout
    assert "every_n_layers=2): layers.0, layers.2" in told


def test_a_model_without_blocks_is_refused(net: str, tmp_path: Path) -> None:
    text = NET.replace("nn.ModuleList(Block(32) for _ in range(4))", "nn.ModuleList([])")
    (tmp_path / "flat.py").write_text(text)
    flat = simulator.plan(recorded(load_spec(f"{tmp_path}/flat.py:build")).trace, "100%", seconds=1)
    with pytest.raises(PlanError, match="no repeated blocks"):
        exports(flat)
    with pytest.raises(PlanError, match="not the plan's"):
        exports(flat, net)


def test_a_plan_that_changes_the_step_itself_is_refused(plan: Plan) -> None:
    changed = replace(plan, rewrites=(Rewrite(kind="bits", storage=3),))
    with pytest.raises(PlanError, match="changes the step itself"):
        exports(changed)

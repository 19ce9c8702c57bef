"""`torch.compile(step, backend="lowtide")`: what is compiled trains as without it, by a plan or within a budget."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

from executor import apply_plan, fit
from executor.backend import lowtide
from simulator.core.problem import Problem
from simulator.prediction import ask as simulator
from tests.torch import small_nets
from tests.torch.steps import build_of, plan_of, recompute_all, recorded
from tracer.capture.compiling import SETTINGS
from tracer.measure.probes import cpu_loop
from tracer.step.step import load_spec
from traces.errors import BudgetError, CaptureError, PlanError, SpecError


class Deep(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = [
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
            for _ in range(depth)
        ]
        self.blocks, self.norm = nn.Sequential(*block), nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.blocks(x))
        return out


def steps(model: nn.Module, loss_of: Any, count: int = 3) -> list[torch.Tensor]:
    """Losses, then all that training changed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    out = []
    torch.manual_seed(1)
    for _ in range(count):
        loss = loss_of(torch.randn(256, 32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.detach())
    return [*out, *model.state_dict().values(), torch.get_rng_state()]


def peak(model: nn.Module, loss_of: Any) -> int:
    """The peak above what was there before, in a third forward and backward."""
    with cpu_loop() as watched:
        for _ in range(3):
            with watched.iteration():
                loss_of(torch.ones(256, 32)).backward()
            model.zero_grad()
    return watched.peaks[2]


@pytest.mark.parametrize("budget", ["55%", "100%"])
def test_a_step_within_a_budget_is_bit_equal(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    eager = Deep(6)
    planned = copy.deepcopy(eager)

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    compiled = torch.compile(loss_of, backend="lowtide", options={"budget": budget}, fullgraph=True)
    wanted = steps(eager, lambda x: loss_of(eager, x))
    for a, b in zip(wanted, steps(planned, lambda x: compiled(planned, x)), strict=True):
        assert torch.equal(a, b)
    assert "a graph of" in capsys.readouterr().err
    less = peak(planned, lambda x: compiled(planned, x)) - peak(eager, lambda x: loss_of(eager, x))
    assert less < (-500_000 if budget == "55%" else 1)


def test_a_model_by_a_plan_of_its_trace(tmp_path: Path) -> None:
    trace = recorded(load_spec(small_nets.spec("residual"))).trace
    plan = plan_of(trace, *recompute_all(Problem(trace)))
    eager = small_nets.Residual()
    planned = copy.deepcopy(eager)
    path = str(plan.save(tmp_path / "plan.json"))
    planned.compile(backend="lowtide", options={"plan": path}, fullgraph=True)
    x, y = torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
    for m in (eager, planned):
        torch.manual_seed(3)
        functional.cross_entropy(m(x), y).backward()
    for (name, p), q in zip(eager.named_parameters(), planned.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    other = torch.compile(nn.Linear(4, 4), backend="lowtide", options={"plan": plan})
    with pytest.raises(BackendCompilerFailed) as refused:
        other(torch.ones(2, 4))
    assert isinstance(refused.value.inner_exception, PlanError)


class Broken(Deep):
    """Looks at its values halfway."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[:2](x)
        if float(x.detach().sum()) > 1e9:
            raise ValueError
        out: torch.Tensor = self.norm(self.blocks[2:](x))
        return out


def test_a_break_is_an_error_with_its_line_or_its_parts_are_planned() -> None:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    eager, x = Broken(), torch.randn(64, 32)
    for options, error in (
        ({"budget": "60%"}, "breaks the graph.*sum.*"),
        ({"budget": 1 << 30, "parts": True}, "60%"),
    ):
        torch.compiler.reset()
        step = torch.compile(loss_of, backend="lowtide", options=options)
        with pytest.raises(BackendCompilerFailed, match=error):
            step(copy.deepcopy(eager), x)
    torch.compiler.reset()
    step = torch.compile(loss_of, backend="lowtide", options={"budget": "60%", "parts": True})
    planned = copy.deepcopy(eager)
    wanted = steps(eager, lambda x: loss_of(eager, x))
    assert all(map(torch.equal, wanted, steps(planned, lambda x: step(planned, x))))


def test_a_model_is_planned_in_parts() -> None:
    eager = Broken()
    planned, whole = copy.deepcopy(eager), copy.deepcopy(eager)
    with pytest.raises(CaptureError, match="cannot be captured"):
        fit(whole, (torch.randn(256, 32),), lambda y: y.square().mean(), budget="60%")
    fit(planned, (torch.randn(256, 32),), budget="60%", parts=True, say=lambda _: None)
    wanted = steps(eager, lambda x: eager(x).square().mean())
    assert all(map(torch.equal, wanted, steps(planned, lambda x: planned(x).square().mean())))
    receipt = planned.receipt()
    assert receipt.planned_steps == 3
    assert receipt.unplanned_steps == 0
    assert [c.steps for c in receipt.captures] == [3, 3]
    assert ".sum()) > 1e9" in receipt.breaks[0]


@pytest.mark.parametrize(
    "whole",
    [{"budget_of": "reserved"}, {"release_gradients": True}, {"allow": "fp"}, {"levers": ["offload"]}],
    ids=lambda given: next(iter(given)),
)
def test_parts_exclude_what_only_a_whole_step_can_be_planned_by(whole: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"^{next(iter(whole))} is for a step that is captured whole"):
        fit(Broken(), (torch.randn(256, 32),), budget="60%", parts=True, **whole)


def test_a_plan_of_the_whole_is_for_its_parts_by_its_share() -> None:
    trace = recorded(
        build_of(lambda: (Deep(), torch.randn(256, 32), lambda y: y.square().mean(), None))
    ).trace
    plan = simulator.plan(trace, "70%")
    planned = apply_plan(Broken(), plan, parts=True)
    planned(torch.randn(256, 32)).square().mean().backward()
    assert [c.fit for c in planned.receipt().captures] == ["replanned", "replanned"]
    with pytest.raises(CaptureError, match=r"\.sum\(\)"):
        apply_plan(Broken(), plan)(torch.randn(256, 32))


def test_too_many_compilations_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x).sin() * scale

    def make() -> Any:
        return Scaled(32, 32), torch.randn(256, 32), lambda y: y.square().mean(), None

    trace = recorded(build_of(make)).trace
    monkeypatch.setitem(SETTINGS, "recompile_limit", 2)
    planned = apply_plan(Scaled(32, 32), plan_of(trace, *recompute_all(Problem(trace))))
    for k in range(2):
        planned(torch.randn(256, 32), scale=0.5 + k)
    with pytest.raises(CaptureError, match="limit"):
        planned(torch.randn(256, 32), scale=3.5)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, SpecError),
        ({"budget": "60%", "plan": "plan.json"}, SpecError),
        ({"budgets": "60%"}, SpecError),
        ({"budget": "much"}, SpecError),
        ({"budget": 1000}, BudgetError),
        ({"plan": "none.json"}, PlanError),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], error: type[Exception]) -> None:
    step = torch.compile(lambda m, x: m(x).sum(), backend=lambda *a: lowtide(*a, options=options))
    with pytest.raises(BackendCompilerFailed) as refused:
        step(Deep(), torch.randn(8, 32))
    assert isinstance(refused.value.inner_exception, error)

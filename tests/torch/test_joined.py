"""Model and loss function as one module: heads in tiles across that border, trained as any plan's module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executor import apply_plan, fit
from executor.fitting.gradient_errors import gradient_errors
from executor.verifying import verify
from simulator import Infeasible, plan
from tests.torch.conftest import Measurer
from tests.torch.test_tile import HEADS, WORDS, Net, batch, flat, in_tiles
from tracer import trace
from tracer.recording import record_real
from tracer.step.step import load_spec
from traces.devices import device as device_entry
from traces.errors import PlanError
from traces.records.gradient_errors import GradientErrors
from traces.records.trace import Trace


class Logits(Net):
    """Words to logits."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.words(ids))))


def apart(net: Net) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """A model of logits, and what a net's forward does with them as a loss function."""
    loss, weights = net.loss, net.weights.clone()
    net.__class__, net.loss = Logits, None
    return net, lambda logits, targets: loss(logits, targets, weights)


class Trained(nn.Module):
    """A model and its loss, as a user joins them."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(x), y)


def joined(model: nn.Module, given: Any, loss: Callable[..., Any], **options: Any) -> Trace:
    of = trace(Trained(model, loss), given, **options)
    assert of.meta.stretches
    return of


def agree(model: nn.Module, planned: nn.Module, rtol: float = 2e-6) -> None:
    for (name, p), q in zip(model.named_parameters(), planned.parameters(), strict=True):
        assert float((p.grad - q.grad).norm()) <= rtol * float(p.grad.norm()), name


# What stands on the border: weights on both sides of it. What heads there are is test_tile's.
def test_gradients_are_those_of_the_untouched_step() -> None:
    torch.manual_seed(0)
    model, loss = apart(HEADS["tied"]())
    x, y = batch().values()
    of = joined(model, (x, y), loss)
    planned = apply_plan(Trained(copy.deepcopy(model), loss), in_tiles(of, 4))
    for parts in (1, 3):  # of an accumulated step
        model.zero_grad()
        planned.zero_grad()
        for _ in range(parts):
            asked = loss(model(x), y)
            (asked / parts).backward()
            made = planned(x, y)
            (made / parts).backward()
        assert torch.allclose(made, asked, rtol=1e-6)
        agree(model, planned.model)


def wide() -> tuple[Any, Any, Any, Any]:
    """A head with a bias at a size at which it decides the peak, and a loss outside."""
    torch.manual_seed(0)
    model, loss = apart(HEADS["bias"]())[0], flat
    ids = torch.randint(0, WORDS, (16, 50))
    return model, (ids, ids.flip(1)), loss, lambda ps: torch.optim.SGD(ps, lr=0.5)


def test_a_trace_of_model_and_loss_has_a_head() -> None:
    model, given, loss, optimizer = wide()
    with pytest.raises(Infeasible):
        plan(trace(model, given, loss=loss, optimizer=optimizer), "50%", allow="fp")
    of = joined(model, given, loss, optimizer=optimizer)
    named = {"model", *(f"model.{part}" for part in ("words", "layer", "head"))}
    assert set(of.ops.module[: of.meta.forward_ops]) == {"", *named}
    assert "model.head.weight" in of.storages.name
    with pytest.raises(Infeasible, match=r"--allow fp \(tile\) lowers"):
        plan(of, "50%")
    tiled = plan(of, "50%", allow="fp")
    assert [r.kind for r in tiled.rewrites] == ["tile"]
    assert tiled.predicted["plan"]["peak_allocated_bytes"] <= tiled.budget_bytes
    with pytest.raises(Infeasible, match="No plan can"):
        plan(of, "50%", allow="fp", levers=["bits"])
    assert plan(of, "100%", allow="fp").rewrites == ()


def deep() -> tuple[Any, Any, Any, Any]:
    """As much before the head as packing can take less of, and a loss outside."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(nn.Embedding(WORDS, 32), *layers, nn.Linear(32, WORDS))
    ids = torch.randint(0, WORDS, (16, 50))
    return Trained(model, flat), (ids, ids.flip(1)), None, lambda ps: torch.optim.SGD(ps, lr=0.1)


DEEP = f"{Path(__file__).resolve()}:deep"


def test_errors_are_measured_with_the_loss_too_and_plan_its_head_in_tiles_beside_packed_values(
    measurer: Measurer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulator.levers.pack.at_rate", lambda rate, nbytes: 0)  # cheaper than tiles
    spec = load_spec(DEEP, {})
    of = record_real(spec, device_entry("cpu"), "cpu", rounds=1, warmup=1)
    known = GradientErrors.load(gradient_errors(spec, of, ("int8",)).save(tmp_path / "errors.json"))
    asked: Any = {"allow": "approximate", "errors": known, "max_gradient_error": 0.1, "planner": "save-all"}
    made = plan(of, "30%", **asked)
    assert {r.kind for r in made.rewrites} == {"tile", "int8"}
    found = verify(spec, made, steps=2)
    assert found.equal
    assert 0 < found.gradient_error < 0.1
    assert measurer.steady_peak(made, tmp_path) == made.predicted["plan"]["peak_allocated_bytes"]


def test_fit_trains_a_user_s_module_of_both_with_the_loss_in_tiles() -> None:
    model, (x, y), loss, make = wide()
    eager = copy.deepcopy(model)
    planned = fit(
        Trained(model, loss), (x, y), optimizer=make(model.parameters()), budget="50%", allow="fp", say=list
    )
    for made in (planned(x, y), loss(eager(x), y)):
        made.backward()
    agree(eager, model)
    few = planned(x[:3], y[:3])
    assert torch.allclose(few, loss(eager(x[:3]), y[:3]), rtol=1e-5)
    receipt = planned.receipt()
    assert (receipt.planned_steps, receipt.unplanned_steps) == (2, 0)
    assert [c.fit for c in receipt.captures] == ["exact", "resized"]


def test_a_plan_of_both_is_none_of_the_model_s() -> None:
    model, given, loss, _ = wide()
    made = in_tiles(joined(model, given, loss), 4)
    with pytest.raises(PlanError, match="for another model: in hand: Trained"):
        apply_plan(model, made)

"""Model and loss function as one: heads in tiles across that border, trained by `planned_loss`, and never silently
otherwise."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from executor import apply_plan, fit, planned_loss, remove_plan, unplanned  # noqa: E402
from executor.fitting.gradient_errors import gradient_errors, with_error  # noqa: E402
from executor.verifying import verify  # noqa: E402
from simulator import Infeasible, plan  # noqa: E402
from simulator.core.problem import Problem  # noqa: E402
from simulator.levers import rewritten_problem  # noqa: E402
from tests.torch.conftest import Measurer  # noqa: E402
from tests.torch.steps import recorded  # noqa: E402
from tests.torch.test_tile import (  # noqa: E402
    HEADS,
    WORDS,
    Net,
    flat,
    in_tiles,
)
from tracer import trace  # noqa: E402
from tracer.measure.step import measure  # noqa: E402
from tracer.recording import record_real  # noqa: E402
from tracer.step.step import load_spec  # noqa: E402
from traces.devices import device as device_entry  # noqa: E402
from traces.errors import CaptureError, PlanError  # noqa: E402
from traces.records.gradient_errors import GradientErrors  # noqa: E402
from traces.records.trace import Trace  # noqa: E402


class Logits(Net):
    """Words to logits."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.words(ids))))


def apart(net: Net) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """A model of logits, and what a net's forward does with them as a loss function."""
    loss, weights = net.loss, net.weights.clone()
    net.__class__, net.loss = Logits, None
    return net, lambda logits, targets: loss(logits, targets, weights)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids, targets = torch.randint(0, WORDS, (4, 15)), torch.randint(0, WORDS, (4, 15))
    targets[0, :5] = 3
    return ids, targets


def joined(model: nn.Module, given: Any, loss: Callable[..., Any], **options: Any) -> Trace:
    of = trace(model, given, loss=loss, join_loss=True, **options)
    assert of.meta.stretches
    return of


def agree(model: nn.Module, planned: nn.Module, rtol: float = 2e-6) -> None:
    for (name, p), q in zip(model.named_parameters(), planned.parameters(), strict=True):
        assert float((p.grad - q.grad).norm()) <= rtol * float(p.grad.norm()), name


# What stands on the border: weights on both sides of it, a slice, random draws. What heads there are is test_tile's.
@pytest.mark.parametrize("head", ["tied", "shifted", "dropped"])
def test_gradients_are_those_of_the_untouched_step(head: str) -> None:
    torch.manual_seed(0)
    model, loss = apart(HEADS[head]())
    x, y = batch()
    of = joined(model, (x, y), loss)
    planned = apply_plan(copy.deepcopy(model), in_tiles(of, 4), loss=loss)
    for parts in (1, 3):  # of an accumulated step
        model.zero_grad()
        planned.zero_grad()
        for k in range(parts):
            torch.manual_seed(k)  # one head drops logits out
            asked = loss(model(x), y)
            (asked / parts).backward()
            torch.manual_seed(k)
            made = planned_loss(planned, (x, y))
            (made / parts).backward()
        assert torch.allclose(made, asked, rtol=1e-6)
        agree(model, planned)


class Named(Logits):
    """As transformers returns logits."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": mask, "logits": super().forward(ids)}


class Criterion(nn.Module):
    """Cross entropy with class weights, of a dict and another; with something of its own to train."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2.0, WORDS), ignore_index=3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, out: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = out["logits"][:, :-1].float().flatten(0, 1)
        return self.scale * self.inner(logits, given["targets"][:, 1:].flatten()) * given["weight"]


def test_a_loss_module_of_dicts_under_autocast() -> None:
    torch.manual_seed(0)
    net, _ = apart(HEADS["tied"]())
    net.__class__ = Named
    x, y = batch()
    given = {"ids": x, "mask": torch.ones(4, 15), "targets": y, "weight": torch.tensor(0.7)}
    model, loss = net, Criterion()
    exact, mine = copy.deepcopy(model), copy.deepcopy(loss)
    of = joined(model, given, loss, amp="bfloat16")
    planned = apply_plan(copy.deepcopy(model), in_tiles(of, 4), loss=mine)
    loss(exact(x, given["mask"]), given).backward()
    scale = loss.scale.grad.clone()
    with torch.autocast("cpu", torch.bfloat16):
        eager, tiled = loss(model(x, given["mask"]), given), planned_loss(planned, given)
    loss.scale.grad = None
    eager.backward()
    tiled.backward()
    assert abs(float(mine.scale.grad - scale)) <= 2 * abs(float(loss.scale.grad - scale)) + 2**-8
    for p, a, b in zip(exact.parameters(), model.parameters(), planned.parameters(), strict=True):
        by_autocast, by_both = ((q.grad - p.grad).norm() / p.grad.norm() for q in (a, b))
        assert float(by_both) <= float(by_autocast) + 2**-8


def wide() -> tuple[Any, Any, Any, Any]:
    """A head with a bias at a size at which it decides the peak, and a loss outside."""
    torch.manual_seed(0)
    model, loss = apart(HEADS["bias"]())[0], flat
    ids = torch.randint(0, WORDS, (16, 50))
    return model, (ids, ids.flip(1)), loss, lambda ps: torch.optim.SGD(ps, lr=0.5)


SPEC = f"{Path(__file__).resolve()}:wide"


def test_the_peak_is_as_predicted(measurer: Measurer, tmp_path: Path) -> None:
    spec = load_spec(SPEC, {"join_loss": True})
    of = measure(recorded(spec), spec, "cpu", rounds=1, warmup=1).finish()
    made = in_tiles(of, 7)
    predicted = rewritten_problem(Problem(of), made.rewrites).saved.timeline.peak_allocated_bytes
    assert predicted < Problem(of).saved.timeline.peak_allocated_bytes // 3
    assert verify(spec, made, steps=2).equal
    assert measurer.steady_peak(made, tmp_path) == predicted


def test_a_trace_of_model_and_loss_has_a_head() -> None:
    model, given, loss, optimizer = wide()
    with pytest.raises(Infeasible, match="or with --join-loss in a loss function"):
        plan(trace(model, given, loss=loss, optimizer=optimizer), "50%", allow="fp")
    of = joined(model, given, loss, optimizer=optimizer)
    assert set(of.ops.module[: of.meta.forward_ops]) == {
        "",
        "model",
        "model.words",
        "model.layer",
        "model.head",
    }
    assert "model.head.weight" in of.storages.name
    with pytest.raises(Infeasible, match="With --allow fp the lever tile lowers"):
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
    return model, (ids, ids.flip(1)), flat, lambda ps: torch.optim.SGD(ps, lr=0.1)


DEEP = f"{Path(__file__).resolve()}:deep"


def test_errors_are_measured_with_the_loss_too_and_plan_its_head_in_tiles_beside_packed_values(
    measurer: Measurer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulator.levers.pack.at_rate", lambda rate, nbytes: 0)  # cheaper than tiles
    spec = load_spec(DEEP, {"join_loss": True})
    of = record_real(spec, device_entry("cpu"), "cpu", rounds=1, warmup=1)
    known = GradientErrors.load(gradient_errors(spec, of, ("int8",)).save(tmp_path / "errors.json"))
    asked: Any = {"allow": "approximate", "errors": known, "max_gradient_error": 0.1, "never": ["*"]}
    made = plan(of, "30%", **asked)
    assert {r.kind for r in made.rewrites} == {"tile", "int8"}
    own = with_error(spec, made)
    assert own.gradient_error is not None
    assert 0 < own.gradient_error < 0.1
    assert verify(spec, own, steps=2).equal
    assert measurer.steady_peak(own, tmp_path) == made.predicted["plan"]["peak_allocated_bytes"]


def test_fit_trains_with_the_loss_in_tiles() -> None:
    model, (x, y), loss, make = wide()
    eager, said = copy.deepcopy(model), []
    optimizers = [make(m.parameters()) for m in (model, eager)]
    planned = fit(
        model, (x, y), loss, optimizers[0], budget="50%", join_loss=True, allow="fp", say=said.append
    )
    assert any("planned_loss(model, batch)" in line for line in said)
    for _ in range(3):
        for made in (planned_loss(planned, (x, y)), loss(eager(x), y)):
            made.backward()
        agree(eager, planned)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    few = planned_loss(planned, (x[:3], y[:3]))
    assert torch.allclose(few, loss(eager(x[:3]), y[:3]), rtol=1e-5)
    receipt = planned.receipt()
    assert (receipt.planned_steps, receipt.unplanned_steps) == (4, 0)
    assert [c.fit for c in receipt.captures] == ["exact", "resized"]
    planned.eval()
    assert torch.equal(planned(x), model.eval()(x))
    assert torch.equal(planned_loss(planned, (x, y)), loss(model(x), y))
    assert planned.receipt().planned_steps == 4


def test_the_model_itself_is_not_silently_trained_without_the_plan() -> None:
    model, given, loss, _ = wide()
    x, y = given
    made = in_tiles(joined(model, given, loss), 4)
    with pytest.raises(PlanError, match="model and loss function as one"):
        apply_plan(model, made)
    planned = apply_plan(copy.deepcopy(model), made, loss=loss)
    with pytest.raises(PlanError, match="call planned_loss"):
        planned(x)
    with unplanned(planned):
        assert torch.equal(planned_loss(planned, given), loss(model(x), y))
    assert planned.receipt().unplanned_steps == 1
    other = apply_plan(copy.deepcopy(model), made, loss=loss, on_mismatch="replan")
    with pytest.warns(UserWarning, match="plan of its own.*call planned_loss"):
        assert torch.equal(loss(other(x), y), loss(model(x), y))
    assert [c.fit for c in other.receipt().captures] == ["replanned"]
    eager = apply_plan(model, made, loss=loss, on_mismatch="eager")
    with pytest.warns(UserWarning, match="without the plan"):
        eager(x)
    assert eager.receipt().unplanned_steps == 1


def test_what_the_loss_depends_on_is_watched() -> None:
    model, (x, y), _, _ = wide()
    loss = nn.CrossEntropyLoss()

    def of_rows(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(logits.flatten(0, 1), targets.flatten())

    made = in_tiles(joined(model, (x, y), of_rows), 4)
    planned = apply_plan(copy.deepcopy(model), made, loss=of_rows)
    planned_loss(planned, (x, y))
    loss.ignore_index = int(y[0, 0])
    assert torch.allclose(planned_loss(planned, (x, y)), of_rows(model(x), y), rtol=1e-6)
    loss.label_smoothing = 0.3
    with pytest.raises(PlanError, match="another graph"):
        planned_loss(planned, (x, y))


class Regularised(Logits):
    def criterion(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return flat(logits, targets) + self.head.weight.pow(2).mean().reshape(1)


def test_a_method_of_the_model_is_that_of_the_planned_one() -> None:
    model, (x, y), _, _ = wide()
    model.__class__ = Regularised
    eager = copy.deepcopy(model)
    made = in_tiles(joined(model, (x, y), model.criterion), 4)
    planned = apply_plan(model, made, loss=model.criterion)
    several = [planned_loss(planned, (x, targets)) for targets in (y, y.flip(0))]  # before one backward
    sum(several).backward()
    sum(eager.criterion(eager(x), targets).sum() for targets in (y, y.flip(0))).backward()
    agree(eager, planned)
    with pytest.raises(RuntimeError, match="second time"):
        several[0].backward()
    with torch.no_grad():
        planned_loss(planned, (x, y))
    assert planned.receipt().planned_steps == 2


class Whole(nn.Module):
    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return flat(logits, targets)


def test_copies_and_pickles_have_the_loss_and_what_has_none_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, _, _ = wide()
    loss = Whole()
    planned = apply_plan(model, in_tiles(joined(model, given, loss), 4), loss=loss)
    for other in (copy.deepcopy(planned), pickle.loads(pickle.dumps(planned))):
        planned_loss(other, given).backward()
        assert other.receipt().planned_steps == 1
    with pytest.raises(PlanError, match="is not"):
        planned_loss(remove_plan(other), given)
    with pytest.raises(CaptureError, match="remove_plan"):
        trace(model, given, loss=loss)
    plain = plan(trace(remove_plan(model), given, loss=loss), "100%")
    with pytest.raises(PlanError, match="given no loss function"):
        planned_loss(apply_plan(model, plain), given)
    other = apply_plan(copy.deepcopy(model), plain, loss=loss)
    assert torch.equal(planned_loss(other, given), loss(remove_plan(model)(given[0]), given[1]))
    assert other.receipt().planned_steps == 1
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(PlanError, match="DistributedDataParallel"):
        planned_loss(other, given)

"""A planned model is the user's object: copied, saved, changed and unplanned as hers, and equal to eager throughout."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import executor.backend as module_module
import executor.graphs.graph as graph_module
import tracer.capture.capture as capture_module
from executor import apply_plan, fit, remove_plan, unplanned
from executor.frameworks.first_batch import FirstBatchCallback
from simulator.core.problem import Problem
from tests.torch import small_nets
from tests.torch.steps import build_of, plan_of, recompute_all, recorded, reruns
from tracer.capture.compiling import compile_joint
from tracer.torch_api import FakeTensor
from traces.errors import BudgetError, PlanError, SpecError
from traces.records.plan import Plan


def compiled(model: Any) -> list[Any]:
    """What was compiled for a planned model so far."""
    made: list[Any] = model._lowtide.compiler.compiled
    return made


def batch(size: int = 4, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 16, 16, generator=g), torch.randint(5, (size,), generator=g)


def planned_for(make: Callable[[], nn.Module], example: Any, loss: Any = None) -> Plan:
    """A plan that recomputes all that may be, of a model and a batch."""
    trace = recorded(build_of(lambda: (make(), example, loss, None))).trace
    return plan_of(trace, *recompute_all(Problem(trace)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned_for(small_nets.Residual, batch(), functional.cross_entropy)


def residual() -> nn.Module:
    torch.manual_seed(0)
    return small_nets.Residual()


def same_training(
    eager: nn.Module, planned: nn.Module, steps: int = 3, step: Callable[..., Any] | None = None
) -> None:
    """Train both from one random state; losses, parameters, buffers and random states must agree in every bit."""

    def ordinary(model: nn.Module, seed: int) -> torch.Tensor:
        x, y = batch(seed=seed)
        return functional.cross_entropy(model(x), y)

    states, losses = [], []
    for model in (eager, planned):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = []
        for k in range(steps):
            loss = (step or ordinary)(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append(loss.item())
        losses.append(run)
        states.append({**model.state_dict(), "random state": torch.get_rng_state()})
    assert losses[0] == losses[1]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def twins() -> tuple[nn.Module, nn.Module]:
    return residual(), residual()


# The object


def test_in_place_it_is_the_very_object_until_the_plan_is_removed(plan: Plan) -> None:
    eager, model = twins()
    assert apply_plan(model, plan) is model
    same_training(eager, model)
    assert len(compiled(model)) == 1
    assert remove_plan(model) is model
    assert vars(model).keys() == vars(eager).keys()
    same_training(eager, model)
    with pytest.raises(PlanError, match="has no plan; apply_plan gives it one"):
        remove_plan(model)


def test_a_module_that_is_planned_at_its_first_call() -> None:
    """By what the callbacks of frameworks share."""
    eager, model = twins()
    chosen = FirstBatchCallback(budget="80%", seconds=1, say=lambda text: None)
    chosen.begin(model, None, {})
    assert chosen.awaits(model)
    same_training(eager, model)
    assert len(compiled(model)) == 1  # when it was planned
    chosen.end(model)
    assert (chosen.receipt.planned_steps, chosen.receipt.unplanned_steps) == (3, 0)
    assert chosen.receipt.plan.actions
    assert vars(model).keys() == vars(eager).keys()


def test_a_second_plan_replaces_the_first(plan: Plan) -> None:
    eager, model = twins()
    planned = apply_plan(model, plan)
    again = apply_plan(planned, plan_of_nothing(plan))
    assert again is model
    same_training(eager, again)
    (made,) = compiled(again)
    assert not reruns(made.rewritten)


def plan_of_nothing(plan: Plan) -> Plan:
    return Plan(meta=plan.meta)


def test_unplanned_runs_the_model_s_own_forward(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, model = twins()
    planned = apply_plan(model, plan)
    whole = nn.Sequential(planned)
    ran: list[Any] = []
    monkeypatch.setattr(
        module_module, "compile_graph", lambda *a, **_: ran.append(a) or pytest.fail("captured")
    )
    with unplanned(whole), unplanned(planned):
        same_training(eager, planned)
    assert not ran
    with pytest.raises(pytest.fail.Exception), warnings.catch_warnings():
        planned(batch()[0])


# Copies


def reloaded(model: nn.Module, folder: Path) -> Any:
    torch.save(model, folder / "m.pt")
    return torch.load(folder / "m.pt", weights_only=False)


@pytest.mark.parametrize(("how", "used"), [(lambda m, _: copy.deepcopy(m), False), (reloaded, True)])
def test_a_copy_trains_by_the_plan(how: Any, used: bool, plan: Plan, tmp_path: Path) -> None:
    eager, model = twins()
    planned = apply_plan(model, plan)
    if used:
        same_training(eager, planned, steps=1)
    other = how(planned, tmp_path)
    assert type(other) is small_nets.Residual
    assert compiled(other) == []
    assert other._lowtide.compiler.plan == plan
    assert {id(p) for p in other.parameters()}.isdisjoint(map(id, planned.parameters()))
    same_training(eager, other)
    assert len(compiled(other)) == 1
    assert len(compiled(planned)) == used
    assert "forward" not in vars(remove_plan(other))


# Plans from the model in hand


class Deep(nn.Module):
    """Linear, GELU, batch norm and dropout, three times: what plans can make smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (
            nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.BatchNorm1d(32), nn.Dropout(0.2)) for _ in range(3)
        )
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor, scale: float = 1.0, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = self.blocks(x) * scale
        return x if bias is None else x + bias


def rows(size: int = 128, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 32, generator=g), torch.randn(size, 32, generator=g)


def on_rows(model: nn.Module, seed: int) -> torch.Tensor:
    x, y = rows(seed=seed)
    return functional.mse_loss(model(x), y)


def fitted(model: nn.Module, budget: str | int = "75%", **options: Any) -> nn.Module:
    return fit(
        model,
        rows(),
        functional.mse_loss,
        budget=budget,
        **{"say": lambda _: None, "seconds": 0.5, **options},
    )


def test_fit_captures_once_and_trains_as_eager_does(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[str] = []

    for module in (capture_module, graph_module):  # that of a trace, and that of a step

        def counted(*args: Any, name: str = module.__name__, **kwargs: Any) -> Any:
            captured.append(name)
            return compile_joint(*args, **kwargs)

        monkeypatch.setattr(module, "compile_joint", counted)
    eager, model = Deep(), Deep()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    told: list[str] = []
    planned = fitted(model, optimizer=optimizer, say=told.append)
    same_training(eager, planned, step=on_rows)
    assert captured == [graph_module.__name__]
    (made,) = compiled(planned)
    assert made.fit == "exact"
    assert reruns(made.rewritten)
    assert [line.partition(" ")[0] for line in told] == ["captured", "planned"]
    plan = planned._lowtide.compiler.plan
    assert plan.budget_of == "allocated"
    assert plan.predicted["plan"]["peak_allocated_bytes"] <= plan.budget_bytes
    assert not optimizer.state


def test_fit_calls_nothing_of_a_model_that_counts_its_calls() -> None:
    class Counting(Deep):
        calls, last = 0, None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = super().forward(x)
            return self.last

    eager, model = Counting(), Counting()
    fitted(model)
    assert (model.calls, model.last) == (0, None)
    same_training(eager, model, step=on_rows)
    assert model.calls == eager.calls
    assert not isinstance(model.last, FakeTensor)


def test_fit_leaves_sizes_that_vary_to_the_first_call() -> None:
    eager, model = Deep(), Deep()
    x, target = rows()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    fit(model, (x, target), functional.mse_loss, budget="100%", say=lambda _: None)
    assert not compiled(model)
    same_training(eager, model, step=on_rows)
    assert len(compiled(model)) == 1


def test_fit_of_a_model_in_evaluation_mode_and_with_hooks() -> None:
    eager, model = Deep(), Deep()
    for m in (eager, model):
        m.register_forward_hook(lambda m, args, out: out * 2)
    model.eval()
    told: list[str] = []
    assert fitted(model, say=told.append) is model
    assert "evaluation mode" in told[0]
    assert all(m.training for m in model.modules())
    same_training(eager, model, step=on_rows)
    assert len(compiled(model)) == 1


def test_fit_of_a_model_that_is_nowhere() -> None:
    with pytest.raises(SpecError, match="the model is on meta"):
        fitted(Deep().to("meta"))


def test_fit_says_the_least_budget_that_would_do() -> None:
    model = Deep()
    with pytest.raises(BudgetError, match=r"Give a budget of \d") as refused:
        fitted(model, 1000)
    least = refused.value.figures["lowest_peak_bytes"]
    assert f"({least} bytes)" in str(refused.value)
    assert type(model) is Deep
    fitted(model, least)


# Calls that the plan is not for


def odd(model: nn.Module, k: int) -> torch.Tensor:
    """Ordinary steps, and one with another argument, one whose input wants a gradient, two with a frozen block."""
    x, y = rows(seed=k)
    model.blocks[0].requires_grad_(k not in (4, 5))
    if k == 1:
        return functional.mse_loss(model(x, bias=torch.ones(32)), y)
    if k == 2:
        x.requires_grad_()
    loss = functional.mse_loss(model(x), y)
    if k == 2:  # as a gradient penalty's first call, and a second call
        return model(x).mean() + loss.detach() + torch.autograd.grad(loss, x)[0].abs().sum()
    return loss


def odd_twice(model: nn.Module, k: int) -> torch.Tensor:
    return odd(model, k % 6)


@pytest.mark.parametrize("how", ["eager", "replan"])
def test_a_long_run_survives_odd_calls(how: str) -> None:
    eager, planned = Deep(), fitted(Deep(), on_mismatch=how)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        same_training(eager, planned, steps=12, step=odd_twice)
    said = [w for w in said if "training call" in str(w.message)]
    assert {w.filename for w in said} == {__file__}  # where the model is called
    told = [str(w.message) for w in said]
    assert not any("on_mismatch" in text for text in told)
    receipt = planned.receipt()
    assert len(told) == 3
    if how == "eager":
        assert all(text.startswith("a training call runs without the plan: ") for text in told)
        # one with the bias, two whose input wants a gradient, two with a frozen block; each came twice
        assert receipt.unplanned_steps == sum(receipt.unplanned_because.values()) == 2 * (1 + 2 + 2)
        assert [c.fit for c in receipt.captures] == ["exact"]
        assert receipt.planned_steps == 2 * 2
    else:
        assert all("by a plan of its own: " in text for text in told)
        assert receipt.unplanned_steps == 0
        assert [(c.fit, c.steps) for c in receipt.captures] == [
            ("exact", 4), ("replanned", 2), ("replanned", 4), ("replanned", 4),
        ]  # fmt: skip
        assert receipt.planned_steps == 14
        assert all(reruns(c.rewritten) for c in compiled(planned))
    assert str(receipt).startswith(f"{receipt.planned_steps} steps by the plan")


def test_by_default_an_odd_call_is_an_error(plan: Plan) -> None:
    planned = apply_plan(Deep(), fitted(Deep())._lowtide.compiler.plan)
    for _ in range(2):
        with pytest.raises(PlanError, match="made for another graph"):
            planned(rows()[0], bias=torch.ones(32))
    with pytest.raises(SpecError, match="give error, eager or replan"):
        apply_plan(Deep(), plan, on_mismatch="shrug")


def test_a_call_that_cannot_be_captured_runs_without_the_plan() -> None:
    class Picky(Deep):
        def forward(self, x: torch.Tensor, check: bool = False) -> torch.Tensor:  # type: ignore[override]
            if check and float(x.sum()) > 1e9:
                raise ValueError
            return super().forward(x)

    eager, planned = Picky(), fitted(Picky())

    def step(model: nn.Module, k: int) -> torch.Tensor:
        x, y = rows(seed=k)
        return functional.mse_loss(model(x, check=k > 0), y)

    with pytest.warns(UserWarning, match="runs without the plan"):
        same_training(eager, planned, step=step)
    assert planned.receipt().unplanned_steps == 2
    assert planned.receipt().planned_steps == 1


def test_steps_inside_unplanned_are_counted() -> None:
    planned = fitted(Deep())
    with unplanned(planned):
        planned(rows()[0])
    planned.eval()
    planned(rows()[0])
    receipt = planned.receipt()
    assert (receipt.planned_steps, receipt.unplanned_steps) == (0, 1)
    assert receipt.unplanned_because == {"inside `with unplanned`": 1}


# Why a plan is not for a call


class Heads(nn.Module):
    """An embedding, a dropout, a norm and a head; two inputs that may be one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU())
        self.head = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, weight: Any = None, scale: float = 1.0) -> Any:
        logits = self.head(self.body(self.embed(ids))) * scale
        loss = functional.cross_entropy(logits, labels)
        return {"loss": loss if weight is None else (loss * weight).sum(), "logits": logits}


def tokens(size: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(16, (size,), generator=torch.Generator().manual_seed(seed))


@functools.cache
def plan_of_heads(shared: bool = False) -> Plan:
    ids = tokens()
    batch = {"ids": ids, "labels": ids if shared else ids.clone()}
    return planned_for(Heads, batch)


def call_with(**more: Any) -> Callable[[nn.Module], Any]:
    return lambda m: m(ids=tokens(), labels=tokens(), **more)


def ordinary(m: nn.Module) -> Any:
    return m(ids=tokens(), labels=tokens(seed=1))


MISMATCHES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any], str]] = {
    "an argument more": (lambda m: m, call_with(weight=torch.ones(3)), r"argument: weight \(float32\[n\]\) new"),
    "another type": (
        lambda m: m,
        lambda m: m(ids=tokens().int(), labels=tokens()),
        r"argument: ids \(int32\[n\]\) new; argument: ids \(int64\[n\]\) gone.*Call the model as it was traced",
    ),
    "frozen": (
        lambda m: m.embed.requires_grad_(False),
        ordinary,
        r"frozen parameters \(requires_grad is off\): 1 new; .* 0 gone",
    ),
    "a module in evaluation mode": (
        lambda m: m.body.eval(),
        ordinary,
        "modules in evaluation mode: 5 new; .* 0 gone",
    ),
    "a dtype": (lambda m: m.double(), ordinary, "parameters of type: float64 new; parameters of type: float32 gone"),
    "an op": (
        lambda m: m.body.__setitem__(3, nn.GELU()),
        ordinary,
        r"its ops are others \(structure \w+, and here \w+\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_names_its_cause(name: str) -> None:
    change, call, says = MISMATCHES[name]
    planned = apply_plan(Heads(), plan_of_heads())
    change(planned)
    with pytest.raises(PlanError, match=f"made for another graph.*{says}"):
        call(planned)


def test_another_model_is_refused_when_the_plan_is_applied() -> None:
    with pytest.raises(PlanError, match=r"another model: .* has 7 parameters, and this Linear has 2"):
        apply_plan(nn.Linear(2, 2), plan_of_heads())
    other = apply_plan(nn.Linear(2, 2), plan_of_heads(), on_mismatch="eager")
    with pytest.warns(UserWarning, match=r"argument: input .* new; argument: ids \(int64\[n\]\)"):
        other(torch.ones(1, 2))


@pytest.mark.parametrize("traced_shared", [False, True])
@pytest.mark.parametrize("called_shared", [False, True])
def test_two_arguments_share_memory_as_they_did(traced_shared: bool, called_shared: bool) -> None:
    plan = plan_of_heads(traced_shared)
    eager, planned = Heads(), apply_plan(Heads(), plan)
    if traced_shared != called_shared:
        ids = tokens()
        with pytest.raises(PlanError, match="arguments share memory otherwise"):
            planned(ids=ids, labels=ids if called_shared else ids.clone())
        return

    def step(model: nn.Module, k: int) -> torch.Tensor:
        ids = tokens(seed=k)
        return model(ids=ids, labels=ids if called_shared else ids.clone())["loss"]

    same_training(eager, planned, step=step)
    assert {c.fit for c in compiled(planned)} <= {"exact", "resized"}


def test_a_plan_without_a_sketch_says_less() -> None:
    plan = plan_of_heads()
    old = Plan.from_json(json.loads(json.dumps(replace(plan, meta=replace(plan.meta, sketch={})).to_json())))
    assert "sketch" not in old.to_json()["trace"]
    assert plan.to_json()["trace"]["sketch"]["parameters"][0] == 7
    planned = apply_plan(Heads(), old)
    with pytest.raises(PlanError, match=r"made for another graph.*its ops are others"):
        call_with(weight=torch.ones(3))(planned)

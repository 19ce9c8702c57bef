"""Packed values: the executor runs the simulated step, exact formats bit for bit, all in the predicted bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor import fit
from executor.codecs.approximate import noise
from executor.fitting.gradient_errors import gradient_errors
from executor.graphs.edited import rewritten
from executor.verifying import verify
from simulator.core.formats import FORMATS
from simulator.core.problem import Problem
from simulator.levers import rewritten_problem
from simulator.levers.pack import offer
from simulator.prediction import ask as api
from tests.torch import small_nets, steps
from tests.torch.conftest import Measurer
from tracer.step.step import load_spec
from traces.errors import PlanError, SpecError
from traces.records.plan import Plan, Rewrite, label_actions
from traces.records.trace import Trace


class Net(nn.Module):
    """Convolutions, max pooling, dropout, attention by a split product, and a mask of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.max_pool2d(functional.gelu(self.norm(self.before(x))), 2)
        y = self.drop(y).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(y).split(16, 2)
        weights = (q @ k.transpose(1, 2)).masked_fill(q[:, :, :1] > k[:, :, :1].mT, -10.0).softmax(2)
        y = y + self.drop(self.out(self.drop(weights) @ v))
        return self.head(functional.gelu(y).mean(1))


def net() -> small_nets.Built:
    model = Net()
    batch = torch.randn(4, 3, 32, 32), torch.randint(5, (4,))
    return model, batch, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)


def narrow() -> small_nets.Built:
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.Tanh())))
    batch = torch.randn(512, 64), torch.randn(512, 64)
    return model, batch, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)


SPEC = f"{Path(__file__).resolve()}:net"
EXACT = ("bits", "narrow8", "narrow16", "narrow32")
LOSSY = tuple(name for name, rule in FORMATS.items() if not rule.exact)
QUICK = ("fp8_e4m3", "int4", "fewbit3")  # one of each kind


def packed(trace: Trace, *kinds: str) -> tuple[Rewrite, ...]:
    return tuple(r for kind in kinds for r in offer(Problem(trace), kind))


def test_masks_and_indices_are_found(trace: Trace) -> None:
    masks = {"gt", "dropout_mask_default", "dropout_mask_default_1", "dropout_mask_default_2"}
    indices = {"max_pool2d_with_indices": "narrow16"}
    assert {r.op: r.kind for r in packed(trace, *EXACT)} == {**dict.fromkeys(masks, "bits"), **indices}


def test_exact_formats_train_bit_for_bit_in_the_predicted_bytes(
    trace: Trace, measurer: Measurer, tmp_path: Path
) -> None:
    plan = Plan(meta=trace.meta, rewrites=packed(trace, *EXACT))
    assert verify(load_spec(SPEC, {}), plan, steps=3).bit_equal
    problem = rewritten_problem(Problem(trace), plan.rewrites)
    predicted = problem.saved.timeline
    assert predicted.peak_allocated_bytes < Problem(trace).saved.timeline.peak_allocated_bytes
    assert measurer.steady_peak(plan, tmp_path) == predicted.peak_allocated_bytes


@pytest.mark.parametrize(
    "format", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in LOSSY]
)
def test_lossy_formats_take_the_predicted_bytes(
    format: str, trace: Trace, measurer: Measurer, tmp_path: Path
) -> None:
    rewrites = packed(trace, format)
    assert len(rewrites) == 2 if FORMATS[format].of_activations else len(rewrites) > 8
    plan = Plan(meta=trace.meta, rewrites=rewrites, exactness="approximate")
    predicted = rewritten_problem(Problem(trace), rewrites).saved.timeline
    assert measurer.steady_peak(plan, tmp_path) == predicted.peak_allocated_bytes


def test_a_plan_keeps_to_the_errors_that_were_measured_of_its_parts() -> None:
    spec = load_spec(SPEC.replace(":net", ":narrow"), {})
    trace = steps.recorded(spec).trace
    noise.cache_clear()
    known = gradient_errors(spec, trace, ("int8", "int2"))
    of = {k: [p.error for p in known.parts if p.kind == k] for k in known.kinds}
    assert (len(of["int8"]), len(of["int2"])) == (3, 3)
    assert 1e-4 < min(of["int8"]) < max(of["int2"])
    # Parts that round independently come to what all of them come to at once.
    rewrites = packed(trace, "int8")
    whole = verify(spec, Plan(meta=trace.meta, rewrites=rewrites, exactness="approximate"), steps=1)
    assert known.of(rewrites) / 1.5 < whole.gradient_error < known.of(rewrites) * 1.5
    plan = api.plan(
        trace,
        "95%",
        allow="approximate",
        errors=known,
        max_gradient_error=0.05,
        levers=["int8"],
        planner="save-all",
    )
    assert {r.kind for r in plan.rewrites} == {"int8"}
    found = verify(spec, plan, steps=2)
    assert found.equal
    assert found.gradient_error < 0.05
    # A plan that says less than it is off does not pass.
    less = tuple(replace(r, error=1e-6) for r in plan.rewrites)
    assert not verify(spec, replace(plan, rewrites=less), steps=1).equal


def test_fit_takes_the_levers_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simulator.levers.pack.at_rate", lambda rate, nbytes: 0)  # cheaper than recomputing
    models = []
    for levers in (None, ["bits", "narrow16"]):
        torch.manual_seed(0)
        model, (x, y), loss, optimizer = net()
        planned = fit(model, (x, y), loss, optimizer, budget="95%", levers=levers, say=lambda line: None)
        assert bool(planned._lowtide.compiler.plan.rewrites) == (levers is not None)
        loss(planned(x), y).backward()
        models.append(planned)
    grads = ([p.grad for p in m.parameters()] for m in models)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with pytest.raises(SpecError, match="bitz: there is no such lever"):
        fit(model, (x, y), loss, optimizer, budget="95%", levers=["bitz"])


def test_packing_and_recomputing_together_train_bit_for_bit(trace: Trace) -> None:
    rewrites = packed(trace, *EXACT)
    problem = rewritten_problem(Problem(trace), rewrites)
    actions = steps.recompute_all(problem)
    again = {problem.trace.ops.name[i] for i in problem.replay(actions).schedule.recomputed_ops}
    assert any(name.endswith("_unpacked_in_forward") for name in again)  # from what is saved of a mask
    plan = Plan(meta=trace.meta, actions=label_actions(problem.trace, actions), rewrites=rewrites)
    assert verify(load_spec(SPEC, {}), plan, steps=3).bit_equal


class Spread(nn.Module):
    """Pools a plane of which memory holds one number: the trace has no more positions than that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.max_pool2d((self.weight * x).expand(2, 2, 200, 200), 2)


def test_indices_that_a_format_may_not_hold_are_refused_whatever_the_trace_says() -> None:
    program = steps.program(Spread(), torch.ones(2, 2, 1, 1))
    (rewrite,) = packed(program.trace(), "narrow8", "narrow16", "narrow32")
    assert rewrite.kind == "narrow8"
    with pytest.raises(PlanError, match="may have numbers that narrow8 cannot hold"):
        rewritten(program, [rewrite])
    assert rewritten(program, [replace(rewrite, kind="narrow32")])

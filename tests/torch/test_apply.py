"""A planned module in the user's own loop behaves as the model itself, and refuses what it cannot do."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

import executor.backend as module_module
import executor.graphs.graph as backend_module
from executor import apply_plan
from executor.verifying import _difference, _train, verify
from simulator.core.problem import Problem
from tests.torch import small_nets
from tests.torch.steps import build_of, plan_of, random_actions, recompute_all, recorded
from tests.torch.test_training_in_hand import batch, twins
from tracer.capture.passes import dropout as dropout_module
from tracer.record import program as program_module
from tracer.step.step import load_spec
from traces.errors import CaptureError, PlanError
from traces.records.measurement import Verification
from traces.records.plan import Plan

RESIDUAL = small_nets.spec("residual")


@pytest.fixture(scope="module")
def plan() -> Plan:
    trace = recorded(load_spec(RESIDUAL)).trace
    actions = random_actions(trace, random.Random(5))
    assert actions
    return plan_of(trace, *actions)


def same(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (other, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(x, y), name
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


def both(
    eager: nn.Module, planned: nn.Module, run: Callable[[nn.Module], Any], seed: int = 7
) -> tuple[Any, Any]:
    """Run something on both from the same random state; both leave the generator in the same state."""
    torch.manual_seed(seed)
    a = run(eager)
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    b = run(planned)
    assert torch.equal(torch.get_rng_state(), after)
    return a, b


def test_evaluation_and_no_grad_use_the_model_s_own_forward(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = twins()
    planned = apply_plan(twin, plan)

    def refuse(*_: Any) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr(module_module, "compile_graph", refuse)
    x, _ = batch()

    def without(m: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return m(x)

    assert torch.equal(*both(model, planned, without))
    same(model, planned)  # in training mode, so the statistics moved
    model.eval(), planned.eval()
    a, b = both(model, planned, lambda m: m(x))
    assert torch.equal(a, b)
    assert b.requires_grad
    planned.train()
    with pytest.raises(CaptureError, match="captured"):
        planned(x)


def test_the_gradient_of_an_argument(plan: Plan) -> None:
    model, twin = twins()
    x, y = batch()

    def make() -> tuple[Any, ...]:
        return small_nets.Residual(), (x.clone().requires_grad_(), y), functional.cross_entropy, None

    trace = recorded(build_of(make)).trace
    planned = apply_plan(twin, plan_of(trace, *recompute_all(Problem(trace))))

    def run(m: nn.Module) -> torch.Tensor:
        u = x.clone().requires_grad_()
        functional.cross_entropy(m(u), y).backward()
        assert u.grad is not None
        return u.grad

    assert torch.equal(*both(model, planned, run))
    same(model, planned)


def test_backward_has_no_constant_twice() -> None:
    """Of a constant that the model makes in forward, and a plan again in backward, one tensor waits for both."""

    class Shifts(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) * torch.tensor([0.5, 1.5, 2.5, 617.0])).sin()

    def make() -> tuple[Any, ...]:
        return Shifts(4, 4), (torch.randn(8, 4),), lambda y: y.sum(), None

    trace = recorded(build_of(make)).trace
    planned = apply_plan(Shifts(4, 4), plan_of(trace, *recompute_all(Problem(trace))))
    planned(torch.randn(8, 4)).sum().backward()
    real = (
        x for x in gc.get_objects() if type(x) is torch.Tensor and x.shape == (4,) and x.device.type == "cpu"
    )
    assert len({x.data_ptr() for x in real if x[-1] == 617.0}) == 1


def test_a_plan_for_another_model_is_refused_before_anything_ran(plan: Plan) -> None:
    _, twin = twins()
    twin.head = nn.Sequential(twin.head, nn.ReLU())[:1]  # the same parameters under other names
    with pytest.raises(PlanError, match="of other names"):
        apply_plan(twin, plan)
    _, twin = twins()
    twin.drop = nn.Softsign()
    planned = apply_plan(twin, plan)
    with pytest.raises(PlanError, match="made for another graph"):
        planned(batch()[0])
    assert int(planned.norm.num_batches_tracked) == 0


def test_an_output_outside_the_plan_s_loss_can_be_read_but_not_differentiated() -> None:
    x = torch.randn(3, 4)
    trace = recorded(build_of(lambda: (small_nets.TwoHeads(), x, lambda out: out["a"].sum(), None))).trace
    model = small_nets.TwoHeads()
    planned = apply_plan(copy.deepcopy(model), plan_of(trace))
    out, want = planned(x), model(x)
    assert out["kind"] == "two"
    assert all(torch.equal(out[k], want[k]) for k in ("a", "b", "ids"))
    out["a"].sum().backward()
    assert planned.a.weight.grad is not None
    out = planned(x)
    with pytest.raises(PlanError, match="differentiates output 1"):
        (out["a"].sum() + out["b"].sum()).backward()
    assert planned.b.weight.grad is None


# The verification itself can fail


def fresh() -> tuple[Any, Plan]:
    """The residual net, with everything recomputed that may be, by the flags of this moment."""
    build = load_spec(RESIDUAL)
    trace = recorded(build).trace
    return build, plan_of(trace, *recompute_all(Problem(trace)))


@pytest.fixture(scope="module")
def honest() -> tuple[Any, Plan]:
    return fresh()


def test_verification_of_an_honest_plan(honest: tuple[Any, Plan]) -> None:
    outcome = verify(*honest, steps=2)
    assert outcome.equal
    assert outcome.bit_equal
    assert set(outcome.max_abs_difference.values()) == {0.0}
    assert len(outcome.losses) == 2


@pytest.mark.parametrize(
    "why",
    [
        "histc does not have a deterministic implementation",
        "this uses CuBLAS and is not deterministic: set CUBLAS_WORKSPACE_CONFIG=:4096:8",
    ],
)
def test_kernels_that_vary_are_allowed_only_where_a_step_needs_one(
    monkeypatch: pytest.MonkeyPatch, honest: tuple[Any, Plan], why: str
) -> None:
    asked: list[bool] = []

    def train(*sides: Any) -> Any:
        asked.append(torch.is_deterministic_algorithms_warn_only_enabled())
        if not asked[-1]:
            raise RuntimeError(why)
        return _train(*sides)

    monkeypatch.setattr("executor.verifying._train", train)
    found = verify(*honest, steps=1)
    assert found.bit_equal
    assert ("CUBLAS_WORKSPACE_CONFIG" in found.note) is ("CuBLAS" in why)
    assert asked == [False, True]


@pytest.mark.parametrize(
    ("loss", "gradient", "equal"), [(1e-6, 1e-7, True), (1e-3, 1e-7, False), (0, 1e-3, False)]
)
def test_what_varies_on_a_gpu_may_vary_with_a_plan(
    loss: float, gradient: float, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(loss: float, gradient: float) -> Verification:
        off = {"loss": loss, "gradients": gradient}
        return Verification(equal=False, bit_equal=False, steps=1, max_abs_difference=off, losses=(10.0,))

    results = iter((found(loss, gradient), found(0.0, 1e-7)))
    monkeypatch.setattr("executor.verifying._compare", lambda *_: next(results))
    assert verify(cast(Any, None), Plan(meta=cast(Any, None)), "cuda").equal is equal


def test_verification_notices_a_mask_that_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "is_random", lambda n: False)
    build, plan = fresh()
    assert any("dropout_mask" in a.storage_name for a in _labelled(build, plan))
    outcome = verify(build, plan, steps=2)
    assert not outcome.equal
    assert outcome.max_abs_difference["gradients"] > 0
    assert outcome.max_abs_difference["rng_state"] > 0
    assert outcome.first_difference.startswith("step 1")


def _labelled(build: Any, plan: Plan) -> list[Any]:
    names = recorded(build).trace.storages.name
    return [SimpleNamespace(storage_name=names[a.storage]) for a in plan.actions]


@pytest.mark.parametrize(("off", "equal"), [(1e-3, False), (2e-7, True)])
def test_another_dropout_kernel_is_noticed_and_one_that_rounds_otherwise_is_said(
    off: float, equal: bool, monkeypatch: pytest.MonkeyPatch, honest: tuple[Any, Plan]
) -> None:
    original = dropout_module.split_dropout

    def scaled(graph: Any) -> None:
        original(graph)
        for n in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Scalar):
            n.args = (n.args[0], n.args[1] * (1 + off))

    monkeypatch.setattr("tracer.capture.captured.split_dropout", scaled)
    outcome = verify(*honest, steps=1)
    assert (outcome.equal, outcome.bit_equal) == (equal, False)
    assert equal or outcome.max_abs_difference["loss"] > 0
    assert ("other kernels than eager" in outcome.note) is equal


def twice(made: Any) -> None:
    """Statistics are written twice."""
    for n in list(made.forward.graph.nodes):
        if n.target is torch.ops.aten.copy_.default and n.args[0].meta["val"].is_floating_point():
            with made.forward.graph.inserting_after(n):
                made.forward.graph.call_function(torch.ops.aten.mul_.Tensor, (n, 1.5))


def wasteful(made: Any) -> None:
    """Random numbers are drawn that eager does not draw: all values are right, but the next step's would not be."""
    (output,) = made.forward.graph.find_nodes(op="output")
    with made.forward.graph.inserting_before(output):
        made.forward.graph.call_function(torch.rand, (1,))


def greedy(made: Any) -> None:
    """An op takes over memory that another op still reads."""
    for n in made.forward.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
        n.target = torch.ops.aten.mul_.Tensor


def forgetful(made: Any) -> None:
    """A gradient is missing."""
    (output,) = made.backward.graph.find_nodes(op="output")
    parameters, arguments = output.args[0]
    output.args = ((((None, *parameters[1:])), arguments),)


@pytest.mark.parametrize(
    ("spoil", "differs"),
    [
        (twice, {"buffers"}),
        (wasteful, {"rng_state"}),
        (greedy, {"gradients", "parameters", "optimizer_state"}),
        (forgetful, {"gradients", "parameters", "optimizer_state"}),
    ],
)
def test_verification_notices_a_spoiled_graph(
    spoil: Callable[[Any], None], differs: set[str], monkeypatch: pytest.MonkeyPatch, honest: tuple[Any, Plan]
) -> None:
    build, plan = honest
    plan = Plan(meta=plan.meta) if spoil is greedy else plan
    original = backend_module.rewrite

    def spoiled(program: Any, schedule: Any) -> Any:
        made = original(program, schedule)
        spoil(made)
        made.forward.recompile(), made.backward.recompile()
        return made

    monkeypatch.setattr(backend_module, "rewrite", spoiled)
    outcome = verify(build, plan, steps=1)
    assert not outcome.equal
    assert {k for k, d in outcome.max_abs_difference.items() if d} == differs
    assert outcome.first_difference.startswith("step 1")


def test_differences() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, nan, inf])
    assert _difference(x, x.clone()) == 0.0
    assert _difference(x, torch.tensor([1.5, nan, inf])) == 0.5
    assert _difference(x, torch.tensor([1.0, 2.0, inf])) == inf
    assert _difference(x, torch.tensor([1.0, nan, 0.0])) == inf
    assert _difference(x, None) == inf
    assert _difference(None, None) == 0.0
    assert _difference(x, x.double()) == inf
    assert _difference(torch.ones(0), torch.ones(0)) == 0.0


@pytest.mark.parametrize(
    ("left", "right", "equal", "same_bits"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), True, True),
        (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), True, False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True, True),
        (torch.tensor(float("nan")), -torch.tensor(float("nan")), True, False),
        (torch.tensor([0.0]).bfloat16(), torch.tensor([-0.0]).bfloat16(), True, False),
        (torch.tensor([1 + 0j]), torch.tensor([complex(1, -0.0)]), True, False),
        (torch.ones(2, 3).t(), torch.ones(3, 2), True, True),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True, True),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False, False),
    ],
)
def test_bit_equal_means_every_bit(
    left: torch.Tensor, right: torch.Tensor, equal: bool, same_bits: bool
) -> None:
    """0 and -0 are equal, so that a plan may swap them, but `bit_equal` must not say so."""

    def side(value: torch.Tensor) -> Any:
        return SimpleNamespace(
            step=SimpleNamespace(scaler=None),
            run=lambda: torch.tensor(1.0),
            tensors=lambda: {("parameters", "w"): value, ("gradients", "w"): None},
        )

    outcome = _train(side(left), side(right), 1)
    assert (outcome.equal, outcome.bit_equal) == (equal, same_bits)

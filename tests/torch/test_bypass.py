"""A forward of the instance's own, and wrappers around or below a plan: they work, or it is said; none trains without
the plan unseen."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor import apply_plan, remove_plan, unplanned
from tests.torch.small_nets import Residual
from tests.torch.test_training_in_hand import batch, planned_for, same_training
from tests.torch.test_training_in_hand import residual as net
from traces.errors import CaptureError, PlanError
from traces.records.plan import Plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned_for(net, batch(), functional.cross_entropy)


def as_eager(model: Callable[..., Any], planned: nn.Module, eager: nn.Module | None = None) -> None:
    """Trained through `model`, the planned module does what the untouched net does, and by its plan."""

    def step(m: nn.Module, k: int) -> torch.Tensor:
        x, y = batch(seed=k)
        return functional.cross_entropy((model if m is planned else m)(x), y)

    same_training(eager or net(), planned, step=step)
    assert len(planned._lowtide.compiler.compiled) == 1


def doubled(self: Residual, x: torch.Tensor) -> torch.Tensor:
    """A forward that goes around the class's and changes what it computes."""
    return 2 * Residual.forward(self, x)


def doubled_net() -> nn.Module:
    model = net()
    model.forward = types.MethodType(doubled, model)  # type: ignore[method-assign]
    return model


def plan_of_doubled() -> Plan:
    return planned_for(doubled_net, batch(), functional.cross_entropy)


def test_a_forward_of_the_instance_that_was_there_before_is_what_is_captured() -> None:
    eager, planned = doubled_net(), apply_plan(doubled_net(), plan_of_doubled())
    x = torch.randn(4, 3, 16, 16)
    planned.eval(), eager.eval()
    assert torch.equal(planned(x), eager(x))
    planned.train(), eager.train()
    as_eager(planned, planned, eager)
    assert vars(remove_plan(planned))["forward"].__func__ is doubled


def test_a_plan_of_the_class_s_forward_is_not_for_another(plan: Plan) -> None:
    with pytest.raises(PlanError):
        apply_plan(doubled_net(), plan)(batch()[0])


def test_one_that_wraps_it_is_no_part_of_the_capture(plan: Plan) -> None:
    """As Accelerate's, which is one object of autocast that must not be entered twice."""
    planned = apply_plan(net(), plan)
    inner, eager = planned.forward, net()
    depth: list[int] = []

    def forward(*args: Any) -> Any:
        assert not depth, "entered twice"
        depth.append(1)
        try:
            return 3 * inner(*args)
        finally:
            depth.clear()

    planned.forward = forward  # type: ignore[method-assign]
    of_eager = eager.forward
    eager.forward = lambda *args: 3 * of_eager(*args)  # type: ignore[method-assign]
    as_eager(planned, planned, eager)


def test_one_that_replaces_it_is_found_at_the_first_training_call(plan: Plan) -> None:
    planned = apply_plan(net(), plan)
    planned.forward = types.MethodType(doubled, planned)  # type: ignore[method-assign]
    planned.eval()(torch.randn(4, 3, 16, 16))  # not a training step, so nothing goes unplanned
    planned.train()
    with pytest.raises(
        PlanError, match=r"got another forward \(.*doubled\).*without the plan; apply the plan after"
    ):
        planned(batch()[0])
    planned = apply_plan(net(), plan)
    planned.forward = types.MethodType(doubled, planned)  # type: ignore[method-assign]
    del planned.forward
    with pytest.raises(PlanError, match="apply the plan again"):
        planned(batch()[0])


def test_one_that_replaces_it_between_steps_is_found_too(plan: Plan) -> None:
    planned = apply_plan(net(), plan)
    as_eager(planned, planned)
    planned.forward = types.MethodType(Residual.forward, planned)  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="without the plan"):
        planned(batch()[0])


def test_unwrapping_a_planned_forward_leads_to_no_other(plan: Plan) -> None:
    """Accelerate follows `__wrapped__` down and puts what it finds on the instance."""
    planned = apply_plan(net(), plan)
    assert inspect.unwrap(planned.forward) is vars(planned)["forward"]
    assert inspect.signature(planned.forward) == inspect.signature(net().forward)


def test_a_wrapper_of_the_planned_forward_outlives_the_plan(plan: Plan) -> None:
    planned = apply_plan(net(), plan)
    inner = planned.forward
    planned.forward = lambda x: inner(x)  # type: ignore[method-assign]
    bare = remove_plan(planned)
    for model in (bare, bare.eval()):
        torch.manual_seed(3)
        found = model(torch.ones(4, 3, 16, 16))
        torch.manual_seed(3)
        assert torch.equal(found, net().train(model.training)(torch.ones(4, 3, 16, 16)))


def test_copies_and_pickles_have_the_instance_s_forward() -> None:
    planned = apply_plan(doubled_net(), plan_of_doubled())
    x = torch.randn(4, 3, 16, 16)
    other = copy.deepcopy(planned).eval()
    assert torch.equal(other(x), 2 * net().eval()(x))
    with unplanned(planned):
        planned.eval()
        assert torch.equal(planned(x), 2 * net().eval()(x))


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (nn.DataParallel, "DataParallel copies the model to every device"),
        (
            lambda m: nn.Sequential(nn.DataParallel(m)),
            r"holds a DataParallel \(0\).* apply a plan to 0.module",
        ),
    ],
)
def test_a_wrapper_that_a_plan_goes_inside_of_is_refused_at_once(
    plan: Plan, wrap: Callable[[nn.Module], nn.Module], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        apply_plan(wrap(net()), plan)


def test_a_compiled_part_is_refused_at_once(plan: Plan) -> None:
    model = net()
    model.conv = torch.compile(model.conv, backend="eager")  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="its module conv was compiled"):
        apply_plan(model, plan)
    with pytest.raises(CaptureError, match=r"it was compiled by torch\.compile, or has"):
        apply_plan(torch.compile(net(), backend="eager"), plan)  # type: ignore[arg-type]


def test_wrappers_around_a_plan_train_by_it(plan: Plan) -> None:
    planned = apply_plan(net(), plan)
    as_eager(torch.compile(planned, backend="eager"), planned)
    planned = apply_plan(net(), plan)
    as_eager(nn.DataParallel(planned), planned)


def test_the_copies_that_data_parallel_makes_are_refused(plan: Plan) -> None:
    replica = apply_plan(net(), plan)._replicate_for_data_parallel()
    with pytest.raises(PlanError, match="DataParallel copies the model to every device"):
        replica(torch.randn(4, 3, 16, 16))

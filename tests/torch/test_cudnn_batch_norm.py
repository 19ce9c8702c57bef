"""cuDNN's batch norm in the graph of a GPU: where torch takes it, what it writes, and that it does so once a step."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor.graphs.match import program_actions
from executor.rewrite import rewrite
from simulator.core.problem import Problem
from simulator.core.schedule import build as build_schedule
from tests.torch.steps import plan_of, random_actions, recompute_all, step_of
from tracer.capture.passes.batch_norm import takes_cudnn
from tracer.record.program import Program, program_of
from tracer.record.step import capture_step
from traces.devices import device
from traces.records.trace import EFFECT, Trace

aten = torch.ops.aten


def program(model: nn.Module, x: Any) -> Program:
    step = step_of(model, x, lambda y: y.float().sum(), None)
    return program_of(capture_step(step, device("h200")))


class Norms(nn.Module):
    """conv -> batch norm -> relu, the norm used twice."""

    def __init__(self, channels: int = 6, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels, **options)
        self.again = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.conv(x)))
        return functional.relu(self.norm(self.again(x)))


@pytest.mark.parametrize(
    ("dtype", "shape", "options", "wanted"),
    [
        (torch.float32, (2, 6, 4, 4), {}, True),
        (torch.float64, (2, 6, 4, 4), {}, True),
        (torch.float16, (2, 6, 4, 4), {}, True),  # with float32 weights
        (torch.bfloat16, (2, 6, 4, 4), {}, False),
        (torch.float32, (2, 6), {}, False),
        (torch.float32, (2, 6, 4), {}, True),
        (torch.float32, (2, 6, 4, 4), {"enabled": False}, False),
        (torch.float32, (880_802, 6, 1, 1), {}, False),
        (torch.float32, (2, 6, 4, 4), {"weight": None, "bias": None}, False),
        (torch.float32, (2, 6, 4, 4), {"mean": None, "var": None}, True),
        (torch.float32, (2, 6, 4, 4), {"mean": None}, False),
        (torch.float16, (2, 6, 4, 4), {"weight": torch.empty(6, dtype=torch.float16)}, False),
    ],
)
def test_when_torch_takes_cudnn(
    dtype: torch.dtype, shape: tuple[int, ...], options: dict[str, Any], wanted: bool
) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    given: dict[str, Any] = dict.fromkeys(("weight", "bias", "mean", "var"), torch.empty(6)) | options
    assert takes_cudnn(x, eps=1e-5, **given) is wanted


def test_what_a_batch_norm_by_cudnn_is() -> None:
    p = program(Norms(), torch.randn(2, 3, 8, 8))
    rows = [r for r in p.rows if r.target == "aten.cudnn_batch_norm.default"]
    assert len(rows) == 2
    assert len([r for r in p.rows if r.target == "aten.cudnn_batch_norm_backward.default"]) == 2
    for row in rows:
        i = p.rows.index(row)
        made = [p.storages[s] for s in row.writes if p.storages[s].producer == i]
        # Output, mean and inverse deviation, and the reserve, of which nothing is known here.
        assert [s.shape for s in made] == [(2, 6, 8, 8), (6,), (6,), (0,)]
        written = [p.storages[s].name for s in row.writes if p.storages[s].producer < 0]
        assert written == ["norm.running_mean", "norm.running_var"]
        assert not row.flags  # it may run again, without statistics to write
    copies = [r for r in p.rows if r.target == "aten.copy_.default"]
    assert len(copies) == 1  # the number of batches
    assert not [r for r in p.rows if "lowtide" in r.target]


def test_a_reader_of_the_statistics_does_not_run_again() -> None:
    class Reader(nn.BatchNorm2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = self.running_mean * 2
            y = super().forward(x) * before.view(1, 3, 1, 1)
            return y * self.running_var.view(1, 3, 1, 1)

    p = program(Reader(3), torch.randn(2, 3, 8, 8))
    assert [r.flags for r in p.rows if r.target == "aten.cudnn_batch_norm.default"] == [0]
    reading = [r for r in p.rows if set(r.reads) & {2, 3} and r.phase == "forward"]  # weight, bias, mean, var
    others = [r for r in reading if r.target not in ("aten.cudnn_batch_norm.default", "aten.view.default")]
    assert len(others) == 2
    assert all(r.flags & EFFECT for r in others)


@pytest.mark.parametrize(
    ("dtype", "target", "wanted"),
    [
        (torch.bfloat16, "h200", "aten._native_batch_norm_legit_functional.default"),
        (torch.float32, "cpu", "aten._native_batch_norm_legit_functional.default"),
        (torch.float32, "t4", "aten.cudnn_batch_norm.default"),
    ],
)
def test_other_batch_norms_keep_torch_s_own_kernel(dtype: torch.dtype, target: str, wanted: str) -> None:
    step = step_of(Norms().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype), lambda y: y.sum(), None)
    p = program_of(capture_step(step, device(target) if target != "cpu" else None))
    assert wanted in [r.target for r in p.rows]
    assert any("cudnn" in r.target for r in p.rows) is ("cudnn" in wanted)


class Turned(nn.Module):
    """A batch norm of what lies otherwise than cuDNN takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x).transpose(2, 3))


def test_an_input_that_lies_otherwise_is_copied_as_in_eager_and_the_copy_is_what_backward_reads() -> None:
    p = program(Turned(), torch.randn(2, 3, 8, 6))
    forward, backward = (
        next(r for r in p.rows if r.target == f"aten.cudnn_batch_norm{end}.default")
        for end in ("", "_backward")
    )
    (copied,) = [r for r in p.rows if r.target == "aten.clone.default"]
    assert {*copied.writes} <= {*forward.reads} & {*backward.reads}


def test_a_batch_norm_in_evaluation_is_left_alone() -> None:
    model = Norms()
    model.norm.eval()
    p = program(model, torch.randn(2, 3, 8, 8))
    assert not [r for r in p.rows if "cudnn" in r.target]


@pytest.fixture
def cudnn_on_the_cpu() -> Iterator[list[bool]]:
    """Gives cuDNN's batch norm a CPU kernel that behaves as it does; yields whether each call had statistics."""
    calls: list[bool] = []

    def forward(x, weight, bias, mean, var, training, momentum, eps):  # type: ignore[no-untyped-def]
        calls.append(mean is not None)
        out = aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
        return (*out, x.new_empty(0, dtype=torch.uint8))

    def backward(x, grad, weight, mean, var, saved_mean, saved_var, eps, reserve):  # type: ignore[no-untyped-def]
        return aten.native_batch_norm_backward(
            grad, x, weight, None, None, saved_mean, saved_var, True, eps, [True, True, True]
        )

    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_batch_norm", forward, "CPU")
    library.impl("cudnn_batch_norm_backward", backward, "CPU")
    yield calls
    library._destroy()


@pytest.mark.parametrize("seed", range(4))
def test_recomputed_batch_norms_update_their_statistics_once(seed: int, cudnn_on_the_cpu: list[bool]) -> None:
    torch.manual_seed(seed)
    model = Norms()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8)
    p = program(model, x)
    trace = p.trace()
    actions = recompute_all(Problem(trace)) if seed == 0 else random_actions(trace, random.Random(seed))
    local = program_actions(plan_of_program(trace, p, *actions), p)
    made = rewrite(p, build_schedule(Problem(p.trace()), local))
    for _ in range(2):
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        mine = [parameters[n] for n in p.captured.parameters]
        with torch.no_grad():
            given = [*mine, *(buffers[n] for n in p.captured.buffers), x]
            (output,), saved = made.forward(given)
            gradients, _ = made.backward([*saved, torch.ones_like(output)])
        for parameter, g in zip(mine, gradients, strict=True):
            parameter.grad = g if parameter.grad is None else parameter.grad + g
        twin(x).sum().backward()
    for (name, a), (_, b) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    if seed == 0:
        # Twice a step with statistics, and twice a step again, without.
        assert cudnn_on_the_cpu == [True, True, False, False] * 2


def plan_of_program(trace: Trace, p: Program, *actions: Any) -> Any:
    meta = replace(
        trace.meta, graph_fingerprint=p.fingerprint(), structure_fingerprint=p.fingerprint(sizes=False)
    )
    return plan_of(replace(trace, meta=meta), *actions)


def test_a_norm_that_torch_s_own_code_normalises_by_is_cudnn_s_too() -> None:
    """`torch.instance_norm` calls the batch norm below Python, over statistics of its own that cuDNN then writes."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True, track_running_stats=True))
    p = program(model, torch.randn(2, 3, 8, 8))
    (row,) = [r for r in p.rows if r.target == "aten.cudnn_batch_norm.default"]
    assert not [r for r in p.rows if "native_batch_norm" in r.target]
    written = [s for s in row.writes if p.storages[s].producer < p.rows.index(row)]
    assert [p.storages[s].shape for s in written] == [(12,), (12,)]
    assert all(p.storages[s].producer >= 0 for s in written)

"""What the untouched model needs is counted on fake tensors: to the byte where everything it runs is known."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.profiler import record_function  # noqa: E402

from executor.measuring import _ITERATION, peaks_of  # noqa: E402
from simulator.allocator.requests import untouched_requests  # noqa: E402
from simulator.allocator.reserved import reserved_peak  # noqa: E402
from simulator.api import simulate  # noqa: E402
from simulator.core.problem import Problem  # noqa: E402
from simulator.prediction.step import untouched_fit  # noqa: E402
from tests.published.models import naive_attention  # noqa: E402
from tests.torch.steps import build_of  # noqa: E402
from tracer.costs.calibration import Costs  # noqa: E402
from tracer.measure.probes import memory_profiler  # noqa: E402
from tracer.record import untouched  # noqa: E402
from tracer.record.step import trace_step  # noqa: E402
from tracer.record.untouched import count_untouched  # noqa: E402
from tracer.recording import (  # noqa: E402
    ProfileUse,
    record_fake,
    record_real,
)
from tracer.step.loop import run_step  # noqa: E402
from tracer.step.step import BuildStep, load_spec  # noqa: E402
from traces.devices import Device, device  # noqa: E402
from traces.records.trace import BACKWARD, FIRST, FORWARD, LATER, Trace, Untouched  # noqa: E402

CPU = device("cpu")
Make = Callable[[], tuple[Any, Any, Any, Any]]


def measured_bytes(build: BuildStep, iteration: int = 2) -> int:
    """The peak of an iteration of the ordinary loop (default: a steady one), by the CPU allocator's own account."""
    gc.collect()
    with memory_profiler() as prof:
        step = build("cpu")
        for k in range(3):
            with record_function(f"{_ITERATION} {k}"):
                run_step(step, step.model, step.optimizer)
    assert prof.profiler is not None
    return peaks_of(prof, 3)[0][iteration]


def counted(build: BuildStep, target: Device, costs: Costs | None = None) -> int:
    return count_untouched(trace_step(build, target), costs or Costs())[0]


class Locals(nn.Module):
    """Keeps a name on what no later op reads, until it returns: 8 x 64 floats, 2,048 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        again = first + 1.0
        y = self.b(again.relu()).relu()
        return y * y


def locals_step() -> tuple[Any, ...]:
    model = Locals()
    return (
        model,
        (torch.randn(8, 64), torch.randn(8, 64)),
        functional.mse_loss,
        torch.optim.Adam(model.parameters()),
    )


def test_names_that_python_keeps_are_counted() -> None:
    build = build_of(lambda: (*locals_step()[:3], None))
    assert counted(build, CPU) == measured_bytes(build)


def test_the_optimizer_s_state_is_there_from_the_start() -> None:
    build = build_of(locals_step)
    bare = build_of(lambda: (*locals_step()[:3], None))
    with_state, without = (counted(b, CPU) for b in (build, bare))
    # Two moments of the 2 x (64 x 64 + 64) parameters, and four step counters; Adam's own temporaries may add to that.
    assert with_state - without >= 2 * 2 * (64 * 64 + 64) * 4 + 4 * 4


@pytest.mark.parametrize(
    "model",
    ["gpt2-tiny", *(pytest.param(m, marks=pytest.mark.slow) for m in ("t5-tiny", "bert-tiny", "llama-tiny"))],
)
def test_language_models_in_the_ordinary_loop(model: str) -> None:
    """Up to a few scalars: the loss of the step before may still have a name."""
    build = load_spec(model, {"batch_size": 2, "seq_len": 16})
    trace = record_fake(build, CPU, ProfileUse(off=True))
    assert trace.meta.untouched_peak_bytes == pytest.approx(measured_bytes(build), abs=128)


def test_a_measured_trace_counts_with_what_it_measured() -> None:
    build = build_of(locals_step)
    trace = record_real(build, CPU, "cpu", ProfileUse(off=True), rounds=1, warmup=1)
    assert trace.meta.untouched_peak_bytes == measured_bytes(build)


def test_what_cannot_be_counted_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    build = build_of(locals_step)
    said: list[str] = []
    monkeypatch.setattr(untouched, "MOST_OPS", 10)
    trace = record_fake(build, CPU, ProfileUse(off=True), said.append)
    assert trace.meta.untouched_peak_bytes == 0
    assert [x for x in said if "the untouched loop is not counted: " in x and "more than 10 ops" in x]
    monkeypatch.undo()
    assert counted(build, CPU) > 0


class Replacing(torch.optim.Optimizer):
    """Puts new tensors in the place of the old ones: moments in the state, others that only it knows, parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.own: dict[torch.Tensor, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            moment = 0.9 * self.state[p].get("m", torch.zeros_like(p)) + 0.1 * p.grad
            self.own[p] = self.own.get(p, torch.zeros_like(p)) + moment * moment
            p.data = p.data - 0.1 * moment / (torch.sqrt(self.own[p]) + 1e-8)
            self.state[p]["m"] = moment


def wide_step(optimizer: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Weights of 256 KiB each, and so few activations that the peak is in the optimizer."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    batch = torch.randn(2, 256), torch.randn(2, 256)
    return model, batch, functional.mse_loss, optimizer(model.parameters())


def test_an_optimizer_may_replace_its_state() -> None:
    """Both are there until the old one is gone; when the step ends, everything is there once, as when it began."""
    build = build_of(lambda: wide_step(Replacing))
    measured = measured_bytes(build)
    assert counted(build, CPU) == pytest.approx(measured, abs=128)
    trace = trace_step(build, CPU).finish()
    parameters = 4 * 2 * (256 * 256 + 256)
    assert trace.resident_bytes == 3 * parameters + 2 * 4 * 2 * 256
    assert Problem(trace).saved.timeline.peak_allocated_bytes == pytest.approx(measured, abs=128)


class OneByOne(torch.optim.Optimizer):
    """Makes a parameter's state when it comes to it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["v"].mul_(0.9).add_(p.grad * p.grad, alpha=0.1)
            p.data -= 0.1 * state["m"] / (torch.sqrt(state["v"]) + 1e-8)


@pytest.mark.parametrize("optimizer", [OneByOne, torch.optim.Adam])
def test_the_first_iteration_makes_state_when_the_optimizer_does(optimizer: Any) -> None:
    build = build_of(lambda: wide_step(optimizer))
    problem = Problem(trace_step(build, CPU).finish())
    first = reserved_peak(problem, problem.saved.schedule).iterations[0]
    assert first.peak_requested_bytes == pytest.approx(measured_bytes(build, 0), abs=128)


def in_groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    small, large = [], []
    for p in parameters:
        (large if p.dim() > 1 else small).append(p)
    return torch.optim.Adam([{"params": small}, {"params": large}])


def test_the_state_of_a_group_of_parameters_comes_at_once() -> None:
    """Two weights, of 256 and 64 KiB: the second's state is there already when the first is updated."""

    def made() -> Any:
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
        batch = torch.randn(2, 256), torch.randn(2, 64)
        return model, batch, functional.mse_loss, in_groups(model.parameters())

    build = build_of(made)
    problem = Problem(trace_step(build, CPU).finish())
    first = reserved_peak(problem, problem.saved.schedule).iterations[0]
    assert first.peak_requested_bytes == pytest.approx(measured_bytes(build, 0), abs=128)


def test_state_that_an_optimizer_has_before_its_first_step_is_there_from_the_start() -> None:
    """The net's peak is in forward, before Adagrad's first step; its state, 288 KiB, it makes with itself."""

    def made() -> Any:
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64))
        batch = torch.randn(4096, 256), torch.randn(4096, 64)
        return model, batch, functional.mse_loss, torch.optim.Adagrad(model.parameters())

    build = build_of(made)
    problem = Problem(trace_step(build, CPU).finish())
    first = reserved_peak(problem, problem.saved.schedule).iterations[0]
    assert first.peak_requested_bytes == pytest.approx(measured_bytes(build, 0), abs=256)


class Sum(nn.Module):
    """The gradient of its weight is one number, expanded; autograd makes 1,000 of it before it becomes `.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


def test_a_gradient_that_autograd_copies_is_a_gradient() -> None:
    build = build_of(lambda: (Sum(), torch.randn(3), lambda y: y.sum(), None))
    sts = trace_step(build, CPU).finish().storages
    found = {
        n: name for n, name, c in zip(sts.nbytes, sts.name, sts.category, strict=True) if c == "gradient"
    }
    assert found[4000] == "gradient of weight"


class Twice(nn.Module):
    """Uses its weight twice, and the place of a maximum: autograd adds the second gradient to the first in place, and
    writes into zeros of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.weight).relu() @ self.weight
        return y * torch.max(y, dim=-1, keepdim=True)[0] + y.gather(
            -1, torch.zeros(4, 256, dtype=torch.int64)
        )


def test_autograd_writes_in_place_where_it_may() -> None:
    build = build_of(lambda: (Twice(), torch.randn(4, 256), lambda y: y.sum(), None))
    assert counted(build, CPU) == pytest.approx(measured_bytes(build), abs=128)


def test_autograd_adds_up_in_place_outside_the_planned_model_too() -> None:
    """Two losses of one output: the second's gradient of it is added to the first's."""
    x, y = torch.randn(64, 256), torch.randn(64, 256)

    def loss(out: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(out, y) + functional.l1_loss(out, y)

    trace = record_fake(build_of(lambda: (nn.Linear(256, 256), x, loss, None)), CPU, ProfileUse(off=True))
    (k,) = [k for k, op in enumerate(trace.ops.target) if op == "aten.add_.Tensor"]
    (written,) = trace.ops.writes[k]
    assert trace.storages.nbytes[written] == 64 * 256 * 4
    assert trace.ops.phase[trace.storages.producer[written]] == BACKWARD


class Parallel(nn.Module):
    """A residual beside two branches, so that two nodes wait for one gradient when it is first added to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.weight
        return ((h @ self.weight).relu() + (h @ self.weight).sigmoid() + h) * 2.0


def test_a_gradient_that_others_wait_for_is_not_written_into() -> None:
    build = build_of(lambda: (Parallel(), torch.randn(4096, 256), lambda y: y.sum(), None))
    of = record_fake(build, device("h100"), ProfileUse(off=True)).untouched
    asked = zip(of.nbytes, of.phase, strict=True)
    # Of the product, of both branches before and after their matrices, and the first of two sums.
    assert sum(1 for n, phase in asked if n == 4096 * 256 * 4 and phase == BACKWARD) == 6


class Attention(nn.Module):
    """Scores of 8 x 1024 x 1024 float32, 32 MiB, which a softmax written by hand divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ self.weight).chunk(3, -1)
        return naive_attention(q, k, v)


def test_what_a_gpu_needs_for_a_formula_s_temporaries() -> None:
    """The figure is that of torch 2.11 on a driver that does nothing, for the same loop."""

    def make() -> tuple[Any, ...]:
        model = Attention()
        return model, torch.randn(8, 1024, 16), lambda y: y.sum(), torch.optim.SGD(model.parameters())

    trace = record_fake(build_of(make), device("a100-80"), ProfileUse(off=True))
    assert trace.meta.untouched_peak_bytes == 221_088_776
    assert (
        Problem(trace).saved.timeline.peak_allocated_bytes < 160_000_000
    )  # the graph has no such temporaries


def on_h100(optimizer: Callable[[Any], Any]) -> Trace:
    def step() -> tuple[Any, ...]:
        model, *rest = locals_step()[:3]
        return (model, *rest, optimizer(list(model.parameters())))

    return record_fake(build_of(step), device("h100"), ProfileUse(off=True))


class Turned(nn.Module):
    """A layer whose input is not contiguous, as that of an attention with the batch first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.transpose(0, 1))


def test_a_linear_layer_adds_its_bias_in_place() -> None:
    def step() -> tuple[Any, ...]:
        model = Turned()
        return model, torch.randn(32, 16, 64), lambda y: y.sum(), torch.optim.SGD(model.parameters())

    of = record_fake(build_of(step), device("h100"), ProfileUse(off=True)).untouched
    asked = zip(of.nbytes, of.phase, strict=True)
    outputs = [n for n, phase in asked if n == 16 * 32 * 256 * 4 and phase == FORWARD]
    assert len(outputs) == 1


class Own(nn.Module):
    """A parameter of its own, which `model.to` moves after those of its children, and a buffer between two children."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3000))
        self.first = nn.Linear(1000, 2000, bias=False)
        self.norm = nn.BatchNorm1d(2000, affine=False)
        self.second = nn.Linear(2000, 3000, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) * self.scale


def test_parameters_and_buffers_lie_as_the_model_is_moved() -> None:
    model, moved = Own(), []
    model._apply(lambda x: moved.append(x.numel()) or x)  # type: ignore[func-returns-value]
    build = build_of(lambda: (Own(), torch.randn(4, 1000), lambda y: y.sum(), None))
    of = record_fake(build, device("h100"), ProfileUse(off=True))
    assert [of.storages.shape[s] for s in of.meta.moved] == [
        (2000, 1000), (2000,), (2000,), (), (3000, 2000), (3000,),
    ]  # fmt: skip
    assert [math.prod(of.storages.shape[s]) for s in of.meta.moved] == moved
    first = untouched_requests(of)
    assert first is not None
    assert first.residents[: len(moved)] == (8_000_000, 8000, 8000, 8, 24_000_000, 12_000)


def test_requests_add_up_to_the_counted_peak() -> None:
    """Played through the allocator, what the loop asks of a GPU has the peak that was counted, in every iteration."""
    trace = on_h100(torch.optim.Adam)
    found = untouched_fit(simulate(trace)).reserved
    assert trace.untouched.block
    assert found is not None
    assert found.steady
    assert found.peak_requested_bytes == trace.meta.untouched_peak_bytes


class Rolling(Replacing):
    """Puts new tensors in the place of its moments alone."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["m"] = 0.9 * self.state[p].get("m", torch.zeros_like(p)) + 0.1 * p.grad
            p.data.sub_(self.state[p]["m"])


def test_blocks_that_outlive_their_iteration_are_given_back_in_the_next() -> None:
    trace = on_h100(Rolling)
    assert {*trace.untouched.once} == {FIRST, LATER}
    found = untouched_fit(simulate(trace)).reserved
    assert found is not None
    assert found.steady
    assert found.peak_requested_bytes == trace.meta.untouched_peak_bytes


def test_what_was_there_before_and_is_replaced_leaves_no_requests() -> None:
    assert on_h100(Replacing).untouched == Untouched()


class Masked(nn.Module):
    """Lets transformers make a mask of one that masks nothing, or of one of which nothing is known."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.known, self.layer = known, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from transformers.masking_utils import sdpa_mask

        given = torch.ones(len(x), 64) if self.known else (x[:, 0] * 0 + 1)
        mask = sdpa_mask(
            batch_size=len(x),
            q_length=64,
            kv_length=64,
            attention_mask=given.bool(),
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=True,
        )
        y = self.layer(x)
        return y if mask is None else y * mask[:, 0]


@pytest.mark.parametrize("known", [True, False])
def test_a_library_leaves_out_a_mask_that_is_known_to_mask_nothing(known: bool) -> None:
    def step() -> tuple[Any, ...]:
        model = Masked(known)
        x = torch.randn(8, 64, 64)
        return model, (x,), lambda out: out.sum(), torch.optim.SGD(model.parameters(), lr=0.01)

    events = trace_step(build_of(step), device("h100"))
    masks = [n for n in count_untouched(events, Costs())[1].nbytes if n == 8 * 64 * 64 * 4]
    assert len(masks) == (2 if known else 3)  # the product with a mask, too

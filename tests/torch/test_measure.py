"""What real mode measures: a time and the allocations of each op, in the order of the fake trace."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tracer.measure.step as measuring
from tests.torch import small_nets
from tests.torch.steps import build_of, measured, recorded
from tracer.measure.probes import Round, Watch, timed_on_cpu
from tracer.measure.runner import GraphRunner, step_code
from tracer.measure.step import measure, with_the_rest
from tracer.step.step import load_spec
from traces.errors import TraceError
from traces.records.store import validate
from traces.records.trace import EAGER, MUTATES, VIEW, Trace, settle


@pytest.fixture(scope="module")
def real() -> Trace:
    build = load_spec(small_nets.spec("residual"))
    return measured(build, rounds=3)


def test_the_real_trace_is_the_fake_one_with_measurements(real: Trace) -> None:
    fake = recorded(load_spec(small_nets.spec("residual"))).trace
    assert (real.meta.mode, fake.meta.mode) == ("real", "fake")
    for key in ("fingerprint", "graph_fingerprint", "structure_fingerprint"):
        assert getattr(real.meta, key) == getattr(fake.meta, key)
    assert real.storages == fake.storages
    assert replace(real.ops, time_ns=fake.ops.time_ns, events=fake.ops.events) == fake.ops
    validate(real)


def test_every_op_has_a_time_and_events_that_end_at_what_it_creates(real: Trace) -> None:
    assert all(t > 0 for t in real.ops.time_ns)
    for i, events in enumerate(real.ops.events):
        created = sum(real.storages.nbytes[s] for s in real.ops.writes[i] if real.storages.producer[s] == i)
        assert sum(events) == created, real.ops.name[i]
        assert not events or not real.ops.flags[i] & VIEW
        assert all(live >= 0 for live in accumulate(events))


def test_workspace_inside_an_op_is_seen() -> None:
    def make() -> tuple[Any, ...]:
        # The fused layer norm's backward keeps a buffer for partial sums of its own.
        model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
        return model, torch.randn(32, 64), lambda y: y.sum(), torch.optim.SGD(model.parameters())

    build = build_of(make)
    trace = measured(build)
    (i,) = [i for i, t in enumerate(trace.ops.target) if t.startswith("aten.native_layer_norm_backward")]
    assert min(trace.ops.events[i]) < 0  # something was allocated and freed inside
    assert sum(e for e in trace.ops.events[i] if e > 0) > sum(trace.ops.events[i])


@pytest.mark.parametrize(
    ("events", "created", "settled"),
    [
        ((), 0, ()),
        ((64,), 64, (64,)),
        ((64, 32, -32), 64, (64, 32, -32)),
        ((64, 32), 64, (64, 32, -32)),  # 32 left in a cache: workspace of this op
        ((32,), 64, (32, 32)),  # memory that the op did not allocate itself
        ((), 64, (64,)),
    ],
)
def test_settled_events(events: tuple[int, ...], created: int, settled: tuple[int, ...]) -> None:
    assert settle(events, created) == settled
    assert sum(settle(events, created)) == created


def test_a_step_that_runs_other_ops_than_the_captured_one_is_refused() -> None:
    calls = []

    def make() -> tuple[Any, ...]:
        calls.append(None)
        extra = len(calls) > 1  # the second step built is not the first

        def loss(y: torch.Tensor) -> torch.Tensor:
            return (y * 2).sum() if extra else y.sum()

        model = nn.Linear(4, 4)
        return model, torch.randn(2, 4), loss, None

    build = build_of(make)
    with pytest.raises(TraceError, match=r"op \d+ is aten.mul.Tensor and was to be"):
        measure(recorded(build), build, "cpu", rounds=1, warmup=1)


@pytest.mark.parametrize("odd", [4, 6])
def test_every_measured_round_must_run_the_recorded_ops(odd: int) -> None:
    """An optimizer that does more in some steps: in a timed round (4) and in that of the allocations (6).

    Step 1 warms up, then comes twice a timed round and a step without a watch.
    """

    class Sometimes(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            self.steps += 1
            if self.steps == odd:
                with torch.no_grad():
                    self.param_groups[0]["params"][0].mul_(0.5)

    def make() -> tuple[Any, ...]:
        model = nn.Linear(4, 4)
        return model, torch.randn(2, 4), lambda y: y.sum(), Sometimes(model.parameters())

    build = build_of(make)
    with pytest.raises(TraceError, match=r"op \d+ is aten.mul_.* does something else in some steps"):
        measure(recorded(build), build, "cpu", rounds=2, warmup=1)


def test_a_busy_machine_is_told_of_and_so_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:

    rounds: list[Round] = []

    def slowing(work: Any) -> Round:
        rounds.append(timed_on_cpu(work))
        return replace(rounds[-1], times_ns=[500_000 * 2 ** len(rounds) for _ in rounds[-1].targets])

    monkeypatch.setattr(measuring, "timed_on_cpu", slowing)
    build = load_spec(small_nets.spec("mlp"))
    said: list[str] = []
    measure(recorded(build), build, "cpu", rounds=2, warmup=1, say=said.append)
    ops = len(recorded(build).trace.ops)
    assert said[-1].startswith(f"warning: the rounds took between {ops:.2f} ms and {2 * ops:.2f} ms; ")
    assert said[:-1] == ["1 of 3: warming up", "2 of 3: timing", "3 of 3: timing"]


class Written(TorchDispatchMode):
    """Notes what really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.targets.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_s_code_lets_each_value_go() -> None:
    fake = recorded(load_spec(small_nets.spec("residual")))
    program, ran = fake.program, Written()
    run_forward, run_backward = step_code(program)
    step = load_spec(small_nets.spec("residual"))()
    own = program.captured.tensors_of(dict(step.model.named_parameters()), dict(step.model.named_buffers()))
    given = [*(x.detach() for x in own), *step.args]
    with torch.no_grad(), ran:
        outputs, saved = run_forward(given)
        assert given == []  # so that each value goes after its last use
        given = [*saved, *(torch.ones_like(x) for x in outputs)]
        begun = len(ran.targets)
        run_backward(given)
    assert given == []
    expected = [str(op.node.target) for op in program.ops]
    assert ran.targets[: program.forward_ops] == expected[: program.forward_ops]
    assert ran.targets[begun:] == expected[program.forward_ops :]
    needed = {s for i in range(program.forward_ops, len(program.ops)) for s in program.rows[i].reads}
    held = {x.untyped_storage().data_ptr() for x in saved}
    assert len(held) <= len(needed - set(program.tangent_storages))


def test_every_way_of_running_a_step_computes_the_same() -> None:
    build = load_spec(small_nets.spec("residual"))
    fake = recorded(build)
    gradients = []
    for watch in (Watch(), None):
        step = build()
        GraphRunner(fake, step).run(watch)
        gradients.append([p.grad for p in step.model.parameters()])
    for other in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], other, strict=True))


@pytest.mark.parametrize(
    ("whole_ns", "times"),
    [
        (100, [10, 20, 30, 0, 40]),  # nothing beside the ops
        (107, [11, 22, 32, 0, 42]),  # 7 more, of which the view takes none
        (50, [5, 10, 15, 0, 20]),  # the watching cost as much as the ops
    ],
)
def test_what_a_step_takes_beside_its_ops(whole_ns: int, times: list[int]) -> None:
    flags = [0, 0, EAGER | MUTATES, EAGER | VIEW, EAGER]
    assert with_the_rest([10, 20, 30, 0, 40], flags, whole_ns) == times
    assert sum(times) == whole_ns


def test_views_alone_share_what_a_step_takes() -> None:
    assert with_the_rest([10, 30], [VIEW, VIEW], 80) == [20, 60]
    assert with_the_rest([0, 0], [VIEW, VIEW], 80) == [0, 0]


def test_a_trace_s_times_sum_to_the_median_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    build = load_spec(small_nets.spec("residual"))
    wholes = iter([5_000_000_000, 9_000_000_000, 8_000_000_000, 7_000_000_000])  # the first warms up
    monkeypatch.setattr(measuring, "_whole_ns", lambda runner: (runner.run(None), next(wholes))[1])
    assert measured(build, rounds=3).time_ns == 8_000_000_000

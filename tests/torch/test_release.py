"""Gradients that are freed in backward: predicted to the byte, and the result that of the ordinary loop."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor import apply_plan, fit
from executor.graphs.match import program_actions
from executor.verifying import verify
from simulator.core.problem import Problem
from simulator.core.schedule import build as schedule_of
from simulator.prediction.ask import plan as plan_within
from simulator.prediction.ask import simulate
from tests.torch.steps import peaks, plan_of, random_actions, recompute_all
from tests.torch.test_loops import CPU, looped, recorded, wide
from tracer import trace
from tracer.measure.probes import cpu_loop
from tracer.record.program import program_of
from tracer.record.step import capture_step
from tracer.recording import record_real
from tracer.step.step import load_spec
from traces.errors import LowtideError, PlanError, SpecError, TraceError
from traces.records.plan import RECOMPUTE, SAVE, Action
from traces.records.store import validate
from traces.records.trace import BACKWARD, GRADIENT, OPTIMIZER, PARAMETER, Trace

RELEASE = {"release_gradients": True}
Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.01, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=False),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True),
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps),
}


class Tied(nn.Module):
    """An embedding whose weight is the head's as well, and norms, whose backward makes two gradients in one op."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 50)
        self.inner = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.inner:
            x = self.norm(x + functional.gelu(layer(x)))
        y: torch.Tensor = self.head(x)
        return y.flatten(0, 1)


class Gate(nn.Module):
    """The gradient of its gate is there before the op that reads the gate for the other factor's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.a, self.b = nn.Parameter(torch.randn(16, 48)), nn.Linear(24, 48), nn.Linear(48, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b((self.a(x).tanh() * self.gate).relu())
        return y


class Peeks(nn.Module):
    """Reads a weight apart from its gradient, before the layer whose backward comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.last = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = functional.linear(x, self.last.weight.detach()).sigmoid()
        y: torch.Tensor = self.last(self.a(x) * mask)
        return y


def grouped(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 0.1}]


def made(model: Callable[[], nn.Module], optimizer: Optimizer) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        net = model()
        if model is Tied:
            batch = torch.randint(50, (4, 8)), torch.randint(50, (32,))
            return net, batch, functional.cross_entropy, optimizer(net.parameters())
        return (
            net,
            (torch.randn(16, 24), torch.randn(16, 24)),
            functional.mse_loss,
            optimizer(net.parameters()),
        )

    return make


STEPS: dict[str, Any] = {
    "wide": wide,
    "gate": made(Gate, OPTIMIZERS["SGD"]),
    "peeks": made(Peeks, OPTIMIZERS["SGD"]),
    "groups": made(Tied, lambda ps: torch.optim.SGD(grouped(list(ps)), lr=0.01, momentum=0.9)),
    **{f"tied {name}": made(Tied, kind) for name, kind in OPTIMIZERS.items()},
}
SLOW = (
    "gate",
    "groups",
    "tied SGD",
    "tied Adafactor",
    "tied NAdam",
    "tied AdamW foreach",
    "tied AdamW fused",
)


@pytest.mark.parametrize("step", [pytest.param(s, marks=[pytest.mark.slow] * (s in SLOW)) for s in STEPS])
def test_peaks_are_measured_and_the_result_is_the_ordinary_loops(step: str) -> None:
    """Of a loop that recomputes all that may be, and of a plan of random actions."""
    build = looped(STEPS[step], RELEASE)
    found = recorded(build)
    for actions in (recompute_all(Problem(found)), random_actions(found, random.Random(1))):
        plan = plan_of(found, *actions)
        predicted = simulate(found, plan).planned.timeline.peak_allocated_bytes
        assert predicted == peaks(build, plan, 4)[-1]
        outcome = verify(build, plan, "cpu", 3)
        assert outcome.bit_equal, outcome.first_difference


@pytest.mark.parametrize("share", [0.55, 0.4])
@pytest.mark.slow
def test_with_a_loss_head_in_tiles(share: float) -> None:
    build = load_spec("gpt2-tiny", {"batch_size": 8, "seq_len": 128, "optimizer": "sgd", **RELEASE})
    found = recorded(build)
    whole = Problem(found).saved.timeline.peak_allocated_bytes
    plan = plan_within(found, int(share * whole), allow="fp", seconds=0.5)
    assert [r.kind for r in plan.rewrites] == ["tile"]
    assert simulate(found, plan).planned.timeline.peak_allocated_bytes == peaks(build, plan, 4)[-1]
    outcome = verify(build, plan, "cpu", 2)
    assert outcome.equal, outcome.note


def steps_of(found: Trace) -> list[str]:
    return sorted(t for t, p in zip(found.ops.target, found.ops.phase, strict=True) if p == OPTIMIZER)


@pytest.fixture(scope="module")
def found() -> Trace:
    """The step of `wide` whose gradients are freed in backward."""
    return recorded(looped(wide, RELEASE))


@pytest.fixture(scope="module")
def ordinary() -> Trace:
    return recorded(looped(wide, {}))


def test_each_parameter_is_stepped_where_its_gradient_is_there(found: Trace, ordinary: Trace) -> None:
    ops, sts = found.ops, found.storages
    within = {i for first, n in found.meta.within_backward for i in range(first, first + n)}
    for s, category in enumerate(sts.category):
        if category == PARAMETER:
            stepped = [i for i, writes in enumerate(ops.writes) if s in writes]
            read = [i for i, reads in enumerate(ops.reads) if s in reads and ops.phase[i] == BACKWARD]
            assert stepped
            assert min(stepped) > max(read, default=0)
        if category == GRADIENT and sts.producer[s] >= 0:
            others = range(sts.producer[s] + 1, sts.hold[s] + 1)
            graph = [i for i in others if i not in within and ops.phase[i] == BACKWARD]
            # Of the graph only the other gradient of that layer, and its views, may come between.
            assert sum(sts.producer[t] in graph for t in range(len(sts))) <= 1
    assert ops.phase.index(OPTIMIZER) < max(i for i, p in enumerate(ops.phase) if p == BACKWARD)
    assert steps_of(found) == steps_of(ordinary)
    assert found.meta.loop == "release_gradients True"
    assert found.meta.graph_fingerprint == ordinary.meta.graph_fingerprint


def most_gradients(found: Trace) -> int:
    """The most bytes of gradients that are there at one time."""
    run, sts = Problem(found).saved, found.storages
    live = most = 0
    for step in range(len(run.schedule)):
        live += sum(sts.nbytes[s] for s in run.schedule.binds[step] if sts.category[s] == GRADIENT)
        most = max(most, live)
        live -= sum(sts.nbytes[s] for s in run.schedule.frees[step] if sts.category[s] == GRADIENT)
    return most


def test_gradients_never_all_exist(found: Trace, ordinary: Trace) -> None:
    weights = [4 * p.numel() for p in wide()[0].parameters()]
    assert most_gradients(ordinary) == sum(weights)
    assert most_gradients(found) == max(weights) + 1024  # and the bias of that layer


def test_what_is_computed_from_a_parameter_that_was_stepped_is_not_recomputed() -> None:
    """Peeks' mask is read after `last.weight` was stepped; without the rule a plan would compute another mask."""
    ordinary, found = recorded(looped(STEPS["peeks"], {})), recorded(looped(STEPS["peeks"], RELEASE))
    (mask,) = (s for s, name in enumerate(found.storages.name) if name == "sigmoid")
    assert mask in Problem(ordinary).candidates
    assert mask not in Problem(found).candidates
    with pytest.raises(PlanError, match="stepped before"):
        schedule_of(Problem(found), [Action(storage=mask, recipe=RECOMPUTE)])


def test_the_rows_within_backward_are_checked(found: Trace) -> None:
    with pytest.raises(TraceError, match="later phase"):
        validate(replace(found, meta=replace(found.meta, within_backward=())))
    with pytest.raises(TraceError, match="none that stand among backward's"):
        validate(replace(found, meta=replace(found.meta, within_backward=((len(found.ops), 1),))))


def test_an_eviction_in_backward_is_found_among_the_graphs_own_ops(found: Trace) -> None:
    """The plan counts the optimizer's rows, the graph has none."""
    ops, (value,) = found.ops, (s for s, name in enumerate(found.storages.name) if name == "relu")
    readers = [i for i, reads in enumerate(ops.reads) if value in reads and ops.phase[i] == BACKWARD]
    first = found.meta.within_backward[0][0]
    assert len(readers) == 2
    assert first < readers[0]
    plan = plan_of(found, Action(storage=value, recipe=SAVE, evict_after=(readers[0],)))
    program = program_of(capture_step(looped(wide, RELEASE)("cpu")))
    (local,) = program_actions(plan, program)[0].evict_after
    assert program.rows[local].name == ops.name[readers[0]]


# -- the user's own loop ----------------------------------------------------------------------------------------------


def own_hooks(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer a parameter, as torch's tutorial has it."""
    optimizers = {p: torch.optim.SGD([p], lr=1e-2, momentum=0.9) for p in model.parameters()}

    def hook(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)
    return list(optimizers.values())


def wide_step() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch, _, _ = wide()
    return model, batch


def test_the_users_own_hooks_run_inside_a_planned_backward() -> None:
    """`fit` predicts that loop to the byte; its result is the ordinary loop's, and so are the optimizers' states."""
    plain, given = wide_step()  # whose batch stays: what is freed meanwhile must have been made meanwhile
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(4):
        functional.mse_loss(plain(given[0]), given[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with cpu_loop() as watched:
        model, batch = wide_step()
        optimizers = own_hooks(model)
        planned = fit(
            model,
            batch,
            loss=functional.mse_loss,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
            budget="100%",
            release_gradients=True,
            say=lambda line: None,
        )
        for _ in range(4):
            with watched.iteration():
                loss = functional.mse_loss(planned(batch[0]), batch[1])
                loss.backward()
    assert all(p.grad is None for p in planned.parameters())
    assert watched.peaks[-1] == planned.receipt().plan.predicted["plan"]["peak_allocated_bytes"]  # type: ignore[operator]
    for x, y in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(x, y)
    state = optimizer.state_dict()["state"]
    for k, one in enumerate(optimizers):
        momentum = one.state_dict()["state"][0]["momentum_buffer"]
        assert torch.equal(momentum, state[k]["momentum_buffer"])


def test_a_plan_of_the_ordinary_loop_waits_for_the_last_reader() -> None:
    """Its recomputations may read a parameter whose gradient is long there."""
    make = STEPS["peeks"]
    found = recorded(looped(make, {}))
    plan = plan_of(found, *recompute_all(Problem(found), share=False))
    torch.manual_seed(0)
    plain, batch, loss, _ = make()
    torch.manual_seed(0)
    model = apply_plan(make()[0], plan)
    own_hooks(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9)
    for _ in range(3):
        loss(plain(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss(model(batch[0]), batch[1]).backward()
    assert all(torch.equal(x, y) for x, y in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_loss_that_uses_a_parameter_too_is_refused_where_gradients_are_freed() -> None:
    model, (x, y) = wide_step()
    eager = copy.deepcopy(model)
    planned = apply_plan(model, plan_of(trace(model, (x, y), loss=functional.mse_loss, optimizer="sgd")))
    for m in (eager, planned):  # by a plan of another loop, hooks wait for the whole gradient
        own_hooks(m)
        (functional.mse_loss(m(x), y) + m.c.weight.square().sum()).backward()
    assert all(map(torch.equal, eager.parameters(), planned.parameters()))

    def penalised() -> tuple[Any, ...]:
        net, batch, _, optimizer = wide()
        return net, batch, lambda out, y: functional.mse_loss(out, y) + net.c.weight.square().sum(), optimizer

    with pytest.raises(LowtideError, match="the loss uses a parameter of the model"):
        recorded(looped(penalised, RELEASE))


def test_a_backward_that_passes_the_parameters_by_is_told() -> None:
    """backward(inputs=...) runs nothing of a step whose parameters get their gradients inside it."""
    model, (x, y) = wide_step()
    own_hooks(model)
    settings: Any = {"budget": "100%", "release_gradients": True, "say": lambda line: None}
    planned = fit(model, (x, y), loss=functional.mse_loss, optimizer="sgd", **settings)
    before = planned.c.weight.clone()
    functional.mse_loss(planned(x), y).backward(inputs=[planned.c.weight])
    assert torch.equal(planned.c.weight, before)
    with pytest.warns(
        UserWarning, match="without the plan: the backward of an earlier training call did not run"
    ):
        planned(x)
    functional.mse_loss(planned(x), y).backward()
    functional.mse_loss(planned(x), y).backward()
    assert not torch.equal(planned.c.weight, before)


class Two(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).sigmoid(), super().forward(x).tanh()


def test_a_loss_that_leaves_an_output_out_is_refused_where_gradients_are_freed() -> None:
    model, x = Two(8, 8), torch.randn(4, 8)
    own_hooks(model)
    settings: Any = {"budget": "100%", "release_gradients": True, "say": lambda line: None}
    planned = fit(model, x, loss=lambda out: out[0].sum() + out[1].sum(), optimizer="sgd", **settings)
    with pytest.raises(PlanError, match="the loss leaves out an output"):
        planned(x)[0].sum().backward()


# -- what is refused --------------------------------------------------------------------------------------------------


class Counting(torch.optim.SGD):
    """Counts steps in its group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def stepped_by(kind: Optimizer) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        model, batch, loss, _ = wide()
        return model, batch, loss, kind(model.parameters())

    return make


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (wide, {"clip_grad_norm": 1.0}, "excludes --clip-grad-norm"),
        (wide, {"accumulate": 2}, "excludes .*--accumulate"),
        (wide, {"zero_grad": "keep"}, "excludes .*--zero-grad"),
        (wide, {"amp": "float16"}, "scaler looks at all gradients"),
        (stepped_by(lambda ps: torch.optim.LBFGS(ps)), {}, "LBFGS wants a closure"),
        (stepped_by(lambda ps: torch.optim.SGD([{"params": ps, "max_grad_norm": 1.0}])), {}, "max_grad_norm"),
        (stepped_by(lambda ps: None), {}, "there is no optimizer"),  # type: ignore[arg-type,return-value]
        (stepped_by(lambda ps: Counting(ps, lr=0.1)), {}, "Counting counts in its groups .'k'"),
    ],
)
def test_what_needs_all_gradients_is_refused(make: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        recorded(looped(make, {**options, **RELEASE}))


def test_its_ops_are_measured_in_a_loop_that_ends_in_a_step_and_its_peak_in_its_own() -> None:
    found = record_real(looped(wide, RELEASE), CPU, "cpu", rounds=1, warmup=1)
    assert found.meta.untouched_peak_bytes == peaks(looped(wide, RELEASE), iterations=4)[-1]
    assert found.meta.within_backward

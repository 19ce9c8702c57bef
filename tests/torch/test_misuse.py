"""What users do to a planned module: each ends as it does with the untouched model, or in an error that says why.

A row is a function of one model that trains it; it runs on an untouched model and on its planned twin, from the same
random state. What it returns, parameters, gradients, buffers, attributes and random states must be the same in every
bit, or else the planned run must have raised an error with the row's words. Everything that may be recomputed is.
"""

from __future__ import annotations

import collections
import copy
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from executor import apply_plan, unplanned
from executor.graphs.graph import digest as _digest
from simulator.core.problem import Problem
from tests.torch.steps import build_of, plan_of, recompute_all, recorded
from tracer.capture.capture import capture
from tracer.torch_api import FakeTensor, pytree
from traces.errors import CaptureError, LowtideError, PlanError
from traces.records.plan import Plan

CHANGED = "modified by an inplace operation"  # torch's own error of what backward reads
EQUAL = "equal"  # how a row may end; otherwise a part of the error's words


class Net(nn.Module):
    """What users turn: dropout, batch norm, activations, a scalar, a config, a list."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(8, 8)
        self.scale = 1.0
        self.config = SimpleNamespace(use_cache=False, layers=[2, 3], nested=SimpleNamespace(gain=1.0))
        self.table = {"shift": 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x) * self.scale
        if self.config.use_cache:
            y = y + 1
        return self.head(y * self.config.nested.gain * self.config.layers[0] + self.table["shift"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.act: nn.Module = nn.GELU()
        self.drop = nn.Dropout(0.25)
        self.beta = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.act(self.norm(self.linear(x)))) + self.beta * x


class Linear(nn.Module):
    """What small nets share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


LIBRARY = torch.library.Library("lowtide_tests", "DEF")
LIBRARY.define("drawn(Tensor x) -> Tensor")
LIBRARY.impl("drawn", lambda x: torch.rand(x.shape), "CompositeExplicitAutograd")
LIBRARY.impl("drawn", lambda x: torch.empty_like(x), "Meta")
Script = Callable[[nn.Module], Any]
ROWS: dict[str, tuple[Callable[[], nn.Module], Script, str, Callable[[Any], torch.Tensor]]] = {}
# All rows that are added as slow, and these, which run no line of Lowtide's that no other row runs.
SLOW = {
    "an_activation_appended", "a_hook_that_stores_features_added_later", "a_global_hook_that_stores",
    "a_buffer_reassigned_with_its_graph", "a_counter_among_globals", "a_convolution_s_stride",
    "a_number_among_the_arguments", "a_weight_pruned", "batch_norm_momentum", "gelu_of_another_formula",
    "an_entry_of_a_dict", "a_table_that_a_helper_reads", "a_config_s_flag", "statistics_read_between_two_norms",
    "one_block_in_evaluation_mode", "a_flag_for_a_number", "a_teacher_that_follows_in_forward",
    "an_object_s_number", "a_default_of_a_helper", "a_closure_s_variable_changed",
    "deterministic_algorithms_that_forward_asks_for", "a_view_without_its_gradient", "one_half_alone",
    "weights_made_by_a_parametrization", "noise_by_torch", "a_hook_that_transforms",
    "hooks_on_output_and_parameters", "a_linear_deleted_and_put_back", "an_activation_replaced_by_its_like",
    "nothing_that_forward_reads", "backward_into_some_parameters", "training_and_evaluation_by_turns",
    "a_call_of_a_part_s_own", "an_attribute_of_the_class_changed", "a_shape_noted",
}  # fmt: skip


def total(out: Any) -> torch.Tensor:
    """The loss that a row's plan is made for: the squares of all outputs that take part in backward."""
    parts = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    return sum((x.square().sum() for x in parts), torch.zeros(()))


def row(
    ends: str = EQUAL, net: Callable[[], nn.Module] = Net, loss: Callable[[Any], torch.Tensor] = total
) -> Callable[[Script], Script]:
    """Add a function to the table, under its name."""

    def add(script: Script) -> Script:
        assert script.__name__ not in ROWS, script.__name__
        ROWS[script.__name__] = net, script, ends, loss
        return script

    return add


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))


def step(m: nn.Module, x: torch.Tensor | None = None, optimizer: Any = None, **kwargs: Any) -> float:
    """One step of the ordinary loop; its loss."""
    loss = total(m(batch() if x is None else x, **kwargs))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def steps(m: Any) -> Any:
    return [step(m, batch(k)) for k in range(4)]


def changed(change: Callable[[Any], None]) -> Script:
    """Train, change something, train on, and change nothing more."""

    def script(m: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        losses = [step(m, batch(1), optimizer), step(m, batch(2), optimizer)]
        change(m)
        losses += [step(m, batch(seed), optimizer) for seed in (3, 4)]
        return losses, optimizer.state_dict()

    return script


def rows(
    ends: str = EQUAL, net: Callable[[], nn.Module] = Net, *, slow: bool = False, **scripts: Script
) -> None:
    """Add rows of one line each, by their names."""
    for name, script in scripts.items():
        assert name not in ROWS, name
        ROWS[name] = net, script, ends, total
        SLOW.update([name] if slow else [])


def changes(ends: str = EQUAL, net: Callable[[], nn.Module] = Net, **functions: Script) -> None:
    """Rows of functions that change the model between two steps."""
    rows(ends, net, **{name: changed(function) for name, function in functions.items()})


def made_of(forward: Callable[..., Any], **parts: Callable[[], Any]) -> type[nn.Module]:
    """A class of a forward and its parts; `linear` is one of them."""

    def make(self: Any) -> None:
        nn.Module.__init__(self)
        for name, part in ({"linear": partial(nn.Linear, 8, 8)} | parts).items():
            made = part()
            buffer = isinstance(made, torch.Tensor) and not isinstance(made, nn.Parameter)
            self.register_buffer(name, made) if buffer else setattr(self, name, made)

    return type("Own", (nn.Module,), {"__init__": make, "forward": forward})


trained = changed(lambda m: None)  # by AdamW


def models(ends: str = EQUAL, script: Script = trained, *, slow: bool = False, **forwards: Any) -> None:
    """Rows of models with a `Kit` of parts, by their names: their forwards."""
    for name, forward in forwards.items():
        rows(ends, type("Own", (Kit,), {"forward": forward}), slow=slow, **{name: script})


@cache
def plan_for(net: Callable[[], nn.Module], loss: Callable[[Any], torch.Tensor]) -> Plan:
    torch.manual_seed(0)
    trace = recorded(build_of(lambda: (net(), batch(), loss, None))).trace
    return plan_of(trace, *recompute_all(Problem(trace)))


def ending(name: str) -> str:
    """How a row ends: EQUAL, the words of the error that the planned run raised, or "DIFFERS: " and where."""
    net, script, _, loss = ROWS[name]
    random_state, seed = random.getstate(), np.random.get_state()
    eager_error = None
    try:
        plan = plan_for(net, loss)
        torch.manual_seed(0)
        eager = net()
        torch.manual_seed(0)
        planned = apply_plan(net(), plan)
        results = []
        for m in (eager, planned):
            torch.manual_seed(1), random.seed(1), np.random.seed(1)
            try:
                with SetBack():
                    results.append((script(m), *state(m)))
            except LowtideError as error:
                assert m is planned
                return f"{type(error).__name__}: {error}"
            except Exception as error:
                if m is planned:
                    if eager_error is not None:
                        alike = str(error) == eager_error or all(
                            CHANGED in e for e in (str(error), eager_error)
                        )
                        return f"as eager: {error}" if alike else f"DIFFERS: {error}"
                    if isinstance(error, RuntimeError):
                        return f"RuntimeError: {error}"
                    raise
                eager_error = str(error)
                results.append(())
    except LowtideError as error:
        return f"refused by trace: {error}"
    finally:
        random.setstate(random_state), np.random.set_state(seed)
    if eager_error is not None:
        return f"DIFFERS: eager raised {eager_error!r}"
    left, right = (pytree.tree_flatten_with_path(r)[0] for r in results)
    if [p for p, _ in left] != [p for p, _ in right]:
        return f"DIFFERS: {[p for p, _ in left]} is not {[p for p, _ in right]}"
    for (path, a), (_, b) in zip(left, right, strict=True):
        if not equal(a, b):
            return f"DIFFERS: {pytree.keystr(path)}: {a} is not {b}"
    return EQUAL


def state(m: nn.Module) -> Iterator[Any]:
    """Everything of a model and of this process that a training step may change."""
    yield m.state_dict()
    yield {name: p.grad for name, p in m.named_parameters()}
    yield {name: plain(module) for name, module in m.named_modules()}
    yield torch.get_rng_state(), random.getstate(), str(np.random.get_state())


def plain(module: nn.Module) -> dict[str, Any]:
    made_by_hooks = {"weight"} if module._forward_pre_hooks else set()
    return {
        k: v for k, v in vars(module).items() if k[0] != "_" and not callable(v) and k not in made_by_hooks
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        assert not isinstance(b, (FakeTensor, FunctionalTensor)), (
            "a tensor of a capture is in the user's hands"
        )
        if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())
    return bool(a == b)


class SetBack:
    """Global settings of torch as they were."""

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()

    def __exit__(self, *_: Any) -> None:
        torch.set_default_dtype(self.before[0])
        torch.use_deterministic_algorithms(self.before[1])


# Changes of the model between two steps


changes(
    dropout_p=lambda m: setattr(m.block.drop, "p", 0.5),
    a_scalar_of_the_root=lambda m: setattr(m, "scale", 0.5),
    a_config_replaced=lambda m: setattr(
        m, "config", SimpleNamespace(use_cache=False, layers=[5], nested=SimpleNamespace(gain=0.5))
    ),
    a_hook_on_the_root=lambda m: (
        m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        m.register_forward_hook(lambda module, args, out: out * 3),
    ),
)
changes(
    batch_norm_momentum=lambda m: setattr(m.block.norm, "momentum", 0.5),
    an_activation_replaced_by_its_like=lambda m: setattr(m.block, "act", nn.GELU()),
    gelu_of_another_formula=lambda m: setattr(m.block.act, "approximate", "tanh"),
    an_entry_of_a_dict=lambda m: m.table.update(shift=0.125),
    a_parameter_replaced=lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach() * 2)),
    weights_tied=lambda m: setattr(m.head, "weight", m.block.linear.weight),
    nothing_that_forward_reads=lambda m: setattr(m, "epoch", getattr(m, "epoch", 0) + 1),
    a_linear_deleted_and_put_back=lambda m: setattr(m.block, "linear", m.block._modules.pop("linear")),
)
changes(
    "another graph",
    an_activation_replaced=lambda m: setattr(m.block, "act", nn.Tanh()),
    a_block_s_forward_replaced_on_the_instance=lambda m: setattr(
        m.block, "forward", lambda x, linear=m.block.linear: linear(x).tanh()
    ),
    a_config_s_flag=lambda m: setattr(m.config, "use_cache", True),
    parameters_frozen=lambda m: m.block.requires_grad_(False),
    a_weight_pruned=lambda m: prune.l1_unstructured(m.head, "weight", 0.5),
    one_block_in_evaluation_mode=lambda m: m.block.eval(),
)


SCALE = 1.0


class WithGlobals(Linear):
    power = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sigmoid() ** self.power * SCALE


def switched(
    name: str,
    change: Callable[[Any, Any], object],
    values: Any = (1.0, 3.0, 1.0),
    *,
    net: Callable[[], nn.Module] = WithGlobals,
    ends: str = EQUAL,
) -> None:
    """A row in which something of the model or of the process is another for the second step."""

    def script(m: Any) -> Any:
        try:
            return [(change(m, value), step(m))[1] for value in values]
        finally:
            change(m, values[0])

    rows(ends, net, **{name: script})


switched("a_global_changed", lambda m, x: globals().update(SCALE=x))
switched("an_attribute_of_the_class_changed", lambda m, x: setattr(WithGlobals, "power", x), (2.0, 3.0))
switched(
    "forward_replaced_in_the_class",
    lambda m, x: setattr(WithGlobals, "forward", x),
    (WithGlobals.forward, lambda self, x: self.linear(x).tanh()),
    ends="another graph",
)


TABLE = {"outer": 1.0}


def by_default(x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
    return x * gain


class Helped(Linear):
    """The numbers that decide its result stand behind functions that its forward calls."""

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return by_default(x * TABLE["outer"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(self.linear(x).sigmoid())


switched("a_table_that_a_helper_reads", lambda m, x: TABLE.update(outer=x), net=Helped)
switched("a_default_of_a_helper", lambda m, x: setattr(by_default, "__defaults__", (x,)), net=Helped)


def closure() -> tuple[type[nn.Module], Callable[[float], None]]:
    gain = 1.0

    class Closed(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).sigmoid() * gain

    def change(value: float) -> None:
        nonlocal gain
        gain = value

    return Closed, change


Closed, set_gain = closure()


switched("a_closure_s_variable_changed", lambda m, x: set_gain(x), net=Closed)


def pooled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.conv(x[:, None]).relu().mean(2)


Convolution = made_of(pooled, conv=partial(nn.Conv1d, 1, 2, 3, padding=1))
changes(net=Convolution, a_convolution_s_stride=lambda m: setattr(m.conv, "stride", (2,)))


class Tensors(Linear):
    """A tensor that is neither parameter nor buffer, and one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.ones(8)
        self.several = [torch.ones(8)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.plain).sigmoid() * self.several[0]


rows(net=Tensors, tensors_that_are_no_buffers=lambda m: step(m))


# Arguments


class Arguments(Linear):
    def forward(self, x: torch.Tensor, *others: Any, gain: Any = 1.0, **kwargs: Any) -> Any:
        for other in others:
            values = getattr(other, "values", other)
            x = x * float(np.sum(values)) if isinstance(values, np.ndarray) else x * values
        return self.linear(x).sigmoid() * gain


rows(
    net=Arguments,
    a_number_among_the_arguments=lambda m: [step(m, gain=gain) for gain in (1.0, 2.0, 2.5, 1.0)],
)


rows(net=Arguments, a_flag_for_a_number=lambda m: [step(m, gain=gain) for gain in (1.0, 1, True)])


ONES = np.ones(2_000)
BOX = SimpleNamespace(values=1.0)


class WithArray(Arguments):
    def forward(self, x: torch.Tensor, values: Any = ONES) -> Any:
        return super().forward(x, values)


@row("cannot be captured by torch.compile", net=WithArray)
def arrays(m: Any) -> Any:
    losses = [step(m)]
    for k in range(3):
        values = np.ones(2_000)
        values[1_000] = k
        losses.append(step(m, values=values))
    values[500] = 8.0
    return [*losses, step(m, values=values)]


class WithObject(Arguments):
    def forward(self, x: torch.Tensor, values: Any = BOX) -> Any:
        return super().forward(x, values)


@row(net=WithObject)
def an_object_s_number(m: Any) -> Any:
    box = SimpleNamespace(values=1.0)
    losses = [step(m, values=box)]
    box.values = 3.0
    return [*losses, step(m, values=box), step(m, values=SimpleNamespace(values=1.0))]


rows(
    "another graph",
    net=WithObject,
    an_object_that_holds_a_tensor=lambda m: [
        step(m, values=SimpleNamespace(values=torch.tensor(float(k)))) for k in (1, 2)
    ],
)


class Writing(Linear):
    """Overwrites its first argument."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        other = x if other is None else other
        x.mul_(2)
        return self.linear(x).sigmoid() * other.detach()


@row(net=Arguments)
def a_view_of_a_larger_tensor(m: Any) -> Any:
    wide = torch.randn(6, 16, generator=torch.Generator().manual_seed(3))
    return step(m), step(m, wide[:, ::2]), step(m, wide[:, 8:])


# Settings of the process


# Makes tensors of the default type.
Making = made_of(lambda s, x: (s.linear(x).sigmoid() * torch.linspace(0, 1, 8)).square())


Deterministic = made_of(
    lambda s, x: s.linear(x).sigmoid() * (3.0 if torch.are_deterministic_algorithms_enabled() else 1.0)
)


# Between forward and backward


class Shallow(Linear):
    """Eager's backward reads neither its input nor its biases; a recomputation reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("offset", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(torch.sigmoid(x / 2 + self.shift + self.offset)).sigmoid()).square()


@row("inference_mode", net=Shallow)
def an_input_made_in_inference_mode(m: Any) -> Any:
    with torch.inference_mode():
        x = batch() * 2
    total(m(x)).backward()


@row(net=Shallow)
def the_input_refilled_after_backward(m: Any) -> Any:
    x, losses = batch(), []
    for k in range(3):
        x.copy_(batch(k))
        losses.append(step(m, x))
    return losses


@row()
def an_optimizer_step_between_two_backwards(m: Any) -> Any:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    a, b = total(m(batch(1))), total(m(batch(2)))
    a.backward()
    optimizer.step()
    b.backward()


@row()
def two_forwards_then_two_backwards(m: Any) -> Any:
    a, b = total(m(batch(1))), total(m(batch(2)))
    b.backward()
    a.backward()
    a, b = total(m(batch(3))), total(m(batch(4)))
    (a + 2 * b).backward()
    return a.item(), b.item()


def output_changed(m: Any) -> Any:
    out = m(batch())
    loss = out.sum()
    with torch.no_grad():
        out.mul_(2)
    loss.backward()


rows(net=Shallow, an_output_changed_without_grad=output_changed)


@row(net=Shallow)
def an_output_changed_in_place(m: Any) -> Any:
    losses = []
    for change in (
        lambda x: x.div_(3.0),
        lambda x: x[:, 1].mul_(2.0),
        lambda x: x.masked_fill_(x < 0.5, 0.0),
        lambda x: x.__setitem__(0, 1.0),
    ):
        out = m(batch())
        change(out)
        loss = total(out)
        loss /= 2
        loss.backward()
        losses.append(loss.item())
    return losses


# Two outputs that share memory, and one that is the argument.
Views = made_of(lambda s, x: (lambda y: (y, y[0], x))(s.linear(x)))


@row(net=Views)
def outputs_that_share_memory_changed_in_place(m: Any) -> Any:
    for which in (0, 1):
        out = m(batch())
        out[which].mul_(2)
        total(out).backward()


# Its output is what its backward reads.
Sigmoid = made_of(lambda s, x: s.linear(x).sigmoid())


rows(net=Sigmoid, an_output_that_backward_reads_changed=output_changed)


@row()
def a_module_replaced_before_backward(m: Any) -> Any:
    loss = total(m(batch()))
    head = m.head
    m.head = nn.Linear(8, 8)
    loss.backward()
    return head.weight.grad, step(m)


@row()
def evaluation_between_forward_and_backward(m: Any) -> Any:
    loss = total(m(batch()))
    m.eval()
    with torch.no_grad():
        out = m(batch(2))
    m.train()
    loss.backward()
    return out


AsksWhetherItTrains = made_of(lambda s, x: functional.dropout(s.linear(x), 0.5, training=s.training))
rows(
    net=AsksWhetherItTrains,
    training_and_evaluation_by_turns=lambda m: [
        (step(m.train(), batch(k)), m.eval()(batch(k))) for k in range(3)
    ],
)


@row(net=Sigmoid)
def a_gradient_penalty_without_the_plan(m: Any) -> Any:
    losses = []
    for k in range(2):
        x = batch(k).requires_grad_()
        with unplanned(m) if hasattr(m, "receipt") else nullcontext():
            (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        losses.append(total(m(batch(k))) + (g.norm(2, 1) - 1).square().sum())
        losses[-1].backward()
    return [x.item() for x in losses]


@row()
def a_call_without_the_plan_before_one_by_it_in_one_loss(m: Any) -> Any:
    """The second writes the batch norm's statistics, which the first has saved; eager makes no new version of them."""
    with unplanned(m) if hasattr(m, "receipt") else nullcontext():
        first = total(m(batch()))
    loss = first + total(m(batch(1)))
    loss.backward()
    return loss.item()


ComplexLinear = partial(nn.Linear, 8, 8, dtype=torch.cfloat)
Complex = made_of(lambda s, x: s.b(torch.tanh(s.a(torch.complex(x, x)))), a=ComplexLinear, b=ComplexLinear)


def magnitude(out: torch.Tensor) -> torch.Tensor:
    return out.abs().square().sum()


@row(net=Complex, loss=magnitude)
def complex_numbers(m: Any) -> Any:
    for k in range(3):
        magnitude(m(batch(k))).backward()


rows(
    gradients_of_some_parameters=lambda m: torch.autograd.grad(
        total(m(batch())), [m.head.weight, m.block.linear.bias]
    )
)


rows(backward_into_some_parameters=lambda m: total(m(batch())).backward(inputs=[m.head.weight]))


@row()
def hooks_on_output_and_parameters(m: Any) -> Any:
    seen = []
    m.head.weight.register_hook(lambda g: g * 2)
    m.block.linear.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    out = m(batch())
    out.register_hook(lambda g: g * 0.5)
    total(out).backward()
    return seen


# A loss over some of the outputs


class Checks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x > -100)
        return super().forward(x).sigmoid()


@row(net=partial(Checks, 8, 8))
def values_that_a_library_checks(m: Any) -> Any:
    losses = steps(m)
    with pytest.raises(RuntimeError):
        m(batch() - 1000)
    return losses, step(m)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.trunk(x).sigmoid()
        return {"a": self.a(h).sigmoid(), "b": self.b(h).square()}


class Steep(Heads):
    """The second head's gradient is NaN where a zero comes back into it."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = super().forward(x)
        return {**out, "b": (out["b"].sum() * 0).sqrt() + out["b"]}


@row(net=Heads)
def one_output_alone(m: Any) -> Any:
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    for k in range(3):
        m(batch(k))["a"].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.state_dict()


# Its outputs are parts of one value, whose gradient is put together from both.
Halves = made_of(lambda s, x: tuple(part.sigmoid() for part in s.linear(x).sigmoid().split(4, 1)))


rows(
    "leaves out an output",
    Heads,
    one_output_at_another_size=lambda m: (step(m), m(batch()[:3])["a"].sum().backward()),
)
rows("leaves out an output", Steep, one_output_without_a_steep_one=lambda m: m(batch())["a"].sum().backward())
rows(net=Halves, one_half_alone=lambda m: m(batch())[1].sum().backward())


# State that forward changes


class Stateful(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(8))
        self.calls = 0
        self.seen: list[Any] = []
        self.last: Any = None
        self.shape: Any = None

    def work(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.work(y) + y.sigmoid()


def stateful(ends: str, net: Callable[[], nn.Module] = Stateful) -> Callable[[Any], None]:
    """A row from the middle of a forward."""

    def add(function: Any) -> None:
        kind = type(function.__name__, (net,), {"work": function})

        def script(m: Any) -> Any:
            return steps(m)

        script.__name__ = function.__name__
        row(ends, kind)(script)

    return add


@stateful(EQUAL)
def a_buffer_reassigned_with_its_graph(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.ema = 0.9 * self.ema.detach() + 0.1 * y.mean(0)
    return y - self.ema


@stateful(EQUAL)
def a_buffer_changed_in_place(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.ema.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return y - self.ema


@stateful(EQUAL)
def a_counter(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return y * self.calls


@stateful(EQUAL)
def a_shape_noted(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.shape = y.shape
    return y


@stateful("self.last")
def an_activation_noted(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.last = y
    return y


@stateful("self.seen")
def an_activation_appended(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.seen.append(y.detach())
    return y


@stateful("another graph")
def a_hidden_state_carried_over(self: Any, y: torch.Tensor) -> torch.Tensor:
    if self.last is not None:
        y = y + self.last
    self.last = y.detach()
    return y


@stateful("another graph")
def a_buffer_made_in_forward(self: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(self, "late"):
        self.register_buffer("late", torch.ones(8))
    return y * self.late


@stateful("torch.manual_seed")
def a_seed_set_in_forward(self: Any, y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return y + torch.rand(8)


GENERATOR = torch.Generator()


WithGenerator = made_of(lambda s, x: s.linear(x) + torch.rand(8, generator=GENERATOR))


@stateful(EQUAL)
def without_grad_inside(self: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        z = self.linear(y).sigmoid()
    return y * z


@stateful("cannot be captured by torch.compile")
def a_gradient_inside(self: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        z = y.detach().requires_grad_()
        (g,) = torch.autograd.grad(self.linear(z).sigmoid().sum(), [z])
    return y * g


class Clipping(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return self.linear(x).sigmoid()


rows("overwrites the parameter", net=Clipping, a_parameter_clipped_in_forward=lambda m: steps(m))


# Hooks of the user's own


def storing(register: Callable[[Any, list[Any]], Any], script: Script = steps) -> Script:
    """Train with hooks that store something."""

    def run(m: Any) -> Any:
        seen: list[Any] = []
        register(m, seen)
        return script(m), seen

    return run


rows(
    a_hook_that_stores_features=storing(
        lambda m, seen: m.block.register_forward_hook(lambda _, args, out: seen.append(out))
    ),
    hooks_on_the_root_that_store=storing(
        lambda m, seen: (
            m.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone())),
            m.register_forward_hook(lambda _, args, out: seen.append(out.detach().clone())),
        )
    ),
    a_hook_that_stores_features_added_later=storing(
        lambda m, seen: (step(m), m.block.register_forward_hook(lambda _, args, out: seen.append(out)))
    ),
    post_accumulate_hooks_and_gradients_asked_for=storing(
        lambda m, seen: m.head.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.grad.clone())
        ),
        lambda m: (torch.autograd.grad(total(m(batch())), [m.head.weight]), step(m)),
    ),
)
rows(
    "another graph",
    a_hook_that_transforms_and_counts=storing(
        lambda m, seen: m.block.register_forward_hook(lambda _, args, out: seen.append(1) or out * 2)
    ),
)
rows(
    "hook",
    a_backward_hook_that_stores_gradients=storing(
        lambda m, seen: m.block.register_full_backward_hook(lambda _, gin, gout: seen.append(gout[0]))
    ),
)


class Hooked(WithGlobals):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, args, out: out * 0.5)


rows(net=Hooked, a_hook_that_transforms=lambda m: steps(m))


def normed() -> nn.Module:
    """Its weights are made by torch's hooks."""
    with warnings.catch_warnings(action="ignore"):  # deprecated, and in many models
        first = nn.utils.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(first, nn.Sigmoid(), nn.utils.spectral_norm(nn.Linear(8, 8)))


rows(net=normed, weights_made_by_torch_s_hooks=lambda m: steps(m))


Parametrized = made_of(
    lambda s, x: s.linear(x).sigmoid(), linear=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
)
rows(net=Parametrized, weights_made_by_a_parametrization=trained)


@row()
def a_global_hook_that_stores(m: Any) -> Any:
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(out))
    try:
        return steps(m), len(seen)
    finally:
        handle.remove()


@stateful("hook")
def a_tensor_hook_in_forward_that_stores(self: Any, y: torch.Tensor) -> torch.Tensor:
    y.register_hook(self.seen.append)
    return y * 2


@stateful(EQUAL)
def a_tensor_hook_in_forward_that_scales(self: Any, y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda g: g * 0.5)
    return y * 2


# Threads, reuse


@row(net=Shallow)
def two_threads(m: Any) -> Any:
    """Two batches of different shapes at once, each captured while the other thread may run."""
    errors, losses = [], {}

    def work(k: int) -> None:
        try:
            for _ in range(3):
                losses[k] = total(m(batch(k)[: k + 2])).item()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors
    step(m)
    return sorted(losses.items())


@row()
def a_deep_copy_trained_beside_it(m: Any) -> Any:
    first = step(m)
    other = copy.deepcopy(m)
    other.block.drop.p = 0.5
    return first, step(other), step(m), [p.grad for p in other.parameters()]


class AsksForItsGradient(Net):
    def forward(self, x: Any) -> Any:
        return super().forward(x.requires_grad_())


@row()
def other_weights_by_functional_call(m: Any) -> Any:
    weights = {k: v.detach().clone().requires_grad_() * 1.5 for k, v in m.named_parameters()}
    loss = total(torch.func.functional_call(m, weights, (batch(),)))
    return torch.autograd.grad(loss, list(weights.values())), step(m)


@row("inside torch.func", net=Shallow)
def a_gradient_of_each_example(m: Any) -> Any:
    weights = {k: v.detach() for k, v in m.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return total(torch.func.functional_call(m, weights, (x[None],)))

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, batch())


@row("or forward_ad", net=Shallow)
def a_directional_derivative(m: Any) -> Any:
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own way there is deprecated in torch
        x = forward_ad.make_dual(batch(), torch.ones(6, 8))
        return forward_ad.unpack_dual(m(x)).tangent


@row()
def sharpness_aware_steps(m: Any) -> Any:
    """Two forwards and backwards a step, the second of changed weights."""
    optimizer, losses = torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9), []
    for k in range(3):
        losses.append(step(m, batch(k)))
        moved = [(p, p.grad / 10) for p in m.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, e in moved:
                p.add_(e)
        optimizer.zero_grad()
        losses.append(step(m, batch(k)))
        with torch.no_grad():
            for p, e in moved:
                p.sub_(e)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses


@row(net=Shallow)
def a_closure_that_lbfgs_calls(m: Any) -> Any:
    optimizer = torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = total(m(batch()))
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(2)]


@row(net=Shallow)
def arguments_that_lie_otherwise(m: Any) -> Any:
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(3))
    return [step(m, y) for y in (x[::2, ::2], x[:1, :8].expand(6, 8), x[:6, 8:])]


rows(net=Shallow, inside_a_checkpoint=lambda m: total(checkpoint(m, batch(), use_reentrant=False)).backward())


# What no plan sees: state that forward, hooks and backward keep outside of the graph

CALLS = 0
DICE = random.Random(3)


@stateful("cannot be captured")
def a_counter_among_globals(self: Any, y: torch.Tensor) -> torch.Tensor:
    global CALLS
    CALLS = (CALLS + 1) % 4
    return y * CALLS


@stateful("cannot be captured")
def dice_of_one_s_own(self: Any, y: torch.Tensor) -> torch.Tensor:
    if not self.seen:
        DICE.seed(3)
    self.seen.append(DICE.random())
    return y * self.seen[-1]


@stateful("cannot be captured")
def random_numbers_of_a_fork(self: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        noise = torch.rand(8)
    return y + noise * torch.rand(8)


@stateful("cannot be captured")
def a_weight_written_through_data(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.linear.weight.data.mul_(0.9)
    return self.linear(y)


@stateful(EQUAL)
def a_buffer_whose_data_is_replaced(self: Any, y: torch.Tensor) -> torch.Tensor:
    self.ema.data = 0.9 * self.ema + y.detach().mean(0)
    return y - self.ema


Transposed = (
    made_of(  # torch's shape function has the gradient of the loss lie otherwise than its kernel does
        lambda s, x: functional.mse_loss(s.linear(x).view(6, 2, 4).transpose(1, 2), torch.ones(6, 4, 2))
    )
)
rows(net=Transposed, a_loss_of_a_transposed_value=lambda m: steps(m))


class ByLambda(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.scaled = lambda x: self.linear(x).sigmoid() * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)


class ByProxy(ByLambda):
    def __init__(self) -> None:
        super().__init__()
        me = weakref.proxy(self)
        self.scaled = lambda x: me.linear(x).sigmoid() * me.scale


rows("cannot be captured", net=ByProxy, a_weak_proxy_of_self=lambda m: steps(m))


class NamesItsOwn(nn.Sequential):
    """Its optimizer is to see its head alone."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self[2].named_parameters(*args, **kwargs)


rows(
    "cannot be captured", net=NamesItsOwn, named_parameters_of_its_own=lambda m: (steps(m), m[0].weight.grad)
)


GeluAndDice = made_of(lambda s, x: functional.gelu(s.linear(x) + torch.rand(8, generator=GENERATOR)))


class CalledOtherwise(Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().__call__(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sigmoid()


rows("another graph", net=CalledOtherwise, a_call_of_the_class_s_own=lambda m: steps(m))


HoldsOne = made_of(lambda s, x: s.inner(x).sigmoid(), inner=CalledOtherwise)
rows("another graph", net=HoldsOne, a_call_of_a_part_s_own=lambda m: steps(m))


class Distilled(nn.Module):
    """A teacher that follows its student, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 8)
        self._teachers = [copy.deepcopy(self.student).requires_grad_(False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x).sigmoid() - self._teachers[0](x)


@row(net=Distilled)
def a_teacher_in_a_list(m: Any) -> Any:
    losses = []
    for k in range(3):
        losses.append(step(m, batch(k)))
        m._teachers[0].weight.lerp_(m.student.weight.detach(), 0.5)
    m._teachers[0] = copy.deepcopy(m._teachers[0])
    return losses, step(m)


class AddsMain(torch.autograd.Function):
    """A product whose backward adds up the weight's gradient itself, as Megatron's does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(x.t() @ grads[0])
        return grads[0] @ weight.t(), None


class WithMain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.eye(8))
        self.weight.main_grad = torch.zeros(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AddsMain.apply(self.first(x).sigmoid(), self.weight)


rows(
    "cannot be captured",
    net=WithMain,
    a_backward_that_adds_up_gradients=lambda m: (steps(m), m.weight.main_grad),
)


class Counts(torch.autograd.Function):
    seen: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Counts.seen.append(1.0)
        return grads[0] * 2


Counting = made_of(lambda s, x: Counts.apply(s.linear(x).sigmoid()))


# An op of its own that draws and does not say so, before one that saves what it made.
Drawing = made_of(lambda s, x: (s.linear(x) * torch.ops.lowtide_tests.drawn(x)).sigmoid() * 2)


rows(net=Drawing, an_op_that_draws_and_does_not_say_so=lambda m: steps(m))


class Averaging:
    """A hook with a state."""

    def __init__(self) -> None:
        self.mean = torch.zeros(8)

    def __call__(self, module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * out.detach().mean(0)
        return out - self.mean


@row("another graph")
def a_hook_with_a_state(m: Any) -> Any:
    hook = Averaging()
    m.block.register_forward_hook(hook)
    return steps(m), hook.mean


@row()
def post_accumulate_hooks_and_chosen_inputs(m: Any) -> Any:
    seen = []
    for name, p in m.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, p.grad.clone())))
    total(m(batch())).backward(inputs=[m.head.weight])
    total(m(batch(1))).backward()
    return dict(seen[:1]), dict(
        sorted(seen[1:], key=lambda x: x[0])
    )  # which comes first is autograd's affair


@row("shallow copy", net=Shallow)
def a_shallow_copy_of_its_own_state(m: Any) -> Any:
    other = copy.copy(m)
    first = step(m)
    other.shift = nn.Parameter(torch.ones(8))
    return first, step(other), other.shift.grad, step(m)


# A line each: layers and ops of torch that keep something, draw, or write


class Kit(nn.Module):
    """Parts, of which a row's forward takes some; the first parameter is read by few."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.some = nn.Parameter(torch.ones(5, dtype=torch.cfloat)), nn.ParameterList([torch.eye(8)])
        self.a, self.b, self.n, self.opts = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8), {"k": 0}
        self.embed, self.bag = (
            nn.Embedding(5, 8, 1, scale_grad_by_freq=True),
            nn.EmbeddingBag(5, 8, mode="sum"),
        )
        self.alpha, self.rrelu, self.drop = nn.AlphaDropout(), nn.RReLU(inplace=True), nn.Dropout(0.5, True)
        self.pool, self.wrap = nn.FractionalMaxPool2d(2, 3), nn.Conv1d(1, 2, 3, 1, 1, padding_mode="circular")
        self.mha, self.inorm = (
            nn.MultiheadAttention(8, 2, 0.3),
            nn.InstanceNorm1d(1, track_running_stats=True),
        )
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.capped = nn.Embedding(5, 8, max_norm=0.5).requires_grad_(False)
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(12, 8), persistent=False)


class OwnGradient(torch.autograd.Function):
    """A backward that draws, asks what is wanted, and is no derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gain: float) -> Any:
        order, ctx.gain = x.argsort(), gain
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(x)
        return x * 2, order

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        assert ctx.needs_input_grad[0]
        return (grads[0] * ctx.gain).clamp(-1, 1) + torch.rand_like(ctx.saved_tensors[0]), None


def by_turns(s: Any, x: torch.Tensor) -> torch.Tensor:
    y = s.n.eval()(s.a(x)).sigmoid()
    return s.n.train()(y).sigmoid()


def follow(s: Any) -> Any:
    with torch.no_grad():
        for p, q in zip(s.teacher.parameters(), s.a.parameters(), strict=True):
            p.lerp_(q, 0.5)
    return s.teacher


def written(s: Any, x: torch.Tensor) -> torch.Tensor:
    y, at = torch.mul(x, 2, out=torch.empty(6, 8)).clone() + s.a(x), s.opts["k"]
    s.seen[at : at + 6], s.opts["k"] = y.detach(), 6 - at
    y[[0, 2, 2]] = x[:3]
    y.index_put_((torch.tensor([1, 1]),), x[:2], accumulate=True).scatter_add_(1, bins(x), s.b(x))
    y[:, :4] *= 2
    y.view(-1)[3:5].add_(1)
    return (y.masked_fill_(x < -1, 2).sigmoid_() @ s.seen.clone().T).sigmoid()


def bins(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() * 2).long().clamp(0, 4)


F, Pair = functional, collections.namedtuple("Pair", "a b")
models(
    noise_by_torch=lambda s, x: s.a(x).sigmoid() + torch.rand(8) * torch.randn_like(x),
    a_checkpoint_inside=lambda s, x: checkpoint(
        lambda y: s.drop(s.a(y)).sigmoid(), s.b(x), use_reentrant=False
    ),
    statistics_read_between_two_norms=lambda s, x: s.n(s.n(s.a(x)).cos() * s.n.running_var).cos(),
    a_norm_that_shares_its_statistics=lambda s, x: s.n(s.n(s.a(x)).sigmoid()) * s.n.running_var,
    a_norm_in_evaluation_and_then_in_training=by_turns,
    a_spectral_norm=lambda s, x: s.spectral(x).sigmoid(),
    writes_of_every_kind=written,
    a_teacher_that_follows_in_forward=lambda s, x: s.a(x).sigmoid() - follow(s)(x),
    a_gradient_of_its_own=lambda s, x: (lambda y, i: y.gather(1, i))(*OwnGradient.apply(s.a(x), 2.0)),
    a_view_without_its_gradient=lambda s, x: (lambda y: (y, y, y.T, y[1:].detach(), y > 0, x, s.seen))(
        s.b(x)
    ),
)
models(
    slow=True,
    noise_in_place=lambda s, x: s.drop(s.rrelu(s.alpha(s.a(x))).mul(2)).sigmoid(),
    attention_with_dropout=lambda s, x: s.layer(s.mha(x, x, s.a(x))[0][None]),
    an_instance_norm_with_statistics=lambda s, x: s.inorm(s.a(x)[:, None]).sigmoid(),
    other_weights_inside=lambda s, x: torch.func.functional_call(s.a, {"weight": s.some[0] * 2}, (x,)).cos(),
    embeddings_that_pad_and_count=lambda s, x: s.a(s.embed(bins(x))) + s.capped(bins(x)),
    a_bag_of_embeddings=lambda s, x: s.bag(bins(x), per_sample_weights=s.a(x).sigmoid()),
    choices_drawn=lambda s, x: s.a(x).gather(1, torch.multinomial(s.b(x).softmax(1), 3)),
    samples_of_a_gamma=lambda s, x: torch.distributions.Gamma(s.a(x).exp(), 1.0).rsample().sigmoid(),
    numbers_drawn_in_place=lambda s, x: s.a(x).sigmoid() * torch.empty(8).normal_().exponential_(),
    pools_at_random_places=lambda s, x: s.pool(s.a(x)[None, None]).sigmoid(),
    a_number_of_python_s_own=lambda s, x: s.a(x).sigmoid() * random.uniform(1, 2),
    edges_that_wrap_around=lambda s, x: s.wrap(s.a(x)[:, None]).sigmoid(),
    frequencies_weighed=lambda s, x: torch.fft.irfft(torch.fft.rfft(s.a(x)) * s.f).sigmoid(),
    an_estimator_straight_through=lambda s, x: s.a(x) + (s.a(x).round() - s.a(x)).detach(),
    a_region_of_autocast=lambda s, x: s.b(torch.autocast("cpu", torch.bfloat16)(lambda: s.a(x))().float()),
    a_layer_under_vmap=lambda s, x: torch.vmap(s.a)(x).sigmoid(),
    a_gradient_of_torch_func=lambda s, x: torch.func.grad(lambda y: s.a(y).cos().sum())(x),
    a_checkpoint_that_reenters=lambda s, x: checkpoint(lambda y: s.drop(s.a(y)), s.b(x), use_reentrant=True),
    a_gradient_that_is_read=lambda s, x: s.a(x).sigmoid() * (1 if s.a.weight.grad is None else 2),
    named_outputs=lambda s, x: Pair(s.a(x).sigmoid(), {"b": [s.b(x), None, "s", 2.5]}),
)
models(
    "random",
    layer_drop_by_python=lambda s, x: s.a(x) if random.random() < 0.5 else x,
    layer_drop_by_numpy=lambda s, x: s.a(x) if np.random.rand() < 0.5 else x,
)
models(
    "cannot be captured",
    an_array_of_random_numbers=lambda s, x: s.a(x).sigmoid() * torch.from_numpy(np.random.rand(8)).float(),
    layers_in_random_order=lambda s, x: [s.a, s.b][random.sample([0, 1], 2)[0]](x).sigmoid(),
    dice_alone=lambda s, x: s.a(x).sigmoid() * DICE.random(),
    a_capped_embedding=lambda s, x: s.a(s.capped.requires_grad_()(bins(x))),
)
models(
    "cannot be captured",
    slow=True,
    the_time=lambda s, x: s.a(x).sigmoid() * (time.time() % 2),
    a_weight_made_late=lambda s, x: s.a(x) * vars(s).setdefault("late", nn.Parameter(torch.ones(8))),
    a_value_of_the_data=lambda s, x: s.a(x).sigmoid() * x.max().item(),
    rows_chosen_by_the_data=lambda s, x: s.a(x)[x[:, 0] > 0].sigmoid(),
    a_number_of_threads=lambda s, x: s.a(x).sigmoid() * torch.get_num_threads(),
)


def inside(context: Callable[[], Any], script: Script = steps) -> Script:
    def run(m: Any) -> Any:
        with context():
            return script(m)

    return run


def caught(m: Any) -> Any:
    """A loop that goes on after calls that its model refuses."""
    found = []
    for width in (8, 7, 8, 5, 8):
        try:
            found.append(step(m, torch.ones(6, width)))
        except Exception as error:
            found.append(str(error))
    return found


def sized(*sizes: int) -> Script:
    return lambda m: [step(m, batch(k)[:n]) for k, n in enumerate(sizes)]


graph, Own = torch.autograd.graph, type("Own", (torch.Tensor,), {})
autocast = partial(torch.autocast, "cpu", torch.bfloat16)
rows(net=Net, errors_of_shapes_that_are_caught=caught)
rows(
    net=Shallow,
    an_empty_batch=sized(6, 0, 6),
    a_frozen_copy_called_with_gradients_on=lambda m: (
        copy.deepcopy(m).requires_grad_(False)(batch()),
        step(m),
    ),
    a_model_for_export=lambda m: (step(torch.export.export(m, (batch(),)).module()), step(m)),
    a_model_traced_by_jit=lambda m: (step(torch.jit.trace(m, (batch(),))), step(m)),
    saved_tensors_on_the_cpu=inside(graph.save_on_cpu),
    a_parameter_deleted_and_the_errors_caught=lambda m: (step(m), delattr(m, "shift"), caught(m)),
    backward_in_a_thread=lambda m: ThreadPoolExecutor(1).submit(total(m(batch())).backward).result(),
    data_swapped=changed(lambda m: [setattr(p, "data", p.data * 0.5) for p in m.parameters()]),
    a_state_assigned=changed(lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True)),
)
rows(
    slow=True,
    batches_that_shrink=sized(6, 4, 2, 3, 6),
    anomalies_looked_for=inside(torch.autograd.detect_anomaly, trained),
    saved_tensors_without_hooks=inside(lambda: graph.disable_saved_tensors_hooks("none")),
    random_numbers_forked_around=lambda m: (inside(partial(torch.random.fork_rng, []))(m), torch.rand(2)),
    a_seed_for_each_step=lambda m: [(torch.manual_seed(k), step(m), torch.rand(1))[1:] for k in (3, 3, 5)],
    gradients_kept_by_reference=lambda m: (step(m), [p.grad for p in m.parameters()], step(m, batch(1))),
    every_second_backward=lambda m: [x.backward() for x in [total(m(batch(k))) for k in range(4)][::2]],
    a_forward_called_by_its_class=lambda m: (total(type(m).forward(m, batch())).backward(), step(m)),
    a_part_called_alone=lambda m: (step(m.block), step(m), step(m.head)),
    parameters_reset=changed(lambda m: m.apply(lambda k: getattr(k, "reset_parameters", int)())),
    a_hook_that_triples=changed(lambda m: m.head.weight.register_hook(lambda g: g * 3)),
)
rows(
    "hooks",
    saved_tensors_that_lose_bits=inside(
        lambda: graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float)
    ),
)
rows("dispatch mode", a_count_of_flops=inside(lambda: FlopCounterMode(display=False)))
rows(
    "backward runs inside",
    Shallow,
    backward_under_autocast=lambda m: inside(autocast, torch.Tensor.backward)(total(m(batch()))),
)
rows(
    "many gradients",
    Sigmoid,
    gradients_in_a_batch=lambda m: torch.autograd.grad(
        m(batch())[0], [m.linear.weight], torch.eye(8), is_grads_batched=True
    ),
)
rows("whose class", Sigmoid, an_argument_of_a_subclass=lambda m: step(m, batch().as_subclass(Own)))
rows("requires a gradient", Shallow, a_buffer_with_a_gradient=lambda m: (m.offset.requires_grad_(), step(m)))


rows(net=Writing, an_argument_that_forward_overwrites=lambda m: (x := batch(), step(m, x)))
rows(
    "another graph",
    net=Writing,
    two_arguments_of_which_one_is_overwritten=lambda m: [
        (step(m, x, other=y), step(m, y, other=y)) for x, y in [(batch(), batch(1))]
    ],
)
rows(
    "another graph",
    net=Making,
    the_default_dtype=lambda m: (step(m), torch.set_default_dtype(torch.float64), step(m, batch().float())),
)
rows(
    deterministic_algorithms=lambda m: (step(m), torch.use_deterministic_algorithms(True), step(m)),
    a_buffer_added_that_nothing_reads=lambda m: (m.register_buffer("unread", torch.ones(3)), step(m)),
    the_gradient_of_the_output=lambda m: [
        (x.retain_grad(), total(x).backward(), x.grad) for x in [m(batch())]
    ],
    backward_twice=lambda m: [x.backward(retain_graph=k) for x in [total(m(batch()))] for k in (True, False)],
    backward_a_third_time_without_its_graph=lambda m: [
        x.backward(retain_graph=k) for x in [total(m(batch()))] for k in (True, False, False)
    ],
)
rows(
    net=Deterministic,
    deterministic_algorithms_that_forward_asks_for=lambda m: (
        step(m),
        torch.use_deterministic_algorithms(True),
        step(m),
    ),
)
rows(
    "another graph", net=Hooked, a_hook_removed=lambda m: (step(m), m.linear._forward_hooks.clear(), step(m))
)
rows(
    net=Heads,
    one_output_after_the_other=lambda m: [
        x[k].sum().backward(retain_graph=True) for x in [m(batch())] for k in "ab"
    ],
)
rows(
    "cannot be captured",
    net=ByLambda,
    a_lambda_around_self=lambda m: (step(m), setattr(m, "scale", 0.5), step(m)),
)


def drawn(m: Any) -> Any:
    GENERATOR.manual_seed(3)
    return steps(m), GENERATOR.get_state()


rows(
    net=Heads,
    one_output_then_both=lambda m: [
        sum(m(batch(3))[k].sum() for k in which).backward() for which in ("a", "ab")
    ],
)
rows(
    "double backward",
    a_gradient_of_the_gradient=lambda m: (
        g := torch.autograd.grad(m(batch()).sum(), m.head.weight, create_graph=True)[0],
        (g.square().sum() + m(batch()).sum()).backward(),
    ),
)
rows(
    "requires_grad",
    net=AsksForItsGradient,
    an_argument_is_asked_for_its_gradient=lambda m: (x := batch(), step(m, x), x.grad),
)
rows("another graph", used_twice_in_one_loss=lambda m: total(m(m(batch()))).backward())
rows("cannot be captured by torch.compile", net=WithGenerator, a_generator_of_one_s_own=drawn)
rows("cannot be captured", net=GeluAndDice, a_generator_beside_gelu=drawn)
rows(
    "cannot be captured",
    net=Counting,
    a_backward_that_counts=lambda m: (Counts.seen.clear(), steps(m), list(Counts.seen)),
)


def between(change: Callable[[Any, Any], Any]) -> Script:
    """Change something of the model, or of the input, between forward and backward."""

    def run(m: Any) -> Any:
        x = batch()
        loss = total(m(x))
        with torch.no_grad():
            change(m, x)
        loss.backward()
        return step(m)

    return run


rows(
    CHANGED,
    Shallow,
    the_input_refilled_before_backward=between(lambda m, x: x.copy_(batch(5))),
    a_bias_changed_before_backward=between(lambda m, x: m.shift.add_(1)),
)
rows(
    "an argument was changed in place",
    Shallow,
    the_input_refilled_through_data=between(lambda m, x: x.data.fill_(2)),
    the_input_s_memory_refilled_by_numpy=between(lambda m, x: x.numpy().fill(2)),
)
rows(
    a_weight_changed_before_backward=between(lambda m, x: m.head.weight.add_(1)),
    dropout_changed_before_backward=between(lambda m, x: setattr(m.block.drop, "p", 0.75)),
)


assert set(ROWS) >= SLOW


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in ROWS])
def test_it_ends_as_without_a_plan_or_says_why(name: str) -> None:
    wanted, end = ROWS[name][2], ending(name)
    assert end == EQUAL or end.startswith("as eager") or (wanted != EQUAL and wanted in end), end


def test_arguments_that_torch_conjugates_or_negates_when_they_are_read_are_added_up() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    for lazy in (x.conj(), x.conj().imag):
        assert _digest(lazy) == _digest(lazy.resolve_conj().resolve_neg().clone())


def test_backward_under_autocast_is_refused_where_forward_leaves_it_and_allowed_elsewhere() -> None:
    def call(s: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad() if s.c else nullcontext(), torch.autocast("cpu", enabled=False):
            y = s.linear(x)
        return s.linear(y) * y

    for without, refused in (
        (True, nullcontext()),
        (False, pytest.raises(PlanError, match="not all of forward")),
    ):
        net = made_of(call, c=lambda without=without: without)
        m = apply_plan(net(), plan_for(net, total), on_mismatch="replan")
        with autocast(), warnings.catch_warnings(action="ignore"), refused:
            step(m)


def test_a_parameter_in_a_list_is_refused() -> None:
    """A model in hand would be captured with it as a constant, and it would get no gradient."""
    m = Tensors()
    m.several[0].requires_grad_()
    with pytest.raises(CaptureError, match=r"shape \(8,\) that requires a gradient"):
        capture(m, (batch(),), {}, lambda out: {id(out)})
    m.several[0].requires_grad_(False)
    assert capture(m, (batch(),), {}, lambda out: {id(out)}).forward

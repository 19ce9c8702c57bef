"""The API: `trace` of objects in hand, from a script, a notebook or the REPL, and a plan of it that trains.

Imports nothing but the packages' public names (a planner by its name until `simulator` has one).
"""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor import verify
from simulator.core.problem import Problem
from simulator.planners import plan_with
from tracer import trace
from traces.errors import CaptureError, PlanError, SpecError
from traces.records.trace import Trace


class Net(nn.Module):
    """Convolutions with batch norm and dropout, a tied weight, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)
        )
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)
        self.tied = nn.Linear(8, 16, bias=False)
        self.tied.weight = self.up.weight
        self.head = nn.Linear(16, 10)
        self.head.bias.requires_grad_(False)
        self.register_buffer("shift", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x).mean(dim=(2, 3))
        h = self.tied(functional.gelu(self.down(functional.gelu(self.up(h)))))
        return self.head(h + self.shift)


def held(seed: int = 1) -> tuple[Net, tuple[torch.Tensor, torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    batch = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    return net, batch, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor], steps: int
) -> list[float]:
    torch.manual_seed(5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def picture(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """All that a trace could change of what the user holds."""
    return copy.deepcopy(
        (
            dict(net.state_dict()),
            [(p.grad, p.requires_grad, p.data_ptr()) for p in net.parameters()],
            optimizer.state_dict(),
            sorted(vars(optimizer)),
            [sorted(vars(m)) for m in net.modules()],
            [m.training for m in net.modules()],
        )
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def test_nothing_that_is_in_hand_changes() -> None:
    net, batch, optimizer = held()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    train(net, optimizer, batch, 2)
    schedule.step()
    before = picture(net, optimizer)
    random.seed(3)
    states = torch.get_rng_state(), random.getstate()
    made = trace(net, batch, loss=functional.cross_entropy, optimizer=optimizer, seed=7)
    assert same(picture(net, optimizer), before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert made.meta.model == "in hand: Net"
    assert made.meta.optimizer == "AdamW"
    assert made.meta.batch_size == 4
    # Step counters, and two moments of each trainable parameter: as after a first step.
    state = [
        n for n, c in zip(made.storages.nbytes, made.storages.category, strict=True) if c == "optimizer state"
    ]
    trainable = [p for p in net.parameters() if p.requires_grad]
    assert sum(state) == sum(2 * p.nbytes + 4 for p in trainable)


BUILD = """
import torch
from torch import nn
from torch.nn import functional

{source}

def build():
    net = Net()
    batch = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    return net, batch, functional.cross_entropy, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
"""


def test_in_hand_and_from_a_file_are_the_same_step(tmp_path: Path) -> None:
    text = Path(__file__).read_text()
    source = text[text.index("class Net(") : text.index("def held(")]
    file = tmp_path / "net.py"
    file.write_text(BUILD.format(source=source))
    from_file = trace(f"{file}:build")
    net, batch, optimizer = held()
    in_hand = trace(net, batch, functional.cross_entropy, optimizer)
    assert in_hand.ops == from_file.ops
    assert in_hand.storages == from_file.storages


@pytest.mark.usefixtures("by_rules")
def test_wherever_the_model_is_the_trace_is_the_same() -> None:
    net, batch, optimizer = held()
    here = trace(net, batch, functional.cross_entropy, optimizer)
    with torch.device("meta"):
        meta = Net()
    assert (
        trace(meta, batch, functional.cross_entropy, torch.optim.AdamW).meta.fingerprint
        == here.meta.fingerprint
    )
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        around = trace(net, batch, functional.cross_entropy, "adamw")
        assert torch.is_autocast_enabled("cpu")
        assert not torch.is_grad_enabled()
    assert around.meta.fingerprint == here.meta.fingerprint
    half = trace(net, batch, functional.cross_entropy, optimizer, amp="bfloat16")
    assert half.meta.amp == "bfloat16"
    assert half.meta.fingerprint != here.meta.fingerprint
    assert trace(net, batch, functional.cross_entropy, optimizer, target="h100").meta.device == "cuda"


def test_shared_storages_stay_shared() -> None:
    flat = torch.zeros(48)

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(flat[:16]), nn.Parameter(flat[16:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.a.sum() + self.b.sum()).sum()

    made = trace(Flat(), torch.randn(3))
    sizes = [n for n, c in zip(made.storages.nbytes, made.storages.category, strict=True) if c == "parameter"]
    assert sizes == [4 * 48]


def test_measured_for_real_on_copies() -> None:
    net, batch, optimizer = held()
    train(net, optimizer, batch, 1)
    before = picture(net, optimizer)
    made = trace(net, batch, functional.cross_entropy, optimizer, device="cpu", rounds=1, warmup=1)
    assert same(picture(net, optimizer), before)
    assert made.meta.mode == "real"
    assert made.meta.fingerprint == trace(net, batch, functional.cross_entropy, optimizer).meta.fingerprint


def test_a_plan_is_verified_on_copies_of_what_is_in_hand(tmp_path: Path) -> None:
    net, batch, optimizer = held()
    made = trace(net, batch, functional.cross_entropy, optimizer, clip_grad_norm=0.5)
    plan = plan_with("recompute-all", Problem(made), 2**40)
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    found = verify(
        plan.save(tmp_path / "plan.json"), net, batch, functional.cross_entropy, optimizer, steps=3
    )
    assert found.bit_equal
    assert found.steps == len(found.losses) == 3
    assert same(dict(net.state_dict()), before)
    assert torch.equal(torch.get_rng_state(), state)
    other = nn.Sequential(nn.Flatten(), nn.Linear(192, 10))
    with pytest.raises(PlanError):
        verify(plan, other, batch, functional.cross_entropy, "adamw")
    with pytest.raises(SpecError, match="in hand when it was traced"):
        verify(plan)


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.inner.lock = threading.Lock()  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def in_backward() -> Net:
    net = held()[0]
    net.up.weight.register_post_accumulate_grad_hook(lambda p: None)
    return net


def compiled() -> Net:
    net = Net()
    net.up.compile(backend="eager")
    return net


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        (lambda: Locked(), {}, "the model cannot be copied"),
        (in_backward, {}, "up.weight has a hook that runs when its gradient is there"),
        (Net, {"batch": None}, "needs an example batch"),
        (Net, {"batch_size": 3}, "batch_size is for a model by its name"),
        (Net, {"optimizer": "lion"}, "optimizer 'lion' is unknown"),
        (
            Net,
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
            "2 of the optimizer's parameters are not",
        ),
        (Net, {"loss": 3}, "the loss is a int, not a function"),
        (Net, {"seed": 2**65}, "cannot be built with these options"),
        (Net, {"device": "cpu", "target": "h100"}, "give one of the two"),
        (lambda: nn.Sequential(nn.LazyLinear(3)), {}, "does not know its sizes yet"),
        (lambda: 3, {}, "a int is no model"),
        (lambda: "resnet18", {}, "brings its own batch"),
        (compiled, {}, "was compiled by torch.compile"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_words(
    model: Callable[[], Any], given: dict[str, Any], said: str
) -> None:
    batch = torch.randn(4, 3, 8, 8), torch.randint(10, (4,))
    call = {"batch": batch, "loss": functional.cross_entropy, **given}
    with pytest.raises((SpecError, CaptureError), match=said.replace(".", r"\.")):
        trace(model(), **call)


def test_a_loss_that_reads_the_real_models_parameters_is_refused() -> None:
    net, batch, optimizer = held()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target) + net.head.weight.norm()

    with pytest.raises(CaptureError, match="a tensor of shape \\(10, 16\\) that requires a gradient"):
        trace(net, batch, loss, optimizer)
    assert all(p.grad is None for p in net.parameters())

    class Decayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = net

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(output, target) + self.model.head.weight.norm()

    assert "linalg_vector_norm" in " ".join(trace(net, batch, Decayed(), optimizer).ops.name)


@pytest.mark.usefixtures("by_rules")
def test_a_trace_shows_itself() -> None:
    net, batch, optimizer = held()
    made: Trace = trace(net, batch, functional.cross_entropy, optimizer, target="h100")
    text = repr(made)
    assert text == str(made)
    assert text.startswith("Trace: in hand: Net (batch_size 4), AdamW")
    assert len(text.splitlines()) <= 12
    for word in ("ops", "parameter", "activation", "saved for backward", "step", "roofline of H100"):
        assert word in text
    page = made._repr_html_()
    assert page.startswith("<table>")
    assert "saved for backward" in page


def test_garbage_is_searched_for_after_a_trace_as_before() -> None:
    net, batch, optimizer = held()
    assert gc.isenabled()
    trace(net, batch, functional.cross_entropy, optimizer)
    assert gc.isenabled()
    with pytest.raises(SpecError):
        trace("no such model")
    assert gc.isenabled()

"""Tiles: found in heads and MLPs of many kinds, equal to the untouched step but for rounding,
and as large as predicted."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor import apply_plan
from executor.verifying import verify
from simulator.core.problem import Problem
from simulator.levers import rewritten_problem
from tests.torch.conftest import Measurer
from tests.torch.steps import measured, recompute_all
from tracer import trace
from tracer.step.step import load_spec
from traces.errors import PlanError
from traces.records.plan import FP, Plan, Rewrite
from traces.records.trace import Trace

WIDTH, WORDS = 16, 211


class Net(nn.Module):
    """Words to a loss: an embedding, a layer, a head, and what the test makes of hidden values and targets."""

    def __init__(self, loss: Callable[..., torch.Tensor], *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.words.weight
        self.loss = loss
        self.register_buffer("weights", torch.linspace(0.5, 2.0, WORDS))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = self.head(torch.tanh(self.layer(self.words(ids))))
        loss = self.loss(logits, targets, self.weights)
        return {"loss": loss, "logits": logits}


def flat(logits: torch.Tensor, targets: torch.Tensor, **how: Any) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, WORDS), targets.view(-1), **how)


def with_z_loss(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    return flat(logits, targets) + 1e-2 * torch.logsumexp(logits, -1).pow(2).mean()


def softcapped(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    return flat(2.0 * torch.tanh(logits / 2.0), targets)


def shifted(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    return flat(logits[:, :-1].contiguous(), targets[:, 1:].contiguous())


HEADS: dict[str, Callable[[], Net]] = {
    "mean": lambda: Net(lambda x, t, w: flat(x, t)),
    "tied": lambda: Net(lambda x, t, w: flat(x, t), tied=True),
    "bias": lambda: Net(lambda x, t, w: flat(x, t), bias=True),
    "sum": lambda: Net(lambda x, t, w: flat(x, t, reduction="sum") / 7),
    "ignored": lambda: Net(lambda x, t, w: flat(x, t, ignore_index=3)),
    "class weights": lambda: Net(lambda x, t, w: flat(x, t, weight=w)),
    "softcap": lambda: Net(softcapped),
}


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, WORDS, (4, 15))
    targets = torch.randint(0, WORDS, (4, 15))
    targets[0, :5] = 3
    return {"ids": ids, "targets": targets}


def in_tiles(of: Trace, number: int) -> Plan:
    """A plan that saves everything and runs all stretches in tiles."""
    assert of.meta.stretches
    rewrites = tuple(Rewrite(kind="tile", storage=x.storage, number=number) for x in of.meta.stretches)
    return Plan(meta=of.meta, rewrites=rewrites, exactness=FP)


# The others differ from one of these in an op or two.
QUICK = ("mean", "class weights", "softcap")


@pytest.mark.parametrize(
    ("head", "number"),
    [
        *((head, 4) for head in QUICK),
        *(pytest.param(head, 4, marks=pytest.mark.slow) for head in HEADS if head not in QUICK),
        pytest.param("mean", 2, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_untouched_step(head: str, number: int) -> None:
    torch.manual_seed(0)
    model, given = HEADS[head](), batch()
    of = trace(model, given)
    planned = apply_plan(copy.deepcopy(model), in_tiles(of, number))
    for scale in (1.0, 3.0):  # the factor that backward multiplies by
        losses = []
        for other in (model, planned):
            other.zero_grad()
            torch.manual_seed(3)
            losses.append(other(**given)["loss"])
            (scale * losses[-1]).backward()
        assert torch.allclose(*losses, rtol=1e-6)
        for (name, p), q in zip(model.named_parameters(), planned.parameters(), strict=True):
            assert float((p.grad - q.grad).norm()) <= 2e-6 * float(p.grad.norm()), name


def test_a_smaller_batch_runs_in_as_many_tiles_as_it_has_rows() -> None:
    model, given = HEADS["mean"](), batch()
    planned = apply_plan(copy.deepcopy(model), in_tiles(trace(model, given), 4))
    few = {name: x[:1, :3] for name, x in given.items()}
    few["targets"] = torch.tensor([[4, 5, 6]])
    model(**few)["loss"].backward()
    planned(**few)["loss"].backward()
    assert torch.allclose(model.head.weight.grad, planned.head.weight.grad, rtol=1e-5)


def test_what_the_plan_does_not_make_says_so() -> None:
    model = HEADS["mean"]()
    made = apply_plan(model, in_tiles(trace(model, batch()), 3))(**batch())
    assert made["logits"].shape == (4, 15, WORDS)
    assert made["logits"].detach().dtype is torch.float32
    with pytest.raises(PlanError, match="does not exist whole"):
        made["logits"].argmax(-1)


def across_rows(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    return flat(torch.softmax(logits, 0), targets)


def dropped(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    return flat(functional.dropout(logits, 0.3), targets)


def with_noisy(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    return flat(logits + torch.rand_like(logits), targets)


def largest(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    return flat(logits, targets) + logits.max()


def smoothed(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    return flat(logits, targets, label_smoothing=0.1)


def each(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    return flat(logits, targets, reduction="none").mean()


def clipped(logits: torch.Tensor, targets: torch.Tensor, _: Any) -> torch.Tensor:
    """Its backward is not linear in the gradient of the loss."""
    logits.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return flat(logits, targets)


@pytest.mark.parametrize(
    "loss", [across_rows, dropped, with_noisy, largest, with_z_loss, smoothed, shifted, each, clipped]
)
def test_a_head_whose_rows_depend_on_each_other_or_of_another_loss_is_none(
    loss: Callable[..., torch.Tensor],
) -> None:
    assert trace(Net(loss), batch()).meta.stretches == ()


@pytest.mark.parametrize("reads", [lambda x: x.pow(2).mean(), lambda x: 0 * x.detach().mean()])
def test_a_loss_around_the_model_that_reads_the_logits_keeps_them(reads: Callable[..., Any]) -> None:
    of = trace(HEADS["mean"](), batch(), loss=lambda out: out["loss"] + reads(out["logits"]))
    assert of.meta.stretches == ()


class Gated(nn.Module):
    """An MLP with a gate."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Blocks(nn.Module):
    """Layers, each with a norm, something beside a residual, and a loss of what comes out."""

    def __init__(self, make: Callable[[], nn.Module], number: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(number))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return x.pow(2).mean()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH))


BLOCKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many tiles there are at most
    "mlp": (mlp, 192),
    "gated": (lambda: Gated(functional.silu), 192),
}


def tokens() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(4, 48, WIDTH)


@pytest.mark.parametrize(("block", "number"), [*((block, 2) for block in BLOCKS), ("mlp", 1), ("gated", 1)])
def test_gradients_of_blocks_are_those_of_the_untouched_step(block: str, number: int) -> None:
    torch.manual_seed(0)
    make, rows = BLOCKS[block]
    model, x = Blocks(make, number), tokens()
    of = trace(model, (x,), loss=lambda out: 3 * out)
    assert [stretch.rows for stretch in of.meta.stretches] == [rows] * number
    planned = apply_plan(copy.deepcopy(model), in_tiles(of, 3))
    drawn = []
    for other in (model, planned):
        torch.manual_seed(3)
        (3 * other(x)).backward()
        drawn.append(torch.rand(()))  # what the next draw gives
    assert drawn[0] == drawn[1]
    for (name, p), q in zip(model.named_parameters(), planned.parameters(), strict=True):
        if p.requires_grad:
            assert float((p.grad - q.grad).norm()) <= 2e-6 * float(p.grad.norm()), name


def layers() -> tuple[Any, Any, Any, Any]:
    """MLPs at a size at which they decide the peak."""
    torch.manual_seed(0)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 4 * 96), nn.GELU(), nn.Linear(4 * 96, WIDTH))

    return Blocks(make), torch.randn(16, 48, WIDTH), None, None


def wide() -> tuple[Any, Any, Any, Any]:
    """The head with a bias, at a size at which it decides the peak."""
    torch.manual_seed(0)
    model = Net(lambda x, t, w: flat(x, t), bias=True)
    model.head = nn.Linear(WIDTH, WORDS)
    ids = torch.randint(0, WORDS, (16, 50))
    return model, {"ids": ids, "targets": ids.flip(1)}, None, None


SPEC = f"{Path(__file__).resolve()}:wide"
LAYERS = f"{Path(__file__).resolve()}:layers"


def test_the_peak_is_as_predicted(measurer: Measurer, tmp_path: Path) -> None:
    spec, number = load_spec(SPEC, {}), 7
    of = measured(spec)
    plan = in_tiles(of, number)
    problem = Problem(of)
    predicted = rewritten_problem(problem, plan.rewrites).saved.timeline.peak_allocated_bytes
    # 800 rows of 211 words in float32 are 675,200 bytes, three of them at once without tiles.
    assert (
        predicted
        < problem.saved.timeline.peak_allocated_bytes - 3 * 675_200 * (number - 1) // number + 200_000
    )
    outcome = verify(spec, plan, steps=2)
    assert outcome.equal
    assert not outcome.bit_equal
    assert measurer.steady_peak(plan, tmp_path) == predicted


def test_what_a_tiled_stretch_leaves_is_recomputed_too(measurer: Measurer, tmp_path: Path) -> None:
    """The call of forward runs again where a plan recomputes what it makes: the peaks are as predicted."""
    spec = load_spec(LAYERS, {})
    of = measured(spec)
    tiled = in_tiles(of, 5)
    rewrites = tiled.rewrites
    step = rewritten_problem(Problem(of), rewrites)
    saved = step.saved.timeline.peak_allocated_bytes
    assert len(rewrites) == 2
    assert (
        measurer.steady_peak(tiled, tmp_path) == saved < Problem(of).saved.timeline.peak_allocated_bytes // 2
    )
    actions = recompute_all(step, share=False)
    replay = step.replay(actions)
    runs = Counter(step.trace.ops.name[i] for i in replay.schedule.op)
    assert max(n for name, n in runs.items() if name.endswith("_tiles")) > 1
    plan = Plan(meta=of.meta, actions=actions, rewrites=rewrites, exactness=FP)
    assert verify(spec, plan, steps=2).equal
    assert measurer.steady_peak(plan, tmp_path) == replay.timeline.peak_allocated_bytes < saved


def test_under_autocast_the_error_is_that_of_autocast_and_one_rounding() -> None:
    torch.manual_seed(0)
    exact, given = HEADS["tied"](), batch()
    model = copy.deepcopy(exact)
    planned = apply_plan(copy.deepcopy(exact), in_tiles(trace(model, given, amp="bfloat16"), 4))
    exact(**given)["loss"].backward()
    for other in (model, planned):
        with torch.autocast("cpu", torch.bfloat16):
            loss = other(**given)["loss"]
        loss.backward()
    for (name, p), eager, tiled in zip(
        exact.named_parameters(), model.parameters(), planned.parameters(), strict=True
    ):
        by_autocast, by_both = ((x.grad - p.grad).norm() / p.grad.norm() for x in (eager, tiled))
        assert float(by_both) <= float(by_autocast) + 2**-8, name  # sums of tiles are rounded, too

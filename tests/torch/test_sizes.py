"""Calls that differ in sizes: one capture serves them all, bit-equal with the untouched model, or each has its own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from executor import apply_plan
from executor.graphs.match import EXACT, RESIZED, SAVED
from simulator.core.problem import Problem
from tests.torch.steps import build_of, plan_of, random_actions, recompute_all, recorded
from tracer.step.named.vision import import_torchvision
from traces.errors import PlanError

Sizes = tuple[int, int]  # of the batch, and of the sequence or image
Batch = Callable[[int, int], dict[str, Any]]


def transformers() -> Any:
    import_torchvision()
    return pytest.importorskip("transformers")


def gpt2() -> tuple[nn.Module, Batch]:
    config = transformers().GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=24, bos_token_id=0, eos_token_id=0
    )

    def batch(n: int, length: int) -> dict[str, Any]:
        ids = torch.randint(40, (n, length))
        return {"input_ids": ids, "labels": ids.clone()}

    return transformers().GPT2LMHeadModel(config), batch


def bert() -> tuple[nn.Module, Batch]:
    config = transformers().BertConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=32,
        vocab_size=40,
        max_position_embeddings=24,
    )

    def batch(n: int, length: int) -> dict[str, Any]:
        lengths = torch.randint(1, length + 1, (n, 1))
        lengths[0] = length
        mask = (torch.arange(length) < lengths).long()
        ids = torch.randint(40, (n, length)) * mask
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (n,))}

    return transformers().BertForSequenceClassification(config), batch


class Conv(nn.Module):
    """Strided convolutions, batch norm, dropout and two kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.stem(x)), inplace=True)
        y = functional.max_pool2d(self.drop(self.conv(y)) + y, 2)
        y = functional.gelu(y)
        return functional.cross_entropy(self.head(functional.adaptive_avg_pool2d(y, 1).flatten(1)), labels)


def conv() -> tuple[nn.Module, Batch]:
    def batch(n: int, size: int) -> dict[str, Any]:
        return {"x": torch.randn(n, 3, size, size), "labels": torch.randint(5, (n,))}

    return Conv(), batch


def loss_of(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return out
    loss: torch.Tensor = out.loss
    return loss


def pair(
    make: Callable[[], tuple[nn.Module, Batch]], first: Sizes, everything: bool = False
) -> tuple[nn.Module, nn.Module, Batch]:
    """An untouched model, the same with a plan for calls of the first sizes, and what makes batches."""
    torch.manual_seed(0)
    model, batch = make()
    trace = recorded(build_of(lambda: (make()[0], batch(*first), None, None))).trace
    actions = recompute_all(Problem(trace)) if everything else random_actions(trace, random.Random(3))
    assert actions
    return model, apply_plan(copy.deepcopy(model), plan_of(trace, *actions)), batch


def same_steps(
    eager: nn.Module, planned: nn.Module, batch: Batch, calls: Sequence[Sizes], loss: Any = loss_of
) -> None:
    """Both train on batches of these sizes: losses, gradients, buffers and the random state are equal to the bit."""
    for k, sizes in enumerate(calls):
        torch.manual_seed(100 + k)
        given = batch(*sizes)
        results, states = [], []
        for model in (eager, planned):
            model.zero_grad()
            torch.manual_seed(k)
            value = loss(model(**given))
            value.backward()
            results.append((value.detach(), [p.grad for p in model.parameters()], list(model.buffers())))
            states.append(torch.get_rng_state())
        (a, grads, buffers), (b, other_grads, other_buffers) = results
        assert torch.equal(a, b), sizes
        for x, y in zip((*grads, *buffers), (*other_grads, *other_buffers), strict=True):
            assert (x is None) == (y is None), sizes
            assert x is None or torch.equal(x, y), sizes
        assert torch.equal(*states)


def fits(planned: nn.Module) -> list[tuple[str, int]]:
    """How each capture fits the plan, and how many steps it served."""
    return [(c.fit, c.steps) for c in planned.receipt().captures]


@pytest.mark.parametrize(
    ("make", "first", "others"),
    [
        pytest.param(bert, (4, 12), [(4, 16), (4, 9), (4, 24), (4, 2), (4, 13)], marks=pytest.mark.slow),
        (conv, (6, 32), [(4, 40), (3, 36), (2, 64), (5, 33), (6, 47)]),
        pytest.param(gpt2, (4, 12), [(3, 16), (2, 9), (6, 24), (7, 2), (4, 4)], marks=pytest.mark.slow),
    ],
)
def test_few_captures_serve_calls_of_all_sizes(make: Any, first: Sizes, others: list[Sizes]) -> None:
    eager, planned, batch = pair(make, first)
    same_steps(eager, planned, batch, [first, *others, first, *others])
    assert fits(planned)[0][0] == EXACT
    assert {fit for fit, _ in fits(planned)[1:]} == {RESIZED}
    assert sum(n for _, n in fits(planned)) == 2 + 2 * len(others)
    assert len(fits(planned)) <= (2 + len(others) if make is gpt2 else 3)


class Deciding(nn.Module):
    """Decides by its argument's length, makes a table of it, or computes with its root."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        y = torch.tanh(self.a(x))
        if self.how == "branches" and n > 8:
            y = torch.sin(y)
        elif self.how == "parity":
            y = y * (2.0 if n % 2 else 3.0)
        elif self.how == "table":
            y = y * torch.tensor([[1.0 / (k + 1)] for k in range(n)])
        elif self.how == "root":
            y = y * n**-0.5
        return self.b(y).mean()


def deciding(how: str) -> Callable[[], tuple[nn.Module, Batch]]:
    return lambda: (Deciding(how), lambda n, length: {"x": torch.randn(n, length, 6)})


@pytest.mark.parametrize("how", ["plain", "branches", "parity", "table", "root"])
def test_a_model_that_decides_by_sizes_never_runs_the_graph_of_others(how: str) -> None:
    eager, planned, batch = pair(deciding(how), (3, 6), everything=True)
    calls = [(3, n) for n in (6, 7, 4, 9)]
    if how == "branches":  # another graph, to which the plan does not apply
        calls = [(3, n) for n in (6, 7, 4, 8)]
    same_steps(eager, planned, batch, calls)
    if how == "branches":
        with pytest.raises(Exception, match="another graph"):
            planned(**batch(3, 12))


def test_what_the_loss_leaves_out_at_many_sizes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.tanh(self.a(x))
            z = y.cumsum(1)
            return self.b(y + z), torch.cat([self.c(z), z], 2)

    torch.manual_seed(0)
    model = Two()

    def batch(n: int, length: int) -> dict[str, Any]:
        return {"x": torch.randn(n, length, 6)}

    def both(out: Any) -> torch.Tensor:
        return out[0].sum() + (out[1] ** 2).sum()

    trace = recorded(build_of(lambda: (Two(), batch(3, 6), both, None))).trace
    planned = apply_plan(copy.deepcopy(model), plan_of(trace, *recompute_all(Problem(trace))))
    same_steps(model, planned, batch, [(3, 6), (3, 7), (3, 5)], both)
    for loss in (lambda out: out[0].sum(), lambda out: (out[1][:, :, :3] ** 2).sum(), both):
        same_steps(model, planned, batch, [(3, 8), (3, 4), (3, 6)], loss)
    assert fits(planned)[-1][0] == RESIZED


@pytest.mark.parametrize("sliced", [False, True])
def test_arguments_that_are_laid_out_otherwise(sliced: bool) -> None:
    """A transposed argument's strides follow from its sizes; those of a slice do not."""

    def x(n: int, length: int) -> torch.Tensor:
        return torch.randn(n, length + 2, 6)[:, 1:-1] if sliced else torch.randn(length, n, 6).transpose(0, 1)

    eager, planned, batch = pair(
        lambda: (Deciding("plain"), lambda *n: {"x": x(*n)}), (3, 6), everything=True
    )
    same_steps(eager, planned, batch, [(3, n) for n in (6, 7, 8, 9)])
    assert fits(planned)[0][0] == EXACT


@pytest.mark.parametrize(
    ("make", "first", "ones"),
    [
        (gpt2, (4, 12), [(1, 12)]),
        pytest.param(gpt2, (4, 12), [(1, 12), (1, 9)], marks=pytest.mark.slow),
        pytest.param(bert, (4, 12), [(1, 12), (4, 1)], marks=pytest.mark.slow),
        pytest.param(conv, (4, 16), [(1, 16)], marks=pytest.mark.slow),
    ],
)
def test_a_batch_or_length_of_one(make: Any, first: Sizes, ones: list[Sizes]) -> None:
    eager, planned, batch = pair(make, first)
    plan = planned._lowtide.compiler.plan
    planned._lowtide.compiler.plan = replace(plan, predicted={"plan": {"peak_allocated_bytes": 1 << 40}})
    same_steps(eager, planned, batch, [first, *ones, first])
    kinds = [fit for fit, _ in fits(planned)]
    assert kinds[0] == EXACT
    assert set(kinds[1:]) <= {SAVED, RESIZED, EXACT}
    assert make is conv or SAVED in kinds


def test_a_batch_of_one_that_takes_more_than_the_planned_step_is_refused() -> None:
    _, planned, batch = pair(gpt2, (4, 12))
    planned._lowtide.compiler.plan = replace(
        planned._lowtide.compiler.plan, predicted={"plan": {"peak_allocated_bytes": 1000}}
    )
    with pytest.raises(PlanError, match=r"int64\[1, n\].* new; .*int64\[n, n\].* gone"):
        planned(**batch(1, 12))

"""The loops in which others measured their models: what they make before, hold, and do in which order.

python tests/published/loops.py FUNCTION LOOP [ARGUMENT ...]: build by a function of `models` or `variants`, and run
LOOP. The step of an optimizer ends an iteration; where theirs has none, `Mark` stands there and does nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.published import models, variants


class Mark(torch.optim.Optimizer):
    """Its step is the end of an iteration, and nothing else."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def step(self, closure: Any = None) -> None: ...


def course(made: dict[str, Any]) -> None:
    """Five warm-up steps, each with a batch of its own that stays, and with the logits of the one before in hand."""
    model, loss_of, optimizer = made["model"], made["loss"], made["optimizer"]
    inputs, targets = (x.shape for x in made.pop("batch"))
    warm_inputs, own_inputs = _ids(5, *inputs), _ids(1, *inputs)
    warm_targets, own_targets = _ids(5, *targets), _ids(1, *targets)
    torch.cuda.empty_cache()
    for k in range(5):
        with _autocast(made):
            output = model(warm_inputs[k])
            loss = loss_of(output, warm_targets[k])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del output, loss
    with _autocast(made):
        output = model(own_inputs[0])
        loss = loss_of(output, own_targets[0])
    loss.backward()
    optimizer.step()


def first(made: dict[str, Any]) -> None:
    """One step, the first, with the logits in hand."""
    inputs, targets = made["batch"]
    torch.cuda.empty_cache()
    logits = made["model"](inputs)
    loss = made["loss"](logits, targets)
    loss.backward()
    made["optimizer"].step()


def forward(made: dict[str, Any]) -> None:
    """One forward pass, and nothing after it."""
    inputs, _ = made["batch"]
    torch.cuda.empty_cache()
    logits = made["model"](inputs)
    Mark().step()
    del logits


def clipped(made: dict[str, Any]) -> None:
    """The gradients clipped at norm 1; the model returns its loss; the next batch comes while the last is in hand."""
    model, optimizer = made["model"], made["optimizer"]
    tokens, targets = made.pop("batch")
    x, y = torch.empty_like(tokens), torch.empty_like(targets)
    del tokens, targets
    torch.cuda.empty_cache()
    while True:
        x, y = torch.zeros_like(x), torch.zeros_like(y)
        with _autocast(made):
            loss = model(x, y)
            loss = loss / 1
            loss.detach().item()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert norm is not None


def trainer(made: dict[str, Any]) -> None:
    """As transformers' Trainer: the next batch is on the GPU already, gradients are clipped at norm 1."""
    model, optimizer = made["model"], made["optimizer"]
    host = {name: x.cpu() for name, x in made.pop("batch").items()}
    torch.cuda.empty_cache()
    following = {name: x.cuda() for name, x in host.items()}
    while True:
        inputs, following = following, {name: x.cuda() for name, x in host.items()}
        loss = model(**inputs).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        assert norm is not None


def once(made: dict[str, Any]) -> None:
    """Forward and backward, once, with the output in hand."""
    torch.cuda.empty_cache()
    output = made["model"](**made["batch"])
    loss = made["loss"](output)
    loss.backward()
    Mark().step()


def gradients_stay(made: dict[str, Any], budget: str = "") -> None:
    """Forward and backward, the gradients zeroed in place; compiled under torch's activation_memory_budget if given."""
    model, batch, loss_of = made["model"], made["batch"], made["loss"]

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return loss_of(self.model(input_ids=input_ids))

    run: Callable[..., Any] = Whole()
    mark = Mark()
    torch.cuda.empty_cache()
    if budget:
        from torch._functorch import config

        config.activation_memory_budget = float(budget)
        run = torch.compile(run, backend="aot_eager", dynamic=False)
    while True:
        run(batch["input_ids"]).backward()
        mark.step()
        model.zero_grad(set_to_none=False)
        torch.cuda.empty_cache()


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long, device="cuda")


def _autocast(made: dict[str, Any]) -> Any:
    amp = made.get("amp")
    return torch.autocast("cuda", getattr(torch, amp)) if amp else contextlib.nullcontext()


def main(function: str, loop: str, *arguments: str) -> None:
    """Build on the host, move model and batch to the GPU, and run the loop."""
    made = getattr(models if hasattr(models, function) else variants, function)()
    if isinstance(made, tuple):
        made = dict(zip(("model", "batch", "optimizer"), made, strict=True))
    made["model"].to("cuda")
    there: dict[int, torch.Tensor] = {}  # a tensor that stands twice in a batch is moved once
    made["batch"] = pytree.tree_map(lambda x: there.setdefault(id(x), _moved(x)), made["batch"])
    there.clear()
    globals()[loop](made, *arguments)


def _moved(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cuda().requires_grad_(x.requires_grad)


if __name__ == "__main__":
    main(*sys.argv[1:])

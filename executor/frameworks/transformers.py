"""A callback with which transformers' `Trainer`, and trainers made of it such as TRL's, train within a budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from executor.frameworks.first_batch import FirstBatchCallback, loop_around, loss_of
from tracer.step.named.huggingface import import_transformers

import_transformers()  # says if it is missing, and makes it importable beside a CPU-only torch
from transformers import TrainerCallback  # noqa: E402


class PlanCallback(FirstBatchCallback, TrainerCallback):
    """Plans the model at the first training batch, in place, and takes the plan off when training ends.

    The plan takes the place of the model's own gradient checkpointing, which is switched off while it is there. With
    gradient accumulation the gradients of the batches before are there beside each step; they count.
    """

    _checkpointed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        self._checkpointed = bool(getattr(model, "is_gradient_checkpointing", False))
        if self._checkpointed:
            model.gradient_checkpointing_disable()
            self.say("the plan takes the place of gradient checkpointing, which is switched off meanwhile")
        loop = loop_around(args.gradient_accumulation_steps, args.max_grad_norm)
        self.begin(model, given.get("optimizer"), loop, _loss)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model: nn.Module = given["model"]
        self.end(model)
        if self._checkpointed:
            model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)


def _loss(outputs: Any) -> torch.Tensor:
    """Return what the trainer differentiates: the model's own loss; of TRL's fused outputs, of which it makes the loss
    itself, the log-probabilities of tokens and what a mixture of experts adds.
    """
    fused = getattr(outputs, "log_probs", None)
    if not isinstance(fused, torch.Tensor):
        return loss_of(outputs)
    more = getattr(outputs, "aux_loss", None)
    return -fused.sum() if more is None else more - fused.sum()

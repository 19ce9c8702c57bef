"""Refuse, in words, what no capture of a training step can hold, before torch fails on it in words of its own."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tracer.step.loop import TrainingStep
from tracer.step.release import needs_closure
from tracer.torch_api import BatchNorm, top_saved_tensors_default_hooks
from traces.errors import CaptureError, OptimizerError


def check_capturable(model: nn.Module) -> None:
    """Raise CaptureError for a model that is compiled or scripted, wholly or in part, has blocks of FSDP2, or holds
    what is not dense."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.layout != torch.strided:
            kind = "parameter" if isinstance(x, nn.Parameter) else "buffer"
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: its {kind} {name} has the layout {x.layout}, whose size "
                "depends on data. Only dense tensors can be planned; keep indices and values as two dense tensors "
                "(torch.Tensor.index_add adds up rows by index), or take .to_dense()."
            )
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without which nothing is sharded
    for path, module in model.named_modules():
        if path and fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise CaptureError(
                f"a plan of a model cannot hold blocks that fully_shard shards by themselves ({path}): parameters of "
                "theirs come and go while forward runs. Give each block a plan of its own, "
                "fully_shard(apply_plan(block, plan, in_place=True)), or shard the planned model as one."
            )
        where = f"its module {path}" if path else "it"
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: {where} was compiled by torch.compile, whose graphs no "
                "plan reaches into. Leave torch.compile out."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: {where} is a TorchScript module, whose code is not "
                "Python's. Use the module that was scripted."
            )
        embeds = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if embeds and module.sparse and module.weight.requires_grad:
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: {where} ({type(module).__name__}) has gradients of the "
                "layout torch.sparse_coo, whose size depends on data. Only dense tensors can be planned; give it "
                "sparse=False."
            )


def check_step(step: TrainingStep) -> None:
    """Raise CaptureError for a step that the ordinary loop cannot run."""
    check_capturable(step.model)
    for x in step.tensors():
        if x.layout != torch.strided:
            raise CaptureError(
                f"{step.name}: the batch holds a tensor of the layout {x.layout}, whose size depends on data. Only "
                "dense tensors can be planned; give its indices and values as two dense tensors."
            )
    if not any(p.requires_grad for p in step.model.parameters()):
        raise CaptureError(f"{step.name}: no parameter requires a gradient, so there is no backward to plan.")
    if step.optimizer is not None and needs_closure(step.optimizer):
        raise OptimizerError(
            f"{step.name}: {type(step.optimizer).__name__} runs forward and backward itself, as often as it likes, "
            "through a closure; a trace is of one forward, one backward and one step. Use another optimizer, or plan "
            "without it (optimizer=None) and leave room for its state."
        )


def tangent_of(output: Any) -> int:
    """Which of the model's outputs a tangent of the captured graph is of. Raises CaptureError if it is of a tensor that
    forward overwrites and that takes part in backward.
    """
    if hasattr(output, "idx"):
        return int(output.idx)
    written = getattr(output.mutated_input, "target", "").removeprefix("model.")
    what = f"the parameter {written}" if written else "a tensor of the batch that requires a gradient"
    raise CaptureError(
        f"the model cannot be captured: forward overwrites {what}, as an embedding with max_norm does at every call. "
        "Only buffers and what takes no part in backward may be overwritten in forward; do it after the optimizer's "
        "step."
    )


def check_statistics(module: BatchNorm, path: str) -> None:
    """Raise CaptureError for a batch norm that updates its statistics twice, inside `torch.utils.checkpoint`, or by a
    factor that each step has anew."""
    if not (module.training and module.track_running_stats):
        return
    if module.momentum is None:
        raise CaptureError(
            f"the model cannot be captured: the batch norm {path} has momentum=None, with which each step updates its "
            "running statistics by another factor, one over the batches so far. Give it a momentum, such as "
            "torch's own 0.1."
        )
    hooks = top_saved_tensors_default_hooks(True)
    if hooks is not None and "_checkpoint_hook" in getattr(hooks[0], "__qualname__", ""):
        raise CaptureError(
            f"the model cannot be captured: the batch norm {path} runs inside torch.utils.checkpoint, which runs it "
            "twice a step and so updates its running statistics twice; a plan's recomputation updates them once. Leave "
            "the model's own checkpointing out (in torchvision: memory_efficient=False); a plan takes its place."
        )

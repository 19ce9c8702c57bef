"""In a rehearsal's process: shard a step that was built for one GPU among the ranks of its job, as people do it."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from executor.training.wrapped import blocks_of
from tracer.precision.policy import OFF
from tracer.step.loop import TrainingStep
from tracer.torch_api import is_traceable_wrapper_subclass
from traces.errors import SpecError


def sharded(step: TrainingStep, how: str) -> TrainingStep:
    """The step of one rank, whose batch is that of the given step. The model is on the CPU, and moves here.

    fsdp2: `fully_shard` of each block (`blocks_of`), then of the root; mixed precision, with gradients reduced in
    float32, in place of autocast. ddp: DistributedDataParallel. Ignores: `no_sync`, and what else scripts choose.
    Raises SpecError: it cannot be sharded, and why.
    """
    model, optimizer = step.model, step.optimizer
    for wrong, why in (
        (any(map(is_traceable_wrapper_subclass, model.parameters())), "its model is sharded already"),
        (step.loss_parameters, "its loss has parameters of its own; put model and loss into one module"),
        (step.loop.release_gradients, "gradients that are reduced are not released in backward"),
    ):
        if wrong:
            raise SpecError(f"{step.name} cannot be sharded: {why}. Or rehearse a script that shards it.")
    dist.init_process_group("nccl")
    if how == "ddp":
        wrapped = DistributedDataParallel(model.cuda(), device_ids=[torch.cuda.current_device()])
        return replace(step, model=wrapped)
    dtype = getattr(torch, step.autocast.dtype or "", None)
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    names = {p: name for name, p in model.named_parameters()}
    if optimizer:  # nothing is to hold the whole parameters
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [names[p] for p in group["params"]]
    names.clear()
    for module in (*blocks_of(model).values(), model):
        fully_shard(module, mp_policy=mixed)
    if optimizer:
        now, kind = dict(model.named_parameters()), type(optimizer)
        groups = [
            {**group, "params": [now[name] for name in group["params"]]} for group in optimizer.param_groups
        ]
        known = inspect.signature(kind).parameters
        optimizer = kind(groups, **{k: v for k, v in optimizer.defaults.items() if k in known})
    return replace(step, optimizer=optimizer, autocast=OFF)

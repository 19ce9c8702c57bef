"""Find what plans go inside of: wrappers that others put around a model or a part of it."""

from __future__ import annotations

import sys
from typing import Any, Final

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from traces.errors import PlanError

DATA_PARALLEL: Final = (
    "copies the model to every device at every step, where there is nothing to plan for; use DistributedDataParallel, "
    "one process for each device."
)


def inside(model: nn.Module) -> nn.Module:
    """The module that a plan is for: that inside a DistributedDataParallel, whose hooks see each gradient as it comes;
    otherwise the model. Raises PlanError for a wrapper that no plan can go around of, and says where the plan goes.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without which there is no model of it
    sharded: tuple[type, ...] = (fsdp.FullyShardedDataParallel,) if fsdp is not None else ()
    name = type(model).__name__
    if isinstance(model, DataParallel):
        raise PlanError(f"{name} {DATA_PARALLEL}")
    if isinstance(model, sharded):
        raise PlanError(
            f"{name} keeps parameters flat and in shards, which no captured graph has; shard with fully_shard: "
            "fully_shard(apply_plan(block, plan))."
        )
    for path, module in model.named_modules():
        if path and isinstance(module, (DataParallel, DistributedDataParallel, *sharded)):
            raise PlanError(
                f"the model holds a {type(module).__name__} ({path}), whose communication no captured graph has; "
                f"apply a plan to {path}.module instead."
            )
    return model


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that get a plan each, by their paths: what `fully_shard` shards below the root, so that
    its parameters are there whenever the block runs again; else the alike members of lists, dictionaries and sequences.

    Of what is nested the innermost counts if it is sharded, else the outermost.
    """
    found = dict(model.named_modules())
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = [path for path, m in found.items() if path and fsdp and isinstance(m, fsdp.FSDPModule)]
    alike = [
        f"{path}.{name}" if path else name
        for path, m in found.items()
        if isinstance(m, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if len(m) > 1 and len({type(child) for child in m.children()}) == 1
        for name, _ in m.named_children()
    ]
    chosen = {path for path in sharded or alike if [*found[path].children()]}
    pairs = ((outer, inner) for outer in chosen for inner in chosen if inner.startswith(f"{outer}."))
    nested = {outer if sharded else inner for outer, inner in pairs}
    return {path: found[path] for path in found if path in chosen - nested}

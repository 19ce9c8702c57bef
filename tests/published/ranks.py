"""A distributed job that others measured: five layers of 8,192 units and the output's, by Adam.

torchrun tests/published/ranks.py ddp | fsdp1 | fsdp2
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS, STEPS = 8192, 256, 5


def main(how: str) -> None:
    """Train in one of three ways."""
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    hidden = [m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model: nn.Module = nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH))
    if how == "ddp":
        model = DistributedDataParallel(model.to(device))
    elif how == "fsdp1":
        each = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(model, auto_wrap_policy=each, device_id=device)
    else:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    x, y = torch.zeros(ROWS, WIDTH, device=device), torch.zeros(ROWS, WIDTH, device=device)
    for _ in range(STEPS):
        optimizer.zero_grad()
        guess = model(x)  # in hand until the next one
        loss = nn.functional.mse_loss(guess, y)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])

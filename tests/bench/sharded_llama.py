"""Llama-3.1-8B under fully_shard, a rank's program: bfloat16 parameters, float32 reduction, AdamW, 2 x 8192 tokens.

execute rehearse tests/bench/sharded_llama.py --gpu h100 --ranks 8 --iterations 3 --budget 79GiB -o plan.json

With `full`, `second` or `ops` behind `--`, every block is checkpointed, every second one, or in every block all but
attention and every second matrix product.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM


def every_second_product() -> Any:
    """What torchtitan's selective checkpointing of ops saves."""
    seen = Counter[bool]()

    def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        product = op is torch.ops.aten.mm.default
        seen[ctx.is_recompute] += product
        save = seen[ctx.is_recompute] % 2 if product else "scaled_dot_product" in str(op)
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def main(how: str = "") -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    layers = model.model.layers
    wrap = (
        partial(checkpoint_wrapper, context_fn=every_second_product) if how == "ops" else checkpoint_wrapper
    )
    for k in range(0, len(layers) if how else 0, 2 if how == "second" else 1):
        layers[k] = wrap(layers[k])
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given = {"mesh": init_device_mesh("cuda", (dist.get_world_size(),)), "mp_policy": mixed}
    for block in (*layers, model):
        fully_shard(block, **given)
    model.to_empty(device="cuda").train()
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        ids = torch.randint(config.vocab_size, (2, 8192), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Distributed training as people write it, one kind a word: run by the tests as one rank of several.

python distributed.py KIND [fake]: with `fake`, torch's process group that does nothing takes the place of NCCL's.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, WIDTH, HEADS, LAYERS = 4096, 512, 8, 6
BATCH, LENGTH = 4, 256
STEPS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(functional.gelu(self.up(self.n2(x))))


class Net(nn.Module):
    """A language model, or of a pipeline's stage the blocks from `first` to `last`."""

    def __init__(self, first: int = 0, last: int = LAYERS, of: int = LAYERS, words: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH) if first == 0 else nn.Identity()
        self.layers = nn.ModuleList(Block() for _ in range(first, last))
        self.norm = nn.LayerNorm(WIDTH) if last == of else nn.Identity()
        self.head = nn.Linear(WIDTH, words, bias=False) if last == of else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


def batch(size: int = BATCH, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, size, length), device="cuda")
    return ids[0], ids[1]


def loss_of(model: Any, *shape: int) -> torch.Tensor:
    x, y = batch(*shape)
    return functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def adamw(model: nn.Module, **given: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, **given)


def train(model: Any, optimizer: torch.optim.Optimizer, *shape: int, clip: bool = True) -> None:
    for _ in range(STEPS):
        loss = loss_of(model, *shape)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach().clone()
        dist.all_reduce(told, op=dist.ReduceOp.AVG)


def ddp(**given: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net().cuda(), device_ids=[torch.cuda.current_device()], **given)


def fsdp2(
    model: Any = None, mesh: Any = None, reshard: bool | int = True, mixed: bool = True, **given: Any
) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = Net().cuda() if model is None else model
    given |= {
        "mesh": mesh or init_device_mesh("cuda", (dist.get_world_size(),)),
        "reshard_after_forward": reshard,
    }
    if mixed:
        given["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, **given)
    return fully_shard(model, **given)


def changed(change: Callable[[Any], Any]) -> nn.Module:
    model = Net().cuda()
    for k, block in enumerate(model.layers):
        model.layers[k] = change(block)
    return model


def tensor_parallel(mesh: Any, sequence: bool = False) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    into = {"input_layouts": Shard(1)} if sequence else {}
    out = {"output_layouts": Shard(1)} if sequence else {}
    norm = {"n1": SequenceParallel(), "n2": SequenceParallel()} if sequence else {}
    model = Net().cuda()
    for block in model.layers:
        wide = {name: ColwiseParallel(**into) for name in ("q", "k", "v", "up")}
        narrow = {name: RowwiseParallel(**out) for name in ("o", "down")}
        parallelize_module(block, mesh, {**wide, **narrow, **norm})
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **out),
        "head": ColwiseParallel(output_layouts=Replicate(), **into),
        **({"norm": SequenceParallel()} if sequence else {}),
    }
    return parallelize_module(model, mesh, ends)


def accumulate(model: Any) -> None:
    optimizer, tell = adamw(model), getattr(model, "set_requires_gradient_sync", None)
    for _ in range(STEPS):
        for k in range(3):
            if tell:
                tell(k == 2)
            with contextlib.nullcontext() if tell or k == 2 else model.no_sync():
                loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    model = FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        sync_module_states=True,
    )
    optimizer = adamw(model)
    for _ in range(STEPS):
        loss_of(model).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def zero() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = ddp()
    train(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-4))


def pipeline(schedule: str, static: bool = False) -> None:
    from torch.distributed import pipelining

    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == ranks - 1
    model = Net(rank, rank + 1, of=ranks).cuda()
    hidden = torch.empty(1, LENGTH, WIDTH, device="cuda")
    shapes = {
        "input_args": (batch(1)[0],) if first else (hidden,),
        "output_args": (torch.empty(1, LENGTH, VOCABULARY, device="cuda"),) if last else (hidden,),
    }
    stage = pipelining.PipelineStage(model, rank, ranks, hidden.device, **(shapes if static else {}))
    run = getattr(pipelining, schedule)(
        stage,
        n_microbatches=BATCH,
        loss_fn=lambda out, y: functional.cross_entropy(out.flatten(0, 1), y.flatten()),
    )
    optimizer = adamw(model)
    for _ in range(STEPS):
        x, y = batch()
        run.step(*([x] if first else []), **({"target": y} if last else {}))
        optimizer.step()
        optimizer.zero_grad()


def communicators() -> None:
    """Of all, of half and of the two outermost ranks, then of half by a split."""
    ranks = dist.get_world_size()
    half, outermost = dist.new_group(list(range(ranks // 2))), dist.new_group([0, ranks - 1])
    if "at once" in sys.argv:
        mesh(2, ranks // 2)
    optimizer = adamw(model := nn.Linear(WIDTH, WIDTH).cuda())
    for _ in range(STEPS):
        model(torch.ones(8, WIDTH, device="cuda")).sum().backward()
        for group, n in ((None, ranks), (half, ranks // 2), (outermost, 2)):
            dist.all_reduce(model.weight.grad, group=group)
            number, all_of_it = torch.tensor([1.5], device="cuda"), torch.empty(n, device="cuda")
            dist.all_reduce(number, group=group)
            assert number.item() == 1.5 * n
            dist.all_gather_into_tensor(all_of_it, torch.tensor([2.5], device="cuda"), group=group)
            assert all_of_it.tolist() == [2.5] * n
        given = torch.tensor([7] * ranks, device="cuda")
        dist.all_to_all_single(taken := torch.empty_like(given), given)
        assert taken.tolist() == [7] * ranks
        length = torch.tensor([9], device="cuda")
        lengths = [torch.zeros_like(length) for _ in range(ranks)]
        dist.all_gather(lengths, length)
        assert max(n.item() for n in lengths) == 9
        optimizer.step()


def experts() -> None:
    """Tokens go to the ranks of the experts that were chosen for them, as many as are counted there."""
    ranks = dist.get_world_size()
    optimizer = adamw(model := nn.Linear(WIDTH, 2 * ranks).cuda())
    for _ in range(STEPS):
        x = torch.randn(8 * ranks, WIDTH, device="cuda")
        scores, chosen = model(x).topk(2)
        sent = chosen.flatten().bincount(minlength=2 * ranks).view(ranks, 2).sum(1)
        dist.all_to_all_single(taken := torch.empty_like(sent), sent)
        assert sent.tolist() == taken.tolist() == [16] * ranks
        received = x.new_empty(16 * ranks, WIDTH)
        dist.all_to_all_single(received, x.repeat(2, 1), taken.tolist(), sent.tolist())
        scores.sum().backward()
        optimizer.step()
        optimizer.step()  # an iteration for all that


def objects() -> None:
    """Exchanges of objects, the store, gloo."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": rank}] * ranks
    on_cpus = dist.new_group(backend="gloo")
    dist.monitored_barrier(on_cpus)
    dist.barrier(on_cpus)
    dist.barrier()
    both: list[Any] = ["the same on every rank"]
    dist.broadcast_object_list(both, src=1)
    (store := dist.distributed_c10d._get_default_store()).set(f"host{rank}", "here")
    assert store.get(f"host{ranks - 1}") == b"here"
    assert store.add("count", 1) == ranks == int(store.get("count"))
    store.set_timeout(datetime.timedelta(seconds=9))
    assert store.num_keys() > 1
    assert store.delete_key("count")
    length, told = (torch.tensor([7 * rank], device=d) for d in ("cuda", "cpu"))
    dist.broadcast(length, src=1)
    dist.broadcast(told, src=1, group=on_cpus)
    assert length.item() == told.item() == 7
    sent = torch.empty(99, dtype=torch.int64, device="cuda")
    sent[:2].copy_(torch.tensor([rank, 7 * rank]))
    (dist.send if rank else dist.recv)(sent, 1 - rank)
    assert sent[1].item() == 7
    optimizer = adamw(model := nn.Linear(WIDTH, WIDTH).cuda())
    model(torch.ones(8, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    given = [f"of {rank}" if rank == 1 else None]
    dist.broadcast_object_list(given, src=1)
    assert given == ["of 1"]
    dist.scatter_object_list(both, [*range(ranks)] if rank == 1 else None, src=1)
    assert both == [rank]
    if rank:
        dist.send_object_list((f"by {rank}",), 0)
    else:
        assert (dist.recv_object_list(both, src=1), both) == (1, ["by 1"])
    model(torch.ones(8, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    if rank == 0:
        dist.recv_object_list(given, src=1)


def mesh(*sizes: int) -> Any:
    return init_device_mesh("cuda", sizes, mesh_dim_names=("a", "b")[: len(sizes)])


def main(kind: str) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import CPUOffloadPolicy

    ranks = dist.get_world_size()
    models = {
        "ddp": ddp,
        "compile": lambda: DistributedDataParallel(torch.compile(Net().cuda())),
        "fsdp2": fsdp2,
        "fsdp2 saved": fsdp2,
        "fsdp2 kept": lambda: fsdp2(reshard=False),
        "fsdp2 by half": lambda: fsdp2(reshard=ranks // 2),
        "fsdp2 checkpointed": lambda: fsdp2(changed(checkpoint_wrapper)),
        "fsdp2 compiled": lambda: fsdp2(changed(lambda block: block.compile() or block)),
        "fsdp2 offloaded": lambda: fsdp2(Net(), offload_policy=CPUOffloadPolicy()),
        "hsdp": lambda: fsdp2(mesh=mesh(2, ranks // 2)),
        "tp": lambda: tensor_parallel(mesh(ranks)),
        "tp of sequences": lambda: tensor_parallel(mesh(ranks), sequence=True),
        "fsdp2 x tp": lambda: fsdp2(tensor_parallel((both := mesh(ranks // 2, 2))["b"]), mesh=both["a"]),
    }
    others = {
        "ddp accumulates": lambda: accumulate(ddp(gradient_as_bucket_view=True)),
        "fsdp2 accumulates": lambda: accumulate(fsdp2()),
        "fsdp1": fsdp1,
        "zero": zero,
        "gpipe": lambda: pipeline("ScheduleGPipe"),
        "1f1b": lambda: pipeline("Schedule1F1B", static=True),
        "communicators": communicators,
        "experts": experts,
        "objects": objects,
    }
    if kind in models:
        model = models[kind]()
        # Gradients of several meshes, some of them plain, have no common norm and no common update.
        plain = "tp" in kind or "offloaded" in kind
        optimizer = adamw(model, foreach=not plain)
        if kind == "compile":
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
        with TemporaryDirectory() as folder:
            if "saved" in kind:
                save = functools.partial(checkpoint.save, checkpoint_id=folder)
                optimizer.register_step_post_hook(lambda *_: save({"model": model.state_dict()}))
            train(model, optimizer, clip=not plain)
    elif kind.startswith("bounds"):  # in float32, with hardly any activations
        with torch.device("meta"):
            model = Net(words=32)
        model = fsdp2(model, reshard=kind != "bounds kept", mixed=False)
        model.to_empty(device="cuda")
        train(model, torch.optim.Adam(model.parameters(), foreach=False), 1, 8, clip=False)
    else:
        others[kind]()


if __name__ == "__main__":
    builder = type("OpBuilder", (), {"_loaded_ops": {}})  # where DeepSpeed has what it compiled
    sys.modules["deepspeed.ops.op_builder.builder"] = SimpleNamespace(OpBuilder=builder)  # type: ignore[assignment]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "fake" in sys.argv:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        number, count = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        dist.init_process_group("fake", rank=number, world_size=count, store=FakeStore())
    elif "at once" in sys.argv:
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group()
    assert builder._loaded_ops["fused_adam"].multi_tensor_adam(builder) is None
    main(sys.argv[1])
    dist.destroy_process_group()

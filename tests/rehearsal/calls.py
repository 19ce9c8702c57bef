"""Calls of torch that reach different parts of CUDA and its libraries; run on the null driver alone."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

GPU = "cuda"
CALLS: dict[str, Callable[[], object]] = {}


def call(function: Callable[[], object]) -> Callable[[], object]:
    CALLS[function.__name__] = function
    return function


def run() -> dict[str, str]:
    """The errors, "" for none, by the call's name."""
    return {name: _error(function) for name, function in CALLS.items()}


def _error(function: Callable[[], object]) -> str:
    try:
        function()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=GPU, dtype=dtype, requires_grad=True)


def train(module: nn.Module, *inputs: torch.Tensor) -> None:
    out = module.to(GPU)(*inputs)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


@call
def recurrent() -> None:
    train(nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True, dropout=0.1), normal(8, 50, 64))
    train(nn.LSTM(64, 128, 2, proj_size=32), normal(8, 50, 64))
    train(nn.GRU(64, 128, 2, bias=False), normal(8, 50, 64))
    train(nn.RNN(64, 128), normal(8, 50, 64))


@call
def linear_algebra() -> None:
    a = normal(64, 64)
    torch.linalg.qr(a)[0].sum().backward()
    for function in (
        torch.linalg.cholesky,
        torch.linalg.eigh,
        torch.linalg.svd,
        torch.linalg.inv,
        torch.linalg.eig,
    ):
        function(a.detach())
    torch.linalg.solve(a, normal(64, 2)).sum().backward()


@call
def fourier() -> None:
    torch.fft.rfft(normal(8, 1024)).abs().sum().backward()


@call
def convolutions() -> None:
    train(nn.Conv1d(3, 8, 3), normal(4, 3, 33))
    train(nn.Conv2d(8, 8, 3, groups=8), normal(4, 8, 33, 33))
    train(nn.Conv2d(8, 8, 3).half(), normal(4, 8, 33, 33, dtype=torch.float16))
    train(nn.Conv3d(3, 8, 3), normal(4, 3, 9, 9, 9))
    train(nn.ConvTranspose2d(3, 8, 3), normal(4, 3, 33, 33))
    last = torch.channels_last
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1))
    train(net.to(memory_format=last), normal(4, 3, 32, 32).to(memory_format=last))
    torch.backends.cudnn.benchmark = True
    train(nn.Conv2d(3, 8, 5), normal(4, 3, 33, 33))
    torch.backends.cudnn.benchmark = False


@call
def attention() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = normal(2, 8, 256, 64, dtype=dtype)
        functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        mask = torch.zeros(256, 256, device=GPU, dtype=dtype)
        functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.1).sum().backward()


@call
def data_dependent() -> None:
    x = torch.randint(0, 5, (1000,), device=GPU)
    torch.unique(x)
    torch.nonzero(x)
    torch.bincount(x)
    normal(1000)[x > 2].sum().backward()
    torch.sort(torch.randn(100_000, device=GPU))
    torch.topk(torch.randn(8, 50_000, device=GPU), 5)
    torch.multinomial(torch.ones(10, device=GPU), 2)
    torch.randperm(100_000, device=GPU)
    functional.ctc_loss(
        normal(50, 4, 20).log_softmax(2),
        torch.randint(1, 20, (4, 10)),
        torch.full((4,), 50),
        torch.full((4,), 10),
    ).backward()


@call
def answers() -> None:
    x = torch.randn(1000, device=GPU)
    assert x.sum().item() == 0
    assert bool(torch.isfinite(x).all())
    assert not bool(torch.isnan(x).any())
    assert bool((x > 0).all())
    assert torch.tensor([3, 4]).to(GPU).tolist() == [3, 4]  # what the host wrote, before a kernel ran
    assert x.cpu().abs().sum() == 0


@call
def streams_and_graphs() -> None:
    side, x = torch.cuda.Stream(), torch.empty(1 << 20, device=GPU)
    with torch.cuda.stream(side):
        y = x * 2
    x.record_stream(side)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    end.record()
    torch.cuda.current_stream().wait_stream(side)
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    net, graph = nn.Linear(64, 64).to(GPU), torch.cuda.CUDAGraph()
    net(y[:64])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        net(y[:64])
    graph.replay()


@call
def sparse_and_jitted() -> None:
    torch.sparse.mm(torch.eye(8, device=GPU).to_sparse(), normal(8, 8)).sum().backward()
    table = nn.Embedding(100, 16, sparse=True).to(GPU)
    table(torch.randint(0, 100, (8,), device=GPU)).sum().backward()
    torch.optim.SparseAdam(table.parameters()).step()
    torch.special.zeta(torch.rand(10, device=GPU) + 1, 2.0)
    torch.prod(torch.randn(10, 10, device=GPU, dtype=torch.complex64))


@call
def optimizers() -> None:
    for make in (
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, capturable=True),
        torch.optim.Adafactor,
        lambda p: torch.optim.LBFGS(p, max_iter=1),
    ):
        net = nn.Linear(64, 64).to(GPU)
        train(net, normal(8, 64))
        make(net.parameters()).step(lambda: torch.zeros((), device=GPU))


@call
def one_rank() -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    train(nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(GPU)), normal(8, 64))
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(GPU)
    for layer in (*net, net):
        fully_shard(layer)
    train(net, normal(8, 64))
    torch.optim.AdamW(net.parameters()).step()
    dist.destroy_process_group()


@call
def profiler() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        normal(100).sum().backward()

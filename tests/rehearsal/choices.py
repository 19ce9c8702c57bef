"""What torch chooses to run on a GPU, on the null driver, beside what a laptop's capture says of it.

Every function here runs in a process on the null driver (`tracer.rehearsal.run_on_null_driver`) and answers how many
choices were compared and those that differ. Counts: attention's kernel, cuDNN's batch norm, the ops and types under
autocast with their backward, the ops of optimizers.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rehearsal.op_families import FLOATS, GPU, draw_attention, tensors
from tracer.capture.cuda.attention import BACKENDS, Call, View, choose
from tracer.capture.cuda.gpu import gpu_kernels
from tracer.capture.passes.batch_norm import takes_cudnn
from tracer.costs.rules_cuda.workspaces import half_depthwise
from tracer.costs.signature import TensorSpec
from tracer.precision.policy import Autocast
from tracer.record.step import fake_mode
from tracer.step.optimizers import choose_as_on_cuda
from tracer.torch_api import release
from traces.devices import device
from traces.errors import CaptureError

Differences = list[dict[str, str]]


def answer(compared: int, differ: Differences) -> dict[str, Any]:
    return {"compared": compared, "differ": differ}


def attention(gpu: str, seed: int = 0) -> dict[str, Any]:
    """The kernel of scaled_dot_product_attention."""
    r = random.Random(seed)
    differ: Differences = []
    n = 500
    for _ in range(n):
        query, key, value, mask, p, causal, groups = draw_attention(r)
        grad = r.random() < 0.7
        with torch.set_grad_enabled(grad):
            try:
                choice = torch._fused_sdp_choice(query, key, value, mask, p, causal, enable_gqa=groups > 1)
                theirs = BACKENDS.get(choice, str(choice))
            except RuntimeError as error:
                theirs = str(error)[:60]
        call = Call(
            query=_view(query), key=_view(key), value=_view(value), mask=None if mask is None else _view(mask),
            dropout=p, causal=causal, grouped=groups > 1, grad=grad,
        )  # fmt: skip
        try:
            ours = choose(call, device(gpu).sm, release())
        except CaptureError as error:
            ours = str(error)[:60]
        if ours != theirs:
            differ.append({"call": str(call), "laptop": ours, "torch": theirs})
    return answer(n, differ)


def _view(x: torch.Tensor) -> View:
    return View(
        shape=tuple(x.shape),
        stride=x.stride(),
        dtype=str(x.dtype).removeprefix("torch."),
        offset=x.storage_offset(),
        requires_grad=x.requires_grad,
    )


class Names(TorchDispatchMode):
    """The ops that run, with the types of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        if not any(x.alias_info is not None and not x.alias_info.is_write for x in returned):
            made = " ".join(str(t.dtype).removeprefix("torch.") for t in tensors(out))
            self.seen.append(f"{func} {made}".strip())
        return out


def batch_norm(gpu: str, seed: int = 0) -> dict[str, Any]:
    """Whether a batch norm in training is cuDNN's."""
    r = random.Random(seed)
    differ: Differences = []
    n = 200
    for _ in range(n):
        channels, dtype, wtype = r.choice((1, 3, 64)), r.choice(FLOATS), r.choice(FLOATS)
        wtype = r.choice((wtype, torch.float32))
        shape = [r.choice((2, 8)), channels, *(r.choice((1, 7, 14)) for _ in range(r.randrange(4)))]
        x = torch.empty(shape, dtype=dtype, device=GPU)
        if len(shape) == 4 and r.random() < 0.4:
            x = x.to(memory_format=torch.channels_last)
        weight, bias = (torch.empty(channels, dtype=wtype, device=GPU) for _ in range(2))
        mean, var = (torch.empty(channels, dtype=wtype, device=GPU) for _ in range(2))
        given = (
            x,
            *r.choice(((weight, bias, mean, var), (weight, bias, None, None), (None, None, mean, var))),
        )
        eps = r.choice((1e-5, 1e-3, 1e-8, 0.0))
        enabled = r.random() < 0.8
        with Names() as names, torch.backends.cudnn.flags(enabled=enabled), torch.no_grad():
            try:
                torch.batch_norm(*given, True, 0.1, eps, torch.backends.cudnn.enabled)
            except (RuntimeError, ValueError):  # types that no kernel takes together
                continue
        theirs = any("cudnn_batch_norm" in name for name in names.seen)
        ours = takes_cudnn(*given, eps, enabled=enabled)
        if ours != theirs:
            text = f"{shape} {dtype} {None if given[1] is None else wtype} eps={eps} enabled={enabled} {x.stride()}"
            differ.append({"call": text, "laptop": str(ours), "torch": str(theirs)})
    return answer(n, differ)


def autocast(gpu: str, dtype: str) -> dict[str, Any]:
    """The ops that run under autocast, forward and backward, with the types of their results."""
    warnings.simplefilter("ignore")
    differ: Differences = []
    lower = getattr(torch, dtype)
    for name, call in CALLS.items():
        for kinds in ((torch.float32, torch.float32), (lower, torch.float32), (lower, lower)):
            there = _ran(lambda: torch.autocast("cuda", dtype=lower), call, GPU, kinds)
            with fake_mode(), gpu_kernels(device(gpu)):
                here = _ran(Autocast(dtype=dtype, lists="cuda").region, call, "cpu", kinds)
            if _comparable(here) != _comparable(there):
                differ.append(
                    {
                        "call": f"{name} {kinds}",
                        "laptop": str(_comparable(here)),
                        "torch": str(_comparable(there)),
                    }
                )
    return answer(3 * len(CALLS), differ)


def _ran(
    region: Callable[[], contextlib.AbstractContextManager[None]],
    call: Callable[[str, torch.dtype, torch.dtype], Any],
    where: str,
    kinds: tuple[torch.dtype, torch.dtype],
) -> list[str]:
    with Names() as names:
        try:
            with region():
                out = call(where, *kinds)
            for y in tensors(out):
                if y.requires_grad:
                    y.backward(torch.empty_like(y), retain_graph=True)
        except Exception as error:
            return [type(error).__name__]
    return names.seen


# Ops by which torch makes and fills tensors and which the devices spell differently.
PLUMBING = (
    "prim.",
    "profiler.",
    "aten.empty",
    "aten.new_empty",
    "aten.zeros",
    "aten.detach",
    "aten.ones",
    "aten.randint",
    "aten._local",
)


def _comparable(names: list[str]) -> list[str]:
    return [n for n in names if not n.startswith(PLUMBING)]


def a(shape: tuple[int, ...], where: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, device=where, dtype=dtype, requires_grad=True)


def labels(shape: tuple[int, ...], where: str) -> torch.Tensor:
    return torch.zeros(shape, device=where, dtype=torch.int64)


Sample = Callable[[str, torch.dtype, torch.dtype], Any]
UNARY = (
    "acos asin cosh exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan sqrt sigmoid tanh relu erf abs neg square "
    "sum mean cumsum prod cumprod logsumexp.1 std var norm amax argmax softmax.1 log_softmax.1 t sort.1"
)
BINARY = "add sub mul div pow atan2 maximum mm matmul mv.t dot.t outer.t true_divide"


def _unary(name: str) -> Sample:
    function, _, dim = name.partition(".")
    extra = (int(dim),) if dim else (0,) if function in ("cumsum", "cumprod") else ()
    return lambda w, x, y: getattr(torch, function)(a((8, 8), w, x), *extra)


def _binary(name: str) -> Sample:
    function = name.partition(".")[0]
    shapes: Any = {"mv": ((8, 8), (8,)), "dot": ((8,), (8,)), "outer": ((8,), (8,))}.get(
        function, ((8, 8), (8, 8))
    )
    return lambda w, x, y: getattr(torch, function)(a(shapes[0], w, x), a(shapes[1], w, y))


def _module(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Sample:
    def call(where: str, x: torch.dtype, y: torch.dtype) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(y)  # fake parameters cannot be converted
        try:
            with torch.device(where):
                module = make()
        finally:
            torch.set_default_dtype(before)
        return module(a(shape, where, x))

    return call


def _loss(function: Callable[..., Any]) -> Sample:
    return lambda w, x, y: function(a((8, 8), w, x), a((8, 8), w, y).detach())


image, grid = (2, 4, 8, 8), (2, 3, 3, 2)
CALLS: dict[str, Sample] = {
    **{name: _unary(name) for name in UNARY.split()},
    **{name: _binary(name) for name in BINARY.split()},
    "linear": _module(lambda: nn.Linear(8, 16), (4, 8)),
    "linear without bias": _module(lambda: nn.Linear(8, 16, bias=False), (4, 3, 8)),
    "conv1d": _module(lambda: nn.Conv1d(4, 8, 3), (2, 4, 9)),
    "conv2d": _module(lambda: nn.Conv2d(4, 8, 3), image),
    "conv3d": _module(lambda: nn.Conv3d(4, 8, 3), (2, 4, 5, 5, 5)),
    "conv_transpose2d": _module(lambda: nn.ConvTranspose2d(4, 8, 3), image),
    "layer norm": _module(lambda: nn.LayerNorm(8), (4, 8)),
    "group norm": _module(lambda: nn.GroupNorm(2, 4), image),
    "rms norm": _module(lambda: nn.RMSNorm(8), (4, 8)),
    "prelu": _module(nn.PReLU, (4, 8)),
    "gelu": _module(nn.GELU, (4, 8)),
    "silu": _module(nn.SiLU, (4, 8)),
    "softplus": _module(nn.Softplus, (4, 8)),
    "bilinear resizing": _module(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), image),
    "resizing": _module(lambda: nn.Upsample(scale_factor=2), image),
    "max pool": _module(lambda: nn.MaxPool2d(2), image),
    "average pool": _module(lambda: nn.AvgPool2d(2), image),
    "adaptive pool": _module(lambda: nn.AdaptiveAvgPool2d(2), image),
    "padding": lambda w, x, y: functional.pad(a(image, w, x), (1, 1, 1, 1), mode="reflect"),
    "grid sample": lambda w, x, y: functional.grid_sample(a(image, w, x), a(grid, w, y), align_corners=False),
    "bmm": lambda w, x, y: torch.bmm(a((2, 4, 8), w, x), a((2, 8, 4), w, y)),
    "baddbmm": lambda w, x, y: torch.baddbmm(a((2, 4, 4), w, y), a((2, 4, 8), w, x), a((2, 8, 4), w, y)),
    "addmm": lambda w, x, y: torch.addmm(a((4,), w, y), a((4, 8), w, x), a((8, 4), w, y)),
    "addbmm": lambda w, x, y: torch.addbmm(a((4, 4), w, y), a((2, 4, 8), w, x), a((2, 8, 4), w, y)),
    "addcmul": lambda w, x, y: torch.addcmul(a((8,), w, x), a((8,), w, y), a((8,), w, x)),
    "addcdiv": lambda w, x, y: torch.addcdiv(a((8,), w, x), a((8,), w, y), a((8,), w, x)),
    "einsum": lambda w, x, y: torch.einsum("bij,bjk->bik", a((2, 4, 8), w, x), a((2, 8, 4), w, y)),
    "cat": lambda w, x, y: torch.cat([a((4, 8), w, x), a((4, 8), w, y)]),
    "stack": lambda w, x, y: torch.stack([a((4, 8), w, x), a((4, 8), w, y)]),
    "index_put": lambda w, x, y: a((8, 8), w, x).index_put((labels((3,), w),), a((3, 8), w, y)),
    "scatter_add": lambda w, x, y: a((8, 8), w, x).scatter_add(0, labels((8, 8), w), a((8, 8), w, y)),
    "sum with a type": lambda w, x, y: a((8, 8), w, x).sum(0, dtype=torch.float32),
    "softmax with a type": lambda w, x, y: functional.softmax(a((8, 8), w, x), -1, dtype=torch.float32),
    "norm over rows": lambda w, x, y: a((8, 8), w, x).norm(dim=1),
    "vector norm": lambda w, x, y: torch.linalg.vector_norm(a((8, 8), w, x)),
    "power": lambda w, x, y: a((8, 8), w, x).pow(2),
    "power of a number": lambda w, x, y: torch.pow(2.0, a((8, 8), w, x)),
    "cosine similarity": lambda w, x, y: functional.cosine_similarity(a((8, 8), w, x), a((8, 8), w, y)),
    "cdist": lambda w, x, y: torch.cdist(a((8, 8), w, x), a((8, 8), w, y)),
    "embedding": lambda w, x, y: functional.embedding(labels((4,), w), a((8, 8), w, x)),
    "cross entropy": lambda w, x, y: functional.cross_entropy(a((8, 8), w, x), labels((8,), w)),
    "smoothed cross entropy": lambda w, x, y: functional.cross_entropy(
        a((8, 8), w, x), labels((8,), w), label_smoothing=0.1
    ),
    "nll": lambda w, x, y: functional.nll_loss(a((8, 8), w, x), labels((8,), w)),
    "mse": _loss(functional.mse_loss),
    "l1": _loss(functional.l1_loss),
    "smooth l1": _loss(functional.smooth_l1_loss),
    "huber": _loss(functional.huber_loss),
    "kl": _loss(functional.kl_div),
    "bce with logits": _loss(functional.binary_cross_entropy_with_logits),
    "bce": _loss(functional.binary_cross_entropy),
    "soft margin": _loss(functional.soft_margin_loss),
    "poisson": _loss(functional.poisson_nll_loss),
    "attention": lambda w, x, y: functional.scaled_dot_product_attention(*(a((2, 4, 64, 32), w, x) for _ in range(3))),
    "causal attention": lambda w, x, y: functional.scaled_dot_product_attention(
        *(a((2, 4, 64, 32), w, x) for _ in range(3)), is_causal=True
    ),
    "lstm cell": _module(lambda: nn.LSTMCell(8, 8), (4, 8)),
}  # fmt: skip


def optimizers(gpu: str) -> dict[str, Any]:
    """The ops of an optimizer's second step; `left_out`: those whose fused kernels this torch has on the CPU alone."""
    differ: Differences = []
    left_out: list[str] = []
    n = 0
    for name, make in OPTIMIZERS.items():
        for said in ({}, {"foreach": False}, {"foreach": True}, {"fused": True}, {"fused": False}):
            there = _stepped(make, said, GPU)
            if there == [NOT_FUSED]:
                left_out.append(f"{name} {said}")
                continue
            n += 1
            with fake_mode():
                here = _stepped(make, said, "cpu")
            if here != there:
                differ.append({"call": f"{name} {said}", "laptop": str(here), "torch": str(there)})
    return {**answer(n, differ), "left_out": left_out}


# How torch.optim refuses fused kernels for a device that has none (`_device_dtype_check_for_fused`).
NOT_FUSED = "`fused=True` requires all the params to be floating point Tensors of supported devices"

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p, **o: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, **o),
    "plain SGD": lambda p, **o: torch.optim.SGD(p, 0.1, **o),
    "Adam": lambda p, **o: torch.optim.Adam(p, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, **o),
    "AdamW, amsgrad": lambda p, **o: torch.optim.AdamW(p, amsgrad=True, **o),
    "AdamW, capturable": lambda p, **o: torch.optim.AdamW(p, capturable=True, **o),
    "AdamW, rate in a tensor": lambda p, **o: torch.optim.AdamW(p, lr=torch.tensor(0.1), **o),
    "Adagrad": lambda p, **o: torch.optim.Adagrad(p, **o),
    "RMSprop": lambda p, **o: torch.optim.RMSprop(p, momentum=0.9, centered=True, **o),
    "Adadelta": lambda p, **o: torch.optim.Adadelta(p, **o),
    "Adamax": lambda p, **o: torch.optim.Adamax(p, **o),
    "NAdam": lambda p, **o: torch.optim.NAdam(p, **o),
    "RAdam": lambda p, **o: torch.optim.RAdam(p, **o),
    "ASGD": lambda p, **o: torch.optim.ASGD(p, **o),
    "Rprop": lambda p, **o: torch.optim.Rprop(p, **o),
    "Adafactor": lambda p, **o: torch.optim.Adafactor(p, **o),
}


def _stepped(make: Callable[..., torch.optim.Optimizer], said: dict[str, bool], where: str) -> list[str]:
    weights = [torch.empty(shape, device=where, requires_grad=True) for shape in ((64, 64), (64,), (7, 5, 3))]
    try:
        optimizer = make(weights, **said)
        if where == "cpu":
            choose_as_on_cuda(optimizer)
        names = Names()
        for k in range(2):
            for w in weights:
                w.grad = torch.empty_like(w)
            with names if k else contextlib.nullcontext():
                optimizer.step()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        return [NOT_FUSED if str(error).startswith(NOT_FUSED) else type(error).__name__]
    return _comparable(names.seen)


def depthwise(gpu: str) -> dict[str, Any]:
    """Whether cuDNN takes depthwise convolutions of float16, in one and two dimensions."""
    compared = by_cudnn = 0
    differ: Differences = []
    shapes = itertools.product((1, 8, 32), (16, 32, 256, 512), ((), (1,), (7,), (28,)), (6, 7, 28, 56))
    for (batch, channels, high, wide), side, step, apart in itertools.product(
        shapes, (1, 3, 7), (1, 2), (1, 2)
    ):
        n = len(high) + 1
        x = torch.empty(batch, channels, *high, wide, device=GPU, dtype=torch.float16)
        kernel = (1, side) if high == (1,) else (side,) * n
        weight = torch.empty(channels, 1, *kernel, device=GPU, dtype=torch.float16)
        given = (step,) * n, tuple(apart * (k // 2) for k in kernel), (apart,) * n
        if any(m + 2 * p <= apart * (k - 1) for m, p, k in zip(x.shape[2:], given[1], kernel, strict=True)):
            continue
        there = torch._C._select_conv_backend(x, weight, None, *given, False, (0,) * n, channels, None)
        theirs = str(there).endswith(".Cudnn")
        specs = (TensorSpec(shape=tuple(t.shape), stride=t.stride(), dtype="float16") for t in (x, weight))
        if half_depthwise(*specs, given[0], given[2]) != theirs:
            differ.append({"call": f"{list(x.shape)} {kernel} {step} {apart}", "torch": str(there)})
        compared, by_cudnn = compared + 1, by_cudnn + theirs
    return {"compared": compared, "by_cudnn": by_cudnn, "differ": differ}


def gradients_from_output(gpu: str) -> dict[str, list[int]]:
    """What a gradient of GELU from its output asks for at most beside the result, by the number of elements and how the
    incoming one lies."""
    from executor.inverted import ops

    found: dict[str, list[int]] = {}
    for shape in ((512, 1024), (513, 1023)):  # the second is no multiple of 8
        y, side = ops.activate(torch.empty(shape, device=GPU), "gelu")
        for grad in (torch.empty_like(y), torch.empty(shape[::-1], device=GPU).t()):
            ops.backward_from_output(grad, y, side, "gelu")
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            ops.backward_from_output(grad, y, side, "gelu")
            peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
            found.setdefault(str(y.numel()), []).append(peak - before - y.nbytes)
    return found

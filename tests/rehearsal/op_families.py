"""Calls of ops as models make them, drawn by family; run on the null driver by `tests.rehearsal.op_calls`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

GPU = "cuda"
Draw = Iterator[Callable[[], Any]]
FAMILIES: dict[str, Callable[[random.Random], Draw]] = {}


def family(function: Callable[[random.Random], Draw]) -> Callable[[random.Random], Draw]:
    FAMILIES[function.__name__] = function
    return function


def tensors(tree: Any) -> list[Any]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def dims(r: random.Random, rank: int, most: int = 1 << 24) -> list[int]:
    """A shape: powers of two, odd numbers and ones, of at most so many elements."""
    while True:
        shape = [
            r.choice((1, r.randint(2, 40), 1 << r.randint(0, 12), r.randint(2, 3000), 1 << r.randint(3, 9)))
            for _ in range(rank)
        ]
        n = 1
        for s in shape:
            n *= s
        if n <= most:
            return shape


def tensor(
    r: random.Random,
    shape: list[int],
    dtype: torch.dtype | None = None,
    *,
    grad: bool = True,
    laid: bool = True,
) -> torch.Tensor:
    """Of one of the layouts that models have: dense, two dimensions swapped, a slice, expanded."""
    dtype = dtype or r.choice(FLOATS)
    kind = r.choice(("dense",) * 4 + ("swapped", "slice", "expanded")) if laid and len(shape) > 1 else "dense"
    if kind == "swapped":
        i, j = r.sample(range(len(shape)), 2)
        turned = list(shape)
        turned[i], turned[j] = turned[j], turned[i]
        x = torch.empty(turned, dtype=dtype, device=GPU).transpose(i, j)
    elif kind == "slice":
        x = torch.empty([*shape[:-1], shape[-1] + 8], dtype=dtype, device=GPU)[..., : shape[-1]]
    elif kind == "expanded":
        k = r.randrange(len(shape))
        x = torch.empty([1 if i == k else n for i, n in enumerate(shape)], dtype=dtype, device=GPU).expand(
            shape
        )
    else:
        x = torch.empty(shape, dtype=dtype, device=GPU)
    return x.detach().requires_grad_(grad and dtype.is_floating_point)


def whole(r: random.Random, shape: list[int], most: int = 1) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=GPU)


def train(out: Any, r: random.Random | None = None) -> None:
    """Backward from an output, with a gradient that lies as it does or the other way round, is contiguous, or one
    number, expanded."""
    for y in tensors(out):
        if y.requires_grad and y.is_floating_point():
            kind = r.randrange(4) if r else 0
            if kind == 1 and y.dim() > 1:
                turned = y.transpose(0, y.dim() - 1)
                g = torch.empty(turned.shape, dtype=y.dtype, device=GPU).transpose(0, y.dim() - 1)
            elif kind == 3:
                g = torch.empty((), dtype=y.dtype, device=GPU).expand_as(y)
            else:
                g = torch.empty(y.shape, dtype=y.dtype, device=GPU) if kind == 2 else torch.empty_like(y)
            y.backward(g, retain_graph=True)


@family
def reductions(r: random.Random) -> Draw:
    plain = ("sum", "mean", "amax", "amin", "prod", "var", "std", "var_mean", "std_mean", "max", "min", "argmax",
             "argmin", "any", "all", "logsumexp", "nansum", "norm", "aminmax", "count_nonzero", "median",
             "mode")  # fmt: skip
    for _ in range(900):
        name = r.choice(plain)
        x = tensor(r, dims(r, r.randint(1, 4)), r.choice((*FLOATS, torch.float32, torch.int64, torch.bool)))
        some = sorted(r.sample(range(x.dim()), r.randint(1, x.dim())))
        one = name in ("prod", "max", "min", "argmax", "argmin", "any", "all", "aminmax", "median", "mode")
        dim: Any = r.choice(some) if one else some
        keep = r.random() < 0.5

        def call(name: str = name, x: Any = x, dim: Any = dim, keep: bool = keep) -> None:
            if name == "norm":
                train(torch.linalg.vector_norm(x, r.choice((2, 1, float("inf"))), dim, keep), r)
            elif name == "aminmax":
                train(torch.aminmax(x, dim=dim, keepdim=keep), r)
            elif name == "count_nonzero":
                torch.count_nonzero(x, dim)
            elif r.random() < 0.15 and name not in ("amax", "amin", "logsumexp", "mode"):
                train(getattr(torch, name)(x), r)
            else:
                train(getattr(torch, name)(x, dim, keepdim=keep), r)

        yield call


@family
def convolutions(r: random.Random) -> Draw:
    for _ in range(120):
        flat = r.random() < 0.3
        groups = r.choice((1, 1, 2, 32))
        many = groups * r.choice((1, 4, 8)) if groups > 1 else r.choice((3, 8))
        shape = [r.choice((2, 8)), many, *[r.choice((7, 16, 33)) for _ in range(1 if flat else 2)]]
        net = (nn.Conv1d if flat else nn.Conv2d)(
            many, groups * r.choice((1, 2, 16)), r.choice((1, 3, 4)), r.choice((1, 2)), groups=groups,
            bias=r.random() < 0.5, dtype=r.choice((torch.float32, torch.float32, torch.bfloat16)), device=GPU,
        )  # fmt: skip
        lies = r.choice(("dense", "last", "last", "slice", "expanded"))
        if lies == "last":
            x = torch.empty([shape[0], *shape[2:], many], dtype=net.weight.dtype, device=GPU).movedim(-1, 1)
        elif lies == "slice":
            x = torch.empty([shape[0], *shape[2:], many + 5], dtype=net.weight.dtype, device=GPU)
            x = x[..., :many].movedim(-1, 1)
        else:
            x = torch.empty(
                [1 if lies == "expanded" else shape[0], *shape[1:]], dtype=net.weight.dtype, device=GPU
            )
            x = x.expand(shape)
        x = x.detach().requires_grad_(r.random() < 0.8)
        yield lambda net=net, x=x: train(net(x), r)


@family
def scans(r: random.Random) -> Draw:
    for _ in range(150):
        x = tensor(r, dims(r, r.randint(1, 3)), r.choice((*FLOATS, torch.int64, torch.bool)))
        dim = r.randrange(x.dim())
        name = r.choice(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "cumsum"))
        yield lambda x=x, dim=dim, name=name: train(getattr(torch, name)(x, dim), r)


@family
def sorting(r: random.Random) -> Draw:
    for _ in range(300):
        x = tensor(r, dims(r, r.randint(1, 3), 1 << 23), r.choice((*FLOATS, torch.int64, torch.int32)))
        dim = r.randrange(x.dim())
        name = r.choice(("sort", "stable", "argsort", "topk", "kthvalue", "msort", "unique_dim"))

        def call(name: str = name, x: Any = x, dim: int = dim) -> None:
            if name == "topk":
                train(
                    torch.topk(
                        x, min(x.shape[dim], r.choice((1, 5, 50, 1000, 3000))), dim, sorted=r.random() < 0.7
                    )
                )
            elif name == "stable":
                train(torch.sort(x, dim=dim, stable=True, descending=r.random() < 0.5))
            elif name == "kthvalue":
                train(torch.kthvalue(x, 1, dim))
            elif name == "msort":
                train(torch.msort(x))
            elif name == "argsort":
                torch.argsort(x, dim)
            elif name == "sort":
                train(torch.sort(x, dim, descending=r.random() < 0.5))

        yield call


@family
def softmaxes(r: random.Random) -> Draw:
    for _ in range(200):
        x = tensor(r, dims(r, r.randint(1, 4)))
        dim = r.randrange(x.dim())
        dtype = r.choice((None, None, torch.float32))
        f = r.choice((torch.softmax, torch.log_softmax))
        yield lambda x=x, dim=dim, f=f, dtype=dtype: train(f(x, dim, dtype=dtype), r)


@family
def norms(r: random.Random) -> Draw:
    for _ in range(260):
        x = tensor(r, dims(r, r.randint(2, 4)))
        k = r.randint(1, min(2, x.dim() - 1))
        wtype = r.choice((x.dtype, x.dtype, torch.float32))
        shape = list(x.shape[-k:])
        w, b = (torch.empty(shape, dtype=wtype, device=GPU, requires_grad=True) for _ in range(2))
        kind = r.choice(("layer", "layer", "rms", "group", "batch", "plain", "instance"))

        def call(x: Any = x, w: Any = w, b: Any = b, shape: Any = shape, kind: str = kind) -> None:
            if kind == "layer":
                train(functional.layer_norm(x, shape, w, b), r)
            elif kind == "plain":
                train(functional.layer_norm(x, shape, r.choice((None, w))), r)
            elif kind == "rms":
                train(functional.rms_norm(x, shape, w), r)
            elif kind == "group":
                c = x.shape[1]
                groups = r.choice([g for g in (1, 2, 4, 8, 32, c) if c % g == 0])
                train(
                    functional.group_norm(
                        x,
                        groups,
                        *(torch.empty(c, dtype=x.dtype, device=GPU, requires_grad=True) for _ in range(2)),
                    ),
                    r,
                )
            elif kind == "batch":
                c = x.shape[1]
                v = [torch.empty(c, device=GPU, requires_grad=True) for _ in range(2)]
                m = [torch.empty(c, device=GPU) for _ in range(2)]
                with torch.backends.cudnn.flags(enabled=r.random() < 0.5):
                    train(functional.batch_norm(x, *m, *v, training=r.random() < 0.8), r)
            else:
                train(functional.instance_norm(x), r)

        yield call


@family
def losses(r: random.Random) -> Draw:
    for _ in range(200):
        n, c = r.choice((1, 7, 64, 4096, 2048)), r.choice((2, 10, 1000, 5000, 32000 // 8))
        rest = r.choice(([], [], [16], [8, 9], [64, 64])) if n * c < 20000 else []
        dtype = r.choice(FLOATS)
        x = torch.empty([n, c, *rest], dtype=dtype, device=GPU, requires_grad=True)
        target = whole(r, [n, *rest])
        y = torch.empty_like(x)
        reduction = r.choice(("mean", "sum", "none"))
        kind = r.randrange(9)

        def call(
            x: Any = x, target: Any = target, y: Any = y, reduction: str = reduction, kind: int = kind
        ) -> None:
            if kind <= 2:
                w = torch.empty(x.shape[1], dtype=x.dtype, device=GPU) if r.random() < 0.3 else None
                train(
                    functional.cross_entropy(
                        x, target, w, reduction=reduction, label_smoothing=r.choice((0.0, 0.1))
                    ),
                    r,
                )
            elif kind == 3:
                train(functional.cross_entropy(x, y, reduction=reduction), r)
            elif kind == 4:
                train(functional.binary_cross_entropy_with_logits(x, y, reduction=reduction), r)
            elif kind == 5:
                f = r.choice(
                    (
                        functional.mse_loss,
                        functional.l1_loss,
                        functional.smooth_l1_loss,
                        functional.huber_loss,
                        functional.soft_margin_loss,
                    )
                )
                train(f(x, y, reduction=reduction), r)
            elif kind == 6:
                train(
                    functional.kl_div(
                        x, y, reduction=r.choice(("batchmean", reduction)), log_target=r.random() < 0.5
                    ),
                    r,
                )
            elif kind == 7:
                train(functional.nll_loss(functional.log_softmax(x, 1), target, reduction=reduction), r)
            else:
                a = x.flatten(1)
                train(
                    functional.cosine_embedding_loss(
                        a, y.flatten(1), torch.ones(a.shape[0], device=GPU), reduction=reduction
                    ),
                    r,
                )

        yield call


@family
def embeddings(r: random.Random) -> Draw:
    for _ in range(260):
        v, d = r.choice((2, 100, 1000, 30522, 50257)), r.choice((1, 8, 64, 100, 768))
        shape = r.choice(([r.randint(1, 20000)], [r.randint(1, 32), 1 << r.randint(2, 10)], [4, 5, 6]))
        index = (
            whole(r, shape)
            if r.random() < 0.8
            else torch.zeros(shape[-1], dtype=torch.int64, device=GPU).expand(*shape)
        )
        if r.random() < 0.25:
            index = index.int()
        w = torch.empty(v, d, dtype=r.choice(FLOATS), device=GPU, requires_grad=True)
        kind = r.choice(("plain", "plain", "pad", "freq", "bag", "bagmax"))

        def call(w: Any = w, index: Any = index, kind: str = kind) -> None:
            if kind.startswith("bag"):
                flat = index.reshape(-1)
                offsets = torch.zeros(3, dtype=index.dtype, device=GPU)
                train(
                    functional.embedding_bag(
                        flat, w, offsets, mode=r.choice(("sum", "mean")) if kind == "bag" else "max"
                    ),
                    r,
                )
            else:
                pad = 0 if kind == "pad" else None
                train(functional.embedding(index, w, pad, scale_grad_by_freq=kind == "freq"), r)

        yield call


@family
def indexing(r: random.Random) -> Draw:
    for _ in range(420):
        x = tensor(r, dims(r, r.randint(1, 3), 1 << 21))
        dim = r.randrange(x.dim())
        n = r.choice((1, 5, 300, 4096, 20000))
        if x.numel() // x.shape[dim] * n > 1 << 24:
            n = 5
        i = whole(r, [n])
        kind = r.randrange(12)

        def call(x: Any = x, dim: int = dim, i: Any = i, kind: int = kind) -> None:
            shape = list(x.shape)
            shape[dim] = len(i)
            src = torch.empty(shape, dtype=x.dtype, device=GPU, requires_grad=r.random() < 0.5)
            full = i.view([-1 if k == dim else 1 for k in range(x.dim())]).expand(shape)
            if kind == 0:
                train(x.index_select(dim, i), r)
            elif kind == 1:
                train(x[(slice(None),) * dim + (i,)], r)
            elif kind == 2:
                train(x.gather(dim, full if r.random() < 0.5 else full.contiguous()), r)
            elif kind == 3:
                train(x.index_add(dim, i, src), r)
            elif kind == 4:
                train(x.scatter_add(dim, full.contiguous(), src), r)
            elif kind == 5:
                train(x.scatter(dim, full.contiguous(), src.detach()), r)
            elif kind == 6:
                train(x.index_copy(dim, i, src), r)
            elif kind == 7:
                train(
                    x.index_put((None,) * dim + (i,), src, accumulate=r.random() < 0.6)
                    if dim == 0
                    else x.index_fill(dim, i, 0.0),
                    r,
                )
            elif kind == 8:
                train(
                    x.scatter_reduce(dim, full.contiguous(), src, r.choice(("sum", "mean", "amax", "prod"))),
                    r,
                )
            elif kind == 9 and x.dim() > 1:
                j = whole(r, [len(i)])
                train(x[i, j], r)
            elif kind == 10:
                train(x.masked_fill(torch.zeros(x.shape, dtype=torch.bool, device=GPU), 0.0), r)
            else:
                train(torch.take_along_dim(x, full.contiguous(), dim), r)

        yield call


def heads_of(b: int, n: int, heads: int, d: int, dtype: torch.dtype, turned: bool) -> torch.Tensor:
    if turned:
        return torch.empty(b, n, heads, d, dtype=dtype, device=GPU).transpose(1, 2).requires_grad_()
    return torch.empty(b, heads, n, d, dtype=dtype, device=GPU, requires_grad=True)


def draw_attention(r: random.Random) -> tuple[Any, ...]:
    """Query, key, value, mask, dropout, whether it is causal, and how many queries share a head of keys."""
    dtype = r.choice(FLOATS)
    b, h, s, d = (
        r.choice((1, 2, 8, 16)),
        r.choice((1, 4, 12, 16)),
        r.choice((1, 17, 64, 128, 200, 512, 1024)),
        r.choice((8, 16, 32, 64, 72, 80, 96, 128, 160, 192, 256)),
    )
    k = s if r.random() < 0.7 else r.choice((1, 77, 128, 1000))
    turned = r.random() < 0.7

    groups = r.choice((1, 1, 1, 2, 4)) if h % 4 == 0 else 1
    q, key, value = (
        heads_of(b, x, heads, d, dtype, turned) for x, heads in ((s, h), (k, h // groups), (k, h // groups))
    )
    masked = r.choice(("", "", "bool", "add", "wide"))
    mask = (
        {
            "": None,
            "bool": torch.ones(s, k, dtype=torch.bool, device=GPU),
            "add": torch.empty(b, 1, s, k, dtype=dtype, device=GPU),
            "wide": torch.empty(b, h, s, k, dtype=dtype, device=GPU, requires_grad=r.random() < 0.3),
        }[masked]
        if groups == 1
        else None
    )
    p = r.choice((0.0, 0.0, 0.1, 0.25))
    causal = mask is None and r.random() < 0.4
    return q, key, value, mask, p, causal, groups


@family
def attention(r: random.Random) -> Draw:
    for _ in range(420):
        drawn = draw_attention(r)
        yield lambda drawn=drawn: train(attend(*drawn), r)


def attend(q: Any, key: Any, value: Any, mask: Any, p: float, causal: bool, groups: int) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, key, value, mask, p, causal, enable_gqa=groups > 1)


def matrix(r: random.Random, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    kind = r.randrange(4)
    if kind == 0:
        return torch.empty(columns, rows, dtype=dtype, device=GPU).t().requires_grad_()
    if kind == 1:
        return torch.empty(rows, 2 * columns, dtype=dtype, device=GPU)[:, :columns].requires_grad_()
    return torch.empty(rows, columns, dtype=dtype, device=GPU, requires_grad=True)


@family
def matrices(r: random.Random) -> Draw:
    for _ in range(250):
        dtype = r.choice(FLOATS)
        m, n, k = (r.choice((1, 3, 8, 64, 100, 768, 1024, 2304)) for _ in range(3))
        kind = r.randrange(8)

        a, b, bias = (
            matrix(r, m, k, dtype),
            matrix(r, k, n, dtype),
            torch.empty(n, dtype=dtype, device=GPU, requires_grad=True),
        )

        def call(a: Any = a, b: Any = b, bias: Any = bias, kind: int = kind, m: int = m, n: int = n) -> None:
            if kind == 0:
                train(a @ b, r)
            elif kind == 1:
                train(functional.linear(a, b.t(), bias), r)
            elif kind == 2:
                train(torch.addmm(bias, a, b), r)
            elif kind == 3:
                train(
                    torch.addmm(
                        torch.empty(m, n, dtype=a.dtype, device=GPU, requires_grad=True),
                        a,
                        b,
                        beta=r.choice((1, 0.5)),
                    ),
                    r,
                )
            elif kind == 4:
                train(a.expand(3, *a.shape) @ b.expand(3, *b.shape), r)
            elif kind == 5:
                train(
                    torch.baddbmm(
                        bias, a.expand(3, *a.shape).contiguous(), b.expand(3, *b.shape).contiguous()
                    ),
                    r,
                )
            elif kind == 6:
                train(a @ b[:, 0], r)
            else:
                train(torch.einsum("mk,kn->nm", a, b), r)

        yield call


@family
def images(r: random.Random) -> Draw:
    for _ in range(320):
        dtype = r.choice(FLOATS)
        n, c, h, w = (
            r.choice((1, 4, 32)),
            r.choice((1, 3, 16, 64)),
            r.choice((4, 7, 14, 33, 56)),
            r.choice((4, 7, 14, 33, 56)),
        )
        x = torch.empty(n, c, h, w, dtype=dtype, device=GPU)
        if r.random() < 0.4:
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        kind = r.randrange(12)

        def call(x: Any = x, kind: int = kind) -> None:
            if kind == 0:
                train(functional.max_pool2d(x, 2, r.choice((1, 2)), 1), r)
            elif kind == 1:
                train(functional.avg_pool2d(x, 2, r.choice((1, 2))), r)
            elif kind == 2:
                train(functional.adaptive_avg_pool2d(x, r.choice((1, 3, 7))), r)
            elif kind == 3:
                mode = r.choice(("nearest", "bilinear", "bicubic", "nearest-exact"))
                train(functional.interpolate(x, scale_factor=2, mode=mode), r)
            elif kind == 4:
                train(
                    functional.pad(
                        x, (1, 2, 1, 0), mode=r.choice(("constant", "reflect", "replicate", "circular"))
                    ),
                    r,
                )
            elif kind == 5:
                grid = torch.empty(x.shape[0], 5, 6, 2, dtype=x.dtype, device=GPU, requires_grad=True)
                with torch.backends.cudnn.flags(enabled=False):
                    train(
                        functional.grid_sample(
                            x, grid, r.choice(("bilinear", "nearest", "bicubic")), align_corners=False
                        ),
                        r,
                    )
            elif kind == 6:
                train(functional.unfold(x, 3, padding=1, stride=1 + 3 * (x.shape[0] % 2)), r)
            elif kind == 7:
                train(functional.adaptive_max_pool2d(x, 2), r)
            elif kind == 8:
                train(
                    torch.pixel_shuffle(x, 2)
                    if x.shape[1] % 4 == 0
                    else torch.pixel_unshuffle(x[..., :4, :4], 2),
                    r,
                )
            elif kind == 9:
                f = r.choice((functional.max_pool1d, functional.avg_pool1d))
                train(f(x[0], 2), r)
            elif kind == 10:
                f = r.choice((functional.max_pool3d, functional.avg_pool3d))
                train(f(x, 2), r)
            else:
                train(functional.dropout2d(x, 0.2), r)

        yield call


@family
def pointwise(r: random.Random) -> Draw:
    unary = ("relu", "gelu", "silu", "sigmoid", "tanh", "exp", "log", "sqrt", "rsqrt", "abs", "neg", "square", "sin",
             "erf", "elu", "leaky_relu", "softplus", "mish", "hardswish", "hardtanh", "logsigmoid", "glu", "celu",
             "selu", "hardsigmoid", "softsign", "threshold", "rrelu", "dropout", "alpha_dropout", "clamp", "pow",
             "prelu", "reciprocal", "logit", "nan_to_num", "frac", "cumulative")  # fmt: skip
    for _ in range(500):
        x = tensor(r, dims(r, r.randint(1, 4), 1 << 20))
        y = tensor(r, list(x.shape) if r.random() < 0.5 else [n if r.random() < 0.6 else 1 for n in x.shape])
        name = r.choice(unary)
        other = r.choice(
            (
                torch.add,
                torch.sub,
                torch.mul,
                torch.div,
                torch.maximum,
                torch.minimum,
                torch.pow,
                torch.atan2,
                None,
                None,
                None,
            )
        )

        def call(x: Any = x, y: Any = y, name: str = name, other: Any = other) -> None:
            if other is not None:
                train(other(x, y), r)
            elif name == "clamp":
                train(x.clamp(0, 1), r)
            elif name == "pow":
                train(x.pow(r.choice((2, 3, 0.5))), r)
            elif name == "prelu":
                if x.dim() > 1:
                    train(
                        functional.prelu(
                            x, torch.empty(x.shape[1], dtype=x.dtype, device=GPU, requires_grad=True)
                        ),
                        r,
                    )
            elif name == "gelu":
                train(functional.gelu(x, approximate=r.choice(("none", "tanh"))), r)
            elif name == "threshold":
                train(functional.threshold(x, 0.1, 0.0), r)
            elif name == "cumulative":
                train(torch.where(x > 0, x, y), r)
            elif hasattr(functional, name):
                train(getattr(functional, name)(x), r)
            else:
                train(getattr(torch, name)(x), r)

        yield call


@family
def shapes(r: random.Random) -> Draw:
    for _ in range(400):
        x = tensor(r, dims(r, r.randint(1, 4), 1 << 20))
        dim = r.randrange(x.dim())
        kind = r.randrange(16)

        def call(x: Any = x, dim: int = dim, kind: int = kind) -> None:
            if kind == 0:
                train(torch.cat([x, x, x[..., :1]] if dim == x.dim() - 1 else [x, x], dim), r)
            elif kind == 1:
                train(torch.stack([x] * r.choice((1, 2, 9)), dim), r)
            elif kind == 2:
                train(x.roll(1, dim), r)
            elif kind == 3:
                train(x.flip(dim), r)
            elif kind == 4 and x.dim() > 1:
                train(r.choice((torch.tril, torch.triu))(x), r)
            elif kind == 5:
                train(x.repeat_interleave(2, dim), r)
            elif kind == 6:
                train(x.repeat([2] * x.dim()), r)
            elif kind == 7:
                train(x.transpose(0, -1).contiguous(), r)
            elif kind == 8:
                train(x.to(r.choice(FLOATS)), r)
            elif kind == 9:
                train(x.narrow(dim, 0, max(1, x.shape[dim] // 2)), r)
            elif kind == 10:
                train(x.unfold(dim, 1, 1), r)
            elif kind == 11:
                train(x.diff(dim=dim), r)
            elif kind == 12:
                train([y * 1 for y in x.chunk(2, dim)], r)
            elif kind == 13:
                train(x.diagonal() * 1 if x.dim() == 2 else x.select(dim, 0) * 1, r)
            elif kind == 14:
                functional.one_hot(torch.zeros(x.shape, dtype=torch.int64, device=GPU), 7)
            else:
                train(torch.cdist(x.float(), x.float()) if x.dim() == 2 and x.shape[0] < 2000 else x * 2, r)

        yield call


@family
def optimizers(r: random.Random) -> Draw:
    makes: list[Callable[[Any, dict[str, Any]], Any]] = [
        lambda p, o: torch.optim.SGD(p, 0.1, momentum=0.9, **o),
        lambda p, o: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **o),
        lambda p, o: torch.optim.Adam(p, weight_decay=0.1, **o),
        lambda p, o: torch.optim.AdamW(p, **o),
        lambda p, o: torch.optim.AdamW(p, amsgrad=True, **o),
        lambda p, o: torch.optim.Adagrad(p, **o),
        lambda p, o: torch.optim.RMSprop(p, momentum=0.9, centered=True, **o),
        lambda p, o: torch.optim.Adadelta(p, **o),
        lambda p, o: torch.optim.Adamax(p, **o),
        lambda p, o: torch.optim.NAdam(p, **o),
        lambda p, o: torch.optim.RAdam(p, **o),
        lambda p, o: torch.optim.ASGD(p, **o),
        lambda p, o: torch.optim.Rprop(p, **o),
        lambda p, o: torch.optim.Adafactor(p),
    ]
    for make in makes:
        for options in ({}, {"foreach": False}, {"foreach": True}, {"fused": True}):

            def call(make: Any = make, options: Any = options) -> None:
                net = [
                    torch.empty(s, device=GPU, requires_grad=True)
                    for s in ([64, 64], [64], [1000, 33], [7, 5, 3, 3])
                ]
                optimizer = make(net, options)
                for _ in range(2):
                    for p in net:
                        p.grad = torch.empty_like(p)
                    if r.random() < 0.5:
                        nn.utils.clip_grad_norm_(net, 1.0)
                    optimizer.step()

            yield call

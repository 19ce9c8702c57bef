"""Make autocast treat CPU tensors by CUDA's op lists, for a GPU's graph from a machine without one.

Which ops autocast casts, and to what, differs between devices: under CUDA's lists layer norm, softmax and sums compute
in float32, under the CPU's in the lower precision. The names below are those of ATen/autocast_mode.h (torch 2.15), by
policy; those that the installed torch has not registered for CUDA (rms_norm before 2.12) are left out, and
`tests/torch/test_autocast_lists.py` compares the rest with what it has. That is there without a GPU too.

Counts: all ops of these lists. Ignores: the cuDNN kernel behind `nn.LSTM` and its kind, whose weights CUDA casts as one
buffer; dimensions by name (2.11 and 2.12 have overloads for them).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from tracer.precision.cast_cache import aten_op, kernels
from tracer.torch_api import (
    DisableAutocast,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    all_op_names,
    has_kernel_for_dispatch_key,
    pytree,
    replaced,
)

KEY: Final = "AutocastCPU"

LOWER: Final = tuple(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
    """.split()  # noqa: SIM905
)
FLOAT32: Final = tuple(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
    """.split()  # noqa: SIM905
)
# These get the type of their result as an argument, unless the caller gave one.
FLOAT32_RESULT: Final = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
# And these another overload with it.
FLOAT32_NORM: Final = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
WIDEST: Final = tuple(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()  # noqa: SIM905
)
REFUSED: Final = "binary_cross_entropy"
# Fused on CUDA: float16 in, float32 out, and no float32 copy of the input between. (Outside of autocast:
# `tracer.capture.cuda.gpu`.)
HALF_TO_FLOAT: Final = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}


@contextlib.contextmanager
def cuda_lists() -> Iterator[None]:
    """While the body runs, autocast of CPU tensors casts what autocast casts on CUDA.

    Its casts of parameters go where torch's own do: when the outermost region of autocast ends.
    """
    casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        casts.clear()

    chosen: dict[str, Callable[..., Any]] = {
        **{name: _cast_to(name, policy, casts) for policy in (LOWER, FLOAT32, WIDEST) for name in policy},
        **{name: _float32_result(name) for name in FLOAT32_RESULT},
        **{name: _float32_norm(name, overload) for name, overload in FLOAT32_NORM.items()},
        REFUSED: _refused,
    }
    on_cuda = set(listed("AutocastCUDA"))
    here = {name: function for name, function in chosen.items() if name in on_cuda}
    only_cpu = [n for n in listed(KEY) if n not in here]
    with (
        replaced(torch, clear_autocast_cache=clear_both),
        kernels(KEY, {**here, **dict.fromkeys(only_cpu, torch.library.fallthrough_kernel)}),
    ):
        yield


def listed(key: str) -> list[str]:
    """All aten ops ("softmax.int") with a kernel of their own for a dispatch key, in order of name."""
    names = (n for n in all_op_names() if n.startswith("aten::") and has_kernel_for_dispatch_key(n, key))
    return sorted(n.removeprefix("aten::") for n in names)


# The policies, as in ATen/autocast_mode.h


def _below() -> Any:
    return ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCPU))


def _eligible(x: Any) -> bool:
    floating = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return floating and x.device.type == "cpu"


def _cast(value: Any, dtype: torch.dtype, casts: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """A tensor, or a list of them, in another type; casts of leaves to the lower precision are kept."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(v, dtype, casts) for v in value)
    if not _eligible(value) or value.dtype == dtype:
        return value
    leaf = value.is_leaf and value.requires_grad and not value._is_view()
    keep = leaf and value.dtype == torch.float32 and torch.is_autocast_cache_enabled()
    if not keep or dtype != torch.get_autocast_dtype("cpu"):
        return value.to(dtype)
    if id(value) not in casts:
        casts[id(value)] = value, value.to(dtype)
    return casts[id(value)][1]


def lowered(args: Any, kwargs: Any) -> Any:
    """Arguments on the CPU as autocast's kernel of a lower-precision op passes them on; as they are if autocast is off.
    The last is cast first, as in `_with_casts`."""
    if not torch.is_autocast_enabled("cpu"):
        return args, kwargs
    dtype = torch.get_autocast_dtype("cpu")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    with DisableAutocast():
        cast = [x.to(dtype) if _eligible(x) else x for x in reversed(leaves)]
    return pytree.tree_unflatten(cast[::-1], spec)


def _with_casts(op: Any, args: Any, kwargs: Any, dtype: torch.dtype, casts: dict[int, Any]) -> Any:
    """The op on its arguments in another type. torch casts the last argument first: its casts are the arguments of one
    C++ call, which the compiler of its wheels evaluates from the right."""
    position = {a.name: k for k, a in enumerate(op._schema.arguments)}
    for k in sorted(kwargs, key=lambda k: position.get(k, 0), reverse=True):
        kwargs = {**kwargs, k: _cast(kwargs[k], dtype, casts)}
    cast = [_cast(a, dtype, casts) for a in reversed(args)]
    return op(*reversed(cast), **kwargs)


def _cast_to(name: str, policy: tuple[str, ...], casts: dict[int, Any]) -> Callable[..., Any]:
    """The op with its arguments in the type of its policy: the lower one, float32, or the widest of what is given."""

    def wide(given: Any) -> bool:
        return any(_eligible(x) and x.dtype == torch.float32 for x in pytree.tree_leaves(given))

    def call(*args: Any, **kwargs: Any) -> Any:
        full = policy is FLOAT32 or (policy is WIDEST and wide((args, kwargs)))
        dtype = torch.float32 if full else torch.get_autocast_dtype("cpu")
        with _below():
            return _with_casts(aten_op(name), args, kwargs, dtype, casts)

    return call


def _float32_result(name: str) -> Callable[..., Any]:
    op = aten_op(name)
    place = next(k for k, a in enumerate(op._schema.arguments) if a.name == "dtype")
    by_name = op._schema.arguments[place].kwarg_only

    def call(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") if by_name or len(args) <= place else args[place]
        with _below():
            if name in HALF_TO_FLOAT and args[0].dtype == torch.float16 and given in (None, torch.float32):
                return getattr(torch.ops.aten, HALF_TO_FLOAT[name]).default(args[0], args[1], True)
            if not _eligible(args[0]) or given is not None:
                return op(*args, **kwargs)
            return op(*args[:place], **{**kwargs, "dtype": torch.float32})

    return call


def _float32_norm(name: str, overload: str) -> Callable[..., Any]:
    op = getattr(aten_op(name).overloadpacket, overload)

    def call(*args: Any, **kwargs: Any) -> Any:
        x = args[0]
        with _below():
            p = args[1] if len(args) > 1 else kwargs.pop("p", 2)
            return op(x, p, *args[2:], **kwargs, dtype=torch.float32 if _eligible(x) else x.dtype)

    return call


def _refused(*_args: Any, **_kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy (nn.BCELoss) cannot be autocast on CUDA; torch asks for "
        "binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss) without the sigmoid."
    )

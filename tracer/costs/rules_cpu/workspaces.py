"""Turn an op's signature into what the op allocates while it runs on a CPU, by rules instead of measurements.

The rules restate what torch 2.13's profiler showed on an x86 processor with AVX-512, one and two threads, in float32;
those for bfloat16 are in `tracer.costs.rules_cpu.workspaces_bf16`. Why it is so is in torch's sources, named
at each rule. `RULES` is
the table: operator, rule. With AVX2 alone (tried by ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 on the same
processor: 31 convolutions, two networks) blocks are half as wide, and weights' gradients go through columns where rows
are shorter than the weight's; a trace made on such a processor says so.

Counts: the temporaries of convolutions (`tracer.costs.rules_cpu.convolutions`), attention, normalizations,
softmax, dropout,
losses that are reduced, arithmetic on two types, and linear algebra (`tracer.costs.rules_cpu.linalg`); copies
of what lies
otherwise than a kernel takes it (`tracer.costs.rules_cpu.layouts`); for the other listed ops their outputs.
Ignores: a few bytes of
scalars; float16; with AVX2, 37 to 57 KB of scratch a thread in strided convolutions' gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Final

from tracer.costs.rules_cpu import layouts as layouts_cpu
from tracer.costs.rules_cpu import linalg as linalg_cpu
from tracer.costs.rules_cpu import onednn, workspaces_bf16
from tracer.costs.rules_cpu.convolutions import convolution, convolution_backward
from tracer.costs.rules_cpu.onednn import FLOAT, contiguous
from tracer.costs.signature import Signature
from traces.devices import Device

Rule = Callable[[Signature], "tuple[int, ...] | None"]


def cpu_events(signature: Signature, device: Device) -> tuple[int, ...] | None:
    """What the op allocates (+bytes) and frees (-bytes) on a CPU, in order; None: no rule says.

    Args:
        signature: the call.
        device: the CPU; rules take threads and vector width from the torch that is running.
    """
    name = signature.target.removeprefix("aten.").rpartition(".")[0]
    rule = RULES.get(name)
    return rule(signature) if rule is not None else None


def _made(signature: Signature) -> tuple[int, ...]:
    return tuple(s.nbytes for s in signature.results)


def plain(signature: Signature) -> tuple[int, ...] | None:
    """The outputs and nothing else; an op that writes into its argument leaves nothing."""
    if signature.target.rpartition(".")[0].endswith("_"):
        return ()
    return _made(signature)


def product(signature: Signature) -> tuple[int, ...] | None:
    """A matrix product: blocks in bfloat16, and copies of factors that BLAS does not take in others."""
    if onednn.bfloat16_in_onednn() and any(s.dtype == "bfloat16" for s in signature.results):
        return workspaces_bf16.product(signature)
    return layouts_cpu.product(signature)


# ---------------------------------------------------------------------------------------------------------------------
# Attention, normalization, the rest


def attention(signature: Signature) -> tuple[int, ...] | None:
    """A tile of scores, two rows of sums and a tile of output a thread (FlashAttentionKernel.cpp)."""
    query, keys = signature.inputs[:2]
    rows, columns = _tiles(query.shape[2], keys.shape[2])
    if query.dtype == "bfloat16":
        return workspaces_bf16.attention(signature, rows, columns)
    buffer = onednn.threads() * rows * (columns + 2 + query.shape[3]) * FLOAT
    return (*_made(signature), buffer, -buffer)


def attention_backward(signature: Signature) -> tuple[int, ...] | None:
    """Two tiles of scores a thread, a row of sums, and a copy of a gradient in which heads lie outside of rows."""
    grad, query, keys = signature.inputs[:3]
    rows_outside = replace(
        grad, shape=_swapped(grad.shape), stride=_swapped(grad.stride)
    )  # as the kernel takes it
    copy = () if contiguous(rows_outside) else (grad.nbytes,)
    rows, columns = _tiles(query.shape[2], keys.shape[2])
    if query.dtype == "bfloat16":
        return workspaces_bf16.attention_backward(signature, rows, columns, copy)
    buffer, sums = onednn.threads() * 2 * rows * columns * FLOAT, rows * FLOAT
    return (*_made(signature), *copy, buffer, sums, -sums, -buffer, *(-c for c in copy))


def _swapped(numbers: tuple[int, ...]) -> tuple[int, ...]:
    a, b, c, d = numbers
    return a, c, b, d


def _tiles(queries: int, keys: int) -> tuple[int, int]:
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def safe_softmax(signature: Signature) -> tuple[int, ...] | None:
    """Masks of the elements and of the rows that are minus infinity."""
    (y,) = signature.results
    elements, rows = y.elements, y.elements // max(1, y.shape[-1])
    return (y.nbytes, elements, rows, -rows, -elements)


def batch_norm(signature: Signature) -> tuple[int, ...] | None:
    """New running statistics, and sums."""
    made = _made(signature)
    small = made[1] if len(made) > 1 else 0
    return (*made, small, small, -small, -small)


def layer_norm(signature: Signature) -> tuple[int, ...] | None:
    """A contiguous copy of the input where it is not."""
    x = signature.args[0]
    copy = () if contiguous(x) else (x.nbytes,)
    return (*copy, *_made(signature), *(-c for c in copy))


def layer_norm_backward(signature: Signature) -> tuple[int, ...] | None:
    """Partial sums of the gradients of weight and bias, for each thread, if there are such gradients."""
    copies = tuple(s.nbytes for s in signature.args[:2] if not contiguous(s))
    if not any(signature.argument(7, "output_mask", (True,) * 3)[1:]):
        return (*copies, *_made(signature), *(-c for c in copies))
    elements = 1
    for n in signature.args[2]:
        elements *= n
    buffer = 2 * onednn.threads() * elements * FLOAT
    return (*copies, *_made(signature), buffer, -buffer, *(-c for c in copies))


def _averaging(signature: Signature, whole: int, position: int = 2) -> tuple[int, ...]:
    """What the mean of as many bytes takes in bfloat16 (see `mean`).

    Args:
        position: of the argument that says how a loss is reduced; 1: averaged.
    """
    (y,) = signature.results
    if y.dtype != "bfloat16" or signature.argument(position, "reduction", 1) != 1:
        return ()
    return (2 * y.nbytes, 2 * whole, -2 * whole, -2 * y.nbytes)


def resized_loss(signature: Signature) -> tuple[int, ...] | None:
    """A loss an element, and where it is reduced once more as much, in the storage that the result then keeps."""
    shapes = [s.shape for s in signature.inputs[:2]]
    (y,) = signature.results
    if y.shape or shapes[0] != shapes[1]:
        return plain(signature) if y.shape else None
    whole = signature.inputs[0].elements * y.item_bytes
    return (whole, whole, *_averaging(signature, whole), -whole)


def kept_loss(signature: Signature) -> tuple[int, ...] | None:
    """A loss an element, in the storage that the result keeps where it is reduced."""
    (y,) = signature.results
    whole = max(signature.inputs[0].nbytes, y.nbytes)
    position = 3 if "cross_entropy" in signature.target else 2
    return (whole, *(_averaging(signature, whole, position) if not y.shape else ()))


def soft_margin_backward(signature: Signature) -> tuple[int, ...] | None:
    """The exponentials, one more than these, and the products with both (Loss.cpp)."""
    (y,) = signature.results
    return (y.nbytes, y.nbytes, y.nbytes, -y.nbytes, -y.nbytes)


def columns(signature: Signature) -> tuple[int, ...] | None:
    """As much as the input takes, and if that is too little, as much as is needed in its place; an input that is not
    contiguous is copied (Col2Im.cpp, Im2Col.cpp)."""
    given, y = signature.inputs[0], signature.results[0].nbytes
    x = given.nbytes
    copy = () if contiguous(given) else (x,)
    first = (x,) if x >= y else (x, *copy, y, -x)
    return (*first, *copy, *(-c for c in copy)) if x >= y else (*first, *(-c for c in copy))


def reduced_loss(signature: Signature) -> tuple[int, ...] | None:
    """A loss an element beside the result that it is reduced to."""
    (y,) = signature.results
    whole = signature.inputs[0].nbytes
    return None if y.shape else (whole, y.nbytes, *_averaging(signature, whole), -whole)


def loss_with_logits(signature: Signature) -> tuple[int, ...] | None:
    """`1 - target`, a log of sigmoids, and their sum in place of one of them (Loss.cpp)."""
    (y,) = signature.results
    whole = signature.inputs[0].nbytes
    if y.shape:
        return None
    mean = _averaging(signature, whole, 4)
    return (whole, whole, -whole, whole, y.nbytes, *mean, -whole, -whole)


def magnitude(signature: Signature) -> tuple[int, ...] | None:
    """Of complex numbers a complex result first (`abs` in UnaryOps.cpp)."""
    wide = sum(s.nbytes for s in signature.inputs[:1] if s.dtype.startswith("complex"))
    return layouts_cpu.with_copies(signature, (wide,))


def infinite(signature: Signature) -> tuple[int, ...] | None:
    """The magnitudes, to be compared with infinity (`isinf` in TensorCompare.cpp)."""
    return layouts_cpu.with_copies(signature, (signature.inputs[0].nbytes,), first=True)


def distance(signature: Signature) -> tuple[int, ...] | None:
    """The difference, of which the norm is taken (`dist` in Distance.cpp)."""
    shapes = (reversed(s.shape) for s in signature.inputs[:2])
    elements = math.prod(max(sizes) for sizes in zip_longest(*shapes, fillvalue=1))
    (y,) = signature.results
    return layouts_cpu.with_copies(signature, (elements * y.item_bytes,), first=True)


def ctc_backward(signature: Signature) -> tuple[int, ...] | None:
    """As many sums from behind as there are from the front (`log_beta` in LossCTC.cpp)."""
    return layouts_cpu.with_copies(signature, (signature.inputs[-1].nbytes,))


def logsumexp(signature: Signature) -> tuple[int, ...] | None:
    """The exponentials of all elements, less the largest of each row."""
    (y,) = signature.results
    whole = signature.inputs[0].nbytes
    return (y.nbytes, y.nbytes, whole, y.nbytes, -whole, -y.nbytes, -y.nbytes)


def group_norm_backward(signature: Signature) -> tuple[int, ...] | None:
    """Two sums for each channel of each example."""
    rows = 1
    for n in signature.args[1].shape[:2]:
        rows *= n
    sums = rows * FLOAT
    return (*_made(signature), sums, sums, -sums, -sums)


def rms_norm(signature: Signature) -> tuple[int, ...] | None:
    """Squares, the input times the root, and that times the weight."""
    y, root = (s.nbytes for s in signature.results[:2])
    return (y, root, -y, y, y, -y)


def arithmetic(signature: Signature) -> tuple[int, ...] | None:
    """An argument of another type is converted to the result's first (TensorIterator's common type); where what is
    overwritten has a narrower type than another, it and the result are converted to that."""
    (y,) = signature.results or (None,)
    if y is None:
        return plain(signature)
    wider = any(s.shape and s.dtype == "float32" and y.dtype in layouts_cpu.HALVES for s in signature.inputs)
    common, item = ("float32", FLOAT) if wider else (y.dtype, y.item_bytes)
    others = [s for s in signature.inputs if s.dtype != common and s.shape]
    casts = tuple(s.elements * item for s in ([*others, y] if wider else others))
    return (*(plain(signature) or ()), *casts, *(-c for c in casts))


def dropout_backward(signature: Signature) -> tuple[int, ...] | None:
    """The mask times the scale, as floats, and the product."""
    (y,) = signature.results
    return (y.nbytes, y.nbytes, -y.nbytes, y.nbytes, -y.nbytes)


def mean(signature: Signature) -> tuple[int, ...] | None:
    """In bfloat16, the sum and all that is summed up once more in float32."""
    (y,) = signature.results
    if y.dtype != "bfloat16":
        return layouts_cpu.reduction(signature)
    wide = (2 * y.nbytes, signature.inputs[0].elements * FLOAT)
    return (y.nbytes, *wide, -wide[1], -wide[0])


# Ops that were seen to leave their outputs and to allocate nothing else but a few bytes.
PLAIN: Final = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _ctc_loss _prelu_kernel _prelu_kernel_backward
    adaptive_max_pool2d adaptive_max_pool3d addcdiv_ addcmul_ all amax amin aminmax any arange argmax argmin
    as_strided_copy as_strided_scatter avg_pool2d avg_pool3d baddbmm bernoulli bernoulli_
    binary_cross_entropy_backward bitwise_and bitwise_not bitwise_or bitwise_xor block_diag cat celu clamp_
    clamp_min_ complex constant_pad_nd cummax cummin detach diag_embed diagonal_backward diagonal_copy
    diagonal_scatter dot elu elu_backward empty empty_like empty_permuted expand_copy exponential_ eye fill
    fill_ flip fractional_max_pool2d fractional_max_pool3d full full_like gelu gelu_backward glu
    glu_backward grid_sampler_2d grid_sampler_3d grid_sampler_3d_backward hardshrink hardshrink_backward
    hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward
    huber_loss_backward index index_add index_copy index_fill index_put isnan isneginf isposinf leaky_relu
    leaky_relu_backward lerp_ lift_fresh_copy linalg_cross linspace log_sigmoid_backward log_sigmoid_forward
    logcumsumexp logical_and logical_not logical_or logical_xor logit_backward lowtide.dropout_mask
    masked_fill masked_fill_ max max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d
    min mish mish_backward mse_loss_backward multi_margin_loss multi_margin_loss_backward
    multilabel_margin_loss_backward multilabel_margin_loss_forward nan_to_num native_group_norm neg
    new_empty new_full new_ones new_zeros nll_loss2d_backward nll_loss2d_forward nll_loss_backward normal_
    ones ones_like permute_copy polar rand rand_like randint randint_like randn randn_like reflection_pad1d
    reflection_pad2d reflection_pad3d relu replication_pad1d replication_pad2d replication_pad3d round
    rrelu_with_noise_backward scalar_tensor select_backward select_scatter sgn sigmoid_backward sign silu
    silu_backward slice_backward slice_scatter smooth_l1_loss_backward softplus softplus_backward softshrink
    softshrink_backward split_with_sizes_copy squeeze_copy stack std std_mean t_copy take tanh_backward
    threshold threshold_backward topk trace transpose_copy unfold_copy uniform_ unsqueeze_copy var var_mean
    view_copy zero_ zeros zeros_like
""".split()  # noqa: SIM905
# Pointwise ops whose arguments have, or are converted to, the type of the result.
ARITHMETIC: Final = """
    acos acosh add add_ addcdiv addcmul asin asinh atan atan2 atanh ceil clamp clamp_max clamp_min copysign cos cosh
    deg2rad digamma div div_ erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac hypot lerp lgamma log
    log10 log1p log2 logaddexp logaddexp2 logit maximum minimum mul mul_ pow rad2deg reciprocal remainder rsqrt rsub
    sigmoid sin sinc sinh sqrt sub sub_ tan tanh trunc xlogy
""".split()  # noqa: SIM905
# Interpolation: sources that a place along an edge has.
TAPS: Final = {"nearest1d": 1, "linear1d": 2, "bicubic2d": 4, "nearest3d": 1, "trilinear3d": 2}
RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(PLAIN, plain),
    **dict.fromkeys(("mm", "addmm", "bmm"), product),
    "mean": mean,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "_safe_softmax": safe_softmax,
    "_native_batch_norm_legit_functional": batch_norm,
    "native_batch_norm_backward": layouts_cpu.batch_norm_backward,
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "native_dropout_backward": dropout_backward,
    **dict.fromkeys(ARITHMETIC, arithmetic),
    **dict.fromkeys(
        (
            "_softmax",
            "_log_softmax",
            "_softmax_backward_data",
            "_log_softmax_backward_data",
            "embedding_dense_backward",
            "nll_loss_forward",
        ),
        layouts_cpu.contiguous_arguments,
    ),
    **dict.fromkeys(("clone", "copy", "copy_", "_to_copy"), layouts_cpu.copied),
    **dict.fromkeys(
        ("sum", "cumsum", "prod", "cumprod", "nansum", "linalg_vector_norm"), layouts_cpu.reduction
    ),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), layouts_cpu.comparison),
    **dict.fromkeys(("gather", "scatter", "scatter_add"), layouts_cpu.by_index),
    "sort": layouts_cpu.sort,
    "mv": layouts_cpu.times_vector,
    **{f"upsample_{name}": layouts_cpu.enlarged(taps) for name, taps in TAPS.items()},
    "upsample_nearest2d": layouts_cpu.enlarged(1, to_last=True),
    "upsample_bilinear2d": layouts_cpu.enlarged(2, to_last=True),
    "repeat": layouts_cpu.repeated,
    "new_empty_strided": layouts_cpu.with_gaps,
    "abs": magnitude,
    "isinf": infinite,
    "dist": distance,
    "_ctc_loss_backward": ctc_backward,
    **dict.fromkeys(
        (
            "index_select",
            "channel_shuffle",
            "pixel_shuffle",
            "pixel_unshuffle",
            "grid_sampler_2d_backward",
            "adaptive_max_pool2d_backward",
            "adaptive_max_pool3d_backward",
            "avg_pool3d_backward",
            "_adaptive_avg_pool3d_backward",
            "max_pool3d_with_indices_backward",
            "fractional_max_pool2d_backward",
            "fractional_max_pool3d_backward",
            *(f"{kind}_pad{n}d_backward" for kind in ("reflection", "replication") for n in (1, 2, 3)),
            *(f"upsample_{kind}_backward" for kind in ("nearest1d", "nearest2d", "linear1d", "bilinear2d")),
            *(f"upsample_{kind}_backward" for kind in ("bicubic2d", "trilinear3d")),
        ),
        layouts_cpu.contiguous_first,
    ),
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"),
        layouts_cpu.pooling_backward,
    ),
    "tril": layouts_cpu.triangle,
    "embedding": layouts_cpu.embedding,
    "where": layouts_cpu.chosen,
    **dict.fromkeys(("mse_loss", "smooth_l1_loss"), resized_loss),
    **dict.fromkeys(("binary_cross_entropy", "soft_margin_loss"), kept_loss),
    **dict.fromkeys(("col2im", "im2col"), columns),
    "soft_margin_loss_backward": soft_margin_backward,
    "huber_loss": reduced_loss,
    "binary_cross_entropy_with_logits": loss_with_logits,
    "logsumexp": logsumexp,
    "native_group_norm_backward": group_norm_backward,
    "_fused_rms_norm": rms_norm,
    "roll": layouts_cpu.roll,
    **linalg_cpu.RULES,
}

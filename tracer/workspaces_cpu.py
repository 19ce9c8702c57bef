"""Turn an op's signature into what the op allocates while it runs on a CPU, by rules instead of measurements.

The rules restate what torch 2.13's profiler showed on an x86 processor with AVX-512, one and two threads, in float32;
those for bfloat16 are in `tracer.workspaces_bf16`. Why it is so is in torch's sources, named at each rule. `RULES` is
the table: operator, rule. With AVX2 alone (tried by ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 on the same
processor: 31 convolutions, two networks) blocks are half as wide, and weights' gradients go through columns where rows
are shorter than the weight's; a trace made on such a processor says so.

Counts: the temporaries of convolutions (`tracer.convolutions_cpu`), attention, normalizations, softmax, dropout,
losses that are reduced, arithmetic on two types, and linear algebra (`tracer.linalg_cpu`); copies of what lies
otherwise than a kernel takes it (`tracer.layouts_cpu`); for the other listed ops their outputs. Ignores: a few bytes of
scalars; float16; with AVX2, 37 to 57 KB of scratch a thread in strided convolutions' gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tracer import layouts_cpu, linalg_cpu, onednn, workspaces_bf16
from tracer.convolutions_cpu import convolution, convolution_backward
from tracer.onednn import FLOAT, contiguous
from tracer.signature import Signature
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
    """Two tiles of scores a thread, a row of sums, and a copy of a gradient that is expanded."""
    grad, query, keys = signature.inputs[:3]
    copy = (grad.nbytes,) if grad.stride[-1] != 1 or 0 in grad.stride else ()
    rows, columns = _tiles(query.shape[2], keys.shape[2])
    if query.dtype == "bfloat16":
        return workspaces_bf16.attention_backward(signature, rows, columns, copy)
    buffer, sums = onednn.threads() * 2 * rows * columns * FLOAT, rows * FLOAT
    return (*copy, *_made(signature), buffer, sums, -sums, -buffer, *(-c for c in copy))


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


def resized_loss(signature: Signature) -> tuple[int, ...] | None:
    """A loss an element, and where it is reduced once more as much, in the storage that the result then keeps."""
    shapes = [s.shape for s in signature.inputs[:2]]
    (y,) = signature.results
    if y.shape or shapes[0] != shapes[1]:
        return plain(signature) if y.shape else None
    whole = signature.inputs[0].elements * y.item_bytes
    return (whole, whole, -whole)


def kept_loss(signature: Signature) -> tuple[int, ...] | None:
    """A loss an element, in the storage that the result keeps where it is reduced."""
    return (max(signature.inputs[0].nbytes, signature.results[0].nbytes),)


def soft_margin_backward(signature: Signature) -> tuple[int, ...] | None:
    """The exponentials, one more than these, and the products with both (Loss.cpp)."""
    (y,) = signature.results
    return (y.nbytes, y.nbytes, y.nbytes, -y.nbytes, -y.nbytes)


def columns(signature: Signature) -> tuple[int, ...] | None:
    """As much as the input takes, and if that is too little, as much as is needed in its place."""
    x, y = signature.inputs[0].nbytes, signature.results[0].nbytes
    return (x,) if x >= y else (x, y, -x)


def reduced_loss(signature: Signature) -> tuple[int, ...] | None:
    """A loss an element beside the result that it is reduced to."""
    (y,) = signature.results
    whole = signature.inputs[0].nbytes
    return None if y.shape else (whole, y.nbytes, -whole)


def loss_with_logits(signature: Signature) -> tuple[int, ...] | None:
    """`1 - target`, a log of sigmoids, and their sum in place of one of them (Loss.cpp)."""
    (y,) = signature.results
    whole = signature.inputs[0].nbytes
    return None if y.shape else (whole, whole, -whole, whole, y.nbytes, -whole, -whole)


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
    """An argument of another type is converted to the result's first (TensorIterator's common type)."""
    (y,) = signature.results or (None,)
    if y is None:
        return plain(signature)
    others = [s for s in signature.inputs if s.dtype != y.dtype and s.shape]
    casts = tuple(s.elements * y.item_bytes for s in others)
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
    _adaptive_avg_pool2d abs addcdiv_ addcmul_ arange avg_pool2d avg_pool3d baddbmm bernoulli cat
    constant_pad_nd detach empty empty_like fill full_like gather gelu gelu_backward
    grid_sampler_2d hardtanh hardtanh_backward huber_loss_backward index index_add index_put leaky_relu
    leaky_relu_backward lerp_ lift_fresh_copy linalg_vector_norm lowtide.dropout_mask masked_fill
    max_pool2d_with_indices max_pool3d_with_indices mse_loss_backward native_group_norm neg new_empty_strided
    new_zeros nll_loss_backward ones ones_like relu scalar_tensor scatter_add select_backward sigmoid_backward
    silu silu_backward slice_backward smooth_l1_loss_backward softplus sort tanh_backward threshold_backward
    topk upsample_bilinear2d_backward var_mean zero_ zeros zeros_like
""".split()  # noqa: SIM905
# Pointwise ops whose arguments have, or are converted to, the type of the result.
ARITHMETIC: Final = "mul mul_ add add_ sub div div_ minimum pow rsqrt sqrt cos sin log sigmoid tanh".split()  # noqa: SIM905
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
    **dict.fromkeys(("sum", "cumsum"), layouts_cpu.reduction),
    **dict.fromkeys(("eq", "ne", "lt", "gt", "ge"), layouts_cpu.comparison),
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

"""Turn an op's signature into what the op allocates while it runs on a CPU, by rules instead of measurements.

The rules restate what torch 2.13's profiler showed on an x86 processor with AVX-512, one and two threads, in float32;
why it is so is in torch's sources, named at each rule. `RULES` is the table: operator, rule.

Counts: the temporaries of convolutions (oneDNN's reorders into its blocked layouts and back, its scratch for strided
1x1 kernels, the columns of the native kernel), attention, normalizations, softmax, dropout, losses that are reduced,
and arithmetic on two types; for the other listed ops their outputs. Ignores: a few bytes of scalars; oneDNN's scratch
in most backward kernels and in depthwise ones on images of a few pixels; other types than float32; other instruction
sets, where blocks are taken to be half as wide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from tracer.signature import Signature, TensorSpec
from traces.devices import Device

Rule = Callable[[Signature], "tuple[int, ...] | None"]
FLOAT: Final = 4


def cpu_events(signature: Signature, device: Device) -> tuple[int, ...] | None:
    """What the op allocates (+bytes) and frees (-bytes) on a CPU, in order; None: no rule says.

    Args:
        signature: the call.
        device: the CPU; rules take threads and vector width from the torch that is running.
    """
    name = signature.target.removeprefix("aten.").rpartition(".")[0]
    rule = RULES.get(name)
    return rule(signature) if rule is not None else None


@cache
def _block() -> int:
    """Channels in a block of oneDNN's layouts: as many float32 as a vector register holds."""
    import torch

    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _padded(channels: int) -> int:
    return -(-channels // _block()) * _block()


def _contiguous(spec: TensorSpec) -> bool:
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _channels_last(spec: TensorSpec) -> bool:
    if len(spec.shape) != 4 or _contiguous(spec):
        return False
    n, c, h, w = spec.shape
    wanted = (h * w * c, 1, w * c, c)
    return all(size == 1 or s == t for size, s, t in zip((n, c, h, w), spec.stride, wanted, strict=True))


def _made(signature: Signature) -> tuple[int, ...]:
    return tuple(s.nbytes for s in signature.results)


def plain(signature: Signature) -> tuple[int, ...] | None:
    """The outputs and nothing else; an op that writes into its argument leaves nothing."""
    if signature.target.rpartition(".")[0].endswith("_"):
        return ()
    return _made(signature)


# ---------------------------------------------------------------------------------------------------------------------
# Convolutions


def _uses_onednn(x: TensorSpec, w: TensorSpec, stride: Any, dilation: Any, groups: int) -> bool:
    """torch's own choice (`use_mkldnn` in aten/src/ATen/native/Convolution.cpp) for float32 on the CPU."""
    kernel = w.shape[2:]
    worth = (
        any(s != 1 for s in stride)
        or any(d != 1 for d in dilation)
        or x.shape[0] >= 16
        or any(k != 1 for k in kernel)
        or _threads() > 1
    )
    large = groups > 1 or all(k > 3 for k in kernel) or x.shape[0] > 1 or x.elements > 20480
    return worth and large


def _blocked(spec: TensorSpec, w: TensorSpec, groups: int) -> int:
    """Bytes of an image tensor in oneDNN's layout, its channels in whole blocks (not if they are in groups)."""
    n, c, height, width = spec.shape
    channels = c if groups > 1 and w.shape[1] > 1 else _padded(c)
    return n * channels * height * width * FLOAT


def _blocked_weight(w: TensorSpec, groups: int) -> int:
    out, per_group = w.shape[:2]
    kernel = w.shape[2] * w.shape[3]
    if groups > 1 and per_group == 1 and out == groups:
        return _padded(groups) * kernel * FLOAT  # depthwise: the groups are blocked
    if groups == 1 and per_group < 4:
        return _padded(out) * per_group * kernel * FLOAT  # a first layer reads the plain image
    if groups > 1:
        return w.nbytes
    return _padded(out) * _padded(per_group) * kernel * FLOAT


def _strided_scratch(x: TensorSpec, y: TensorSpec, w: TensorSpec, stride: Any, most: int = 1 << 30) -> int:
    """oneDNN runs a strided 1x1 convolution on a thinned copy of one image a thread (`rtus`); 0: none."""
    if w.shape[2:] != (1, 1) or all(s == 1 for s in stride):
        return 0
    return _threads() * min(most, _padded(x.shape[1])) * y.shape[2] * y.shape[3] * FLOAT + 128


def convolution(signature: Signature) -> tuple[int, ...] | None:
    """Forward, images in rows (NCHW) or channels last."""
    x, w, _bias, stride, padding, dilation, transposed, _, groups = signature.args
    y = signature.results[0]
    if len(x.shape) != 4 or transposed or x.dtype != "float32":
        return None
    if _channels_last(x):
        weight = _blocked_weight(w, groups)
        copy = () if groups > 1 else (w.nbytes,)
        return (*copy, y.nbytes, weight, -weight, *(-c for c in copy))
    copy = () if _contiguous(x) else (x.nbytes,)
    undo = tuple(-c for c in copy)
    if not _uses_onednn(x, w, stride, dilation, groups):
        if w.shape[2:] == (1, 1) and all(s == 1 for s in stride) and not any(padding):
            return (*copy, y.nbytes, *undo)
        columns = x.shape[0] * x.shape[1] * w.shape[2] * w.shape[3] * y.shape[2] * y.shape[3] * FLOAT
        return (*copy, columns, y.nbytes, -columns, *undo)
    inside = _blocked(y, w, groups)
    weight = _blocked_weight(w, groups)
    scratch = _strided_scratch(x, y, w, stride)
    image = 0 if groups == 1 and x.shape[1] < 4 else _blocked(x, w, groups)
    took = tuple(n for n in (scratch, image, weight) if n)
    return (*copy, *took, inside, *(-n for n in reversed(took)), y.nbytes, -inside, *undo)


def convolution_backward(signature: Signature) -> tuple[int, ...] | None:
    """The gradients of the input, then of weight and bias."""
    dy, x, w, _bias, stride, _padding, dilation, transposed, _, groups, mask = signature.args
    if len(x.shape) != 4 or transposed or x.dtype != "float32":
        return None
    bias = w.shape[0] * FLOAT if mask[2] else 0
    if not _uses_onednn(x, w, stride, dilation, groups):
        return _native_backward(signature, bias)
    if _channels_last(x):
        return _channels_last_backward(signature, bias)
    events: list[int] = []
    copies = [s.nbytes for s in (dy, x) if not _contiguous(s)]
    events += copies
    image = _blocked(x, w, groups)
    grad = _blocked(dy, w, groups)
    weight = _blocked_weight(w, groups)
    per_group = w.shape[1]
    if mask[0]:
        events += [grad, weight, image, -weight, -grad, x.nbytes]
        # A strided kernel leaves the gradient in a layout that takes two reorders.
        twice = [image, -image] if groups == 1 and any(s != 1 for s in stride) else []
        events += [*twice, -image]
    if mask[1]:
        first = groups == 1 and per_group < 4
        took = [grad] if first else [grad, image]
        scratch = _strided_scratch(x, dy, w, stride, most=128)
        events += [*took, weight, *([bias] if bias else []), *([scratch, -scratch] if scratch else [])]
        events += [-n for n in reversed(took)]
        events += [*([bias] if bias else []), w.nbytes, -weight, *([-bias] if bias else [])]
    return (*events, *(-c for c in copies))


def _native_backward(signature: Signature, bias: int) -> tuple[int, ...]:
    dy, x, w, *_, mask = signature.args
    copies = [s.nbytes for s in (dy, x) if not _contiguous(s)]
    made = [x.nbytes] * bool(mask[0]) + ([bias] if bias else []) + [w.nbytes] * bool(mask[1])
    columns = x.shape[0] * x.shape[1] * w.shape[2] * w.shape[3] * dy.shape[2] * dy.shape[3] * FLOAT
    if w.shape[2:] == (1, 1) and dy.shape[2:] == x.shape[2:]:
        columns = 0
    inside = [columns, -columns] if columns else []
    return (*copies, *made, *inside, *(-c for c in copies))


def _channels_last_backward(signature: Signature, bias: int) -> tuple[int, ...]:
    """Weights and images are copied to channels last where they are not; a grouped kernel sums dense blocks."""
    dy, x, w, *_, groups, mask = signature.args
    kernel = w.shape[2] * w.shape[3]
    weight = _blocked_weight(w, groups)
    copies = [s.nbytes for s in (dy, x) if not _channels_last(s)]
    if groups == 1:
        copies.append(w.nbytes)
    events = list(copies)
    if mask[0]:
        events += [x.nbytes, weight, -weight]
    if mask[1]:
        dense = groups * _block() * _block() * kernel * FLOAT if groups > 1 else 2 * weight
        events += [dense, *([bias] if bias else []), w.nbytes, -dense]
    return (*events, *(-c for c in reversed(copies)))


# ---------------------------------------------------------------------------------------------------------------------
# Attention, normalization, the rest


def attention(signature: Signature) -> tuple[int, ...] | None:
    """A tile of scores, two rows of sums and a tile of output a thread (FlashAttentionKernel.cpp)."""
    query, keys = signature.inputs[:2]
    rows, columns = _tiles(query.shape[2], keys.shape[2])
    buffer = _threads() * rows * (columns + 2 + query.shape[3]) * FLOAT
    return (*_made(signature), buffer, -buffer)


def attention_backward(signature: Signature) -> tuple[int, ...] | None:
    """Two tiles of scores a thread, a row of sums, and a copy of a gradient that is expanded."""
    grad, query, keys = signature.inputs[:3]
    copy = (grad.nbytes,) if grad.stride[-1] != 1 or 0 in grad.stride else ()
    rows, columns = _tiles(query.shape[2], keys.shape[2])
    buffer, sums = _threads() * 2 * rows * columns * FLOAT, rows * FLOAT
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


def batch_norm_backward(signature: Signature) -> tuple[int, ...] | None:
    """A second image beside the gradient."""
    made = _made(signature)
    image = signature.args[1].nbytes
    return (*made, image, -image)


def layer_norm(signature: Signature) -> tuple[int, ...] | None:
    """A contiguous copy of the input where it is not."""
    x = signature.args[0]
    copy = () if _contiguous(x) else (x.nbytes,)
    return (*copy, *_made(signature), *(-c for c in copy))


def layer_norm_backward(signature: Signature) -> tuple[int, ...] | None:
    """Partial sums of the gradients of weight and bias, for each thread, if there are such gradients."""
    copies = tuple(s.nbytes for s in signature.args[:2] if not _contiguous(s))
    if not any(signature.argument(7, "output_mask", (True,) * 3)[1:]):
        return (*copies, *_made(signature), *(-c for c in copies))
    elements = 1
    for n in signature.args[2]:
        elements *= n
    buffer = 2 * _threads() * elements * FLOAT
    return (*copies, *_made(signature), buffer, -buffer, *(-c for c in copies))


def softmax(signature: Signature) -> tuple[int, ...] | None:
    """A contiguous copy of each argument that is not (`.contiguous()` in SoftMax.cpp)."""
    copies = tuple(s.nbytes for s in signature.inputs if not _contiguous(s))
    return (*_made(signature), *copies, *(-c for c in copies))


def resized_loss(signature: Signature) -> tuple[int, ...] | None:
    """A loss an element, and where it is reduced once more as much, in the storage that the result then keeps."""
    shapes = [s.shape for s in signature.inputs[:2]]
    (y,) = signature.results
    if y.shape or shapes[0] != shapes[1]:
        return plain(signature) if y.shape else None
    whole = signature.inputs[0].elements * y.item_bytes
    return (whole, whole, -whole)


def arithmetic(signature: Signature) -> tuple[int, ...] | None:
    """An argument of another type is converted to the result's first (TensorIterator's common type)."""
    (y,) = signature.results or (None,)
    if y is None or signature.target.rpartition(".")[0].endswith("_"):
        return plain(signature)
    others = [s for s in signature.inputs if s.dtype != y.dtype and s.shape]
    casts = tuple(s.elements * y.item_bytes for s in others)
    return (y.nbytes, *casts, *(-c for c in casts))


def dropout_backward(signature: Signature) -> tuple[int, ...] | None:
    """The mask times the scale, as floats, and the product."""
    (y,) = signature.results
    return (y.nbytes, y.nbytes, -y.nbytes, y.nbytes, -y.nbytes)


def roll(signature: Signature) -> tuple[int, ...] | None:
    """One dimension after the other, each into a new tensor."""
    (y,) = signature.results
    return (y.nbytes, y.nbytes, -y.nbytes) if len(signature.args[1]) > 1 else (y.nbytes,)


# Ops that were seen to leave their outputs and to allocate nothing else but a few bytes.
PLAIN: Final = """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _to_copy abs add_ addcdiv_ addcmul_ addmm arange
    avg_pool2d avg_pool2d_backward
    bernoulli bmm cat clone constant_pad_nd copy copy_ cos detach div_ embedding
    embedding_dense_backward empty empty_like eq fill full_like gather ge gelu
    gelu_backward gt hardtanh hardtanh_backward index lerp_ lift_fresh_copy log lt masked_fill
    max_pool2d_with_indices max_pool2d_with_indices_backward mean mm mse_loss_backward ne neg
    new_empty_strided new_zeros nll_loss_backward nll_loss_forward ones ones_like pow relu rsqrt scalar_tensor
    select_backward sigmoid sigmoid_backward silu silu_backward sin slice_backward sqrt sum tanh tanh_backward
    threshold_backward tril where zero_ zeros zeros_like lowtide.dropout_mask
""".split()  # noqa: SIM905
RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(PLAIN, plain),
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
    "_safe_softmax": safe_softmax,
    "_native_batch_norm_legit_functional": batch_norm,
    "native_batch_norm_backward": batch_norm_backward,
    "native_layer_norm": layer_norm,
    "native_layer_norm_backward": layer_norm_backward,
    "native_dropout_backward": dropout_backward,
    **dict.fromkeys(("mul", "mul_", "add", "sub", "div", "minimum"), arithmetic),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"), softmax
    ),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss"), resized_loss),
    "roll": roll,
}

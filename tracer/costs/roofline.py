"""Estimate what an op costs: floating-point operations, bytes moved, and from both its time on a device.

The time is a roofline: an op takes as long as its arithmetic at the device's peak rate or its memory traffic at
the device's bandwidth, whichever is longer, each reduced by what kernels of its kind reach, plus one kernel launch.

Counts: matrix products, convolutions and attention by torch's own FLOP formulas; every byte of the tensors that an op
reads and writes, once; one launch an op. Ignores: arithmetic of all other ops (their traffic decides); caches; overlap
between kernels; how well a shape fits the hardware; the kernels that one op may consist of; the causal half of
attention (torch's formulas count the full square).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from traces.devices import GIGA, Device

if TYPE_CHECKING:
    import torch

PRODUCT: Final = "matrix product"
CONVOLUTION: Final = "convolution"
STREAM: Final = "elementwise"
# What kernels of a kind reach: how much of the datasheet's arithmetic, and how many GB/s each multiprocessor moves.
# Fitted to half of 22 steps whose kernels were measured on an H200 and half of the published step times, see
# `python -m tests.bench.times`.
REACHED: Final = {
    PRODUCT: (0.72, 15),
    "unaligned product": (0.25, 15),  # of 16 bits, whose rows begin anywhere
    CONVOLUTION: (0.5, 9),
    "backward of a convolution": (0.45, 6),
    "depthwise convolution": (0.06, 8),  # of float32's arithmetic
    "backward of a depthwise convolution": (0.012, 4.5),
    "attention": (0.3, 6),
    "batch norm without cuDNN": (1.0, 3.5),  # of bfloat16; by one step alone
    "norm": (1.0, 10),
    "backward of a norm": (1.0, 7),
    "reduction": (1.0, 14),
    "copy": (1.0, 20),
    STREAM: (1.0, 60),
}
ON_CPU: Final = 0.7  # of the arithmetic, for all kinds: nothing was fitted there
BANDWIDTH: Final = 0.8  # of the datasheet's, at most, for tensors that are more than the cache holds
# Kinds by what an op's name has in it; the first that fits.
NAMED: Final = {
    "attention": "scaled_dot_product",
    STREAM: "_foreach",
    "batch norm without cuDNN": "native_batch_norm",
    "norm": "batch_norm layer_norm group_norm",
    "reduction": "norm softmax pool sum mean var embedding_dense_backward index_put scatter",
    "copy": "copy clone cat roll stack pad select_backward slice_backward",
}
PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm"})
GROUPS_AT: Final = {"convolution": 8, "convolution_backward": 9}  # among the arguments

# Attention on the CPU takes the same arguments as flash attention, but torch has no formula under its name.
SAME_FORMULA: Final = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable": "_scaled_dot_product_flash_attention",
}


def op_time_ns(flops: int, bytes_moved: int, dtype: str, device: Device, kind: str = STREAM) -> int:
    """Nanoseconds that an op of a kind takes that computes in a type as `compute_dtype` names it. A multiplication and
    an addition are two `flops`.

    Counts: max(flops / (reached * peak), bytes / rate) + launch. The rate is what the multiprocessors move; where the
    bytes are more than the cache holds, at most 0.8 of the bandwidth. Ignores: see the module's docstring.
    """
    compute, each_gb_per_s = REACHED[kind] if device.multiprocessors else (ON_CPU, 0)
    bytes_per_s = BANDWIDTH * device.bandwidth_bytes_per_s
    if of_all := device.multiprocessors * each_gb_per_s * GIGA:
        bytes_per_s = of_all if bytes_moved <= device.l2_bytes else min(of_all, bytes_per_s)
    compute_s = flops / (compute * device.flops_per_s.get(dtype, device.flops_per_s["float32"]))
    memory_s = bytes_moved / bytes_per_s
    return round(max(compute_s, memory_s) * 1e9) + device.launch_ns


def op_kind(target: str, args: Sequence[Any], tensors: Iterable[torch.Tensor]) -> str:
    """The kind of an op, as REACHED has it, that takes and returns these tensors."""
    name = target.removeprefix("aten.").partition(".")[0]
    if name in PRODUCTS:
        halves = (x for x in tensors if x.element_size() == 2 and x.dim() > 1)
        return "unaligned product" if any(max(x.stride()) % 8 for x in halves) else PRODUCT
    kind = next((kind for kind, words in NAMED.items() if any(w in name for w in words.split())), STREAM)
    if name in GROUPS_AT:
        # Of a channel each, the weight has one.
        deep = args[GROUPS_AT[name]] > 1 and any(x.dim() > 2 and x.shape[1] == 1 for x in tensors)
        kind = "depthwise " * deep + CONVOLUTION
    backward = f"backward of a {kind}"
    return backward if name.endswith("_backward") and backward in REACHED else kind


def compute_dtype(inputs: Iterable[torch.Tensor], kind: str = STREAM) -> str:
    """Return as what an op of a kind computes, by which its peak rate is looked up: the type of its first
    floating-point input; "tf32" where torch runs that on TF32 tensor cores, if there are some.

    Not the widest of all: attention in bfloat16 also gives and takes statistics in float32.
    """
    import torch

    first = next((x.dtype for x in inputs if x.is_floating_point()), torch.float32)
    if kind.endswith("depthwise convolution"):
        return "float32"
    cores = {PRODUCT: torch.backends.cuda.matmul, CONVOLUTION: torch.backends.cudnn.conv}
    backend = cores.get(kind.removeprefix("backward of a "))
    allowed = backend is not None and first is torch.float32 and backend.fp32_precision == "tf32"
    return "tf32" if allowed else str(first).removeprefix("torch.")


def op_flops(target: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Floating-point operations of one call of an op (or its packet), whose tensors may be fake.

    Counts: what `torch.utils.flop_counter` counts, also for attention on the CPU, or where heads share keys and values;
    heads are at least as wide as 32, as kernels compute them. Ignores: all other ops, and calls that torch's formula
    refuses; these return 0.
    """
    packet = getattr(target, "_overloadpacket", target)
    formula = _formulas().get(packet)
    if formula is None:
        return 0
    try:
        if "scaled_dot_product" in str(packet):
            heads = max(x.shape[1] for x in args[:3])
            of = [x for x in args[:4] if getattr(x, "ndim", 0) == 4]
            args = [*((len(x), heads, x.shape[2], max(32, x.shape[3])) for x in of), *args[len(of) :]]
        flops = int(formula(*args, **kwargs, out_val=out))
        if str(packet) == "aten.convolution_backward" and (groups := args[9]) > 1:
            # torch 2.15 counts the weight's gradient as if each group read all channels.
            of_input, of_weight = args[10][:2]
            both = 1 + groups if of_input and of_weight else groups if of_weight else 1
            flops = flops // both * (of_input + of_weight)
        return flops
    except (AssertionError, TypeError, ValueError):  # e.g. nested or zero-dimensional tensors
        return 0


@cache
def _formulas() -> dict[Any, Callable[..., int]]:
    import torch
    from torch.utils.flop_counter import flop_registry

    formulas = dict(flop_registry)
    for name, like in SAME_FORMULA.items():
        if hasattr(torch.ops.aten, name):
            formulas.setdefault(getattr(torch.ops.aten, name), formulas[getattr(torch.ops.aten, like)])
    return formulas


# Losses that allocate one element a prediction and then resize that to the reduced result, which keeps the memory
# (aten/src/ATen/native/Loss.cpp). Name -> where the reduction stands among the arguments.
RESIZED: Final = {
    "aten.mse_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.soft_margin_loss.default": 2,
    "aten.binary_cross_entropy.default": 3,
}
# Ops that allocate as much as their input takes and then resize that, likewise (Im2Col.cpp, Col2Im.cpp).
RESIZED_INPUT: Final = frozenset({"aten.col2im.default", "aten.im2col.default"})

# Norms whose CPU kernels keep the statistics in the type of weights and running statistics, where that is another than
# the input's (float32 weights under autocast), while torch's fake tensors say the input's (2.13,
# aten/src/ATen/native/mixed_data_type.h against torch/_decomp/decompositions.py). Name -> the arguments whose type
# counts, the first that is there.
MIXED_STATISTICS: Final = {
    "aten._native_batch_norm_legit_functional.default": (1, 2, 3, 4),
    "aten.native_batch_norm.default": (1, 2, 3, 4),
    "aten.native_layer_norm.default": (2, 3),
    "aten.native_group_norm.default": (1, 2),
}


def result_bytes(func: Any, args: Sequence[Any], result: torch.Tensor) -> int:
    """Bytes of the storage behind an op's result as the real kernel leaves it; a fake tensor may say less."""
    import torch

    nbytes = int(result.untyped_storage().nbytes())
    name = str(func)
    if name == EFFICIENT_ATTENTION and result.dtype is torch.int64 and len(args) > 5 and args[5] > 0:
        return 0
    if (
        name == EFFICIENT_ATTENTION_BACKWARD
        and min(result.stride()[:-1]) == result.stride(-2) > result.shape[-1]
    ):
        nbytes = result.numel() // result.shape[-1] * result.stride(-2) * result.element_size()
    if name in RESIZED_INPUT:
        nbytes = max(nbytes, args[0].numel() * result.element_size())
    if name in RESIZED and (len(args) <= RESIZED[name] or args[RESIZED[name]] != 0):  # 0: not reduced
        rows = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
        nbytes = max(nbytes, int(rows) * result.element_size())
    if name in MIXED_STATISTICS and result.device.type == "cpu":
        given = [args[k] for k in MIXED_STATISTICS[name] if k < len(args) and args[k] is not None]
        statistics = result.dtype == args[0].dtype and result.numel() < args[0].numel()
        if given and statistics:
            nbytes = nbytes // result.element_size() * given[0].element_size()
    return nbytes


# With dropout its seed and its offset are on the CPU, outside of a CUDA graph (transformers/cuda/attention.cu).
EFFICIENT_ATTENTION: Final = "aten._scaled_dot_product_efficient_attention.default"
# The gradient of its mask is made of the first columns of a wider tensor (attention_backward.cu).
EFFICIENT_ATTENTION_BACKWARD: Final = "aten._scaled_dot_product_efficient_attention_backward.default"

# Ops that read only as much of their (first) input as they write.
GATHERS: Final = frozenset({"embedding", "index", "gather", "index_select"})


def op_bytes(
    inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor], target: Any | None = None
) -> int:
    """Bytes that an op reads and writes, each tensor counted once. `target`: the op, if lookups are to be counted by
    the rows that they fetch and not by the whole table.

    Counts: the elements of each tensor, an expanded one by what it has in memory. Ignores: caches, and what a kernel
    reads twice.
    """
    made, given = ({id(t): t for t in of}.values() for of in (outputs, inputs))
    written = sum(map(_touched_bytes, made))
    gathers = str(target).removeprefix("aten.").partition(".")[0] in GATHERS
    return written + sum(min(_touched_bytes(t), written) if gathers else _touched_bytes(t) for t in given)


def _touched_bytes(tensor: torch.Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or size == 0 else 1
    return elements * tensor.element_size()

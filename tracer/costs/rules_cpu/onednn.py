"""Say how torch and oneDNN lay tensors out on this CPU: threads, channels in a block, which tensors are in order."""

from __future__ import annotations

from functools import cache
from typing import Final

from tracer.costs.signature import TensorSpec

FLOAT: Final = 4  # bytes


@cache
def block() -> int:
    """Channels in a block of oneDNN's layouts: as many float32 as a vector register holds."""
    import torch

    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


@cache
def bfloat16_in_onednn() -> bool:
    """Whether torch gives oneDNN its bfloat16 convolutions and products (`mkldnn_bf16_device_check`)."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def measured_kind() -> bool:
    """Whether this is the kind of processor from which the rules were read: with AVX-512."""
    return block() == 16


@cache
def has_amx() -> bool:
    """Whether oneDNN runs bfloat16 on AMX tiles, with layouts of their own."""
    import torch

    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


@cache
def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    import torch

    return bool(torch.cpu._is_avx512_bf16_supported())


def threads() -> int:
    """Threads that torch's kernels share their work among."""
    import torch

    return torch.get_num_threads()


def padded(channels: int) -> int:
    """Channels in whole blocks."""
    return -(-channels // block()) * block()


def contiguous(spec: TensorSpec) -> bool:
    """Whether a tensor's elements lie in the order of its dimensions, without gaps."""
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def channels_last(spec: TensorSpec) -> bool:
    """Whether an image tensor lies in NHWC order, and not in NCHW as well."""
    if len(spec.shape) != 4 or contiguous(spec):
        return False
    n, c, h, w = spec.shape
    wanted = (h * w * c, 1, w * c, c)
    return all(size == 1 or s == t for size, s, t in zip((n, c, h, w), spec.stride, wanted, strict=True))

"""How torch and oneDNN work on this CPU: threads, channels in a block, the first cache, products in bfloat16."""

from __future__ import annotations

from functools import cache

from tracer.costs.signature import TensorSpec
from tracer.costs.table import copied, round_up


@cache
def block() -> int:
    """Channels in a block of oneDNN's layouts: as many float32 as a vector register holds; 16 with AVX-512."""
    import torch

    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


@cache
def first_cache() -> int:
    """Bytes of a core's first cache of data; where nobody says, as many as oneDNN assumes."""
    import torch

    told: dict[str, int] = getattr(torch.cpu, "get_capabilities", dict)()  # before torch 2.12: nothing
    return told.get("l1d_cache_size") or 32 << 10


@cache
def bfloat16_in_onednn() -> bool:
    """Whether torch gives oneDNN its products in bfloat16 (`mkldnn_bf16_device_check`)."""
    from tracer.torch_api import is_mkldnn_bf16_supported

    return bool(is_mkldnn_bf16_supported())


def threads() -> int:
    """Threads that torch's kernels share their work among."""
    import torch

    return torch.get_num_threads()


def padded(channels: int) -> int:
    """Channels in whole blocks."""
    return round_up(channels, block())


def channels_last(x: TensorSpec) -> bool:
    """Whether an image tensor lies in NHWC order, and not in NCHW as well."""
    return len(x.shape) == 4 and copied(x) > 0 and copied(x, 0, 2, 3, 1) == 0

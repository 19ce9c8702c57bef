"""Which kernel torch would take for a call of scaled_dot_product_attention on a given GPU.

The rules are those of torch's `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (`select_sdp_backend`) and of the
composite in `attention.cpp`, restated for dense tensors and releases 2.11 to 2.13, where they have been read; what is
new in 2.14 was told by the wheels alone. They have been compared with what the wheels' own `torch._fused_sdp_choice`
(2.11 to 2.13, 2.15) answers to random calls when it is told of compute capabilities from
7.5 to 12.0; no GPU has confirmed them here. What a build decides, and not the source, is taken from PyPI's wheels (CUDA
13.0): their cuDNN.

Counts: data types, head sizes, masks, dropout, gradients, compute capability, sequence lengths, grouped queries,
strides, torch's own switches (`torch.backends.cuda.enable_flash_sdp` and its like) and the priority order.
Ignores: nested tensors, ROCm, FlashAttention 3 where the user has activated it, kernels that a build left out.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, Final

from tracer.torch_api import release
from traces.devices import Device
from traces.errors import CaptureError

MATH: Final = "math"
FLASH: Final = "flash"
EFFICIENT: Final = "efficient"
CUDNN: Final = "cudnn"
# torch's default order; on compute capability 9 and 10, cuDNN goes first (`check_prefer_cudnn_attention`).
DEFAULT_ORDER: Final = (FLASH, EFFICIENT, MATH, CUDNN)
HOPPER_ORDER: Final = (CUDNN, FLASH, EFFICIENT, MATH)
BACKENDS: Final = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}  # numbers of torch.nn.attention.SDPBackend

# nvidia-cudnn-cu13 that PyPI's wheel of each torch release requires; its number is major * 10000 + minor * 100 + patch.
CUDNN_VERSIONS: Final = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92400, (2, 15): 92600}
CUDNN_PREFERRED_FROM: Final = 91501  # older ones were slow or wrong for lengths off 128 (pytorch#169849)
CUDNN_HEAD_LIMIT: Final = 128
CUDNN_HOPPER_HEAD_LIMIT: Final = 256
CUDNN_DROPOUT_STEPS: Final = (2, 12)  # from here on only multiples of 1/16 (pytorch#174245, February 2026)
# From here on the efficient kernel takes grouped queries (pytorch#191085, July 2026), every kernel one head of keys and
# values for all of the queries' unasked, and cuDNN trains these heads beyond 128 and no others.
SHARED_HEADS: Final = (2, 14)
CUDNN_TRAINED: Final = ((192, 128), (256, 256))
EFFICIENT_OFFSETS: Final = (2, 13)  # from here on storage offsets must be aligned (pytorch#184258, May 2026)
HALVES: Final = ("float16", "bfloat16")
ITEM: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What of a tensor the choice looks at."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str = "float32"
    offset: int = 0  # in elements
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of scaled_dot_product_attention."""

    query: View
    key: View
    value: View
    mask: View | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False  # enable_gqa
    grad: bool = True  # whether gradients are on
    deterministic: bool = False  # torch.use_deterministic_algorithms(True), not only warnings

    @property
    def tensors(self) -> tuple[View, View, View]:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Whether some of query, key and value requires a gradient."""
        return self.grad and any(x.requires_grad for x in self.tensors)


def choose(
    call: Call,
    sm: tuple[int, int],
    release: tuple[int, int],
    *,
    order: tuple[str, ...] = DEFAULT_ORDER,
    enabled: frozenset[str] = frozenset((MATH, FLASH, EFFICIENT, CUDNN)),
) -> str:
    """The kernel that torch would take: "cudnn", "flash", "efficient" or "math".

    Args:
        release: of torch, as (2, 13).
        order: torch's priority order; the default one becomes cuDNN's on compute capability 9 and 10.
        enabled: the kernels that are switched on.

    Raises:
        CaptureError: none of those takes the call, which torch refuses too.
    """
    cudnn = cudnn_version(release)
    put_off = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "") == "1" or cudnn < CUDNN_PREFERRED_FROM
    if order == DEFAULT_ORDER and sm[0] in (9, 10) and not put_off:
        order = HOPPER_ORDER
    fits = {
        CUDNN: lambda: _fits_cudnn(call, sm, release, cudnn),
        FLASH: lambda: _fits_flash(call, sm, release),
        EFFICIENT: lambda: _fits_efficient(call, sm, release),
        MATH: lambda: True,
    }
    chosen = next((name for name in order if name in enabled and fits[name]()), "")
    if not chosen:
        raise CaptureError(
            f"no attention kernel that is switched on ({', '.join(sorted(enabled)) or 'none'}) takes query "
            f"{list(call.query.shape)} of {call.query.dtype} on compute capability {sm[0]}.{sm[1]}; there torch would "
            "stop with `No available kernel`. Switch the math kernel on (torch.backends.cuda.enable_math_sdp), or take "
            "another type or head size."
        )
    return chosen


def cudnn_version(release: tuple[int, int]) -> int:
    """cuDNN's version in PyPI's wheel of a release; the nearest known one for a release not in the table."""
    return CUDNN_VERSIONS[min(max(release, min(CUDNN_VERSIONS)), max(CUDNN_VERSIONS))]


def _fits_all(call: Call, sm: tuple[int, int], least: tuple[int, int], *more: str) -> bool:
    """What every fused kernel asks for: four dimensions, compute capability, lengths, one type: a half or one more."""
    dtypes = (*(HALVES if sm >= (8, 0) else HALVES[:1]), *more)
    same = len({x.dtype for x in call.tensors}) == 1 and call.query.dtype in dtypes
    dense = all(len(x.shape) == 4 for x in call.tensors) and call.query.shape[2] != 0 != call.key.shape[2]
    return least <= sm <= (12, 1) and same and dense


def _batch_and_heads(
    call: Call, release: tuple[int, int], *, groups: bool, same_key_value: bool = True
) -> bool:
    q, k, v = call.tensors
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    heads = q.shape[1], k.shape[1], v.shape[1]
    if call.grouped and groups:
        if same_key_value and heads[1] != heads[2]:
            return False
        return all(h and heads[0] % h == 0 for h in heads[1:])
    shared = release >= SHARED_HEADS and heads[1] == heads[2] == 1
    return shared or heads[0] == heads[1] == heads[2]


def _last_strides(call: Call, *, ignore_single: bool) -> bool:
    ones = all(x.stride[-1] == 1 for x in call.tensors) or (ignore_single and call.query.shape[-1] == 1)
    return ones and (call.mask is None or call.mask.stride[-1] == 1)


def _fits_flash(call: Call, sm: tuple[int, int], release: tuple[int, int]) -> bool:
    if call.mask is not None or not _fits_all(call, sm, (8, 0)):
        return False
    head = call.query.shape[-1]
    if not call.key.shape[-1] == call.value.shape[-1] == head <= 256:
        return False
    small = (8, 6) <= sm <= (8, 9) or (12, 0) <= sm <= (12, 1)
    if call.trains and small and not (head <= 192 or (call.dropout == 0.0 and head > 224)):
        return False
    if call.causal and call.query.shape[2] != call.key.shape[2]:
        return False
    return _batch_and_heads(call, release, groups=True) and _last_strides(call, ignore_single=True)


def _fits_efficient(call: Call, sm: tuple[int, int], release: tuple[int, int]) -> bool:
    if not _fits_all(call, sm, (5, 0), "float32"):
        return False
    half = call.query.dtype in HALVES
    alignment = 4 if sm >= (8, 0) else 1
    if sm >= (8, 0) or (sm >= (7, 0) and half):  # tensor cores
        alignment = max(alignment, 128 // (16 if half else 32))
    q, k, v = (x.shape[-1] for x in call.tensors)
    if q != k or not q or not v or q % alignment or v % alignment:
        return False
    if release >= EFFICIENT_OFFSETS and sm >= (8, 0):
        size = ITEM.get(call.query.dtype, 4)
        if any(x.offset * size % (alignment * size) and math.prod(x.shape) for x in call.tensors):
            return False
    groups = release >= SHARED_HEADS
    return _last_strides(call, ignore_single=False) and _batch_and_heads(call, release, groups=groups)


def _fits_cudnn(call: Call, sm: tuple[int, int], release: tuple[int, int], cudnn: int) -> bool:
    if call.deterministic or not _fits_all(call, sm, (8, 0)) or not _mask_shape(call):
        return False
    if release >= CUDNN_DROPOUT_STEPS and not (call.dropout * 16).is_integer():
        return False
    b, h, s_q, d = call.query.shape
    s_k, d_v = call.key.shape[2], call.value.shape[3]
    limit = CUDNN_HEAD_LIMIT
    if release >= SHARED_HEADS and sm[0] in (9, 10):
        limit = CUDNN_HOPPER_HEAD_LIMIT if not call.trains or (d, d_v) in CUDNN_TRAINED else limit
    elif sm == (9, 0) and cudnn >= 91000:
        limit = CUDNN_HOPPER_HEAD_LIMIT
    elif sm[0] == 10 and cudnn >= 91100 and (d, d_v) == (192, 128):
        limit = 192
    if max(b, h) > 65535 or max(d, d_v) > limit or d % 8 or d_v % 8:
        return False
    if s_k == 1 or (call.dropout != 0.0 and s_q == 1):
        return False
    heads = _batch_and_heads(call, release, groups=True, same_key_value=False)
    return heads and _last_strides(call, ignore_single=True)


def _mask_shape(call: Call) -> bool:
    mask = call.mask
    if mask is None:
        return True
    b, h, s_q, _ = call.query.shape
    if mask.requires_grad or mask.shape[-2] not in (s_q, 1) or mask.shape[-1] not in (call.key.shape[2], 1):
        return False
    return len(mask.shape) == 2 or (
        len(mask.shape) == 4 and mask.shape[0] in (1, b) and mask.shape[1] in (1, h)
    )


# The call itself, on fake tensors


def attend(
    device: Device,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What `scaled_dot_product_attention` would run on `device`, on fake tensors of another device.

    Takes the arguments of `torch.nn.functional.scaled_dot_product_attention`, as autocast's kernel for it passes them
    on, and returns its output. The steps around the kernel (masks made additive and padded, head sizes padded) are
    those of `attention.cpp`.
    """
    import torch
    from torch.nn import functional

    aten = torch.ops.aten
    call = Call(
        query=_view(query),
        key=_view(key),
        value=_view(value),
        mask=None if attn_mask is None else _view(attn_mask),
        dropout=dropout_p,
        causal=is_causal,
        grouped=enable_gqa,
        grad=torch.is_grad_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    name = choose(call, device.sm, release(), order=_order(), enabled=_enabled())
    mask = _additive(attn_mask, query, cudnn=name == CUDNN)
    if name == CUDNN:
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.trains, dropout_p, is_causal, False, scale=scale
        )[0]
    if name == FLASH:
        head = query.shape[-1]
        padded = [functional.pad(x, (0, -head % 8)) if head % 8 else x for x in (query, key, value)]
        factor = scale if scale is not None else 1.0 / math.sqrt(head)
        out = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=factor)
        return out[0][..., :head] if head % 8 else out[0]
    if name == EFFICIENT:
        if mask is not None:
            if any(s % 8 for s in mask.stride()[:-1]) or mask.stride(-1) != 1:
                last = mask.shape[-1]
                mask = functional.pad(mask, (0, 8 - last % 8))[..., :last]
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, call.trains, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _view(x: Any) -> View:
    return View(
        shape=tuple(x.shape),  # of a graph for many sizes these are symbols, which int() would decide
        stride=tuple(x.stride()),
        dtype=str(x.dtype).removeprefix("torch."),
        offset=x.storage_offset(),
        requires_grad=bool(x.requires_grad),
    )


def _additive(mask: Any, query: Any, *, cudnn: bool) -> Any:
    """A bool mask as numbers to add, which cuDNN gets without infinities."""
    import torch

    if mask is None or mask.dtype is not torch.bool:
        return mask
    if cudnn:
        return torch.where(mask.logical_not(), -65504.0, torch.scalar_tensor(0.0, dtype=query.dtype))
    return torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype))


def _order() -> tuple[str, ...]:
    from tracer.torch_api import sdp_priority_order

    return tuple(BACKENDS[n] for n in sdp_priority_order() if n in BACKENDS)


def _enabled() -> frozenset[str]:
    from torch.backends import cuda

    switches = {
        MATH: cuda.math_sdp_enabled(),
        FLASH: cuda.flash_sdp_enabled(),
        EFFICIENT: cuda.mem_efficient_sdp_enabled(),
        CUDNN: cuda.cudnn_sdp_enabled(),
    }
    return frozenset(name for name, on in switches.items() if on)

"""The ops `lowtide::side` and `lowtide::backward_from_output`, on any device and for fake tensors.

One bit an element, eight to a byte, in planes: bit k of byte j belongs to element k * m + j of the tensor's memory, m
the number of bytes, so that neighbours are read together; where `two_bits` says so, as many bytes more. Autocast
changes nothing: like torch's own activations, the ops run in the type of what they are given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from executor.inverted.formulas import DIGITS, derivative, gradient, pack, two_bits

COMPILED_FROM = 1 << 16  # smaller tensors are not worth a compiler's seconds
OPTIONS = {"triton.autotune_pointwise": False}  # the first of two forms is taken: to time them would allocate


@torch.library.custom_op("lowtide::side", mutates_args=())
def side(x: torch.Tensor, kind: str) -> torch.Tensor:
    """One bit where x lies left of the minimum of `kind`: uint8, ceil(elements / 8) or twice as many, as x's memory
    lies."""
    return _fast(pack, kind, _planes(_dense(x)))


@side.register_fake
def new_side(x: torch.Tensor, kind: str) -> torch.Tensor:
    planes = 1 + two_bits(kind, DIGITS[x.dtype])
    return x.new_empty((planes * ((x.numel() + 7) // 8),), dtype=torch.uint8)


@torch.library.custom_op("lowtide::backward_from_output", mutates_args=())
def backward_from_output(grad: torch.Tensor, y: torch.Tensor, side: torch.Tensor, kind: str) -> torch.Tensor:
    """The gradient of the input of the activation `kind`, from that of its output y, and the input's `side`.

    Of y's shape, layout and type. Where the number of elements is no multiple of 8, `grad` and `y` are copied.
    """
    y = _dense(y)
    if grad.stride() == y.stride():
        return _laid(_fast(gradient, kind, _planes(grad), _planes(y), side), y)
    # A gradient that lies otherwise is not copied.
    return _laid(_fast(derivative, kind, _planes(y), side), y).mul_(grad)


@backward_from_output.register_fake
def _(grad: torch.Tensor, y: torch.Tensor, side: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.empty_like(y)


def _laid(planes: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return planes.flatten()[: y.numel()].as_strided(y.shape, y.stride())


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x, copied if there are gaps in its memory; what torch computes from it elementwise is then laid out as it is."""
    return x if torch.ops.aten.is_non_overlapping_and_dense(x) else x.clone()


def _planes(x: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as 8 × ceil(elements / 8), filled up by zeros."""
    n = x.numel()
    flat = x.detach().as_strided((n,), (1,))
    return (functional.pad(flat, (0, -n % 8)) if n % 8 else flat).view(8, (n + 7) // 8)


# What runs for a large tensor: compiled at the first call, or as it is, after one warning, where no compiler works.
_forms: dict[tuple[Callable[..., torch.Tensor], str], Callable[..., torch.Tensor]] = {}


def _fast(body: Callable[..., torch.Tensor], kind: str, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    if x.numel() < COMPILED_FROM:
        return body(x, *rest, kind)
    if (body, kind) not in _forms:
        # torch.compile counts versions by code object, and stops at eight: one for each kind, so that there are two for
        # each type, one of the first size and one of all others.
        code = body.__code__.replace(co_name=f"{body.__name__}_{kind}")
        _forms[body, kind] = torch.compile(FunctionType(code, body.__globals__), options=OPTIONS)
    try:
        return _forms[body, kind](x, *rest, kind)
    except (RuntimeError, OSError) as error:  # what torch raises where there is no compiler
        _forms[body, kind] = body
        warnings.warn(
            f"torch.compile fails here ({str(error).splitlines()[0]}): activations from their output run op by op, "
            "ten times slower.",
            RuntimeWarning,
            stacklevel=2,
        )
        return body(x, *rest, kind)

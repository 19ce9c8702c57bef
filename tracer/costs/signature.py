"""The signature of one call of an op: its name and its arguments, with shapes in place of tensors.

What an op allocates while it runs follows from its signature (on one device, one version of torch, one set of
flags). So a signature is what a few rules look at, and what measured costs are found by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

DEVICE: Final = "device"  # stands for every argument that is a device


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The parts of a tensor that decide how an op treats it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    dtype: str  # as torch names it: "float32"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, each counted once however the strides repeat them: what a contiguous copy takes."""
        return self.elements * self.item_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes from its first element to its last: what the smallest storage that holds it takes."""
        if self.elements == 0:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (last + 1) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A call of an op, hashable. Arguments are TensorSpec, None, bool, int, float, str, and tuples of these."""

    target: str  # such as "aten.convolution.default"
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()  # in order of name
    outputs: tuple[Any, ...] = ()  # one TensorSpec (or None) an output

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """The tensors among the outputs, in order."""
        return tuple(_specs(self.outputs))

    def argument(self, position: int) -> Any:
        """An argument by position; None: it was not given so."""
        return self.args[position] if position < len(self.args) else None


def of_call(func: Any, args: Any, kwargs: Any, out: Any) -> Signature:
    """The signature of a call that has been made."""
    outputs = out if isinstance(out, (tuple, list)) else (out,)
    return Signature(
        target=str(func),
        args=tuple(_plain(a) for a in args),
        kwargs=tuple((str(k), _plain(v)) for k, v in sorted(kwargs.items())),
        outputs=tuple(_plain(o) for o in outputs),
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    if hasattr(value, "untyped_storage"):
        return TensorSpec(
            shape=tuple(int(d) for d in value.shape),
            stride=tuple(int(d) for d in value.stride()) if str(value.layout) == "torch.strided" else (),
            dtype=str(value.dtype).removeprefix("torch."),
        )
    if type(value).__name__ == "device":
        return DEVICE  # the same call on a laptop's fake tensors and on the GPU
    text = str(value)  # a dtype, a layout, a memory format
    return text if len(text) < 64 and "0x" not in text else type(value).__name__


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from _specs(v)

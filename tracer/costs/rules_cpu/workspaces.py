"""What an op allocates while it runs on a CPU, by rules instead of measurements.

The rules are rows of `workspaces.toml`, and for convolutions `tracer.costs.rules_cpu.convolutions`. They hold for
processors with AVX-512; a trace made on another says so. Products in bfloat16 have none, where oneDNN makes them.

Counts: temporaries of convolutions, products, attention, norms, softmax, dropout, losses and arithmetic on two types;
copies of what lies in memory otherwise than a kernel takes it. Ignores: some KB of scratch; complex numbers; float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from tracer.costs import table
from tracer.costs.rules_cpu import onednn
from tracer.costs.rules_cpu.convolutions import convolution, convolution_backward
from tracer.costs.rules_cpu.onednn import channels_last
from tracer.costs.signature import ITEM_BYTES, Signature, TensorSpec
from tracer.costs.table import Events, Table, copied, fits_blas, is_pointwise, made, short_name

FLOATS: Final = ("float32", "float64")
HALVES: Final = ("float16", "bfloat16")
SMALL_PRODUCT: Final = 400  # multiplications; below, a product of a batch of matrices is torch's own loop


def cpu_events(signature: Signature) -> Events | None:
    """What the op allocates (+bytes) and frees (-bytes) on a CPU, in order; None: no rule says. Rules take threads and
    vector width from the torch that is running."""
    compute = COMPUTED.get(short_name(signature.target))
    if compute is not None:
        return compute(signature)
    if TABLE.rule_for(signature.target) is not None:
        return TABLE.events(signature, threads=onednn.threads())
    if not is_pointwise(signature.target):
        return None
    # An argument of another type is converted to the common one first, as is a narrower result (TensorIterator.cpp).
    took = casts(signature.inputs, signature.results[0]) if signature.results else ()
    return (*made(signature), *took, *(-n for n in reversed(took)))


# What formulas may call


def copies(specs: Iterable[Any], order: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Bytes of contiguous copies (after a permutation) of those tensors that need one."""
    return tuple(copied(s, *order) for s in specs if isinstance(s, TensorSpec))


def casts(specs: Iterable[Any], y: TensorSpec | None) -> tuple[int, ...]:
    """Bytes of what is converted to the type of `y`, or to float32 together with `y` if that is a half among floats."""
    if y is None:
        return ()
    given = [s for s in specs if isinstance(s, TensorSpec) and s.shape]
    wide = y.dtype in HALVES and any(s.dtype == "float32" for s in given)
    common = "float32" if wide else y.dtype
    others = [s for s in given if s.dtype != common] + ([y] if wide else [])
    return tuple(s.elements * ITEM_BYTES[common] for s in others)


def summed(x: TensorSpec, y: TensorSpec, dimensions: Any) -> tuple[int, ...]:
    """Bytes that a sum over a tuple of dimensions converts first: to the result's type; or halves to float32, and the
    result, where what is summed does not lie side by side."""
    if x.dtype == y.dtype and y.dtype in HALVES and isinstance(dimensions, tuple) and _apart(x, dimensions):
        return 4 * y.elements, 4 * x.elements
    return (x.elements * y.item_bytes,) if x.dtype != y.dtype else ()


def _apart(x: TensorSpec, dimensions: tuple[int, ...]) -> bool:
    """Whether the dimensions make up more than one run of elements that lie behind each other."""
    gone = {d % len(x.shape) for d in dimensions if x.shape}
    order = sorted(range(len(x.shape)), key=lambda d: -x.stride[d])
    dims = [d for d in order if x.shape[d] != 1 and x.stride[d]]
    joined = sum({a, b} <= gone and x.stride[a] == x.shape[b] * x.stride[b] for a, b in pairwise(dims))
    return sum(d in gone for d in dims) - joined > 1


def product_takes(a: TensorSpec, b: TensorSpec, y: TensorSpec) -> tuple[int, ...] | None:
    """Bytes of copies of factors whose strides BLAS does not take, one matrix of a batch at a time; None: oneDNN
    multiplies, in bfloat16, and what its blocks take is not known."""
    if y.dtype == "bfloat16" and onednn.bfloat16_in_onednn():
        return None
    small = len(a.shape) == 3 and a.shape[-2] * a.shape[-1] * b.shape[-1] < SMALL_PRODUCT
    if small or not y.elements or not {a.dtype, b.dtype} <= {*FLOATS}:
        return ()
    return tuple(x.shape[-2] * x.shape[-1] * x.item_bytes for x in (a, b) if not fits_blas(x))


TABLE: Final = Table(
    path=Path(__file__).with_name("workspaces.toml"),
    functions=table.by_name(casts, channels_last, copies, product_takes, summed),
)
COMPUTED: Final[Mapping[str, Callable[[Signature], Events | None]]] = {
    "convolution": convolution,
    "convolution_backward": convolution_backward,
}

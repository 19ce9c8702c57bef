"""What an op allocates while it runs on a GPU, by rules instead of measurements.

The rules are rows of `workspaces.toml`, each with the source that it was read from. Beyond the table, an op that torch
tags as pointwise allocates its outputs and nothing else.

No rule has been confirmed on a GPU by this project; a measurement goes first wherever there is one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tracer.costs import table
from tracer.costs.libraries import bytes_a_call
from tracer.costs.rules_cuda.reductions import partial_results
from tracer.costs.signature import Signature, TensorSpec
from tracer.costs.table import Events, Table, ceil_div, is_pointwise, made
from traces.devices import Device


def rule_events(signature: Signature, device: Device, release: tuple[int, int]) -> Events | None:
    """What the op allocates (+bytes) and frees (-bytes) on a device, in order; None: no rule says.

    The events sum to the bytes of the outputs that the op leaves, as `traces.trace.Ops.events` demands.

    Args:
        signature: the call.
        device: where it runs; the rules are those of CUDA.
        release: of torch, as (2, 13).

    Counts: the allocations that torch's own code makes, each at the size that it asks for. Ignores: what the table
    names as not known.
    """
    if device.kind != "cuda":
        return None
    if TABLE.rule_for(signature.target) is not None:
        return TABLE.events(
            signature,
            sm=10 * device.sm[0] + device.sm[1],
            sms=device.multiprocessors,
            deterministic=_deterministic(),
            **bytes_a_call(device, release),
        )
    # A kernel converts types in registers.
    return made(signature) if is_pointwise(signature.target) else None


def _deterministic() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())


# ---------------------------------------------------------------------------------------------------------------------
# What formulas may call


def converted(x: TensorSpec, y: TensorSpec) -> TensorSpec:
    """What the kernel of a sum of `x` into `y` reads: `x`, or `x` converted to the type of `y`.

    The copy has the strides of `x` if they leave no gaps. Halves are summed to float32 as they are.
    """
    if x.dtype == y.dtype or (x.dtype in ("float16", "bfloat16") and y.dtype == "float32"):
        return x
    stride = x.stride
    if x.span_bytes != x.nbytes:
        stride = tuple(math.prod(x.shape[k + 1 :]) for k in range(len(x.shape)))
    return replace(x, dtype=y.dtype, stride=stride)


def largest(specs: Any) -> int:
    """The most elements that a tensor of a list has."""
    return max((x.elements for x in specs if isinstance(x, TensorSpec)), default=0)


def flash_splits(blocks: int, slots: int, key_blocks: int, most: int = 128) -> int:
    """Into how many parts flash attention's forward splits the keys (`num_splits_heuristic` of flash_api.cpp).

    Args:
        blocks: batch * heads * blocks of queries. slots: twice the multiprocessors. key_blocks: blocks of keys.
    """
    if blocks >= 0.8 * slots:
        return 1
    most = min(most, slots, key_blocks)
    fits = [k for k in range(1, most + 1) if k == 1 or ceil_div(key_blocks, k) != ceil_div(key_blocks, k - 1)]
    waves = {k: blocks * k / slots for k in fits}
    share = {k: w / math.ceil(w) for k, w in waves.items()}
    best = max(share.values(), default=0.0)
    return next((k for k in fits if share[k] >= 0.85 * best), 1)


def staging(x: TensorSpec, gone: Any, each_bytes: int, sm: int, processors: int) -> tuple[int, ...]:
    """Bytes of a reduction's partial results and of the counters that belong to them; see `rules_cuda.reductions`.

    gone: a dimension or several, none for all of them. each_bytes: of a partial result.
    """
    dims = (gone,) if isinstance(gone, int) else tuple(gone or ())
    return partial_results(x, dims, divmod(sm, 10), processors, each_bytes)


FUNCTIONS: Final[Mapping[str, Any]] = {
    **table.FUNCTIONS,
    "converted": converted,
    "largest": largest,
    "flash_splits": flash_splits,
    "staging": staging,
}
TABLE: Final = Table(path=Path(__file__).with_name("workspaces.toml"), functions=FUNCTIONS)

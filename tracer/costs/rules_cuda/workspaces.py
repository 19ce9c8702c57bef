"""Turn an op's signature into what the op allocates while it runs on a GPU, by rules instead of measurements.

The rules are data: `workspaces.toml` has one row a kind of op, each with the source that it was read from. Beyond the
table, an op that torch tags as pointwise allocates its outputs and nothing else. The rules of the CPU are in
`tracer.costs.rules_cpu.workspaces`.

No rule has been confirmed on a GPU by this project; a measurement goes first wherever there is one.
"""

from __future__ import annotations

import fnmatch
import math
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from tracer.costs.rules_cuda.formulas import Formula
from tracer.costs.rules_cuda.reductions import partial_sums
from tracer.costs.signature import Signature, TensorSpec
from traces.devices import Device

TABLE: Final = Path(__file__).with_name("workspaces.toml")
CONFIDENCES: Final = ("source", "partial", "assumed")
OUT: Final = "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table."""

    name: str
    ops: tuple[str, ...]  # names of ops; * stands for anything
    source: str
    confidence: str  # one of CONFIDENCES
    when: Formula | None
    let: tuple[tuple[str, Formula], ...]  # name -> number, in order
    events: tuple[str, ...]  # names, "out", and "-name" where something is freed before the op returns

    def matches(self, target: str) -> bool:
        return any(fnmatch.fnmatchcase(target, pattern) for pattern in self.ops)


def rule_events(signature: Signature, device: Device) -> tuple[int, ...] | None:
    """What the op allocates (+bytes) and frees (-bytes) on a device, in order; None: no rule says.

    The events sum to the bytes of the outputs that the op leaves, as `traces.trace.Ops.events` demands.

    Args:
        signature: the call.
        device: where it runs; the rules are those of CUDA.

    Counts: the allocations that torch's own code makes, each at the size that it asks for. Ignores: what the table
    names as not known.
    """
    if device.kind != "cuda":
        return None
    rule = rule_for(signature.target)
    if rule is not None:
        return _apply(rule, signature, device)
    if not is_pointwise(signature.target):
        return None
    in_place = signature.target.split(".")[-2].endswith("_")
    return () if in_place else tuple(x.span_bytes for x in signature.results if x.span_bytes)


@cache
def rule_for(target: str) -> Rule | None:
    """The first row of the table that names an op."""
    return next((rule for rule in rules() if rule.matches(target)), None)


@cache
def rules() -> tuple[Rule, ...]:
    """The table, in order."""
    with TABLE.open("rb") as file:
        rows = tomllib.load(file)["rule"]
    return tuple(_rule(row) for row in rows)


def _rule(row: dict[str, Any]) -> Rule:
    let = tuple(line.split(" = ", 1) for line in row.get("let", ()))
    return Rule(
        name=row["name"],
        ops=tuple(row["ops"]),
        source=row["source"],
        confidence=row["confidence"],
        when=Formula(row["when"]) if "when" in row else None,
        let=tuple((name, Formula(text)) for name, text in let),
        events=tuple(row["events"]),
    )


def _apply(rule: Rule, signature: Signature, device: Device) -> tuple[int, ...] | None:
    values: dict[str, Any] = {
        **{f"a{k}": a for k, a in enumerate(signature.args)},
        **{f"o{k}": o for k, o in enumerate(signature.outputs)},
        **FUNCTIONS,
        "sm": 10 * device.sm[0] + device.sm[1],
        "sms": device.multiprocessors,
        "deterministic": _deterministic(),
        "arg": lambda k, default: signature.argument(k, default=default),
    }
    if rule.when is not None and not rule.when(values):
        return None
    for name, formula in rule.let:
        values[name] = formula(values)
    out: list[int] = []
    live: list[str] = []
    for event in rule.events:
        if event == OUT:
            out.extend(x.span_bytes for x in signature.results)
        elif event.startswith("-"):
            live.remove(event[1:])
            out.append(-values[event[1:]])
        else:
            live.append(event)
            out.append(values[event])
    out.extend(-values[name] for name in reversed(live))
    return tuple(e for e in out if e)


def _deterministic() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.are_deterministic_algorithms_enabled())


@cache
def is_pointwise(target: str) -> bool:
    """Whether torch tags an op ("aten.mul.Tensor") as pointwise: its CUDA kernel converts types in registers."""
    import torch

    namespace, _, rest = target.partition(".")
    name, _, overload = rest.rpartition(".")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    op = getattr(packet, overload, None)
    return op is not None and torch.Tag.pointwise in op.tags


# ---------------------------------------------------------------------------------------------------------------------
# What formulas may call


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple


def copied(x: TensorSpec, *permutation: int) -> int:
    """Bytes of `x.permute(permutation).contiguous()`, 0 if that is no copy."""
    order = permutation or tuple(range(len(x.shape)))
    expected = 1
    for k in reversed(order):
        if x.shape[k] != 1 and x.stride[k] != expected and x.elements:
            return x.nbytes
        expected *= x.shape[k]
    return 0


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


def sum_buffer(x: TensorSpec, summed: Any, sm: int, processors: int) -> int:
    """Bytes of a sum's partial results; see `rules_cuda.reductions`.

    summed: dimensions, 0 for all of them.
    """
    return sum(partial_sums(x, tuple(summed or ()), divmod(sm, 10), processors)[:1])


def sum_counters(x: TensorSpec, summed: Any, sm: int, processors: int) -> int:
    """Bytes of the counters that belong to `sum_buffer`."""
    return sum(partial_sums(x, tuple(summed or ()), divmod(sm, 10), processors)[1:])


FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "ceil_div": ceil_div,
    "round_up": round_up,
    "copied": copied,
    "converted": converted,
    "largest": largest,
    "flash_splits": flash_splits,
    "sum_buffer": sum_buffer,
    "sum_counters": sum_counters,
    "min": min,
    "max": max,
    "product": math.prod,
}

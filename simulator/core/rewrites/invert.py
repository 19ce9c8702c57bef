"""Invert: an activation's backward takes its output and one bit an element in place of its input.

`lowtide::side` makes the bits behind the activation; where backward reads the output for another op in any case, the
input then need not wait for it (Inverted Activations, Novikov and Oseledets, arXiv:2407.15545; `executor.inverted`).

Counts: the bits; their pass over the input, at the rate that the trace's ops without matrix products have together;
on a CPU, where backward computes more than it reads, the factor that `tests/bench/inverted.py` shows. Ignores: what the
ops allocate where no compiler makes loops of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Final

from simulator.core.facts import Facts
from simulator.core.rewrites.activations import activation_of, kind
from simulator.core.rewrites.edit import Editing, Op, Value
from simulator.core.rewrites.pack import ITEM_BYTES, pass_ns
from traces.errors import PlanError
from traces.records.plan import FP, Rewrite
from traces.records.trace import ACTIVATION, EAGER, FORWARD, Trace

EXACTNESS: Final = FP
LEAST: Final = 1 << 16  # numbers: the ops compile their loops from here on
TYPES: Final = ("float32", "float16", "bfloat16")
CPU_FACTOR: Final = 2.4  # of torch's gelu_backward


def offer(facts: Facts) -> Iterator[Rewrite]:
    """The saved inputs of activations that can be done without; first the largest."""
    trace, sts = facts.trace, facts.trace.storages
    for s in sorted(trace.saved, key=lambda s: (-sts.nbytes[s], s)):
        if not facts.pinned[s] and not isinstance(pair_of(trace, s), str):
            yield Rewrite(kind="invert", storage=s, op=trace.ops.name[sts.producer[s]])


def edit(editing: Editing, rewrite: Rewrite) -> None:
    """Put the op of the bits behind the activation, and let the backward op take the output and the bits; where a
    rewrite before has taken one of them out, or its input away, all is left as it is.

    Raises:
        PlanError: the storage is not the input of an activation that can be inverted.
    """
    trace, s = editing.source, rewrite.storage
    known = 0 <= s < len(trace.storages)
    pair = pair_of(trace, s) if known else "there is none"
    if isinstance(pair, str):
        raise PlanError(f"the input of an activation in storage {s} cannot be done without: {pair}.")
    forward, backward = (editing.op[i] for i in pair)
    x, y = editing.value[s], forward.writes[0]
    if forward not in editing.order or backward not in editing.order or x not in backward.reads:
        return
    n = math.prod(x.shape)
    bits = Value(
        name=f"{forward.name}_side",
        nbytes=-(-n // 8),
        dtype="uint8",
        shape=(-(-n // 8),),
        category=ACTIVATION,
    )
    moved = x.nbytes + bits.nbytes
    side = Op(
        name=bits.name,
        target="lowtide.side.default",
        phase=FORWARD,
        module=forward.module,
        time_ns=pass_ns(trace, moved),
        inputs=list(forward.inputs),
        reads=[x],
        writes=[bits],
        events=(bits.nbytes,),
        bytes_moved=moved,
        arguments=json.dumps([None, kind(trace, pair[0])], separators=(",", ":")),
    )
    editing.insert(side, forward, after=True)
    taken = forward.inputs[0]
    backward.inputs = list(dict.fromkeys([*(i for i in backward.inputs if i is not taken), forward, side]))
    backward.reads = list(dict.fromkeys([*(v for v in backward.reads if v is not x), y, bits]))
    backward.target = "lowtide.backward_from_output.default"
    backward.arguments = json.dumps([None, None, None, kind(trace, pair[0])], separators=(",", ":"))
    backward.bytes_moved += bits.nbytes
    backward.time_ns += pass_ns(trace, bits.nbytes)
    if trace.meta.device == "cpu":
        backward.time_ns = int(backward.time_ns * CPU_FACTOR)
    if backward.overwrites is x:
        backward.overwrites = None


def pair_of(trace: Trace, s: int) -> tuple[int, int] | str:
    """The activation of forward that reads a storage, and its op of backward; or why the storage is needed."""
    ops, sts = trace.ops, trace.storages
    made_by = sts.producer[s]
    if (
        made_by < 0
        or ops.phase[made_by] != FORWARD
        or ops.flags[made_by] & EAGER
        or sts.last_backward_use[s] < 0
    ):
        return "it is not made in forward and read in backward"
    if sts.hold[s] >= 0:
        return "code outside the captured graph holds it"
    size = math.prod(sts.shape[s])
    if sts.dtype[s] not in TYPES or size < LEAST or size % 8:
        return f"it has {size:,} numbers of {sts.dtype[s]}"
    if sts.nbytes[s] != size * ITEM_BYTES[sts.dtype[s]]:
        return "its memory has gaps"
    readers = [i for i in range(made_by + 1, len(ops)) if s in ops.reads[i]]
    if any(s in ops.writes[i] for i in readers):
        return "it is overwritten"
    pair = activation_of(trace, s)
    if isinstance(pair, str):
        return pair
    f, b = pair
    y = ops.writes[f][0]
    if sts.nbytes[y] != sts.nbytes[s] or sts.dtype[y] != sts.dtype[s] or sts.hold[y] >= 0:
        return "the output is laid out otherwise, or held outside the captured graph"
    if any(y in ops.writes[i] for i in range(f + 1, b)):
        return "the output is overwritten"
    if not any(y in ops.reads[i] and ops.phase[i] != FORWARD for i in range(f + 1, len(ops))):
        return "backward does not read the output"
    return f, b

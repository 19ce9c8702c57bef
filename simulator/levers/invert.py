"""Invert: an activation's backward takes its output and one bit an element in place of its input.

`lowtide::side` makes the bits before the activation, which may then work in place; where backward reads the output for
another op in any case, the input then need not wait for it (Inverted Activations, Novikov and Oseledets,
arXiv:2407.15545; `executor.inverted`).

Counts: the bits; their pass over the input, at the rate that the trace's ops without matrix products have together;
on a CPU, where backward computes more than it reads, the factor that `tests/bench/inverted.py` shows. Ignores: what the
ops allocate where no compiler makes loops of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from simulator.core.problem import Problem
from simulator.levers.edit import Argument, Editing, Taken, Value, new_op, users_of
from simulator.levers.pack import activation, activation_of, at_rate, needed, pass_rate
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import ACTIVATION, FORWARD, Trace

LEAST: Final = 1 << 16  # numbers: the ops compile their loops from here on
DIGITS: Final = {"float32": 24, "float16": 11, "bfloat16": 8}  # binary, of the types' mantissas
TWO_BITS: Final = ("silu",)  # an element of bfloat16 has, of these activations
CPU_FACTOR: Final = 2.4  # of torch's gelu_backward


def offer(problem: Problem, kind: str = "invert") -> Iterator[Rewrite]:
    """The saved inputs of activations that can be done without; first the largest."""
    trace, sts = problem.trace, problem.trace.storages
    for s in sorted(trace.saved, key=lambda s: (-sts.nbytes[s], s)):
        if not problem.pinned[s] and not isinstance(pair_of(trace, s, _users(problem)[s]), str):
            yield Rewrite(kind=kind, storage=s, op=trace.ops.name[sts.producer[s]])


def _users(problem: Problem) -> list[list[int]]:
    return problem.once(users_of, lambda p: users_of(p.trace))[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An activation and its op of backward, by their ids."""

    forward: int
    backward: int
    kind: str  # by the name that `executor.inverted` has for it
    # The op that copies the input for backward, as torch does where the activation works in place.
    copy: int = -1

    @property
    def two_bits(self) -> bool:
        return self.kind in TWO_BITS


def edit(editing: Editing, rewrite: Rewrite) -> None:
    """Put the op of the bits before the activation, and let the backward op take the output and the bits; where a
    rewrite before has taken one of them out, or its input away, all is left as it is. Raises PlanError if the storage
    is not the input of an activation that can be inverted.
    """
    trace, s = editing.source, rewrite.storage
    known = 0 <= s < len(trace.storages)
    pair = pair_of(trace, s, editing.once(users_of)[1][s]) if known else "there is none"
    if isinstance(pair, str):
        raise PlanError(f"the input of an activation in storage {s} cannot be done without: {pair}.")
    forward, backward, value = editing.op[pair.forward], editing.op[pair.backward], editing.value[s]
    if not editing.there(forward) or not editing.there(backward) or value not in backward.reads:
        return
    x, y = forward.reads[0], forward.writes[0]
    nbytes = math.prod(x.shape) // 8 * (1 + (x.dtype == "bfloat16" and pair.two_bits))
    name = f"{forward.name}_side"
    bits = Value(name=name, nbytes=nbytes, dtype="uint8", shape=(nbytes,), category=ACTIVATION)
    moved = x.nbytes + bits.nbytes
    side = new_op(
        forward,
        bits.name,
        "lowtide.side.default",
        FORWARD,
        (Argument(0), pair.kind),
        [bits],
        inputs=list(forward.inputs),
        reads=[x],
        time_ns=at_rate(editing.once(pass_rate), moved),
        events=(bits.nbytes,),
        bytes_moved=moved,
        arguments=json.dumps([None, pair.kind], separators=(",", ":")),
    )
    editing.insert(side, forward)
    copy = editing.op[pair.copy] if pair.copy >= 0 else None
    taken = copy or forward.inputs[0]
    kept = (i for i in backward.inputs if i is not taken)
    editing.take(backward, list(dict.fromkeys([*kept, forward, side])))
    reads = dict.fromkeys([*(v for v in backward.reads if v is not value), y, bits])
    editing.read(backward, list(reads))
    backward.target = "lowtide.backward_from_output.default"
    backward.arguments = json.dumps([None, None, None, pair.kind], separators=(",", ":"))
    backward.called_with = (Argument(0), Taken(forward, y), Taken(side, bits), pair.kind)
    # It takes nothing inside, whatever torch's op takes.
    backward.events = tuple(v.nbytes for v in backward.writes)
    backward.bytes_moved += bits.nbytes
    backward.time_ns += at_rate(editing.once(pass_rate), bits.nbytes)
    if trace.meta.device == "cpu":
        backward.time_ns = int(backward.time_ns * CPU_FACTOR)
    if backward.overwrites is value:
        backward.overwrites = None
    if copy is not None:
        editing.remove([copy], forward)


def pair_of(trace: Trace, s: int, users: Sequence[int]) -> Pair | str:
    """The activation whose input a storage is, or whose input is copied there, and its op of backward; or why the
    storage of these users is needed."""
    ops, sts = trace.ops, trace.storages
    if why := needed(trace, s, users):
        return why
    size = math.prod(sts.shape[s])
    if sts.dtype[s] not in DIGITS or size < LEAST or size % 8:
        return f"it has {size:,} numbers of {sts.dtype[s]}"
    if isinstance(found := activation_of(trace, users, s, copied=True), str):
        return found
    f, b = found
    copy = sts.producer[s] if ops.inputs[f] != ops.inputs[b][1:] else -1
    pair = Pair(forward=f, backward=b, kind=activation(trace, f), copy=copy)
    y = ops.writes[pair.forward][0]
    if sts.nbytes[y] != sts.nbytes[s] or sts.dtype[y] != sts.dtype[s] or sts.hold[y] >= 0:
        return "the output is laid out otherwise, or held outside the captured graph"
    if any(y in ops.writes[i] for i in range(pair.forward + 1, pair.backward)):
        return "the output is overwritten"
    later = range(pair.forward + 1, len(ops))
    if not any(y in ops.reads[i] and ops.phase[i] != FORWARD and i != pair.backward for i in later):
        return "backward does not read the output"
    return pair

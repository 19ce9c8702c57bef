"""Invert: an activation's backward takes its output in place of its input, and one bit an element where it needs it.

Where backward reads the output for another op in any case, the input then need not wait for it. `lowtide::side` makes
the bits of GELU and SiLU before the activation, which may then work in place (Inverted Activations, Novikov and
Oseledets, arXiv:2407.15545; `executor.inverted`). A leaky relu and a hardtanh (as relu6 is) need none, and the gradient
is the same in every bit: backward only asks on which side of a border the input lies, and forward maps each side to
itself and the border to the border. So torch's own op takes the output; that is `from_output`.

Counts: the bits; their pass over the input, at the rate that the trace's ops without matrix products have together;
on a CPU, where backward computes more than it reads, `CPU_FACTOR`. Ignores: what the ops allocate where no compiler
makes loops of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from simulator.core.problem import Problem
from simulator.levers import pack
from simulator.levers.edit import Argument, Editing, Ladder, Op, Taken, Value, by_shares, new_op, users_of
from simulator.levers.pack import activation_of, at_rate, backward_of, needed, pass_rate
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import ACTIVATION, FORWARD, Trace

LEAST: Final = 1 << 16  # numbers: the ops compile their loops from here on
DIGITS: Final = {"float32": 24, "float16": 11, "bfloat16": 8}  # binary, of the types' mantissas
TWO_BITS: Final = ("silu",)  # an element of bfloat16 has, of these activations
CPU_FACTOR: Final = 2.4  # of torch's gelu_backward
FROM_OUTPUT: Final = "from_output"
TELLING: Final = backward_of("leaky_relu", "hardtanh")
EXACT_UP_TO: Final = 256  # whole numbers that each of the types has itself: else forward rounds a border


def offer(problem: Problem, kind: str = "invert") -> Iterator[Rewrite]:
    """The saved inputs of activations that can be done without; first the largest."""
    trace, sts = problem.trace, problem.trace.storages
    users = problem.once(users_of, lambda p: users_of(p.trace))[1]
    for s in sorted(trace.saved, key=lambda s: (-sts.nbytes[s], s)):
        if not problem.pinned[s] and not isinstance(pair_of(trace, s, users[s], kind), str):
            yield Rewrite(kind=kind, storage=s, op=trace.ops.name[sts.producer[s]])


def ladders(problem: Problem, rewrites: Sequence[Rewrite], *_: object) -> Iterator[Ladder]:
    """All or nothing of what costs nothing, else shares."""
    if rewrites[0].kind == FROM_OUTPUT:
        yield [tuple(rewrites)]
    else:
        yield from by_shares(problem, rewrites)


def edit(editing: Editing, rewrite: Rewrite) -> None:
    """Put the op of the bits before the activation, and let the backward op take the output and the bits, unless a
    rewrite before has taken one of them out. Raises PlanError if the storage is not the input of such an activation.
    """
    trace, s = editing.source, rewrite.storage
    known = 0 <= s < len(trace.storages)
    pair = pair_of(trace, s, editing.once(users_of)[1][s], rewrite.kind) if known else "there is none"
    if isinstance(pair, str):
        raise PlanError(f"the input of an activation in storage {s} cannot be done without: {pair}.")
    f, b, name, copied = pair
    forward, backward, value = editing.op[f], editing.op[b], editing.value[s]
    if not editing.there(forward) or not editing.there(backward) or value not in backward.reads:
        return
    y = forward.writes[0]
    copy = editing.op[copied] if copied >= 0 else None
    taken = copy or forward.inputs[0]
    if rewrite.kind == FROM_OUTPUT:
        instead, bits = [forward], []
        told = json.loads(backward.arguments)
        more: list[Any] = [Argument(k) for k in range(2, len(told))]
        if told[-1] is False:  # a leaky relu's: that it is given the result
            told[-1] = more[-1] = True
        backward.arguments = json.dumps(told, separators=(",", ":"))
        backward.called_with = (Argument(0), Taken(forward, y), *more)
    else:
        side = _side(editing, forward, name)
        instead, bits = [forward, side], list(side.writes)
        backward.target = "lowtide.backward_from_output.default"
        backward.arguments = json.dumps([None, None, None, name], separators=(",", ":"))
        backward.called_with = (Argument(0), Taken(forward, y), Taken(side, bits[0]), name)
        # It takes nothing inside, whatever torch's op takes.
        backward.events = tuple(v.nbytes for v in backward.writes)
        backward.bytes_moved += bits[0].nbytes
        backward.time_ns += at_rate(editing.once(pass_rate), bits[0].nbytes)
        if trace.meta.device == "cpu":
            backward.time_ns = int(backward.time_ns * CPU_FACTOR)
    kept = (i for i in backward.inputs if i is not taken)
    editing.take(backward, list(dict.fromkeys([*kept, *instead])))
    reads = dict.fromkeys([*(v for v in backward.reads if v is not value), y, *bits])
    editing.read(backward, list(reads))
    if backward.overwrites is value:
        backward.overwrites = None
    if copy is not None and rewrite.kind != FROM_OUTPUT:
        editing.remove([copy], forward)


def _side(editing: Editing, forward: Op, name: str) -> Op:
    """The op of the bits, before the activation of that name."""
    x = forward.reads[0]
    nbytes = math.prod(x.shape) // 8 * (1 + (x.dtype == "bfloat16" and name in TWO_BITS))
    bits = Value(
        name=f"{forward.name}_side", nbytes=nbytes, dtype="uint8", shape=(nbytes,), category=ACTIVATION
    )
    moved = x.nbytes + bits.nbytes
    side = new_op(
        forward,
        bits.name,
        "lowtide.side.default",
        FORWARD,
        (Argument(0), name),
        [bits],
        inputs=list(forward.inputs),
        reads=[x],
        time_ns=at_rate(editing.once(pass_rate), moved),
        events=(bits.nbytes,),
        bytes_moved=moved,
        arguments=json.dumps([None, name], separators=(",", ":")),
    )
    editing.insert(side, forward)
    return side


def pair_of(
    trace: Trace, s: int, users: Sequence[int], kind: str = "invert"
) -> tuple[int, int, str, int] | str:
    """The activation whose input, or its copy, a storage is, its op of backward, its name in `executor.inverted`, and
    the op that copies the input for backward, where the activation works in place (-1: none); or why the storage is
    needed.
    """
    ops, sts = trace.ops, trace.storages
    if why := needed(trace, s, users):
        return why
    size = math.prod(sts.shape[s])
    if sts.dtype[s] not in DIGITS or size < LEAST or size % 8:
        return f"it has {size:,} numbers of {sts.dtype[s]}"
    pairs = TELLING if kind == FROM_OUTPUT else pack.ACTIVATIONS
    if isinstance(found := activation_of(trace, users, s, pairs, copied=True), str):
        return found
    f, b = found
    if kind == FROM_OUTPUT and not _tells(ops.target[f], json.loads(ops.arguments[f])[1:]):
        return "its output does not tell on which side of a border it lies"
    copy = sts.producer[s] if ops.inputs[f] != ops.inputs[b][1:] else -1
    y = ops.writes[f][0]
    if sts.nbytes[y] != sts.nbytes[s] or sts.dtype[y] != sts.dtype[s] or sts.hold[y] >= 0:
        return "the output is laid out otherwise, or held outside the captured graph"
    if any(y in ops.writes[i] for i in range(f + 1, b)):
        return "the output is overwritten"
    later = range(f + 1, len(ops))
    if not any(y in ops.reads[i] and ops.phase[i] != FORWARD and i != b for i in later):
        return "backward does not read the output"
    return f, b, pack.activation(trace, f), copy


def _tells(target: str, arguments: list[Any]) -> bool:
    """Return whether an activation with these arguments after its input maps each side of its borders to itself."""
    if "leaky_relu" in target:
        return bool(arguments[0] >= 0)
    low, high = arguments
    return bool(low <= high) and all(float(n).is_integer() and abs(n) <= EXACT_UP_TO for n in arguments)

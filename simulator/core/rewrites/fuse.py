"""Fuse: an activation that a model writes out in steps runs as the one op that torch has for it, backward, too.

transformers' `gelu_new` (GPT-2's) makes eight values and saves five of them; as `aten.gelu` it saves one beside its
output. What a chain of ops computes is told by its values at some points, so the order of its steps does not matter.

Counts: one pass each way, at the rate of the chain's own ops. Ignores: nothing that a GPU would see; on a CPU the op's
own speed, which is taken to be that of the chain's slowest op.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Final

from simulator.core.facts import Facts
from simulator.core.rewrites.edit import Editing, users_of
from traces.errors import PlanError
from traces.records.plan import FP, Rewrite
from traces.records.trace import BACKWARD, EAGER, FORWARD, VIEW, Trace

EXACTNESS: Final = FP
POINTS: Final = (-6.0, -2.5, -1.3, -0.75, -0.2, 0.3, 1.1, 2.4, 5.0)
GRADIENTS: Final = (1.0, -2.0, 0.5, 3.0, -1.0, 2.0, -0.5, 1.5, -3.0)  # of the output at these points
NEAR: Final = 1e-6
MOST: Final = 64  # ops that are looked at from one op on
STARTS: Final = ("aten.tanh.default", "aten.sigmoid.default", "aten.erf.default", "aten.exp.default")
Values = Sequence[float]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# What ops compute from numbers, their arguments by the schema.
RULES: Final[dict[str, Callable[..., float]]] = {
    "aten.add.Tensor": lambda a, b, alpha: a + alpha * b,
    "aten.add.Scalar": lambda a, b, alpha: a + alpha * b,
    "aten.sub.Tensor": lambda a, b, alpha: a - alpha * b,
    "aten.rsub.Scalar": lambda a, b, alpha: b - alpha * a,
    "aten.mul.Tensor": lambda a, b: a * b,
    "aten.mul.Scalar": lambda a, b: a * b,
    "aten.div.Tensor": lambda a, b: a / b,
    "aten.div.Scalar": lambda a, b: a / b,
    "aten.pow.Tensor_Scalar": lambda a, b: a**b,
    "aten.neg.default": lambda a: -a,
    "aten.reciprocal.default": lambda a: 1 / a,
    "aten.exp.default": math.exp,
    "aten.erf.default": math.erf,
    "aten.tanh.default": math.tanh,
    "aten.tanh_backward.default": lambda g, t: g * (1 - t * t),
    "aten.sigmoid.default": _sigmoid,
    "aten.sigmoid_backward.default": lambda g, s: g * s * (1 - s),
    "aten.softplus.default": lambda x, beta, top: (
        x if x * beta > top else math.log1p(math.exp(x * beta)) / beta
    ),
    "aten.softplus_backward.default": lambda g, x, beta, top: (
        g * (1 if x * beta > top else _sigmoid(x * beta))
    ),
    # Neither the order of the elements nor, but for rounding, their values are others.
    "aten.view.default": lambda a, *_: a,
    "aten.alias.default": lambda a, *_: a,
    "aten._to_copy.default": lambda a, *_: a,
}
# Target and further arguments -> the function.
FUSED: Final[dict[tuple[str, tuple[str, ...]], Callable[[float], float]]] = {
    ("gelu", ("tanh",)): lambda x: x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    ("gelu", ("none",)): lambda x: x * (1 + math.erf(x * math.sqrt(0.5))) / 2,
    ("silu", ()): lambda x: x * _sigmoid(x),
    ("mish", ()): lambda x: x * math.tanh(math.log1p(math.exp(x))),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """An activation in steps: ops by their ids, each of them the last of its part."""

    x: int
    y: int
    grad: int  # of y
    dx: int
    forward: tuple[int, ...]  # the steps, y among them; rising
    backward: tuple[int, ...]  # dx among them
    name: str  # of torch's op
    options: tuple[str, ...]  # its arguments beside tensors

    @property
    def calls(self) -> tuple[tuple[int, str, tuple[int, ...], tuple[Any, ...]], ...]:
        """What stands there instead: in whose place, its target, of which ops' values, and all of its arguments."""
        return (
            (self.y, f"aten.{self.name}.default", (self.x,), (None, *self.options)),
            (self.dx, f"aten.{self.name}_backward.default", (self.grad, self.x), (None, None, *self.options)),
        )


def offer(facts: Facts) -> Iterator[Rewrite]:
    """All chains, each by the storage of its output."""
    for s, chain in facts.once(chains, lambda f: chains(f.trace)).items():
        yield Rewrite(kind="fuse", storage=s, op=facts.trace.ops.name[chain.y])


def choices(_problem: object, rewrites: Sequence[Rewrite], *_: object) -> Iterator[tuple[Rewrite, ...]]:
    """All of them: they cost nothing."""
    yield tuple(rewrites)


def adds_ns(facts: Facts, rewrite: Rewrite) -> int:
    """By how much an activation takes longer, at least: it takes less, unless another rewrite has taken its steps."""
    chain = chain_of(facts.once(chains, lambda f: chains(f.trace)), rewrite)
    return -sum(facts.trace.ops.time_ns[i] for i in (*chain.forward, *chain.backward))


def edit(editing: Editing, rewrite: Rewrite) -> None:
    """Put the two ops in the place of the steps; where a rewrite before has taken one out, all is left as it is. Raises
    PlanError if the storage is not the output of such a chain.
    """
    trace = editing.source
    chain = chain_of(editing.once(chains), rewrite)
    if not all(editing.there(editing.op[i]) for i in (*chain.forward, *chain.backward)):
        return
    both = (chain.backward, chain.forward)  # backward's steps take forward's values
    for steps, (at, target, taken, arguments) in zip(both, reversed(chain.calls), strict=True):
        new, of = editing.op[at], [storage_behind(trace, i) for i in taken]
        first = [editing.op[i].overwrites for i in steps if trace.ops.inputs[i][:1] == taken[:1]]
        passes = [editing.op[i].time_ns for i in steps if len(trace.ops.reads[i]) <= len(taken)]
        new.target = target
        editing.take(new, list(dict.fromkeys(editing.op[i] for i in taken)))
        editing.read(new, list(dict.fromkeys(editing.value[s] for s in of)))
        new.arguments = json.dumps(arguments, separators=(",", ":"))
        new.time_ns = max(passes)
        new.bytes_moved = sum(v.nbytes for v in (*new.reads, *new.writes))
        # Forward's has a twin that works in place; backward's has none.
        new.overwrites = next((v for v in first if v is not None), None) if at == chain.y else None
        editing.remove([editing.op[i] for i in steps if i != at], new)


def chain_of(known: Mapping[int, Chain], rewrite: Rewrite) -> Chain:
    """The chain that makes a rewrite's storage, of all that `chains` found. Raises PlanError if none does."""
    if rewrite.storage not in known:
        raise PlanError(
            f"storage {rewrite.storage}{rewrite.op and f' ({rewrite.op})'} is not the output of an activation in steps "
            "for which torch has one op."
        )
    return known[rewrite.storage]


def chains(trace: Trace) -> dict[int, Chain]:
    """The activations in steps whose values nothing else reads, by the storages of their outputs; in their order."""
    starts = [i for i, t in enumerate(trace.ops.target) if t in STARTS and trace.ops.phase[i] == FORWARD]
    found: dict[int, Chain] = {}
    if not starts:
        return found
    users, readers = users_of(trace)
    done: set[int] = set()
    for start in starts:
        if start not in done:
            chain = next(_through(trace, users, readers, start), None)
            if chain is not None:
                done.update(chain.forward)
                found[trace.ops.writes[chain.y][0]] = chain
    return found


def storage_behind(trace: Trace, op: int) -> int:
    """The storage that an op's value lies in, if it makes one or is a view of such; -1."""
    ops = trace.ops
    while ops.flags[op] & VIEW and len(ops.inputs[op]) == 1:
        op = ops.inputs[op][0]
    return ops.writes[op][0] if len(ops.writes[op]) == 1 and not ops.flags[op] & VIEW else -1


def _through(
    trace: Trace, users: Sequence[Sequence[int]], readers: Sequence[Collection[int]], start: int
) -> Iterator[Chain]:
    """The chains that an op is part of, from the nearest ops on that may be their inputs."""
    for x in _above(trace, [start], FORWARD)[1:]:
        made = _grown(trace, users, {x: POINTS}, FORWARD)
        for y, values in made.items():
            for (name, options), f in FUSED.items() if y > start else ():
                if not _alike(values, map(f, POINTS)):
                    continue
                forward = _leading(trace, y, made, x)
                slope = [
                    g * (f(p + 1e-5) - f(p - 1e-5)) / 2e-5 for p, g in zip(POINTS, GRADIENTS, strict=True)
                ]
                grad, dx, backward = _backward(trace, users, made, forward, slope)
                chain = Chain(
                    x=x, y=y, grad=grad, dx=dx, forward=forward, backward=backward, name=name, options=options
                )
                if start in forward and dx >= 0 and _separate(trace, readers, chain):
                    yield chain


def _above(trace: Trace, ops: list[int], phase: str) -> list[int]:
    """Ops, and those of a phase whose values they are made of by steps that are known, the nearest first."""
    found, k = list(ops), 0
    while k < len(found) < MOST:
        if trace.ops.target[found[k]] in RULES:
            found += [j for j in trace.ops.inputs[found[k]] if j not in found and trace.ops.phase[j] == phase]
        k += 1
    return found


def _backward(
    trace: Trace,
    users: Sequence[Sequence[int]],
    made: Mapping[int, Values],
    forward: tuple[int, ...],
    slope: Values,
) -> tuple[int, int, tuple[int, ...]]:
    """The op of the output's gradient, that of the input's, and the steps between them; -1 where there are none."""
    phase = trace.ops.phase
    late = {u for i in forward[:-1] for u in users[i] if phase[u] == BACKWARD}
    for grad in _above(trace, sorted(late), BACKWARD):
        grown = _grown(trace, users, {**made, grad: GRADIENTS}, BACKWARD)
        dx = next((i for i, v in grown.items() if i != grad and i not in made and _alike(v, slope)), -1)
        if dx >= 0:
            return grad, dx, _leading(trace, dx, {i: v for i, v in grown.items() if i not in made}, grad)
    return -1, -1, ()


def _grown(
    trace: Trace, users: Sequence[Sequence[int]], known: Mapping[int, Values], phase: str
) -> dict[int, Values]:
    """The values of ops, and of the ops of a phase that compute with nothing else, in their order."""
    grown, given = dict(known), len(known)
    waiting = [u for i in grown for u in users[i]]
    heapify(waiting)
    while waiting and len(grown) < given + MOST:
        i = heappop(waiting)
        values = None if i in grown or trace.ops.phase[i] != phase else _values(trace, i, grown)
        if values is not None:
            grown[i] = values
            for u in users[i]:
                heappush(waiting, u)
    return grown


def _values(trace: Trace, i: int, known: Mapping[int, Values]) -> Values | None:
    """What an op makes of known values; None: it is none of the rules', or takes something else."""
    ops = trace.ops
    rule, inputs = RULES.get(ops.target[i]), ops.inputs[i]
    if rule is None or not ops.arguments[i] or ops.flags[i] & EAGER or any(j not in known for j in inputs):
        return None
    arguments = json.loads(ops.arguments[i])
    tensors = [k for k, a in enumerate(arguments) if a is None]
    taken = [known[j] for j in inputs]
    if ops.target[i] == "aten._to_copy.default":
        tensors = tensors[:1]
    elif len(taken) == 1 and len(tensors) == 2 and len(ops.reads[i]) == 1:
        taken *= 2  # of one value twice
    if len(taken) != len(tensors):
        return None
    out = []
    try:
        for numbers in zip(*taken, strict=True):
            for k, number in zip(tensors, numbers, strict=True):
                arguments[k] = number
            out.append(float(rule(*arguments)))
    except (ArithmeticError, TypeError, ValueError):
        return None
    return out


def _alike(found: Values, wanted: Any) -> bool:
    return all(abs(a - b) <= NEAR * (1 + abs(b)) for a, b in zip(found, wanted, strict=True))


def _leading(trace: Trace, last: int, made: Collection[int], first: int) -> tuple[int, ...]:
    """The ops among `made` that an op's value is made by, itself included, `first` not."""
    found, k = [last], 0
    while k < len(found):
        found += [j for j in trace.ops.inputs[found[k]] if j in made and j != first and j not in found]
        k += 1
    return tuple(sorted(found))


def _separate(trace: Trace, readers: Sequence[Collection[int]], chain: Chain) -> bool:
    """Whether nothing else reads what the steps make, and they lie between values of one size and type."""
    ops, sts = trace.ops, trace.storages
    inside = {*chain.forward, *chain.backward}
    ends = [storage_behind(trace, i) for i in (chain.x, chain.y, chain.grad, chain.dx)]
    if -1 in ends or any(ops.flags[i] & VIEW for i in (chain.y, chain.dx)):
        return False
    x, y, grad, dx = ends
    alike = {(sts.dtype[s], math.prod(sts.shape[s]), sts.nbytes[s]) for s in (x, y, dx)}
    made = [s for i in inside for s in ops.writes[i] if s not in (y, dx)]
    return (
        len(alike) == 1
        and sts.dtype[grad] == sts.dtype[y]
        and sts.shape[dx] == sts.shape[y]
        and all(sts.hold[s] < 0 and inside.issuperset(readers[s]) for s in made)
        and all(math.prod(sts.shape[s]) == math.prod(sts.shape[y]) for s in made)
        and not any(x in ops.writes[i] for i in readers[x])
    )

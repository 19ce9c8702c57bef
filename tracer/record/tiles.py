"""Find the language-model heads and the MLPs of a captured graph that can run in tiles over their rows.

What is sought is a matrix product whose rows are independent of each other: each op that reads what is as wide works on
rows alone (a view, a cast, a pointwise function, a softmax along another dimension, a product with what has no rows),
or sums over them. In a head the sums are a cross entropy, the last that forward makes, and backward is linear in one
number, the gradient of the loss; so all of it runs in forward. An MLP ends where values are narrow again; its backward
begins with the gradients of those, and makes again what it reads of forward.

Counts: the ops that `rows_of` knows. Ignores: heads whose loss is more than one cross entropy, or shifts the logits
and not the targets; random ops, a dropout among them; in heads float16, whose gradients without the factor of a
gradient scaler would be rounded to zero; attention; what else is as wide as a head's logits (a teacher's).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import torch
from torch import fx

from tracer.record.program import GraphOp, Program, is_random
from tracer.record.rows import tensors_in
from tracer.torch_api import OpOverload
from traces.records.trace import PRODUCT, ROWS, SUM, WHOLE, Part, Result, Stretch

aten = torch.ops.aten
PRODUCTS: Final = (aten.mm, aten.addmm)
VIEWS: Final = (aten.view, aten._unsafe_view, aten.reshape)  # which are told sizes
COPIES: Final = (aten.alias, aten.clone, aten.detach, aten._to_copy, aten.contiguous)
ALONG_ONE: Final = {  # pointwise but for one dimension, and which argument names it
    aten._softmax: 1,
    aten._log_softmax: 1,
    aten._softmax_backward_data: 2,
    aten._log_softmax_backward_data: 2,
}
LOSS, LOSS_BACKWARD = aten.nll_loss_forward, aten.nll_loss_backward
# What they make is proportional to what they take.
STRAIGHT: Final = (*VIEWS, *COPIES, aten.t, aten.sum, aten.neg, aten.div)
NO_SUM: Final = 0  # torch's number of the reduction
WIDE: Final = 2  # a value is wide if its rows have at least one of so many parts of the widest's elements
# Where the rows of a value lie: in so many of its first dimensions; or
TURNED: Final = -1  # in the second of two;
NONE: Final = 0  # it has none, and is taken whole;
SUMMED: Final = -2  # what an op makes is a sum over them.


class _NotByRows(Exception):
    """An op on the way does not work on rows alone."""


def _require(holds: object) -> None:
    if not holds:
        raise _NotByRows


@dataclass(frozen=True, slots=True)
class Call:
    """Nodes that run tile by tile in one call, in order; what they take from outside, and what they leave."""

    body: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


@dataclass(eq=False, kw_only=True)
class Found:
    """A head or an MLP as nodes: what the executor makes tiles of."""

    product: fx.Node
    rows: int
    body: list[fx.Node] = field(default_factory=list)
    lies: dict[fx.Node, int] = field(default_factory=dict)  # where the rows of the body's values lie
    sums: dict[fx.Node, str] = field(default_factory=dict)  # SUM or PRODUCT
    # Cross entropies -> the weight of their targets.
    losses: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: dict[fx.Node, int] = field(default_factory=dict)  # and where their rows lie
    factor: fx.Node | None = None
    results: list[fx.Node] = field(default_factory=list)  # that forward makes: sums; of an MLP, rows
    gradients: list[fx.Node] = field(default_factory=list)  # of a head, but for the factor
    outputs: tuple[int, ...] = ()  # numbers of the model's outputs that are rows of the body
    parts: tuple[Call, ...] = ()  # of a head one; forward and backward

    def where(self, n: fx.Node) -> int:
        """Where the rows of a value lie."""
        return self.lies.get(n) or self.inputs.get(n) or NONE

    def grows(self, n: fx.Node) -> str:
        """How a value of the body grows with the tile."""
        return self.sums[n] if n in self.sums else ROWS if self.lies.get(n) else WHOLE

    def record(self, program: Program, ids: Sequence[int]) -> Stretch:
        """Return what was found in ids of a trace; `ids`: op of the program -> op of the trace."""
        op_of = {n: i for i, op in enumerate(program.ops) for n in (op.node, *op.parts)}

        def place(n: fx.Node) -> tuple[int, int]:
            return ids[op_of[n]] if n in op_of else -1, program.storage_of[n][0]

        def part(call: Call) -> Part:
            grows: dict[int, str] = {}
            for n in call.body:
                if op_of[n] not in grows or n in self.sums:
                    grows[op_of[n]] = self.grows(n)
            places = ((n, *place(n)) for n in call.results)
            return Part(
                body=tuple((ids[i], how) for i, how in grows.items()),
                inputs=tuple(place(n) for n in call.inputs),
                results=tuple(Result(op=op, storage=s, grows=self.grows(n)) for n, op, s in places),
            )

        first, *others = (part(call) for call in self.parts)
        left = len(self.results)
        return Stretch(
            storage=program.storage_of[self.product][0],
            rows=self.rows,
            body=first.body,
            inputs=first.inputs,
            losses=first.results[:left],
            gradients=first.results[left:],
            weights=tuple(elements(x.args[1]) for x in self.losses),
            outputs=self.outputs,
            backward=others[0] if others else None,
        )


def found_in(program: Program) -> tuple[Found, ...]:
    """Return what of a program could run in tiles, the widest first; no two have an op in common."""
    if program.captured.numbers or not program.captured.grad_outputs:
        return ()

    def nbytes(op: GraphOp) -> int:
        return program.storages[program.storage_of[op.node][0]].nbytes

    products = [op for op in program.ops[: program.forward_ops] if packet(op.node) in PRODUCTS and nbytes(op)]
    kinds: tuple[type[_Head | _Mlp], ...] = (_Head, _Mlp)
    taken: set[fx.Node] = set()
    found: list[Found] = []
    for op, kind in product(sorted(products, key=lambda op: -nbytes(op)), kinds):
        if op.node in taken or op.node.meta["val"].shape[0] < 2:
            continue
        try:
            made = kind(program, op.node).found()
        except _NotByRows:
            continue
        if taken.isdisjoint(made.body):
            found.append(made)
            taken.update(made.body)
    return tuple(found)


class _Search:
    """One attempt: the body grows until it is closed, or `_NotByRows` is raised."""

    def __init__(self, program: Program, product: fx.Node) -> None:
        self.to = Found(product=product, rows=product.meta["val"].shape[0])
        self.program, self.captured = program, program.captured
        self.forward, self.backward = set(self.captured.forward), set(self.captured.backward)
        self.order = {n: k for k, n in enumerate((*self.captured.forward, *self.captured.backward))}
        self.wide = elements(product) // self.to.rows // WIDE

    def is_large(self, n: fx.Node) -> bool:
        """Return whether a node would be wide if it had rows."""
        return elements(n) // self.to.rows >= self.wide

    def takes_wide(self, n: fx.Node) -> bool:
        """Return whether a node takes a wide value of the body."""
        return any(self.to.lies.get(a) and self.is_large(a) for a in n.all_input_nodes)

    def belongs(self, a: fx.Node) -> bool:
        """Return whether what makes a value must be in the body if something there takes it."""
        raise NotImplementedError

    def pull(self, n: fx.Node) -> None:
        """Add a node, and before it the makers that belong to it. Raises _NotByRows if one works not on rows alone."""
        to = self.to
        if n in to.lies or n in to.sums:
            return
        for a in n.all_input_nodes:
            if a not in to.lies and a not in to.sums and a is not to.factor and self.belongs(a):
                self.pull(a)
        if n.target is operator.getitem:  # a cross entropy, or the weight of its targets
            _require(packet(n.args[0]) is LOSS)
            self._put(n, SUMMED)
            if n.args[1] == 1:
                to.losses[n.args[0]] = n
        else:
            _require(
                isinstance(n.target, OpOverload) and not n.target._schema.is_mutable and not is_random(n)
            )
            for a in n.all_input_nodes:
                divisor = packet(n) is LOSS_BACKWARD and a in to.losses.values()
                _require(a not in to.sums or divisor)  # a sum of all tiles, which none has yet
                if a not in to.lies and a is not to.factor and not divisor:
                    to.inputs.setdefault(a, NONE)
            self._put(n, self.rows_of(n))

    def _put(self, n: fx.Node, lies: int) -> None:
        _require(n not in self.to.inputs)  # or an op of the body takes it from outside
        self.to.body.append(n)
        if lies == SUMMED:
            self.to.sums[n] = PRODUCT if packet(n) in PRODUCTS else SUM
        else:
            self.to.lies[n] = lies

    def cut(self, a: fx.Node, lies: int) -> None:
        """Take an input in rows. Raises _NotByRows if it is taken otherwise already, or has no such rows."""
        to, x = self.to, a.meta["val"]
        if to.where(a) == lies:
            return
        along = x.shape[1:] if lies == TURNED and x.dim() == 2 else x.shape[: max(lies, 0)]
        _require(not to.where(a) and a not in to.lies and along and math.prod(along) == to.rows)
        # The rows are one dimension in memory, and no other op takes it whole.
        _require(all(x.stride(d) == x.shape[d + 1] * x.stride(d + 1) for d in range(lies - 1)))
        _require(not any(a in n.all_input_nodes for n in to.body))
        to.inputs[a] = lies

    def rows_of(self, n: fx.Node) -> int:
        """Where the rows of what an op makes lie, whose arguments are in the body or inputs of it. Raises _NotByRows if
        it does not work on each row by itself."""
        what, rows = packet(n), {a: lies for a in n.all_input_nodes if (lies := self.to.where(a))}
        if what in (LOSS, LOSS_BACKWARD):
            values, target, _, reduction = n.args[:4] if what is LOSS else n.args[1:5]
            _require(rows.get(values) == 1 and reduction != NO_SUM)
            self.cut(target, 1)
            return SUMMED if what is LOSS else 1
        if what in PRODUCTS:
            return self._product(*n.args)
        if not rows:
            return NONE
        lies, x = next(iter(rows.values())), n.all_input_nodes[0].meta["val"]
        if what is aten.t:
            _require(lies == 1 and x.dim() == 2)
            return TURNED
        _require(lies > 0)
        if what in VIEWS:
            shape = n.meta["val"].shape
            fits = [k for k in range(1, len(shape) + 1) if math.prod(shape[:k]) == self.to.rows]
            _require(fits)
            return fits[0]
        if what is aten.sum:
            gone = {d % x.dim() for d in n.args[1]} if len(n.args) > 1 else {*range(x.dim())}
            _require(gone.isdisjoint(range(lies)) or gone.issuperset(range(lies)))
            return lies if gone.isdisjoint(range(lies)) else SUMMED
        if what in ALONG_ONE:
            _require(n.args[ALONG_ONE[what]] % x.dim() >= lies)
        else:
            _require(what in COPIES or torch.Tag.pointwise in n.target.tags)
        return self._pointwise(n, rows)

    def _pointwise(self, n: fx.Node, rows: dict[fx.Node, int]) -> int:
        lies, rank = next(iter(rows.values())), n.meta["val"].dim()
        _require({*rows.values()} == {lies} and all(a.meta["val"].dim() == rank for a in rows))
        for a in n.all_input_nodes:
            shape = a.meta["val"].shape
            if a not in rows and math.prod(shape[: max(0, lies - rank + len(shape))]) != 1:
                _require(len(shape) == rank)
                self.cut(a, lies)
        return lies

    def _product(self, *given: fx.Node) -> int:
        *biases, first, second = given
        left, right = self.to.where(first), self.to.where(second)
        _require(first is not second)
        _require(all(not right and b.meta["val"].dim() == 1 and not self.to.where(b) for b in biases))
        if not left and not right:
            self.cut(first, left := 1)
        if left == 1 and not right:
            return 1
        _require(not biases)
        self.cut(first, TURNED)
        self.cut(second, 1)
        return SUMMED

    def leaves(self, n: fx.Node) -> tuple[list[fx.Node], list[int], bool]:
        """Who takes a node of the body outside: nodes, numbers of outputs, the optimizer as a gradient."""
        to, captured = self.to, self.captured
        inside = {*to.lies, *to.sums}
        outside = [u for u in n.users if u not in inside and u.op != "output"]
        returned = [k for k, x in enumerate(captured.outputs) if x is n]
        return outside, returned, n in captured.parameter_grads or n in captured.argument_grads

    def call(self, results: Sequence[fx.Node], phase: set[fx.Node]) -> Call:
        """Return what of the body makes the results, in one call among the nodes of a phase. Raises _NotByRows if a
        result is no whole storage, or that of another one, or something takes one before all inputs are there.
        """
        storages = [self.program.storage_of[n] for n in results]
        for n, own in zip(results, storages, strict=True):
            _require(len(own) == 1 and self.program.storages[own[0]].nbytes == n.meta["val"].nbytes)
            _require(self.to.grows(n) != WHOLE and n.meta["val"].is_contiguous())
            _require(packet(n) not in VIEWS)  # a result has the shape in which its storage was made
        _require(len(set(storages)) == len(results))
        needed: set[fx.Node] = set()
        for n in reversed(self.to.body):
            if n in results or not needed.isdisjoint(n.users):
                needed.add(n)
        taken = {a for n in needed for a in n.all_input_nodes}
        call = Call(
            body=tuple(n for n in self.to.body if n in needed),
            inputs=tuple(a for a in self.to.inputs if a in taken),
            results=tuple(results),
        )
        users = {u for n in results for u in self.leaves(n)[0]} & phase
        first = min(map(self.order.__getitem__, users), default=len(self.order))
        _require(all(self.order[a] < first for a in phase.intersection(call.inputs)))
        return call


class _Head(_Search):
    """Its forward ends in a cross entropy; all of it runs in forward."""

    def found(self) -> Found:
        to = self.to
        _require(to.product.meta["val"].dtype is not torch.float16)
        self.pull(to.product)
        for n in self.captured.forward[self.order[to.product] + 1 :]:
            if any(a in to.lies or (packet(a) is LOSS and a in to.sums) for a in n.all_input_nodes):
                self.pull(n)
        for n in filter(self.takes_wide, self.captured.backward):
            self.pull(n)
        to.body.sort(key=self.order.__getitem__)
        tainted, outputs = {to.factor}, list[int]()  # what depends on the factor, all of it in proportion
        for n in to.body:
            if not tainted.isdisjoint(n.all_input_nodes):
                _require(_proportional(n, tainted))
                tainted.add(n)
        for n in (n for n in to.body if packet(n) is not LOSS):
            outside, returned, gradient = self.leaves(n)
            if not (outside or returned or gradient):
                continue
            if n in tainted:
                to.gradients.append(n)
            elif n in to.sums:
                to.results.append(n)
            else:
                _require(
                    n in self.forward and not outside and not {*returned} & {*self.captured.grad_outputs}
                )
                outputs += returned
        _require(to.gradients and self.backward.isdisjoint(to.inputs))
        to.outputs = tuple(outputs)
        to.parts = (self.call([*to.results, *to.gradients], self.forward),)
        return to

    def belongs(self, a: fx.Node) -> bool:
        if elements(a) == 1 and (a in self.backward or "tangent_of" in a.meta):
            _require(self.to.factor is None)  # or the loss has several summands
            self.to.factor = a
            return False
        return a in self.backward


class _Mlp(_Search):
    """It lies between narrow values, and its backward makes again what it reads of forward."""

    def found(self) -> Found:
        to = self.to
        self.pull(to.product)
        for n in filter(self.takes_wide, (*self.captured.forward, *self.captured.backward)):
            self.pull(n)
        # Backward's views of what is taken whole are taken in, whose place may be later.
        copied, waiting = set(), [a for a, lies in to.inputs.items() if lies == NONE]
        while waiting:
            a = waiting.pop()
            if a in self.backward and packet(a) in (*VIEWS, aten.t):
                del to.inputs[a]
                copied.add(a)
                self._put(a, NONE)
                new = [b for b in a.all_input_nodes if b not in to.inputs and b not in to.lies]
                to.inputs |= dict.fromkeys(new, NONE)
                waiting += new
        to.body.sort(key=self.order.__getitem__)
        for n in to.body:
            outside, *returned = self.leaves(n)
            if (outside and n not in copied) or any(returned):
                _require(not to.lies.get(n) or not self.is_large(n))
                (to.results if n in self.forward else to.gradients).append(n)
        _require(to.results and to.gradients)
        to.parts = (self.call(to.results, self.forward), self.call(to.gradients, self.backward))
        _require(len(to.body) == len({n for call in to.parts for n in call.body}))  # somebody takes all of it
        return to

    def belongs(self, a: fx.Node) -> bool:
        made = a in self.order and self.program.storages[self.program.storage_of[a][0]].producer >= 0
        alone = a in self.backward or sum(u in self.forward for u in a.users) == 1
        return made and alone and self.is_large(a)


def _proportional(n: fx.Node, tainted: set[fx.Node | None]) -> bool:
    """Return whether what an op makes grows in proportion with those of its arguments."""
    what, mine = packet(n), [a in tainted for a in n.args if isinstance(a, fx.Node)]
    if what is aten.add:
        return len(mine) == 2 and all(mine)
    if what in (aten.mul, aten.mm):
        return sum(mine) == 1
    by_name = str(what).endswith(("_backward", "_backward_data"))
    return (what in STRAIGHT or by_name) and mine[0] and not any(mine[1:])


def packet(n: fx.Node) -> Any:
    """The op that a node calls, whatever its overload; None: it calls none of torch's."""
    return n.target.overloadpacket if isinstance(n.target, OpOverload) else None


def elements(n: fx.Node) -> int:
    """How many numbers a node's value has."""
    return sum(int(part.numel()) for part in tensors_in(n.meta.get("val")))

"""Find the loss heads and the MLPs of a captured graph that can run in tiles over their rows.

What is sought is a matrix product whose rows are independent of each other: each op that reads what is as wide works on
rows alone (a view, a cast, a pointwise function, a softmax along another dimension, a product with what has no rows),
or sums over them. In a loss head the sums are the last that forward makes, and backward is linear in one number, the
gradient of the loss; so all of it runs in forward. An MLP ends where values are narrow again; its backward begins with
the gradients of those, and makes again what it reads of forward.

A mask of a dropout inside is drawn whole before the tiles, as the untouched step draws it, and taken in rows.

Counts: the ops that `_rows_of` knows. Ignores: other random ops; in heads float16, whose gradients without the factor
of a gradient scaler would be rounded to zero; attention; what else is as wide as a head's logits (a teacher's).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

import torch
from torch import fx

from tracer.capture.passes.dropout import dropout_mask
from tracer.record.program import GraphOp, Program, is_random
from tracer.record.rows import tensors_in
from tracer.torch_api import OpOverload
from traces.records.trace import PRODUCT, ROWS, SUM, WHOLE, Part, Result, Stretch

aten = torch.ops.aten
DRAWS: Final = dropout_mask._opoverload.overloadpacket
PRODUCTS: Final = (aten.mm, aten.addmm)
VIEWS: Final = (aten.view, aten._unsafe_view, aten.reshape)
TURNS: Final = (aten.t, aten.transpose, aten.permute)
COPIES: Final = (aten.alias, aten.clone, aten.detach, aten._to_copy, aten.contiguous)
ALONG_ONE: Final = {  # pointwise but for one dimension, and which argument names it
    aten._softmax: 1,
    aten._log_softmax: 1,
    aten._safe_softmax: 1,
    aten._softmax_backward_data: 2,
    aten._log_softmax_backward_data: 2,
    aten.gather: 1,
    aten.scatter_add: 1,
    aten.cat: 1,
    aten.split: 2,
}
SUMS: Final = (aten.sum, aten.mean)
LOSSES: Final = (aten.nll_loss_forward, aten.nll_loss2d_forward)
LOSS_BACKWARDS: Final = (aten.nll_loss_backward, aten.nll_loss2d_backward)
ALONG: Final = (aten.logsumexp, aten.amax, aten.amin)
PARTS: Final = (aten.slice, aten.select)
PART_BACKWARDS: Final = (aten.slice_backward, aten.select_backward)
ZEROS: Final = {aten.full: 0, aten.zeros: 0, aten.new_zeros: 1}  # and which argument has the sizes
SIZES: Final = {
    **dict.fromkeys((*VIEWS, *PART_BACKWARDS, aten.expand), 1),
    **ZEROS,
}  # of all that are told sizes
STRAIGHT: Final = (  # what they make is proportional to what they take
    *VIEWS, *TURNS, *COPIES, *SUMS, *PARTS, *PART_BACKWARDS, aten.neg, aten.unsqueeze, aten.squeeze, aten.expand,
)  # fmt: skip
NO_SUM: Final = 0  # torch's number of the reduction
WIDE: Final = 2  # a value is wide if its rows have at least one of so many parts of the widest's elements


@dataclass(frozen=True, slots=True)
class Axis:
    """Where the rows of a value lie: `span` dimensions from `dim` on, which have `unit` elements a row together."""

    dim: int
    span: int = 1
    unit: int = 1

    @property
    def dims(self) -> range:
        return range(self.dim, self.dim + self.span)

    def fits(self, shape: Sequence[int], rows: int) -> bool:
        """Return whether a shape has so many rows there."""
        return self.dim >= 0 and math.prod(shape[self.dim : self.dims.stop]) == rows * self.unit


SUMMED: Final = Axis(-1)  # what an op makes is a sum over the rows


class _NotByRows(Exception):
    """An op on the way does not work on rows alone."""


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
    unit: int  # elements a row of the product's first dimension
    body: list[fx.Node] = field(default_factory=list)
    axes: dict[fx.Node, Axis | None] = field(default_factory=dict)  # of the body's values; None: whole
    sums: dict[fx.Node, str] = field(default_factory=dict)  # SUM or PRODUCT
    # Cross entropies -> the weight of their targets.
    losses: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: dict[fx.Node, Axis | None] = field(default_factory=dict)  # None: taken whole
    factor: fx.Node | None = None
    results: list[fx.Node] = field(default_factory=list)  # that forward makes: sums; of an MLP, rows
    gradients: list[fx.Node] = field(default_factory=list)  # of a head, but for the factor
    outputs: tuple[int, ...] = ()  # numbers of the model's outputs that are rows of the body
    parts: tuple[Call, ...] = ()  # of a head one; forward and backward

    def axis(self, n: fx.Node) -> Axis | None:
        """Where the rows of a value lie; None: it has none."""
        return self.axes.get(n) or self.inputs.get(n)

    def grows(self, n: fx.Node) -> str:
        """How a value of the body grows with the tile."""
        return self.sums[n] if n in self.sums else ROWS if self.axes.get(n) else WHOLE

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
    for op in sorted(products, key=lambda op: -nbytes(op)):
        for kind, (rows, unit) in product(kinds, _ways(op.node)):
            if op.node in taken or rows < 2:
                continue
            try:
                made = kind(program, op.node, rows, unit).found()
            except _NotByRows:
                continue
            if taken.isdisjoint(made.body):
                found.append(made)
                taken.update(made.body)
    return tuple(found)


def _ways(of: fx.Node) -> Iterator[tuple[int, int]]:
    """How its rows can be counted, and the elements of its first dimension that one has: each, or each example's."""
    n = of.meta["val"].shape[0]
    yield n, 1
    for user in of.users:
        if packet(user) in VIEWS and n % (first := user.meta["val"].shape[0]) == 0 and 1 < first < n:
            yield first, n // first


class _Search:
    """One attempt: the body grows until it is closed, or `_NotByRows` is raised."""

    def __init__(self, program: Program, product: fx.Node, rows: int, unit: int) -> None:
        self.to = Found(product=product, rows=rows, unit=unit)
        self.program, self.captured = program, program.captured
        self.forward, self.backward = set(self.captured.forward), set(self.captured.backward)
        self.order = {n: k for k, n in enumerate((*self.captured.forward, *self.captured.backward))}
        self.wide = elements(product) // rows // WIDE
        self.numbers: set[fx.Node] = set()  # made in backward, of one element, and not in the body

    def is_large(self, n: fx.Node) -> bool:
        """Return whether a node would be wide if it had rows."""
        return elements(n) // self.to.rows >= self.wide

    def takes_wide(self, n: fx.Node) -> bool:
        """Return whether a node takes a wide value of the body."""
        return any(self.to.axes.get(a) is not None and self.is_large(a) for a in n.all_input_nodes)

    def belongs(self, a: fx.Node) -> bool:
        """Return whether what makes a value must be in the body if something there takes it."""
        raise NotImplementedError

    def pull(self, n: fx.Node) -> None:
        """Add a node, and before it the makers that belong to it. Raises _NotByRows if one works not on rows alone."""
        to = self.to
        if n in to.axes or n in to.sums:
            return
        for a in n.all_input_nodes:
            if a not in to.axes and a not in to.sums and a not in self.numbers and self.belongs(a):
                self.pull(a)
        if packet(n) is DRAWS:  # of what is dropped it needs the shape alone
            axis, x = to.axes.get(n.args[0]), n.args[0].meta["val"]
            if axis is None or not x.is_contiguous():
                raise _NotByRows
            self.cut(n, axis)
        elif n.target is operator.getitem:
            self._pick(n, n.args[0])
        elif not isinstance(n.target, OpOverload) or n.target._schema.is_mutable or is_random(n):
            raise _NotByRows
        else:
            for a in n.all_input_nodes:
                divisor = packet(n) in LOSS_BACKWARDS and a in to.losses.values()
                if a in to.sums and not divisor:
                    raise _NotByRows  # a sum of all tiles, which none has yet
                if a not in to.axes and a not in self.numbers and not divisor:
                    to.inputs.setdefault(a)
            axis = _rows_of(n, to, self.cut)
            self._put(n, SUMMED if packet(n) in LOSSES else axis)

    def _put(self, n: fx.Node, axis: Axis | None) -> None:
        if n in self.to.inputs:
            raise _NotByRows  # an op of the body takes it from outside
        self.to.body.append(n)
        if axis is SUMMED:
            self.to.sums[n] = PRODUCT if packet(n) in PRODUCTS else SUM
        else:
            self.to.axes[n] = axis

    def _pick(self, n: fx.Node, source: fx.Node) -> None:
        to = self.to
        if packet(source) is aten.split:
            self._put(n, to.axis(source))
        elif packet(source) not in LOSSES:
            raise _NotByRows
        elif n.args[1] == 0 and source.args[3] == NO_SUM:
            self._put(n, to.axis(source.args[0]))
        else:
            self._put(n, SUMMED)
            to.losses |= {source: n} if n.args[1] == 1 else {}

    def cut(self, a: fx.Node, axis: Axis) -> None:
        """Take an input in rows. Raises _NotByRows if it is taken otherwise already, or has no such rows."""
        to, x = self.to, a.meta["val"]
        if to.axis(a) == axis:
            return
        if to.axis(a) is not None or a in to.axes or not axis.fits(x.shape, to.rows):
            raise _NotByRows
        if any(x.stride(d) != x.shape[d + 1] * x.stride(d + 1) for d in axis.dims[:-1]):
            raise _NotByRows  # rows that are no one dimension in memory
        if any(a in n.all_input_nodes for n in to.body):
            raise _NotByRows  # another op takes it whole
        to.inputs[a] = axis

    def leaves(self, n: fx.Node) -> tuple[list[fx.Node], list[int], bool]:
        """Who takes a node of the body outside: nodes, numbers of outputs, the optimizer as a gradient."""
        to, captured = self.to, self.captured
        drawn = [u for u in n.users if packet(u) is DRAWS and u in to.inputs]
        inside = {*to.axes, *to.sums, *drawn}
        outside = [u for u in n.users if u not in inside and u.op != "output"]
        returned = [k for k, x in enumerate(captured.outputs) if x is n]
        return outside, returned, n in captured.parameter_grads or n in captured.argument_grads

    def call(self, results: Sequence[fx.Node], phase: set[fx.Node]) -> Call:
        """Return what of the body makes the results, in one call among the nodes of a phase. Raises _NotByRows if a
        result is no whole storage, or that of another one, or something takes one before all inputs are there.
        """
        storages = [self.program.storage_of[n] for n in results]
        for n, own in zip(results, storages, strict=True):
            whole = len(own) == 1 and self.program.storages[own[0]].nbytes == n.meta["val"].nbytes
            if self.to.grows(n) == WHOLE or not whole or not n.meta["val"].is_contiguous():
                raise _NotByRows
            if packet(n) in VIEWS:
                raise _NotByRows  # a result has the shape in which its storage was made
        if len(set(storages)) < len(results):
            raise _NotByRows
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
        if any(self.order[a] >= first for a in phase.intersection(call.inputs)):
            raise _NotByRows
        return call


class _Head(_Search):
    """Its forward ends in sums, one of them the loss; all of it runs in forward."""

    def found(self) -> Found:
        to = self.to
        if to.product.meta["val"].dtype is torch.float16:
            raise _NotByRows
        self.pull(to.product)
        for n in self.captured.forward[self.order[to.product] + 1 :]:
            if any(a in to.axes or (packet(a) in LOSSES and a in to.sums) for a in n.all_input_nodes):
                self.pull(n)
        for n in filter(self.takes_wide, self.captured.backward):
            self.pull(n)
        while len(self.numbers) > 1:  # up to the one from which all the others are made
            last = max(self.numbers, key=lambda n: self.order.get(n, -1))
            if last not in self.order:
                raise _NotByRows
            self.numbers.remove(last)
            self.pull(last)
        to.factor = next(iter(self.numbers), None)
        to.body.sort(key=self.order.__getitem__)
        tainted, outputs = self._linear(), []
        for n in (n for n in to.body if packet(n) not in LOSSES):
            outside, returned, gradient = self.leaves(n)
            if not (outside or returned or gradient):
                continue
            if n in tainted:
                to.gradients.append(n)
            elif n in to.sums:
                to.results.append(n)
            elif n in self.forward and not outside and not set(returned) & set(self.captured.grad_outputs):
                outputs += returned
            else:
                raise _NotByRows
        if not to.gradients or not self.backward.isdisjoint(to.inputs):
            raise _NotByRows
        to.outputs = tuple(outputs)
        to.parts = (self.call([*to.results, *to.gradients], self.forward),)
        return to

    def belongs(self, a: fx.Node) -> bool:
        if elements(a) == 1 and (a in self.backward or "tangent_of" in a.meta):
            self.numbers.add(a)
            return False
        return a in self.backward

    def _linear(self) -> set[fx.Node | None]:
        """Return what depends on the factor. Raises _NotByRows unless all of it is proportional to that."""
        tainted = {self.to.factor}
        for n in self.to.body:
            if packet(n) not in ZEROS and not tainted.isdisjoint(n.all_input_nodes):
                if not _proportional(n, tainted):
                    raise _NotByRows
                tainted.add(n)
        return tainted


class _Mlp(_Search):
    """It lies between narrow values, and its backward makes again what it reads of forward."""

    def found(self) -> Found:
        to = self.to
        self.pull(to.product)
        for n in filter(self.takes_wide, (*self.captured.forward, *self.captured.backward)):
            self.pull(n)
        copied = self._views()
        to.body.sort(key=self.order.__getitem__)
        for n in to.body:
            outside, *returned = self.leaves(n)
            if (outside and n not in copied) or any(returned):
                if to.axes.get(n) is not None and self.is_large(n):
                    raise _NotByRows
                (to.results if n in self.forward else to.gradients).append(n)
        if not to.results or not to.gradients:
            raise _NotByRows
        to.parts = (self.call(to.results, self.forward), self.call(to.gradients, self.backward))
        if len(to.body) > len({n for call in to.parts for n in call.body}):
            raise _NotByRows  # something that nobody takes
        return to

    def belongs(self, a: fx.Node) -> bool:
        made = a in self.order and self.program.storages[self.program.storage_of[a][0]].producer >= 0
        alone = a in self.backward or sum(u in self.forward for u in a.users) == 1
        return made and alone and self.is_large(a)

    def _views(self) -> set[fx.Node]:
        """Take in what backward makes of nothing, and its views of what is taken whole, whose place may be later."""
        to, copied = self.to, set()
        waiting = [a for a, axis in to.inputs.items() if axis is None]
        while waiting:
            a = waiting.pop()
            if a in self.backward and (not a.all_input_nodes or packet(a) in (*VIEWS, *TURNS)):
                del to.inputs[a]
                copied.add(a)
                self._put(a, None)
                new = [b for b in a.all_input_nodes if b not in to.inputs and b not in to.axes]
                to.inputs |= dict.fromkeys(new)
                waiting += new
        return copied


# Where rows are behind an op


def _rows_of(n: fx.Node, to: Found, cut: Callable[[fx.Node, Axis], None]) -> Axis | None:
    """Where the rows of what an op makes lie; SUMMED: it is a sum over them; None: it has none.

    Args:
        n: what it takes is in the body, or an input of it.
        cut: called with an input that must be taken in rows, too, and where they lie.

    Raises:
        _NotByRows: it does not work on each row by itself.
    """
    what = packet(n)
    rows = {a: axis for a in n.all_input_nodes if (axis := to.axis(a)) is not None}
    if what in (*LOSSES, *LOSS_BACKWARDS):
        values, target = n.args[:2] if what in LOSSES else n.args[1:3]
        axis = rows.get(values)
        if axis is None or axis.dim != 0 or axis.span != 1:
            raise _NotByRows
        cut(target, axis)
        return axis
    if what in PRODUCTS:
        return _product(n.args, to, cut)
    if what in ZEROS or (what is aten.expand and not rows):
        return _spread(n, to)
    if not rows:
        return None
    axis = next(iter(rows.values()))
    if what in (*VIEWS, aten.unsqueeze, aten.squeeze):
        return _viewed(n.args[0].meta["val"].shape, axis, n.meta["val"].shape, to.rows)
    if what in TURNS:
        return _permuted(n, axis)
    if what is aten.expand:
        return _aligned(n.args[0], n, axis)
    if what in (*PARTS, *PART_BACKWARDS):
        return _part(n, axis)
    if what in (*SUMS, *ALONG):
        return _reduced(n, axis)
    if what in ALONG_ONE:
        place = ALONG_ONE[what]
        dim = n.args[place] if place < len(n.args) else 0
        if dim % n.all_input_nodes[0].meta["val"].dim() in axis.dims:
            raise _NotByRows
    elif what not in COPIES and torch.Tag.pointwise not in n.target.tags:
        raise _NotByRows
    return axis if what in COPIES or what is aten.split else _pointwise(n, rows, cut)


def _aligned(a: fx.Node, n: fx.Node, axis: Axis) -> Axis:
    return replace(axis, dim=n.meta["val"].dim() - a.meta["val"].dim() + axis.dim)


def _pointwise(n: fx.Node, rows: dict[fx.Node, Axis], cut: Callable[[fx.Node, Axis], None]) -> Axis:
    found = {_aligned(a, n, axis) for a, axis in rows.items()}
    if len(found) != 1:
        raise _NotByRows
    axis, rank = found.pop(), n.meta["val"].dim()
    for a in n.all_input_nodes:
        shape = a.meta["val"].shape
        first = axis.dim - (rank - len(shape))
        along = [shape[d] for d in range(max(first, 0), first + axis.span)]
        if a not in rows and math.prod(along) != 1:
            if first < 0:
                raise _NotByRows
            cut(a, replace(axis, dim=first))
    return axis


def _product(args: Sequence[fx.Node], to: Found, cut: Callable[[fx.Node, Axis], None]) -> Axis:
    *biases, first, second = args
    left, right = to.axis(first), to.axis(second)
    if any(right or b.meta["val"].dim() != 1 or to.axis(b) for b in biases) or first is second:
        raise _NotByRows
    if not left and not right:
        cut(first, left := Axis(0, 1, to.unit))
    if left and left.dim == 0 and left.span == 1 and right is None:
        return left
    if right and right.dim == 1 and left is None:
        return right
    inner = [(first, left, 1), (second, right, 0)]
    known = [axis.unit for _, axis, dim in inner if axis and axis.dim == dim and axis.span == 1]
    if biases or not known or any(axis and axis.dim != dim for _, axis, dim in inner):
        raise _NotByRows
    for a, axis, dim in inner:
        if axis is None:
            cut(a, Axis(dim, 1, known[0]))
    return SUMMED


def _spread(n: fx.Node, to: Found) -> Axis | None:
    """A number spread over rows, where its first dimensions have as many."""
    shape = n.meta["val"].shape
    if any(elements(a) != 1 for a in n.all_input_nodes if packet(n) is aten.expand):
        raise _NotByRows
    for span in range(1, len(shape) + 1):
        if math.prod(shape[:span]) == to.rows:
            return Axis(0, span)
    units = {axis.unit for axis in to.axes.values() if axis is not None}
    return next((Axis(0, 1, unit) for unit in units if shape and shape[0] == to.rows * unit), None)


def _viewed(before: Sequence[int], axis: Axis, after: Sequence[int], rows: int) -> Axis:
    ahead = math.prod(before[: axis.dim])
    behind = math.prod(before[axis.dims.stop :]) * axis.unit  # elements that a row has from its dimension on
    for dim in range(len(after)):
        if math.prod(after[:dim]) != ahead or (after[dim] == 1 and rows > 1):
            continue
        for span in range(1, len(after) - dim + 1):
            if math.prod(after[dim : dim + span]) == rows and math.prod(after[dim + span :]) == behind:
                return Axis(dim, span)
        unit, left = divmod(after[dim], rows)
        if not left and unit * math.prod(after[dim + 1 :]) == behind:
            return Axis(dim, 1, unit)
    raise _NotByRows


def _permuted(n: fx.Node, axis: Axis) -> Axis:
    rank = n.meta["val"].dim()
    order = list(range(rank))
    if packet(n) is aten.permute:
        order = [d % rank for d in n.args[1]]
    elif rank > 1:
        a, b = (0, 1) if packet(n) is aten.t else (n.args[1] % rank, n.args[2] % rank)
        order[a], order[b] = b, a
    if axis.span != 1:
        raise _NotByRows
    return Axis(order.index(axis.dim), 1, axis.unit)


def _part(n: fx.Node, axis: Axis) -> Axis:
    """A slice or one index of a dimension that has no rows; or what is zero but for such a part."""
    what = packet(n)
    back = what in PART_BACKWARDS
    dim = n.args[2 if back else 1] % (n if back else n.args[0]).meta["val"].dim()
    if what is aten.select_backward and dim <= axis.dim:
        axis = replace(axis, dim=axis.dim + 1)
    if dim in axis.dims:
        raise _NotByRows
    return replace(axis, dim=axis.dim - 1) if what is aten.select and dim < axis.dim else axis


def _reduced(n: fx.Node, axis: Axis) -> Axis:
    rank = n.args[0].meta["val"].dim()
    dims = n.args[1] if len(n.args) > 1 and n.args[1] else range(rank)
    gone = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    if gone.issuperset(axis.dims) and packet(n) in SUMS:
        return SUMMED
    if not gone.isdisjoint(axis.dims):
        raise _NotByRows
    stays = len(n.args) > 2 and bool(n.args[2])
    return axis if stays else replace(axis, dim=axis.dim - sum(d < axis.dim for d in gone))


def _proportional(n: fx.Node, tainted: set[fx.Node | None]) -> bool:
    """Return whether what an op makes grows in proportion with those of its arguments."""
    what = packet(n)
    mine = [a in tainted for a in n.args if isinstance(a, fx.Node)]
    if what in (aten.mul, aten.mm):
        return sum(mine) == 1
    if what in (aten.add, aten.sub):
        return len(mine) == 2 and all(mine)
    if what is aten.scatter_add:
        return not mine[0] and mine[-1] and _is_zero(n.args[0])
    if what is aten.masked_fill:
        return mine[0] and n.args[2] == 0
    if what is aten.where:
        return not mine[0] and all(m or _is_zero(a) for m, a in zip(mine[1:], n.args[1:], strict=True))
    if what is aten.div or str(what).endswith(("_backward", "_backward_data")):
        return mine[0] and not any(mine[1:])
    return what in STRAIGHT


def _is_zero(n: fx.Node) -> bool:
    what = packet(n)
    if what is aten.scalar_tensor:
        return bool(n.args[0] == 0)
    return what in ZEROS and (what is not aten.full or n.args[1] == 0)


def packet(n: fx.Node) -> Any:
    """The op that a node calls, whatever its overload; None: it calls none of torch's."""
    return n.target.overloadpacket if isinstance(n.target, OpOverload) else None


def elements(n: fx.Node) -> int:
    """How many numbers a node's value has."""
    return sum(int(part.numel()) for part in tensors_in(n.meta.get("val")))

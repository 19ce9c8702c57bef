"""Find the stretches of a captured graph that can run in tiles: loss heads, from their matrix product to the loss.

What is sought is a matrix product whose rows are independent of each other up to a sum over them: in forward each op
on the way works on rows alone (a view, a cast, a pointwise function, a softmax along another dimension, a cross
entropy), and the sums are the last that forward makes of them. In backward all that reads the wide values works on rows
or sums over them, and is linear in one number, the gradient of the loss.

Counts: the ops that `_follow` knows. Ignores: stretches that end otherwise than in sums, and float16, whose gradients
without the factor of a gradient scaler would be rounded to zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from tracer.record.program import GraphOp, Program, is_random
from tracer.torch_api import OpOverload
from traces.records.stretch import PRODUCT, ROWS, SUM, WHOLE, Result, Stretch

aten = torch.ops.aten
PRODUCTS: Final = (aten.mm, aten.addmm)
VIEWS: Final = (aten.view, aten._unsafe_view, aten.reshape)
COPIES: Final = (aten.alias, aten.clone, aten.detach, aten._to_copy, aten.contiguous)
ALONG_ONE: Final = {  # pointwise but for one dimension, and which argument names it
    aten._softmax: 1,
    aten._log_softmax: 1,
    aten._softmax_backward_data: 2,
    aten._log_softmax_backward_data: 2,
    aten.gather: 1,
    aten.scatter_add: 1,
}
SUMS: Final = (aten.sum, aten.mean)
ALONG: Final = (aten.logsumexp, aten.amax, aten.amin)
PARTS: Final = (aten.slice, aten.select)
PART_BACKWARDS: Final = (aten.slice_backward, aten.select_backward)
ZEROS: Final = {aten.full: 0, aten.zeros: 0, aten.new_zeros: 1}  # and which argument has the sizes
SIZES: Final = {
    **dict.fromkeys((*VIEWS, *PART_BACKWARDS, aten.expand), 1),
    **ZEROS,
}  # of all that are told sizes
STRAIGHT: Final = (  # what they make is proportional to what they take
    *VIEWS, *COPIES, *SUMS, *PARTS, *PART_BACKWARDS, aten.neg, aten.t, aten.transpose, aten.permute, aten.unsqueeze,
    aten.squeeze, aten.expand,
)  # fmt: skip
MEAN_LOSS: Final = 1  # torch's number of the reduction
WIDE: Final = 2  # a value is wide if its rows have at least one of so many parts of the widest's elements
SHARE: Final = 8  # a product is looked at if its size is at least one of so many parts of the largest value's


@dataclass(frozen=True, slots=True)
class Axis:
    """Where the rows of a value lie: `span` dimensions from `dim` on, which have `unit` elements a row together."""

    dim: int
    span: int = 1
    unit: int = 1

    @property
    def dims(self) -> range:
        return range(self.dim, self.dim + self.span)


class _NoStretch(Exception):
    """An op on the way does not work on rows alone."""


@dataclass(eq=False, kw_only=True)
class Found:
    """A stretch as nodes: what the executor makes tiles of."""

    product: fx.Node
    rows: int
    unit: int  # elements a row of the product's first dimension
    body: list[fx.Node] = field(default_factory=list)
    axes: dict[fx.Node, Axis | None] = field(default_factory=dict)  # of the body's values; None: whole
    sums: dict[fx.Node, str] = field(default_factory=dict)  # SUM or PRODUCT
    means: set[fx.Node] = field(default_factory=set)  # of the sums, those that are means over rows
    losses: dict[fx.Node, fx.Node] = field(
        default_factory=dict
    )  # cross entropies -> the weight of their targets
    inputs: dict[fx.Node, Axis | None] = field(default_factory=dict)  # None: taken whole
    factor: fx.Node | None = None
    results: list[fx.Node] = field(default_factory=list)  # sums that forward makes
    gradients: list[fx.Node] = field(default_factory=list)  # but for the factor
    outputs: tuple[int, ...] = ()  # numbers of the model's outputs that are rows of the body

    def axis(self, n: fx.Node) -> Axis | None:
        return self.axes.get(n) or self.inputs.get(n)

    def grows(self, n: fx.Node) -> str:
        if n in self.sums:
            return self.sums[n]
        return ROWS if self.axes.get(n) else WHOLE

    def record(self, program: Program, ids: Sequence[int]) -> Stretch:
        """The stretch in ids of a trace; `ids`: op of the program -> op of the trace."""
        op_of = {n: i for i, op in enumerate(program.ops) for n in (op.node, *op.parts)}
        grows: dict[int, str] = {}
        for n in self.body:
            if op_of[n] not in grows or n in self.sums:
                grows[op_of[n]] = self.grows(n)

        def place(n: fx.Node) -> tuple[int, int]:
            return ids[op_of[n]] if n in op_of else -1, program.storage_of[n][0]

        def result(n: fx.Node) -> Result:
            op, storage = place(n)
            return Result(op=op, storage=storage, grows=self.grows(n))

        return Stretch(
            storage=program.storage_of[self.product][0],
            rows=self.rows,
            body=tuple((ids[i], how) for i, how in grows.items()),
            inputs=tuple(place(n) for n in self.inputs),
            losses=tuple(result(n) for n in self.results),
            gradients=tuple(result(n) for n in self.gradients),
            weights=tuple(_elements(x.args[1]) for x in self.losses),
            outputs=self.outputs,
        )


def stretches(program: Program) -> tuple[Found, ...]:
    """The stretches of a program, the widest first; no two have an op in common."""
    if program.captured.numbers or not program.captured.grad_outputs:
        return ()
    made = [row.nbytes for row in program.storages if row.producer >= 0]
    least = max(made, default=0) // SHARE
    products = [
        op for op in program.ops[: program.forward_ops]
        if _packet(op.node) in PRODUCTS and program.storages[program.storage_of[op.node][0]].nbytes >= max(1, least)
    ]  # fmt: skip
    products.sort(key=lambda op: -program.storages[program.storage_of[op.node][0]].nbytes)
    found: list[Found] = []
    for op in products:
        for rows, unit in _ways(op.node):
            if any(op.node in other.body for other in found):
                break
            try:
                found.append(_Search(program, op, rows, unit).found())
                break
            except _NoStretch:
                continue
    return tuple(found)


def _ways(product: fx.Node) -> Iterator[tuple[int, int]]:
    """How its rows can be counted, and the elements of its first dimension that one has: each, or each example's."""
    n = product.meta["val"].shape[0]
    yield n, 1
    for user in product.users:
        if _packet(user) in VIEWS and n % (first := user.meta["val"].shape[0]) == 0 and 1 < first < n:
            yield first, n // first


class _Search:
    """One attempt: the body grows until it is closed, or `_NoStretch` is raised."""

    def __init__(self, program: Program, product: GraphOp, rows: int, unit: int) -> None:
        self.program, self.captured = program, program.captured
        self.to = Found(product=product.node, rows=rows, unit=unit)
        self.forward = set(self.captured.forward)
        self.order = {n: k for k, n in enumerate((*self.captured.forward, *self.captured.backward))}
        self.wide = _elements(product.node) // rows // WIDE
        self.numbers: set[fx.Node] = set()  # made in backward, of one element, and not in the body

    def found(self) -> Found:
        to = self.to
        if to.rows < 2 or to.product.meta["val"].dtype is torch.float16:
            raise _NoStretch
        self._grow_forward()
        self._grow_backward()
        self._one_factor()
        to.body.sort(key=self.order.__getitem__)
        self._check_linear()
        self._close()
        return to

    def _grow_forward(self) -> None:
        to = self.to
        axis = Axis(0, 1, to.unit)
        first, *others = [a for a in to.product.args if isinstance(a, fx.Node)][-2:]
        to.inputs[first] = axis
        for other in others:
            to.inputs.setdefault(other, None)
        for bias in to.product.args[:-2]:
            if bias.meta["val"].dim() != 1:
                raise _NoStretch
            to.inputs.setdefault(bias, None)
        to.axes[to.product] = axis
        to.body.append(to.product)
        for n in self.captured.forward[self.order[to.product] + 1 :]:
            if any(
                a in to.axes or (_packet(a) is aten.nll_loss_forward and a in to.sums)
                for a in n.all_input_nodes
            ):
                self._add(n)

    def _grow_backward(self) -> None:
        for n in self.captured.backward:
            if any(self._is_wide(a) for a in n.all_input_nodes) and n not in self.to.body:
                self._pull(n)

    def _is_wide(self, n: fx.Node) -> bool:
        return self.to.axes.get(n) is not None and _elements(n) // self.to.rows >= self.wide

    def _pull(self, n: fx.Node) -> None:
        """Add a node of backward, and before it what it takes that backward makes, up to numbers."""
        for a in n.all_input_nodes:
            if a in self.to.axes or a in self.forward or a in self.to.inputs or a in self.numbers:
                continue
            if _elements(a) == 1 and (a in self.order or "tangent_of" in a.meta):
                self.numbers.add(a)
            elif a in self.order:
                self._pull(a)
        self._add(n)

    def _one_factor(self) -> None:
        """The one number of backward from which all the others that the body takes are made."""
        while len(self.numbers) > 1:
            last = max(self.numbers, key=lambda n: self.order.get(n, -1))
            if last not in self.order:
                raise _NoStretch
            self.numbers.remove(last)
            self._pull(last)
        if not self.numbers:
            raise _NoStretch
        self.to.factor = next(iter(self.numbers))

    def _add(self, n: fx.Node) -> None:
        """Add a node; raises _NoStretch if it does not work on rows alone."""
        to = self.to
        if n in to.body:
            return
        if n.target is operator.getitem:
            source = n.args[0]
            to.body.append(n)
            if _packet(source) is aten.nll_loss_forward:
                to.sums[n] = SUM
                if n.args[1] == 1:
                    to.losses[source] = n
            else:
                raise _NoStretch
            return
        if not isinstance(n.target, OpOverload) or n.target._schema.is_mutable or is_random(n):
            raise _NoStretch
        for a in n.all_input_nodes:
            if a not in to.axes and a not in to.inputs and a not in self.numbers and not self._weight(n, a):
                if a in to.sums or a in to.body:
                    raise _NoStretch  # a sum of all tiles, which none has yet
                to.inputs[a] = None
        axis = _follow(n, to, self._cut)
        to.body.append(n)
        if axis is SUMMED:
            to.sums[n] = PRODUCT if _packet(n) in PRODUCTS else SUM
            if _packet(n) is aten.mean:
                to.means.add(n)
        elif _packet(n) is not aten.nll_loss_forward:
            to.axes[n] = axis

    def _weight(self, n: fx.Node, a: fx.Node) -> bool:
        """Whether a is the weight by which the cross entropy was divided whose backward n is."""
        return _packet(n) is aten.nll_loss_backward and a in self.to.losses.values()

    def _cut(self, a: fx.Node, axis: Axis) -> None:
        """Take an input in rows."""
        known = self.to.inputs.get(a)
        shape = a.meta["val"].shape
        if a in self.to.axes or known not in (None, axis):
            raise _NoStretch
        if math.prod(shape[d] for d in axis.dims) != self.to.rows * axis.unit:
            raise _NoStretch
        if any(a in n.all_input_nodes for n in self.to.body) and known is None:
            raise _NoStretch  # another op takes it whole
        self.to.inputs[a] = axis

    def _check_linear(self) -> None:
        """Raise _NoStretch unless all that depends on the factor is proportional to it."""
        tainted = {self.to.factor}
        for n in self.to.body:
            mine = [a for a in n.all_input_nodes if a in tainted and _packet(n) not in ZEROS]
            if mine and not _proportional(n, tainted):
                raise _NoStretch
            if mine:
                tainted.add(n)
        self.tainted = tainted

    def _close(self) -> None:
        """What leaves the body, and whether forward can make all of it."""
        to = self.to
        body, outputs = set(to.body), []
        last = max(self.order[n] for n in body if n in self.forward)
        for n in to.body:
            if n in to.losses or (_packet(n) is aten.nll_loss_forward):
                continue
            outside = [u for u in n.users if u not in body and u.op != "output"]
            returned = [k for k, x in enumerate(self.captured.outputs) if x is n]
            gradient = n in self.captured.parameter_grads or n in self.captured.argument_grads
            if not (outside or returned or gradient):
                continue
            if n in self.tainted:
                to.gradients.append(n)
            elif n in to.sums:
                if any(self.order[u] < last for u in outside):
                    raise _NoStretch
                to.results.append(n)
            elif n in self.forward and not outside and not set(returned) & set(self.captured.grad_outputs):
                outputs += returned
            else:
                raise _NoStretch
        given = [*to.inputs]
        if not to.gradients or any(
            a in self.order and not (a in self.forward and self.order[a] < last) for a in given
        ):
            raise _NoStretch
        for n in to.gradients:
            own, x = self.program.storage_of[n], n.meta["val"]
            whole = len(own) == 1 and x.numel() * x.itemsize == self.program.storages[own[0]].nbytes
            if to.grows(n) == WHOLE or not whole or not x.is_contiguous():
                raise _NoStretch
        to.outputs = tuple(outputs)


# ---------------------------------------------------------------------------------------------------------------------
# What an op does to rows

SUMMED: Final = Axis(-1)  # what an op makes is a sum over the rows


def _follow(n: fx.Node, to: Found, cut: Callable[[fx.Node, Axis], None]) -> Axis | None:
    """Where the rows of what an op makes lie; SUMMED: it is a sum over them; None: it has none.

    Args:
        n: whose arguments are in the stretch, or inputs of it.
        to: the stretch.
        cut: called with an input that must be taken in rows, too, and where they lie.

    Raises:
        _NoStretch: it does not work on each row by itself.
    """
    packet = _packet(n)
    rows = {a: axis for a in n.all_input_nodes if (axis := to.axis(a)) is not None}
    if packet is aten.nll_loss_forward:
        return _cross_entropy(n, n.args[0], n.args[1], n.args[3], to, cut)
    if packet is aten.nll_loss_backward:
        return _cross_entropy(n, n.args[1], n.args[2], n.args[4], to, cut)
    if packet in PRODUCTS:
        return _product(n, to, cut)
    if packet in ZEROS or (packet is aten.expand and not rows):
        return _spread(n, to)
    if not rows:
        return None
    axis = next(iter(rows.values()))
    if packet in (*VIEWS, aten.unsqueeze, aten.squeeze):
        return _viewed(n.args[0].meta["val"].shape, axis, n.meta["val"].shape, to.rows)
    if packet in COPIES:
        return axis
    if packet in (aten.t, aten.transpose, aten.permute):
        return _permuted(n, axis)
    if packet is aten.expand:
        return _aligned(n.args[0], n, axis)
    if packet in (*PARTS, *PART_BACKWARDS):
        return _part(n, axis)
    if packet in (*SUMS, *ALONG):
        return _reduced(n, axis)
    if packet in ALONG_ONE:
        _not_along(n.args[ALONG_ONE[packet]], axis, n)
    elif torch.Tag.pointwise not in n.target.tags:
        raise _NoStretch
    return _pointwise(n, to, cut)


def _pointwise(n: fx.Node, to: Found, cut: Callable[[fx.Node, Axis], None]) -> Axis:
    rows = {a: axis for a in n.all_input_nodes if (axis := to.axis(a)) is not None}
    found = {_aligned(a, n, axis) for a, axis in rows.items()}
    if len(found) != 1:
        raise _NoStretch
    axis = found.pop()
    rank = n.meta["val"].dim()
    for a in n.all_input_nodes:
        shape = a.meta["val"].shape
        first = axis.dim - (rank - len(shape))
        along = [shape[d] for d in range(max(first, 0), first + axis.span)]
        if a not in rows and math.prod(along) != 1:
            if first < 0:
                raise _NoStretch
            cut(a, Axis(first, axis.span, axis.unit))
    return axis


def _aligned(a: fx.Node, n: fx.Node, axis: Axis) -> Axis:
    return Axis(n.meta["val"].dim() - a.meta["val"].dim() + axis.dim, axis.span, axis.unit)


def _cross_entropy(
    n: fx.Node,
    values: fx.Node,
    target: fx.Node,
    reduction: int,
    to: Found,
    cut: Callable[[fx.Node, Axis], None],
) -> Axis:
    axis = to.axis(values)
    if axis is None or axis.dim != 0 or axis.span != 1 or values.meta["val"].dim() != 2 or reduction == 0:
        raise _NoStretch
    if to.inputs.get(target) != axis:
        cut(target, axis)
    return SUMMED if _packet(n) is aten.nll_loss_forward else axis


def _product(n: fx.Node, to: Found, cut: Callable[[fx.Node, Axis], None]) -> Axis:
    if _packet(n) is not aten.mm:
        raise _NoStretch
    left, right = (to.axis(a) for a in n.args)
    if left and left.dim == 0 and left.span == 1 and right is None:
        return left
    if right and right.dim == 1 and left is None:
        return right
    inner = [(n.args[0], left, 1), (n.args[1], right, 0)]
    known = [axis.unit for _, axis, dim in inner if axis and axis.dim == dim and axis.span == 1]
    if not known or any(axis and axis.dim != dim for _, axis, dim in inner):
        raise _NoStretch
    for a, axis, dim in inner:
        if axis is None:
            cut(a, Axis(dim, 1, known[0]))
    return SUMMED


def _spread(n: fx.Node, to: Found) -> Axis | None:
    """A number spread over rows, where its first dimensions have as many."""
    shape = n.meta["val"].shape
    for span in range(1, len(shape) + 1):
        if math.prod(shape[:span]) == to.rows:
            return Axis(0, span)
    return Axis(0, 1, to.unit) if shape and shape[0] == to.rows * to.unit else None


def _viewed(before: Sequence[int], axis: Axis, after: Sequence[int], rows: int) -> Axis:
    ahead = math.prod(before[: axis.dim])
    behind = (
        math.prod(before[axis.dim + axis.span :]) * axis.unit
    )  # elements that a row has from its dimension on
    for dim in range(len(after)):
        if math.prod(after[:dim]) != ahead or (after[dim] == 1 and rows > 1):
            continue
        for span in range(1, len(after) - dim + 1):
            if math.prod(after[dim : dim + span]) == rows and math.prod(after[dim + span :]) == behind:
                return Axis(dim, span)
        unit, left = divmod(after[dim], rows)
        if not left and unit * math.prod(after[dim + 1 :]) == behind:
            return Axis(dim, 1, unit)
    raise _NoStretch


def _permuted(n: fx.Node, axis: Axis) -> Axis:
    rank = n.meta["val"].dim()
    order = list(range(rank))
    if _packet(n) is aten.permute:
        order = [d % rank for d in n.args[1]]
    elif rank > 1:
        a, b = (0, 1) if _packet(n) is aten.t else (n.args[1] % rank, n.args[2] % rank)
        order[a], order[b] = b, a
    if axis.span != 1:
        raise _NoStretch
    return Axis(order.index(axis.dim), 1, axis.unit)


def _not_along(dim: int, axis: Axis, n: fx.Node) -> None:
    if dim % n.meta["val"].dim() in axis.dims:
        raise _NoStretch


def _part(n: fx.Node, axis: Axis) -> Axis:
    """A slice or one index of a dimension that has no rows; or what is zero but for such a part."""
    packet = _packet(n)
    whole = n if packet in PART_BACKWARDS else n.args[0]
    dim = n.args[2 if packet in PART_BACKWARDS else 1] % whole.meta["val"].dim()
    one = packet in (aten.select, aten.select_backward)
    if packet in PART_BACKWARDS and one and dim <= axis.dim:
        axis = Axis(axis.dim + 1, axis.span, axis.unit)
    if dim in axis.dims:
        raise _NoStretch
    if packet is aten.select and dim < axis.dim:
        axis = Axis(axis.dim - 1, axis.span, axis.unit)
    return axis


def _reduced(n: fx.Node, axis: Axis) -> Axis:
    rank = n.args[0].meta["val"].dim()
    dims = n.args[1] if len(n.args) > 1 and n.args[1] else range(rank)
    gone = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    if gone.issuperset(axis.dims):
        if _packet(n) not in SUMS:
            raise _NoStretch
        return SUMMED
    if not gone.isdisjoint(axis.dims):
        raise _NoStretch
    stays = len(n.args) > 2 and bool(n.args[2])
    return Axis(axis.dim - (0 if stays else sum(d < axis.dim for d in gone)), axis.span, axis.unit)


def _proportional(n: fx.Node, tainted: set[Any]) -> bool:
    """Whether what an op makes grows in proportion with those of its arguments."""
    packet = _packet(n)
    mine = [a in tainted for a in n.args if isinstance(a, fx.Node)]
    if packet in (aten.mul, *PRODUCTS):
        return sum(mine) == 1
    if packet in (aten.add, aten.sub):
        return len(mine) == 2 and all(mine)
    if packet is aten.scatter_add:
        return not mine[0] and mine[-1] and _is_zero(n.args[0])
    if packet is aten.masked_fill:
        return mine[0] and n.args[2] == 0
    backward = str(packet).endswith(("_backward", "_backward_data"))
    if packet is aten.div or backward:
        return mine[0] and not any(mine[1:])
    return packet in STRAIGHT


def _is_zero(n: fx.Node) -> bool:
    packet = _packet(n)
    return packet in ZEROS and (packet is not aten.full or n.args[1] == 0)


def _packet(n: fx.Node) -> Any:
    return n.target.overloadpacket if isinstance(n.target, OpOverload) else None


def _elements(n: fx.Node) -> int:
    x = n.meta.get("val")
    return int(x.numel()) if isinstance(x, torch.Tensor) else 0

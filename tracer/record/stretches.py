"""Find the stretches of a captured graph that can run in tiles: loss heads, attention by matrix products, MLP blocks.

What is sought is a matrix product whose rows are independent of each other: each op that reads what is as wide works on
rows alone (a view, a cast, a pointwise function, a softmax along another dimension, a product with what has no rows),
or sums over them. In a loss head, the sums are the last that forward makes, and backward is linear in one number, the
gradient of the loss; so all of it runs in forward, and with it what else is as wide (a teacher's head). Any other
stretch ends where values are narrow again; its backward begins with the gradients of those, and makes again what it
reads of forward.

A mask of a dropout inside is drawn whole before the tiles, as the untouched step draws it, and taken in rows.

Counts: the ops that `_follow` knows. Ignores: other random ops; in heads float16, whose gradients without the factor
of a gradient scaler would be rounded to zero.
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
from tracer.costs.roofline import RESIZED
from tracer.record.program import GraphOp, Program, is_random
from tracer.record.rows import tensors_in
from tracer.torch_api import OpOverload
from traces.records.stretch import PRODUCT, ROWS, SUM, WHOLE, Part, Result, Stretch

aten = torch.ops.aten
DRAWS: Final = dropout_mask._opoverload.overloadpacket
PRODUCTS: Final = (aten.mm, aten.addmm)
BATCHES: Final = (aten.bmm,)
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
BY_ELEMENT: Final = {  # sums over elements of what is pointwise, and their backward; which argument names the reduction
    aten.mse_loss: 2,
    aten.smooth_l1_loss: 2,
    aten.huber_loss: 2,
    aten.binary_cross_entropy_with_logits: 4,
    aten.mse_loss_backward: 3,
    aten.smooth_l1_loss_backward: 3,
    aten.huber_loss_backward: 3,
}
ZEROS: Final = {aten.full: 0, aten.zeros: 0, aten.new_zeros: 1}  # and which argument has the sizes
SIZES: Final = {
    **dict.fromkeys((*VIEWS, *PART_BACKWARDS, aten.expand), 1),
    **ZEROS,
}  # of all that are told sizes
STRAIGHT: Final = (  # what they make is proportional to what they take
    *VIEWS, *TURNS, *COPIES, *SUMS, *PARTS, *PART_BACKWARDS, aten.neg, aten.unsqueeze, aten.squeeze, aten.expand,
)  # fmt: skip
NO_SUM: Final = 0  # torch's numbers of reductions
MEAN_LOSS: Final = 1
WIDE: Final = 2  # a value is wide if its rows have at least one of so many parts of the widest's elements
# Bytes of a model's output for which its loss is captured once more with it, and of what share of the largest value's.
LEAST: Final = 1 << 14
SHARE: Final = 32


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


@dataclass(frozen=True, slots=True)
class Call:
    """Nodes that run tile by tile in one call, in order; what they take from outside, and what they leave."""

    body: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


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
    # Cross entropies -> the weight of their targets.
    losses: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inputs: dict[fx.Node, Axis | None] = field(default_factory=dict)  # None: taken whole
    factor: fx.Node | None = None
    results: list[fx.Node] = field(default_factory=list)  # that forward makes: sums; not of a head, rows
    gradients: list[fx.Node] = field(default_factory=list)  # of a head, but for the factor
    outputs: tuple[int, ...] = ()  # numbers of the model's outputs that are rows of the body
    parts: tuple[Call, ...] = ()  # of a head one; forward and backward

    def axis(self, n: fx.Node) -> Axis | None:
        return self.axes.get(n) or self.inputs.get(n)

    def grows(self, n: fx.Node) -> str:
        if n in self.sums:
            return self.sums[n]
        return ROWS if self.axes.get(n) else WHOLE

    def drawn(self) -> set[fx.Node]:
        """The masks among the inputs for which a value of the body is drawn, of which they need the shape alone."""
        taken = (n for call in self.parts for n in call.inputs if _packet(n) is DRAWS)
        return {n for n in taken if n.args[0] in self.axes}

    def record(self, program: Program, ids: Sequence[int]) -> Stretch:
        """The stretch in ids of a trace; `ids`: op of the program -> op of the trace."""
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
            weights=tuple(_elements(x.args[1]) for x in self.losses),
            outputs=self.outputs,
            backward=others[0] if others else None,
        )


def stretches(program: Program) -> tuple[Found, ...]:
    """The stretches of a program, the widest first; no two have an op in common."""
    if program.captured.numbers or not program.captured.grad_outputs:
        return ()

    def nbytes(op: GraphOp) -> int:
        return program.storages[program.storage_of[op.node][0]].nbytes

    forward = program.ops[: program.forward_ops]
    products = [op for op in forward if _packet(op.node) in (*PRODUCTS, *BATCHES) and nbytes(op)]
    kinds: tuple[type[_Head | _Inner], ...] = (_Head, _HeadAlone, _Inner)
    taken: set[fx.Node] = set()
    found: list[Found] = []
    for op in sorted(products, key=lambda op: -nbytes(op)):
        for kind, (rows, unit) in product(kinds, _ways(op.node)):
            if op.node in taken or rows < 2:
                continue
            try:
                stretch = kind(program, op, rows, unit).found()
            except _NoStretch:
                continue
            if taken.isdisjoint(stretch.body):
                found.append(stretch)
                taken.update(stretch.body)
    return tuple(found)


def may_have_head(program: Program) -> bool:
    """Whether code around the model takes what a matrix product may have made, as large as heads are."""
    least = max((row.nbytes for row in program.storages if row.producer >= 0), default=0) // SHARE
    captured = program.captured
    outputs = [captured.outputs[k] for k in captured.grad_outputs]
    widest = max((_elements(n) for n in outputs if n.meta["val"].nbytes >= max(LEAST, least)), default=0)
    products = (_elements(n) for n in captured.forward if _packet(n) in PRODUCTS)
    return bool(widest) and max(products, default=0) >= widest


def _ways(of: fx.Node) -> Iterator[tuple[int, int]]:
    """How its rows can be counted, and the elements of its first dimension that one has: each, or each example's."""
    n = of.meta["val"].shape[0]
    yield n, 1
    for user in of.users:
        if _packet(user) in VIEWS and n % (first := user.meta["val"].shape[0]) == 0 and 1 < first < n:
            yield first, n // first


class _Search:
    """One attempt: the body grows until it is closed, or `_NoStretch` is raised."""

    def __init__(self, program: Program, op: GraphOp, rows: int, unit: int) -> None:
        self.program, self.captured = program, program.captured
        self.to = Found(product=op.node, rows=rows, unit=unit)
        self.forward, self.backward = set(self.captured.forward), set(self.captured.backward)
        self.order = {n: k for k, n in enumerate((*self.captured.forward, *self.captured.backward))}
        self.wide = _elements(op.node) // rows // WIDE
        self.inside: set[fx.Node] = set()  # the body
        self.numbers: set[fx.Node] = set()  # made in backward, of one element, and not in the body

    def _seed(self, n: fx.Node) -> None:
        """Add a product of which each row is made of one of its first argument, of a batch of both arguments."""
        to, axis = self.to, Axis(0, 1, self.to.unit)
        *biases, left, right = (a for a in n.args if isinstance(a, fx.Node))
        if left is right or any(bias.meta["val"].dim() != 1 for bias in biases):
            raise _NoStretch
        cut = (left, right) if _packet(n) in BATCHES else (left,)
        for a in (left, right, *biases):
            if a in cut:
                self._cut(a, axis)
            elif to.axis(a) is not None or a in to.sums:
                raise _NoStretch
            elif a not in to.axes:
                to.inputs[a] = None
        to.axes[n] = axis
        self._put(n)

    def _put(self, n: fx.Node) -> None:
        if n in self.to.inputs:
            raise _NoStretch  # an op of the body takes it from outside
        self.to.body.append(n)
        self.inside.add(n)

    def _is_wide(self, n: fx.Node) -> bool:
        return self.to.axes.get(n) is not None and self._is_large(n)

    def _is_large(self, n: fx.Node) -> bool:
        return _elements(n) // self.to.rows >= self.wide

    def _add(self, n: fx.Node) -> None:
        """Add a node; raises _NoStretch if it does not work on rows alone."""
        to = self.to
        if n in self.inside:
            return
        if _packet(n) is DRAWS:
            self._draw(n)
            return
        if n.target is operator.getitem:
            source = n.args[0]
            self._put(n)
            if _packet(source) is aten.split:
                to.axes[n] = to.axis(source)
            elif _packet(source) not in LOSSES:
                raise _NoStretch
            elif n.args[1] == 0 and source.args[3] == NO_SUM:
                to.axes[n] = to.axis(source.args[0])
            else:
                to.sums[n] = SUM
                to.losses |= {source: n} if n.args[1] == 1 else {}
            return
        if not isinstance(n.target, OpOverload) or n.target._schema.is_mutable or is_random(n):
            raise _NoStretch
        for a in n.all_input_nodes:
            if a not in to.axes and a not in to.inputs and a not in self.numbers and not self._weight(n, a):
                if a in to.sums or a in self.inside:
                    raise _NoStretch  # a sum of all tiles, which none has yet
                to.inputs[a] = None
        axis = _follow(n, to, self._cut)
        self._put(n)
        if axis is SUMMED or _packet(n) in LOSSES:
            to.sums[n] = PRODUCT if _packet(n) in PRODUCTS else SUM
            if _packet(n) is aten.mean or (_packet(n) in BY_ELEMENT and reduction(n) == MEAN_LOSS):
                to.means.add(n)
        else:
            to.axes[n] = axis

    def _draw(self, n: fx.Node) -> None:
        """Take the mask of a dropout in rows; of what is dropped it needs the shape alone."""
        (x, _), axis = n.args, self.to.axis(n.args[0])
        if axis is None or x not in self.inside or not x.meta["val"].is_contiguous():
            raise _NoStretch
        _Search._cut(self, n, axis)

    def _weight(self, n: fx.Node, a: fx.Node) -> bool:
        """Whether a is the weight by which the cross entropy was divided whose backward n is."""
        return _packet(n) in LOSS_BACKWARDS and a in self.to.losses.values()

    def _cut(self, a: fx.Node, axis: Axis) -> None:
        """Take an input in rows."""
        if self.to.axis(a) == axis:
            return
        if self.to.axis(a) is not None or a in self.to.axes or not self._has_rows(a, axis):
            raise _NoStretch
        shape, strides = a.meta["val"].shape, a.meta["val"].stride()
        if any(strides[d] != shape[d + 1] * strides[d + 1] for d in axis.dims[:-1]):
            raise _NoStretch  # rows that are no one dimension in memory
        if any(a in n.all_input_nodes for n in self.to.body):
            raise _NoStretch  # another op takes it whole
        self.to.inputs[a] = axis

    def _has_maker(self, a: fx.Node) -> bool:
        """Whether an op makes a value that takes memory of its own."""
        x = a.meta["val"]
        spread = x.numel() * x.itemsize > self.program.storages[self.program.storage_of[a][0]].nbytes
        return isinstance(a.target, OpOverload) and not spread

    def _with_maker(self, a: fx.Node, axis: Axis) -> None:
        """Take a value in rows with what makes it."""
        to, packet = self.to, _packet(a)
        if to.inputs.pop(a, None) is not None or any(a in n.all_input_nodes for n in to.body):
            raise _NoStretch
        if packet in (*PRODUCTS, *BATCHES):
            self._seed(a)
        else:
            source = a.args[0]
            if packet in VIEWS:
                self._cut(source, _viewed(a.meta["val"].shape, axis, source.meta["val"].shape, to.rows))
            elif packet in TURNS:
                self._cut(source, _permuted(a, axis, back=True))
            else:
                for b in a.all_input_nodes:
                    if self._has_rows(b, same := _aligned(a, b, axis)):
                        self._cut(b, same)
            self._add(a)
        if to.axes.get(a) != axis:
            raise _NoStretch

    def _has_rows(self, a: fx.Node, axis: Axis) -> bool:
        shape = a.meta["val"].shape
        return axis.dim >= 0 and math.prod(shape[axis.dim : axis.dims.stop]) == self.to.rows * axis.unit

    def _leaves(self, n: fx.Node) -> tuple[list[fx.Node], list[int], bool]:
        """Who takes a node of the body outside: nodes, numbers of outputs, the optimizer as a gradient."""
        drawn = [u for u in n.users if _packet(u) is DRAWS and u in self.to.inputs]
        outside = [u for u in n.users if u not in self.inside and u not in drawn and u.op != "output"]
        returned = [k for k, x in enumerate(self.captured.outputs) if x is n]
        return outside, returned, n in self.captured.parameter_grads or n in self.captured.argument_grads

    def _whole(self, n: fx.Node) -> fx.Node:
        """What a node of the body is a view of in another shape, if that is of the body too; else the node: a result
        has the shape in which its storage was made, and views of it stay outside."""
        storage_of = self.program.storage_of
        while _packet(n) in VIEWS and n.args[0] in self.inside and storage_of[n] == storage_of[n.args[0]]:
            n = n.args[0]
        return n

    def _call(self, results: Sequence[fx.Node], phase: set[fx.Node]) -> Call:
        """What of the body makes the results, in one call among the nodes of a phase. Raises _NoStretch if a result is
        no whole storage, or that of another one, or something takes one before all inputs are there.
        """
        for n in results:
            own, x = self.program.storage_of[n], n.meta["val"]
            nbytes = x.numel() * x.itemsize
            # A loss lies where its elements were added up, as large as those.
            whole = len(own) == 1 and (self.program.storages[own[0]].nbytes == nbytes or is_resized(n))
            if self.to.grows(n) == WHOLE or not whole or not x.is_contiguous():
                raise _NoStretch
        if len({self.program.storage_of[n] for n in results}) < len(results):
            raise _NoStretch
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
        users = {u for n in self.to.body if self._whole(n) in results for u in self._leaves(n)[0]} & phase
        first = min(map(self.order.__getitem__, users), default=len(self.order))
        if any(self.order[a] >= first for a in phase.intersection(call.inputs)):
            raise _NoStretch
        return call


class _Head(_Search):
    """A stretch whose forward ends in sums, one of them the loss."""

    makers = True  # of other wide values are in the stretch, too

    def found(self) -> Found:
        to = self.to
        if to.product.meta["val"].dtype is torch.float16 or _packet(to.product) in BATCHES:
            raise _NoStretch
        self._seed(to.product)
        seen = 0
        while seen < len(to.body):  # what is taken with its maker may have been used before
            seen = len(to.body)
            for n in self.captured.forward[min(map(self.order.__getitem__, to.body)) + 1 :]:
                if any(a in to.axes or (_packet(a) in LOSSES and a in to.sums) for a in n.all_input_nodes):
                    self._add(n)
            if seen < len(to.body):
                continue
            for n in self.captured.backward:
                if any(self._is_wide(a) for a in n.all_input_nodes) and n not in self.inside:
                    self._pull(n)
        self._one_factor()
        to.body.sort(key=self.order.__getitem__)
        self._check_linear()
        self._close()
        return to

    def _cut(self, a: fx.Node, axis: Axis) -> None:
        """Take an input in rows; with what makes it a wide one (a teacher's logits), and a view that is later than
        something that takes a loss already."""
        to, at = self.to, self.order.get(a, -1)
        if (
            self.makers
            and a in self.forward
            and to.axis(a) is None
            and self._is_large(a)
            and self._has_maker(a)
        ):
            self._with_maker(a, axis)
            return
        late = any(self.order.get(u, at) < at for n in to.sums for u in n.users)
        if not late or _packet(a) not in VIEWS or to.axis(a) is not None:
            super()._cut(a, axis)
            return
        if a in to.axes or any(a in n.all_input_nodes for n in to.body):
            raise _NoStretch
        to.inputs.pop(a, None)
        source = a.args[0]
        self._cut(source, _viewed(a.meta["val"].shape, axis, source.meta["val"].shape, to.rows))
        self._add(a)
        if to.axes.get(a) != axis:
            raise _NoStretch

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
        to, outputs = self.to, []
        for n in to.body:
            if _packet(n) in LOSSES:
                continue
            outside, returned, gradient = self._leaves(n)
            if not (outside or returned or gradient):
                continue
            if n in self.tainted:
                to.gradients.append(self._whole(n))
            elif n in to.sums:
                to.results.append(n)
            elif n in self.forward and not outside and not set(returned) & set(self.captured.grad_outputs):
                outputs += returned
            else:
                raise _NoStretch
        to.gradients = list(dict.fromkeys(to.gradients))
        if not to.gradients or not self.backward.isdisjoint(to.inputs):
            raise _NoStretch
        to.outputs = tuple(outputs)
        to.parts = (self._call([*to.results, *to.gradients], self.forward),)


class _HeadAlone(_Head):
    """One to which what else is wide comes from outside, since something else takes it, or its rows are not its own."""

    makers = False


class _Inner(_Search):
    """A stretch between narrow values, whose backward makes again what it reads of forward."""

    def found(self) -> Found:
        to = self.to
        self.after: set[fx.Node] = set()  # the body of one phase, and what depends on it there
        self.copied: set[fx.Node] = set()  # of the body, what stays outside as well, if that takes it
        self._seed(to.product)
        for phase in (self.captured.forward, self.captured.backward):
            self.after.clear()
            for n in phase:
                if any(self._is_wide(a) for a in n.all_input_nodes):
                    self._add(n)
                if not self.after.isdisjoint((n, *n.all_input_nodes)):
                    self.after.add(n)
        to.body.sort(key=self.order.__getitem__)
        for n in to.body:
            outside, *returned = self._leaves(n)
            if (outside and n not in self.copied) or any(returned):
                if self._is_wide(n):
                    raise _NoStretch
                (to.results if n in self.forward else to.gradients).append(n)
        if not to.results or not to.gradients:
            raise _NoStretch
        to.parts = (self._call(to.results, self.forward), self._call(to.gradients, self.backward))
        if len(to.body) > len({n for call in to.parts for n in call.body}):
            raise _NoStretch  # something that nobody takes
        return to

    def _put(self, n: fx.Node) -> None:
        super()._put(n)
        self.after.add(n)

    def _add(self, n: fx.Node) -> None:
        if n in self.inside:
            return
        of_split = n.target is operator.getitem and _packet(n.args[0]) is aten.split
        if (n.target is operator.getitem and not of_split) or _packet(n) in (*LOSSES, *LOSS_BACKWARDS):
            raise _NoStretch
        for a in n.all_input_nodes:
            if a in self.after and a not in self.inside:
                self._add(a)
        super()._add(n)
        for a in n.all_input_nodes:  # what backward makes of nothing, and views, whose place may be later
            whole = a in self.backward and a in self.to.inputs and self.to.inputs[a] is None
            if whole and (not a.all_input_nodes or _packet(a) in (*VIEWS, *TURNS)):
                del self.to.inputs[a]
                self.copied.add(a)
                self._add(a)
                if self.to.axes.get(a) is not None:
                    raise _NoStretch

    def _cut(self, a: fx.Node, axis: Axis) -> None:
        """Take a value in rows: as an input, or with what makes it, if that is wide or a view of backward."""
        to = self.to
        alone = sum(u in self.forward for u in a.users) == 1
        made = self._has_maker(a) and (a in self.backward or (a in self.forward and alone))
        turned = a in self.backward and _packet(a) in (*VIEWS, *TURNS) and not self._is_large(a)
        if to.axis(a) == axis:
            return
        if a in to.axes or not made or not (turned or self._is_large(a)):
            super()._cut(a, axis)
            return
        if turned:
            self.copied.add(a)
        self._with_maker(a, axis)


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
    if packet in (*LOSSES, *LOSS_BACKWARDS):
        values, target = n.args[:2] if packet in LOSSES else n.args[1:3]
        return _cross_entropy(values, target, to, cut)
    if packet in PRODUCTS:
        return _product(n, to, cut)
    if packet in BATCHES:
        return _batch(n, to, cut)
    if packet in ZEROS or (packet is aten.expand and not rows):
        return _spread(n, to)
    if not rows:
        return None
    axis = next(iter(rows.values()))
    if packet in (*VIEWS, aten.unsqueeze, aten.squeeze):
        return _viewed(n.args[0].meta["val"].shape, axis, n.meta["val"].shape, to.rows)
    if packet in COPIES:
        return axis
    if packet in TURNS:
        return _permuted(n, axis)
    if packet is aten.expand:
        return _aligned(n.args[0], n, axis)
    if packet in (*PARTS, *PART_BACKWARDS):
        return _part(n, axis)
    if packet in (*SUMS, *ALONG):
        return _reduced(n, axis)
    if packet in BY_ELEMENT:
        axis = _pointwise(n, to, cut)
        return SUMMED if not is_backward(packet) and reduction(n) != NO_SUM else axis
    if packet in ALONG_ONE:
        place = ALONG_ONE[packet]
        dim = n.args[place] if place < len(n.args) else 0
        along = dim % n.all_input_nodes[0].meta["val"].dim() in axis.dims
    else:
        along = torch.Tag.pointwise not in n.target.tags
    if along:
        raise _NoStretch
    return axis if packet is aten.split else _pointwise(n, to, cut)


def is_backward(packet: Any) -> bool:
    return str(packet).endswith(("_backward", "_backward_data"))


def is_resized(n: fx.Node) -> bool:
    """Whether what a node makes is a number in the memory of what was added up."""
    return _packet(n) in BY_ELEMENT and str(n.target) in RESIZED and reduction(n) != NO_SUM


def reduction(n: fx.Node) -> int:
    """torch's number for how a loss over elements is put together."""
    place = BY_ELEMENT[_packet(n)]
    return int(n.args[place]) if place < len(n.args) else MEAN_LOSS


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
            cut(a, replace(axis, dim=first))
    return axis


def _aligned(a: fx.Node, n: fx.Node, axis: Axis) -> Axis:
    return replace(axis, dim=n.meta["val"].dim() - a.meta["val"].dim() + axis.dim)


def _cross_entropy(values: fx.Node, target: fx.Node, to: Found, cut: Callable[[fx.Node, Axis], None]) -> Axis:
    """Rows are examples, or of images (examples x classes x height x width) the first dimension alone."""
    axis = to.axis(values)
    if axis is None or axis.dim != 0 or axis.span != 1:
        raise _NoStretch
    cut(target, axis)
    return axis


def _product(n: fx.Node, to: Found, cut: Callable[[fx.Node, Axis], None]) -> Axis:
    *biases, first, second = n.args
    left, right = to.axis(first), to.axis(second)
    if biases and (right or biases[0].meta["val"].dim() != 1 or to.axis(biases[0])):
        raise _NoStretch
    if left and left.dim == 0 and left.span == 1 and right is None:
        return left
    if right and right.dim == 1 and left is None:
        return right
    inner = [(first, left, 1), (second, right, 0)]
    known = [axis.unit for _, axis, dim in inner if axis and axis.dim == dim and axis.span == 1]
    if biases or not known or any(axis and axis.dim != dim for _, axis, dim in inner):
        raise _NoStretch
    for a, axis, dim in inner:
        if axis is None:
            cut(a, Axis(dim, 1, known[0]))
    return SUMMED


def _batch(n: fx.Node, to: Found, cut: Callable[[fx.Node, Axis], None]) -> Axis:
    """A batch of products whose rows are batches."""
    axis = Axis(0, 1, next((x.unit for a in n.args if (x := to.axis(a)) is not None), 1))
    for a in n.args:
        if to.axis(a) is None:
            cut(a, axis)
        elif to.axis(a) != axis:
            raise _NoStretch
    return axis


def _spread(n: fx.Node, to: Found) -> Axis | None:
    """A number spread over rows, where its first dimensions have as many."""
    shape = n.meta["val"].shape
    if any(_elements(a) != 1 for a in n.all_input_nodes if _packet(n) is aten.expand):
        raise _NoStretch
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
    raise _NoStretch


def _permuted(n: fx.Node, axis: Axis, *, back: bool = False) -> Axis:
    """Where the rows are behind a permutation; `back`: before it, if they are there behind it."""
    rank = n.meta["val"].dim()
    order = list(range(rank))
    if _packet(n) is aten.permute:
        order = [d % rank for d in n.args[1]]
    elif rank > 1:
        a, b = (0, 1) if _packet(n) is aten.t else (n.args[1] % rank, n.args[2] % rank)
        order[a], order[b] = b, a
    if axis.span != 1:
        raise _NoStretch
    return Axis(order[axis.dim] if back else order.index(axis.dim), 1, axis.unit)


def _part(n: fx.Node, axis: Axis) -> Axis:
    """A slice or one index of a dimension that has no rows; or what is zero but for such a part."""
    packet = _packet(n)
    back = packet in PART_BACKWARDS
    dim = n.args[2 if back else 1] % (n if back else n.args[0]).meta["val"].dim()
    if packet is aten.select_backward and dim <= axis.dim:
        axis = replace(axis, dim=axis.dim + 1)
    if dim in axis.dims:
        raise _NoStretch
    return replace(axis, dim=axis.dim - 1) if packet is aten.select and dim < axis.dim else axis


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
    return axis if stays else replace(axis, dim=axis.dim - sum(d < axis.dim for d in gone))


def _proportional(n: fx.Node, tainted: set[Any]) -> bool:
    """Whether what an op makes grows in proportion with those of its arguments."""
    packet = _packet(n)
    mine = [a in tainted for a in n.args if isinstance(a, fx.Node)]
    if packet in (aten.mul, aten.mm, aten.bmm):
        return sum(mine) == 1
    if packet in (aten.add, aten.sub):
        return len(mine) == 2 and all(mine)
    if packet is aten.scatter_add:
        return not mine[0] and mine[-1] and _is_zero(n.args[0])
    if packet is aten.masked_fill:
        return mine[0] and n.args[2] == 0
    if packet is aten.where:
        return not mine[0] and all(m or _is_zero(a) for m, a in zip(mine[1:], n.args[1:], strict=True))
    if packet is aten.div or is_backward(packet):
        return mine[0] and not any(mine[1:])
    return packet in STRAIGHT


def _is_zero(n: fx.Node) -> bool:
    packet = _packet(n)
    if packet is aten.scalar_tensor:
        return bool(n.args[0] == 0)
    return packet in ZEROS and (packet is not aten.full or n.args[1] == 0)


def _packet(n: fx.Node) -> Any:
    return n.target.overloadpacket if isinstance(n.target, OpOverload) else None


def _elements(n: fx.Node) -> int:
    x = n.meta.get("val")
    return sum(int(part.numel()) for part in tensors_in(x))

"""Build the graph of an edited trace: the captured nodes in the order of its rows, and the ops that levers put there.

The edited trace says everything (`simulator.levers`): which ops run, in which order, and what each is called with. This
module copies the node of an op that was captured, and makes one of an op that a lever added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, getitem
from typing import Any

import torch
from torch import fx

import executor.codecs.host
import executor.codecs.payloads
import executor.inverted.ops  # noqa: F401 - all three define ops of lowtide's
from executor.graphs.tiles import Tiles
from simulator.core.formats import HOLDS
from simulator.levers import edited
from simulator.levers.edit import Argument, Editing, Factor, InTiles, Layout, Op, Taken, Value
from tracer.capture.captured import Captured
from tracer.record.program import GraphOp, Program, program_of
from tracer.record.rows import tensors_in
from tracer.record.tiles import Found, found_in
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import FORWARD

# What the graph returns takes no value instead.
NOWHERE = Op(name="", target="", phase="", module="", time_ns=0)


def rewritten(program: Program, rewrites: Sequence[Rewrite]) -> Program:
    """The program of the step as rewrites change it, whose storages are those of the program as it was captured. Raises
    PlanError if a rewrite is of no known kind, cannot be made in this graph, or makes another step than the simulator
    has for it (a defect).
    """
    if not rewrites:
        return program
    if program.captured.known:
        raise PlanError("a step that is rewritten is captured for each size.")
    found, base = found_in(program), program.trace()
    recorded = tuple(x.record(program, range(len(program.ops))) for x in found)
    editing = edited(Editing(replace(base, meta=replace(base.meta, stretches=recorded))), rewrites)
    made = program_of(_Building(program, editing, found).captured())
    if made.fingerprint() != editing.trace().meta.graph_fingerprint:
        raise PlanError("the rewritten step is not the one that was simulated; please report this.")
    return made


class _Building:
    """A graph while it is built: what stands for each captured node, and what ops make that levers added."""

    def __init__(self, program: Program, editing: Editing, found: Sequence[Found]) -> None:
        self.program, self.editing = program, editing
        self.found = {program.storage_of[x.product][0]: x for x in found}
        self.op_of = {n: editing.op[i] for i, op in enumerate(program.ops) for n in (op.node, *op.parts)}
        self.graph = fx.Graph()
        self.node: dict[fx.Node, fx.Node] = {}
        # By the op that a lever added, and what of it: a value of several, a captured node that it repeats; None: all.
        self.made: dict[tuple[Op, Value | fx.Node | None], fx.Node] = {}
        for n in program.captured.graph_module.graph.nodes:
            if n.op in ("placeholder", "get_attr"):
                self.node[n] = self.graph.node_copy(n)

    def captured(self) -> Captured:
        """Return what was captured, so changed."""
        for op in self.editing.order:
            self._put(op)
        before, outputs = self.program.captured, []
        not_made = dict(before.not_made)
        for k, n in enumerate(before.outputs):
            op = self.editing.standing(self.op_of[n]) if n in self.op_of else NOWHERE
            if op is NOWHERE or self.editing.there(op):
                outputs.append(self._now(NOWHERE, n))
                continue
            tiles = self.editing.instead_of(op)
            outputs.append(self.made[tiles, tiles.writes[0]])
            number = tiles.target.removeprefix("lowtide.tiles_")
            why = f"a plan that runs the loss head in {number} tiles does not make it"
            not_made[k] = f"output {k} of the model does not exist whole: {why}"
        groups = before.parameter_grads, before.argument_grads
        grads: Any = fx.node.map_arg(groups, lambda g: self._now(NOWHERE, g))
        self.graph.output((tuple(outputs), *grads))
        self.graph.lint()
        calls = [n for n in self.graph.nodes if n.op == "call_function"]
        late = {n for n in calls if n.meta.get("partitioner_tag") == "is_backward"}
        return replace(
            before,
            graph_module=fx.GraphModule(before.graph_module, self.graph),
            forward=tuple(n for n in calls if n not in late),
            backward=tuple(n for n in calls if n in late),
            outputs=tuple(outputs),
            parameter_grads=grads[0],
            argument_grads=grads[1],
            not_made=not_made,
        )

    def _put(self, op: Op) -> None:
        """Add the nodes of a row."""
        like = self.program.ops[op.source]
        if op.called_with is None:
            self._copy(op, like)
        elif isinstance(op.called_with[0], InTiles):
            self._put_tiles(op, like.node, op.called_with[0])
        else:
            args = tuple(x for given in op.called_with for x in self._argument(op, like.node, given))
            target = attrgetter(op.target)(torch.ops)
            if HOLDS.keys() & {a for a in args if isinstance(a, str)}:
                _check_held(like.node, args[1])
            made = self._call(op, like.node, target, args)
            vals = fx.node.map_arg(args, lambda n: n.meta["val"])
            with next(tensors_in(like.node.meta["val"])).fake_mode:
                made.meta["val"] = target(*vals)
            was = [x.value for x in op.called_with if isinstance(x, Layout)]
            here = self._is_its_source(op)
            if here or was:
                old = like.node if here else self._maker(was[0])
                a, b = made.meta["val"], old.meta["val"]
                if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
                    raise PlanError(f"{made.name} is laid out otherwise than {old.name}; please report this.")
            if here:
                self.node[like.node] = made
            else:
                self.made[op, None] = made

    def _copy(self, op: Op, like: GraphOp) -> None:
        """Repeat what was captured, with the picks from its tuple."""
        copies: dict[fx.Node, fx.Node] = {}
        for n in (like.node, *like.parts):
            copies[n] = self.graph.node_copy(n, lambda a: copies[a] if a in copies else self._now(op, a))
            copies[n].meta = {**n.meta, "partitioner_tag": _tag(op)}
        if self._is_its_source(op):
            self.node |= copies
        else:
            copies[like.node].name = op.name
            self.made |= {(op, n): copy for n, copy in copies.items()}

    def _put_tiles(self, op: Op, like: fx.Node, tiles: InTiles) -> None:
        found = self.found[tiles.storage]
        call = found.parts[tiles.part]
        inputs = tuple(self._now(op, n) for n in call.inputs)
        made = self._call(op, like, Tiles(found, call, tiles.number), inputs)
        made.meta.pop("val", None)
        for k, (n, value) in enumerate(zip(call.results, op.writes, strict=True)):
            pick = self.graph.call_function(getitem, (made, k))
            pick.name = n.name if value is self.editing.value[value.at] else f"{n.name}_in_tiles"
            pick.meta = {**n.meta, "partitioner_tag": _tag(op)}
            self.made[op, value] = pick

    def _call(self, op: Op, like: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
        made = self.graph.call_function(target, args)
        made.name, made.meta = op.name, {**like.meta, "partitioner_tag": _tag(op)}
        return made

    def _argument(self, op: Op, like: fx.Node, given: Any) -> Iterator[Any]:
        """Return what an argument of an op that a lever added is in the graph."""
        if isinstance(given, Taken):
            yield self._value(op, given.op, given.value, given.value) or self.node[self._maker(given.value)]
        elif isinstance(given, Argument):
            a = like.args[given.number]
            yield self._now(op, a) if isinstance(a, fx.Node) else a
        elif isinstance(given, Layout):
            val = self._maker(given.value).meta["val"]
            yield from (list(val.shape), list(val.stride()), val.dtype)
        elif isinstance(given, Factor):
            factor = self.found[given.head].factor
            assert factor is not None
            yield self._now(op, factor)
        else:
            yield given

    def _now(self, by: Op, a: fx.Node) -> fx.Node:
        """Return what an op takes for a node that was captured."""
        if a not in self.op_of:
            return self.node[a]
        value = self.editing.value[self.program.storage_of[a][0]]
        return self._value(by, self.op_of[a], value, a) or self.node[a]

    def _value(self, by: Op, of: Op, value: Value, a: Value | fx.Node) -> fx.Node | None:
        """Return what an op takes for the value of another that lies in a storage, or which a captured node names;
        None: that itself, as it was captured.
        """
        of = self.editing.standing(of)
        of = self.editing.standing((by.instead or {}).get((of, value), of))
        return self.made.get((of, a)) or self.made.get((of, value)) or self.made.get((of, None))

    def _maker(self, value: Value) -> fx.Node:
        """The captured node that makes a storage."""
        made = self.program.ops[self.program.storages[value.at].producer]
        return next(n for n in (*made.parts, made.node) if self.program.storage_of[n] == (value.at,))

    def _is_its_source(self, op: Op) -> bool:
        return self.editing.op[op.source] is op


def _check_held(pool: fx.Node, format: str) -> None:
    """Raise PlanError if a pooling of what is spread over its memory names more positions than its trace knows of."""
    of = pool.args[0]
    assert isinstance(of, fx.Node)
    if math.prod(of.meta["val"].shape[-3 if "3d" in str(pool.target) else -2 :]) > HOLDS[format]:
        raise PlanError(f"{pool.name} may have numbers that {format} cannot hold; please report this.")


def _tag(op: Op) -> str:
    return "is_forward" if op.phase == FORWARD else "is_backward"

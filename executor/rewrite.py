"""Rewrite a captured program by a Schedule into two FX modules: a forward and a backward, each with its reruns.

The schedule decides everything; this module only copies nodes. A step that runs an op copies its node, with each
input resolved to its current copy; one that runs it again copies it again, without its effect on buffers, under a name
that ends in "_recomputed". A step that takes over its input's memory becomes the op's in-place twin. FX's generated
code frees each value after its last use, which is when the schedule frees its storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import fx

from executor.codecs.host import WAIT_IN
from simulator.core.facts import PREFETCH, RELOAD
from simulator.core.schedule import Schedule
from tracer.capture.passes.batch_norm import STATISTICS
from tracer.capture.passes.batch_norm import again as without_effect
from tracer.record.program import Program, inplace_twin, is_number
from tracer.torch_api import BoxedCodeGen
from traces.errors import PlanError
from traces.records.trace import VIEW

# In a node's meta: numbers of parameters whose gradient is there once it has run, and which nothing reads after it.
HANDED: Final = "handed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The two modules and how they fit together.

    `forward` takes the placeholders' values (parameters, buffers, arguments) in one list, which it empties, and returns
    (model outputs, saved values). `backward` takes saved values and tangents in one list, which it empties, and returns
    the gradients of the parameters and of the arguments; None where there is none.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved_storages: tuple[int, ...]  # the storages behind them that are not placeholders'


def rewrite(program: Program, schedule: Schedule) -> Rewritten:
    """Copy the graph of a captured model in the order of a schedule of `program.trace()`. Raises PlanError if a value
    is needed that the schedule has not made (a defect), or backward would hold a forward value that the schedule has
    freed.
    """
    writing = _Writing(program)
    for step in range(len(schedule)):
        writing.step(schedule, step)
    return writing.finish(schedule)


class _Writing:
    """The graphs so far, and which copy of each captured node is the current one."""

    def __init__(self, program: Program) -> None:
        self.program, self.captured = program, program.captured
        self.forward, self.backward = fx.Graph(), fx.Graph()
        self.current: dict[fx.Node, fx.Node] = {}  # captured node -> its latest copy
        self.side: dict[fx.Node, fx.Graph] = {}  # copy -> the graph that it stands in
        self.crossing: dict[fx.Node, fx.Node] = {}  # forward's copy -> placeholder in backward
        self.crossing_of: dict[fx.Node, fx.Node] = {}  # forward's copy -> captured node
        self.constants: dict[tuple[fx.Node, fx.Graph], fx.Node] = {}
        self.returned: dict[fx.Node, fx.Node] = {}  # model output -> its first copy
        self.arriving: dict[int, fx.Node] = {}  # storage -> what reloads it, until something waits
        self.outputs = set(self.captured.outputs)
        self.handed: dict[int, fx.Node] = {}  # parameter -> the last node of backward that concerns it
        self.concerning: dict[int | fx.Node, list[int]] = {}  # a storage, a gradient -> parameters
        for k, g in enumerate(self.captured.parameter_grads):
            for key in (program.storage_of[self.captured.placeholders[k]][0], *([] if g is None else [g])):
                self.concerning.setdefault(key, []).append(k)
        holders = [*self.captured.placeholders, *self.captured.numbers]
        for n in holders:
            graph = self.backward if "tangent_of" in n.meta else self.forward
            copy = graph.placeholder(n.name)
            copy.meta = dict(n.meta)
            self._put(n, copy, graph)
        self.first_tangent = next(iter(self.backward.nodes), None)

    def step(self, schedule: Schedule, step: int) -> None:
        """Copy the nodes of one step."""
        op_id, again = schedule.op[step], schedule.recompute[step]
        op = self.program.ops[op_id]
        graph = self.forward if step < schedule.forward_steps else self.backward
        row = self.program.rows[op_id]
        if row.target != PREFETCH and not row.flags & VIEW:
            for s in row.reads:
                if s in self.arriving:
                    graph.call_function(WAIT_IN, (self._resolve(self.arriving.pop(s), graph),))
        target, args = op.node.target, op.node.args
        if again:
            target, args = without_effect(target, args)
        copy = self._copy(graph, op.node, (target, args), again, lambda n: self._resolve(n, graph))
        if schedule.takes[step] >= 0:
            twin = inplace_twin(copy.target)
            assert twin is not None
            copy.target = twin
        # A view that runs again looks at its base's new copy with all its parts; another op may run again for some
        # of its outputs only, while the others are still there.
        partial = again and not row.flags & VIEW
        if again and row.target == RELOAD:
            self.arriving |= dict.fromkeys(row.writes, op.node)
        parts = {op.node: copy}
        self.side[copy] = graph
        if not op.parts or not partial:
            self.current[op.node] = copy
        for part in op.parts:
            # A batch norm that runs again makes no statistics; one after it, which also runs again, asks for none.
            gone = target is not op.node.target and part.args[1] in STATISTICS
            if partial and (
                gone or not any(s in schedule.binds[step] for s in self.program.storage_of[part])
            ):
                continue
            parts[part] = self._copy(graph, part, (part.target, part.args), again, parts.__getitem__)
            self._put(part, parts[part], graph)
        if graph is self.backward:
            for key in (*row.reads, *parts):
                self.handed |= dict.fromkeys(self.concerning.get(key, ()), next(reversed(parts.values())))
        if graph is self.forward and not again:
            self.returned.update((n, x) for n, x in parts.items() if n in self.outputs)

    def finish(self, schedule: Schedule) -> Rewritten:
        """The modules, once every step has been copied."""
        captured = self.captured
        outputs = [
            self.returned[n] if n in self.returned else self._resolve(n, self.forward)
            for n in captured.outputs
        ]
        groups = captured.parameter_grads, captured.argument_grads
        grads = fx.node.map_arg(groups, lambda g: self._resolve(g, self.backward))
        for k, n in self.handed.items():
            n.meta[HANDED] = (*n.meta.get(HANDED, ()), k)
        self.forward.output((tuple(outputs), tuple(self.crossing)))
        self.backward.output(grads)
        for graph in (self.forward, self.backward):
            # FX calls an argument by its target and everything else by its name; if the two differed for one
            # placeholder, another value could bear the name of that argument.
            assert all(n.name == n.target for n in graph.nodes if n.op == "placeholder")
            graph.set_codegen(BoxedCodeGen())
            graph.lint()
        behind = {s for n in self.crossing_of.values() for s in self.program.storage_of[n]}
        crossing = sorted(s for s in behind if self.program.storages[s].producer >= 0)
        _check_crossing(self.program, schedule, crossing)
        return Rewritten(
            forward=fx.GraphModule(captured.graph_module, self.forward, class_name="LowtideForward"),
            backward=fx.GraphModule(captured.graph_module, self.backward, class_name="LowtideBackward"),
            saved_storages=tuple(crossing),
        )

    def _put(self, node: fx.Node, copy: fx.Node, graph: fx.Graph) -> None:
        self.current[node], self.side[copy] = copy, graph

    def _copy(self, graph: fx.Graph, node: fx.Node, call: Any, again: bool, resolve: Any) -> fx.Node:
        target, args = call
        args, kwargs = fx.node.map_arg((args, dict(node.kwargs)), resolve)
        name = f"{node.name}_recomputed" if again else node.name
        copy = graph.create_node("call_function", target, args, kwargs, name=name)
        copy.meta = dict(node.meta)
        if again:
            copy.meta["recomputed"] = True
        return copy

    def _resolve(self, n: fx.Node, graph: fx.Graph) -> fx.Node:
        """The copy of a captured node that a new node of this graph takes."""
        if n.op == "get_attr":
            if (n, graph) not in self.constants:
                constant = graph.get_attr(str(n.target))
                constant.meta = dict(n.meta)
                self.constants[n, graph] = constant
            return self.constants[n, graph]
        if n not in self.current and is_number(n):
            made_in = self.backward if n.meta.get("partitioner_tag") == "is_backward" else self.forward
            args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda a: self._resolve(a, made_in))
            number = made_in.create_node("call_function", n.target, args, kwargs, name=n.name)
            number.meta = dict(n.meta)
            self._put(n, number, made_in)
        if n not in self.current:
            raise PlanError(f"the schedule needs the value of {n.name} before it exists; please report this.")
        copy = self.current[n]
        if self.side[copy] is graph:
            return copy
        if copy not in self.crossing:
            assert graph is self.backward, "a forward op takes a value of backward"
            with self.backward.inserting_before(self.first_tangent):
                twin = self.backward.placeholder(f"saved_{copy.name}")
            twin.meta = dict(copy.meta)
            self.crossing[copy], self.crossing_of[copy] = twin, n
            self.side[twin] = self.backward
        return self.crossing[copy]


def _check_crossing(program: Program, schedule: Schedule, crossing: list[int]) -> None:
    """Nothing of forward may live on in backward that the schedule says is freed."""
    there = schedule.made_by(schedule.forward_steps)
    held = [program.storages[s].name for s in crossing if s not in there]
    if held:
        raise PlanError(
            f"backward would hold values that the plan evicted: {', '.join(held[:5])}; please report this."
        )

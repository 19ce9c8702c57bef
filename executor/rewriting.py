"""Change a captured program by a plan's rewrites, as the simulator changes its trace."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from typing import Any

from torch import fx

from simulator.core.formats import FORMATS
from simulator.levers import in_order
from simulator.levers import rewritten as rewritten_trace
from tracer.capture.captured import Captured
from tracer.record.program import GraphOp, Program, program_of
from tracer.record.tiles import Found, found_in
from traces.errors import PlanError
from traces.records.plan import Rewrite
from traces.records.trace import Trace


def rewritten(program: Program, rewrites: Sequence[Rewrite]) -> Program:
    """The program of the step so changed, by the module `executor.emit.KIND` of each rewrite, which has a function
    `change(changing, rewrite)`. The rewrites' storages are those of the program as it was captured. Raises PlanError if
    a rewrite is of no known kind, cannot be made in this graph, or makes another step than the simulator has for it (a
    defect).
    """
    if not rewrites:
        return program
    if program.known is not None:
        raise PlanError("a step that is rewritten is captured for each size.")
    changing = Changing(program)
    for rewrite in in_order(rewrites):
        module = "pack" if rewrite.kind in FORMATS else rewrite.kind
        import_module(f"executor.emit.{module}").change(changing, rewrite)
    made = program_of(changing.captured(), program.shares)
    base = program.trace()
    found = tuple(x.record(program, range(len(program.ops))) for x in changing.stretches)
    simulated = rewritten_trace(replace(base, meta=replace(base.meta, stretches=found)), rewrites)
    if made.fingerprint() != simulated.meta.graph_fingerprint:
        raise PlanError("the rewritten step is not the one that was simulated; please report this.")
    return replace(made, before=program)


class Changing:
    """A copy of a captured graph while it is changed; nodes are given as those of the original."""

    def __init__(self, program: Program) -> None:
        self.program, captured = program, program.captured
        self.graph = fx.Graph()
        self.node: dict[fx.Node, fx.Node] = {}  # original -> what stands for it
        self.graph.graph_copy(captured.graph_module.graph, self.node)
        first = next(n for n in self.graph.nodes if n.op == "call_function")
        for n in self.graph.find_nodes(op="get_attr"):  # which a new node may take before the old one did
            first.prepend(n)
        self.forward = frozenset(captured.forward)
        self.outputs = [self.node[n] for n in captured.outputs]
        self.grads = [
            [None if g is None else self.node[g] for g in group]
            for group in (captured.parameter_grads, captured.argument_grads)
        ]
        self._replaced: dict[fx.Node, fx.Node] = {}  # original -> its copy, for which another node stands
        self.not_made: dict[int, str] = {}  # numbers of outputs -> why they do not exist

    @cached_property
    def trace(self) -> Trace:
        """The original as a trace."""
        return self.program.trace()

    @cached_property
    def stretches(self) -> tuple[Found, ...]:
        """The stretches of the original that could run in tiles."""
        return found_in(self.program)

    def made(self, storage: int) -> tuple[GraphOp, fx.Node, str]:
        """The op that makes a storage of the original, the node whose value it is, and what tells it from others of the
        op in a name."""
        program = self.program
        made_by = program.storages[storage].producer
        beside = [s for s, row in enumerate(program.storages) if row.producer == made_by]
        op = program.ops[made_by]
        value = next(n for n in (*op.parts, op.node) if op.storage_of[n] == (storage,))
        return op, value, f"_{beside.index(storage)}" if len(beside) > 1 else ""

    def name(self, new: fx.Node, name: str, like: fx.Node, module_of: fx.Node | None = None) -> None:
        """Give a new node its name and what it shares with a node of the original."""
        new.name = name
        new.meta = dict(like.meta)
        tag = "is_forward" if module_of in self.forward or like in self.forward else "is_backward"
        new.meta["partitioner_tag"] = tag

    def call(
        self, target: Any, args: tuple[Any, ...], made: Any, name: str, like: fx.Node, *, late: bool = False
    ) -> fx.Node:
        """A new call where the graph inserts, of forward or (late) of backward, whose fake value is `made`."""
        n = self.graph.call_function(target, args)
        self.name(n, name, like)
        n.meta |= {"val": made, "partitioner_tag": "is_backward" if late else "is_forward"}
        return n

    def end(self, n: fx.Node) -> fx.Node:
        """The last node of the op of the graph as it is now that n belongs to: a pick of its tuple, or itself."""
        made_by = n.args[0] if n.target is operator.getitem else n
        assert isinstance(made_by, fx.Node)
        picks = [x for x in made_by.users if x.target is operator.getitem]
        return picks[-1] if picks else made_by

    def instead(self, old: fx.Node, new: fx.Node) -> None:
        """Let a new node stand for one of the original wherever its value is taken."""
        was = self._replaced[old] = self.node[old]
        self.node[old] = new
        was.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        self.outputs = [new if n is was else n for n in self.outputs]
        self.grads = [[new if n is was else n for n in group] for group in self.grads]

    def remove(self, nodes: Iterable[fx.Node]) -> None:
        """Take nodes out, but for those that something else uses."""
        for n in reversed(list(nodes)):
            if not (was := self._replaced.get(n, self.node[n])).users:
                self.graph.erase_node(was)

    def captured(self) -> Captured:
        """What was captured, so changed."""
        before = self.program.captured
        grads = [tuple(group) for group in self.grads]
        self.graph.output((tuple(self.outputs), *grads))
        self.graph.lint()
        calls = [n for n in self.graph.nodes if n.op == "call_function"]
        late = [n for n in calls if n.meta.get("partitioner_tag") == "is_backward"]
        return replace(
            before,
            graph_module=fx.GraphModule(before.graph_module, self.graph),
            forward=tuple(n for n in calls if n not in set(late)),
            backward=tuple(late),
            outputs=tuple(self.outputs),
            parameter_grads=grads[0],
            argument_grads=grads[1],
            not_made={**before.not_made, **self.not_made},
        )

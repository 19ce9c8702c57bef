"""One captured graph for the training steps of many sizes, by torch's dynamic shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tracer.capture.capture import Capturing
from tracer.capture.captured import Captured
from tracer.capture.sizes import at, number
from tracer.record.program import Program, program_of
from tracer.record.rows import shared_groups, storage_key
from tracer.record.step import capture_step
from tracer.step.loop import TrainingStep
from tracer.torch_api import pytree
from traces.devices import Device
from traces.errors import CaptureError

SLICE, SLICE_BACKWARD = torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default


@dataclass(slots=True)
class OneGraph:
    """Makes the programs of steps that differ in sizes alone: of a graph in which those that vary are symbols, if it is
    at those of its first step what is captured of that alone. The very first graph has no symbols."""

    target: Device | None  # the GPU whose ops are wanted of steps on the CPU
    capturing: Capturing = field(default_factory=lambda: Capturing(many=True))
    right: dict[int, bool] = field(default_factory=dict)  # by the id of a graph: whether it is

    def program(self, step: TrainingStep) -> Program | None:
        """The program of a step; None: no graph of many sizes serves it."""
        made = self._of_many(step)
        called = self.capturing.called
        graph = id(called)
        if made is None or not self.right.get(graph, True):
            return None
        if graph in self.right or (called is not None and not called.sizes):
            return made
        alone = program_of(capture_step(step, self.target))
        self.right[graph] = alone.fingerprint() == made.fingerprint()
        return made if self.right[graph] else alone

    def _of_many(self, step: TrainingStep) -> Program | None:
        try:
            captured = _at_its_sizes(capture_step(step, self.target, self.capturing))
        except CaptureError:
            return None
        leaves = pytree.tree_leaves((step.args, step.kwargs))
        arguments = list(dict.fromkeys(x for x in leaves if isinstance(x, torch.Tensor)))
        made = program_of(captured, shared_groups(map(storage_key, arguments)))
        first = len(captured.parameters) + len(captured.buffers)
        for n, x in zip(captured.placeholders[first:], arguments, strict=False):
            # An argument may be a part of what is in its memory.
            made.storages[made.storage_of[n][0]].nbytes = x.untyped_storage().nbytes()
        return made


def _at_its_sizes(captured: Captured) -> Captured:
    """A graph of many sizes with those of the call in it, as of one call alone: there a slice that takes all is an
    alias, whose gradient is the slice's own."""
    graph, now, gone = fx.Graph(), dict[Any, Any]({None: None}), set[fx.Node]()
    for n in captured.graph_module.graph.nodes:
        val = n.meta.get("val")
        if isinstance(val, int | torch.SymInt):
            now[n] = number(val, captured.known)
            continue
        vals = pytree.tree_map_only(torch.Tensor, lambda x: at(x, captured.known), val)
        whole = n.target in (SLICE, SLICE_BACKWARD) and vals.shape == now[n.args[0]].meta["val"].shape
        if whole and (n.target == SLICE_BACKWARD or not _last_of_whole(n, gone)):
            now[n] = now[n.args[0]]
            gone.add(n)
            continue
        if whole:
            now[n] = graph.create_node("call_function", torch.ops.aten.alias.default, (now[n.args[0]],))
            now[n].meta = dict(n.meta)
        else:
            now[n] = graph.node_copy(n, now.__getitem__)
        now[n].meta["val"] = vals

    def there(nodes: Sequence[fx.Node | None]) -> tuple[Any, ...]:
        return tuple(now[n] for n in nodes if not isinstance(now[n], int))

    def made(nodes: Sequence[fx.Node]) -> tuple[Any, ...]:
        return there([n for n in nodes if n not in gone])

    return replace(
        captured,
        graph_module=fx.GraphModule(captured.graph_module, graph),
        forward=made(captured.forward),
        backward=made(captured.backward),
        outputs=there(captured.outputs),
        parameter_grads=there(captured.parameter_grads),
        argument_grads=there(captured.argument_grads),
        numbers=(),
        known={},
    )


def _last_of_whole(n: fx.Node, gone: set[fx.Node]) -> bool:
    """Return whether a slice that takes all ends an indexing such as x[:, :n] all of whose slices do: torch makes one
    alias of these together, and none beside a slice that takes less."""
    before, after = n.args[0], list(n.users)
    further = len(after) == 1 and after[0].target == SLICE
    return not further and not (isinstance(before, fx.Node) and before.target == SLICE and before not in gone)

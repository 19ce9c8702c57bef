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


@dataclass(slots=True)
class OneGraph:
    """Makes the programs of steps that differ in sizes alone: of a graph of many sizes, if it is at those of its first
    step what is captured of that alone."""

    target: Device | None  # the GPU whose ops are wanted of steps on the CPU
    capturing: Capturing = field(default_factory=lambda: Capturing(many=True))
    right: dict[int, bool] = field(default_factory=dict)  # by the id of a graph: whether it is

    def program(self, step: TrainingStep) -> Program | None:
        """The program of a step; None: no graph of many sizes serves it."""
        made = self._of_many(step)
        graph = id(self.capturing.called)
        if made is None or not self.right.get(graph, True):
            return None
        if graph in self.right:
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
    """A graph of many sizes with those of the call in it, as of one call alone."""
    graph, now = fx.Graph(), dict[Any, Any]({None: None})
    for n in captured.graph_module.graph.nodes:
        val = n.meta.get("val")
        if isinstance(val, int | torch.SymInt):
            now[n] = number(val, captured.known)
            continue
        now[n] = graph.node_copy(n, now.__getitem__)
        vals = pytree.tree_map_only(torch.Tensor, lambda x: at(x, captured.known), val)
        now[n].meta["val"] = vals

    def there(nodes: Sequence[fx.Node | None]) -> tuple[Any, ...]:
        return tuple(now[n] for n in nodes if not isinstance(now[n], int))

    return replace(
        captured,
        graph_module=fx.GraphModule(captured.graph_module, graph),
        forward=there(captured.forward),
        backward=there(captured.backward),
        outputs=there(captured.outputs),
        parameter_grads=there(captured.parameter_grads),
        argument_grads=there(captured.argument_grads),
        numbers=(),
        known={},
    )

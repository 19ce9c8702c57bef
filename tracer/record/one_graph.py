"""One captured graph for the training steps of many sizes, compared with captures of single ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Final

import torch

from tracer.capture.capture import Captured, capture, only_these
from tracer.capture.sizes import Layout, Sizes, symbolic, with_numbers, without_numbers
from tracer.costs.rows import OpRow
from tracer.record.program import Program, program_of
from tracer.record.rows import shared_groups, storage_key
from tracer.record.step import fake_mode
from tracer.step.loop import TrainingStep
from tracer.step.step import BuildStep
from tracer.torch_api import pytree
from traces.devices import Device
from traces.errors import CaptureError
from traces.records.trace import ALIAS, SLICE

COMPARED: Final = 3  # steps of a graph that are captured for themselves, too
TRIES: Final = 3  # captures for many sizes: a model may decide by them once or twice


@dataclass(slots=True)
class _Graph:
    captured: Captured
    sizes: Sizes
    compared: int = 0


@dataclass(slots=True)
class OneGraph:
    """The graphs that serve the steps of some shapes. The first steps that are asked for ought to be of a middle
    shape, after which what is captured decides, of the largest and of the smallest."""

    builds: Sequence[BuildStep]  # of all shapes
    target: Device
    tries: int = TRIES
    graphs: list[_Graph] = field(default_factory=list)

    def program(self, step: TrainingStep) -> Program | None:
        """The program of a step from a graph that is for its sizes; None: it must be captured for itself."""
        for graph in self.graphs:
            known = graph.sizes.known(layouts_of(step))
            if known is not None and graph.compared >= COMPARED:
                captured = without_numbers(graph.captured, known)
                made = program_of(captured, _shares(step))
                first = len(captured.parameters) + len(captured.buffers)
                for n, x in zip(captured.placeholders[first:], _arguments(step), strict=False):
                    # An argument may be a part of what is in its memory.
                    made.storages[made.storage_of[n][0]].nbytes = x.untyped_storage().nbytes()
                return replace(made, known=known)
        return None

    def captured(self, step: TrainingStep, build: BuildStep, single: Program) -> None:
        """Learn from a step that was captured for itself: whether the graphs are right, or what another must be."""
        mine, layouts = None, layouts_of(step)
        for graph in list(self.graphs):
            if (known := graph.sizes.known(layouts)) is not None:
                mine = graph
                try:
                    check_same(program_of(graph.captured, single.shares, known), single)
                    graph.compared += 1
                except CaptureError:
                    self.graphs.remove(graph)
        if mine is None and self.tries:
            self.tries -= 1
            try:
                self.graphs.append(self._graph(step, build, single.captured))
            except Exception:  # whatever stops it, each step can be captured for itself
                return
            self.captured(step, build, single)

    def _graph(self, step: TrainingStep, build: BuildStep, single: Captured) -> _Graph:
        """A graph for the shapes at which what is decided by sizes is decided as in this step."""
        gpu = single.target
        calls = [layouts_of(step)]
        for other in {0, len(self.builds) // 3, len(self.builds) - 1}:
            with fake_mode():
                calls.append(layouts_of(self.builds[other]("cpu", optimizer_as_on=self.target.kind)))
        sizes = symbolic(calls)
        with fake_mode(sizes.mode):
            again = build("cpu", optimizer_as_on=self.target.kind)
            given = iter(sizes.arguments)
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda x: next(given), (again.args, again.kwargs)
            )
            wanted = only_these(single.grad_outputs)
            captured = capture(again.model, args, kwargs, wanted, gpu, again.autocast)
        return _Graph(captured=with_numbers(captured, sizes), sizes=sizes)


def layouts_of(step: TrainingStep) -> tuple[Layout, ...]:
    """The layouts of the tensors that the model of a step is called with."""
    return tuple(map(Layout.of, _arguments(step)))


def _arguments(step: TrainingStep) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves((step.args, step.kwargs)) if isinstance(x, torch.Tensor)]


def _shares(step: TrainingStep) -> tuple[tuple[int, ...], ...]:
    return shared_groups(map(storage_key, _arguments(step)))


def check_same(many: Program, single: Program) -> None:
    """Raise CaptureError unless the graph for many sizes is, at those of a call, what was captured of it alone."""

    def told(p: Program) -> Sequence[Any]:
        rows = [(*_call(r), r.phase, r.inputs, r.reads, r.writes, r.overwrites, r.flags) for r in p.rows]
        made = [(s.producer, s.dtype, s.shape, s.nbytes) for s in p.storages if s.producer >= 0]
        return [*rows, *made]

    for a, b in zip_longest(told(many), told(single), fillvalue="nothing more"):
        if a != b:
            raise CaptureError(
                f"at these sizes the graph for many is another: {a} where the call's own has {b}."
            )


def _call(row: OpRow) -> tuple[str, str]:
    """An op and its arguments; a slice of all is an alias, as which it is captured of a call for itself."""
    call = row.signature
    if row.target == SLICE and call is not None and call.inputs[:1] == call.outputs:
        return ALIAS, "[null]"
    return row.target, row.arguments

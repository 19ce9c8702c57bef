"""In a rehearsal's process: record the blocks of a model while they train with everything saved, or apply their plans.
The model is the first whose call trains and that has blocks (`blocks_of`). Where in the step each block runs is marked,
with the highest point of memory between two marks: what lies beside the blocks is measured so, and nowhere restated.
So are parameters that are gathered for a block, whether they stay after its forward, and the bytes that are reduced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from executor.backend import Compiler, trace_of
from executor.graphs.graph import Graph
from executor.training.module import STATE, apply_plan, install, trains
from executor.training.wrapped import blocks_of, inside
from tracer.record.program import Program
from tracer.rehearsal.watch import Watch, now_us
from tracer.torch_api import current_graph_task, is_traceable_wrapper_subclass, pytree, replaced
from traces.errors import SpecError
from traces.files import canonical_json, write_text
from traces.records import store
from traces.records.plan import Action
from traces.records.trace import Trace

STEP: Final = "step.json"
FORWARD, LOSS, BACKWARD, REST = "forward", "loss", "backward", "rest"  # what begins at a mark
REDUCE: Final = ("reduce_scatter_single", "reduce_scatter_tensor")  # as versions of torch name it


@contextmanager
def _at_first_call(do: Callable[[nn.Module], Any]) -> Iterator[None]:
    """In the body, the first model that has blocks is given away when its first training call begins."""

    def called(module: nn.Module, _: Any) -> None:
        if trains(module) and blocks_of(inside(module)):
            hook.remove()
            if [m for m in module.modules() if STATE in vars(m)]:
                raise SpecError("the script applies a plan itself; leave that line out while a plan is made.")
            do(module)

    hook = register_module_forward_pre_hook(called)
    try:
        yield
    finally:
        hook.remove()


def planned(_: Watch, path: str) -> Any:
    """In the body, the model's blocks train by the plans in that file."""
    return _at_first_call(lambda model: apply_plan(model, path))


@contextmanager
def recording(watch: Watch, folder: str) -> Iterator[None]:
    """In the body, the model's blocks train as compiled graphs with everything saved. What was recorded of the last
    step is in the folder then: a trace for each graph, and STEP."""
    recorder = Recorder(watch)
    with _at_first_call(recorder.watch):
        hook = register_optimizer_step_pre_hook(lambda *_: recorder.mark(REST))
        reduce = {k: partial(recorder.reduce, getattr(dist, k)) for k in REDUCE if hasattr(dist, k)}
        try:
            with replaced(dist, **reduce):
                yield
        finally:
            hook.remove()
    recorder.save(Path(folder))


class _Saving(Compiler):
    """Compiles graphs with everything saved, and keeps their traces."""

    def __init__(self) -> None:
        super().__init__(budget="100%")
        self.traces: list[Trace] = []

    def _within(self, graph: Graph) -> tuple[Program, Sequence[Action]]:
        program = graph.read()
        header = {
            "graph_fingerprint": program.fingerprint(),
            "structure_fingerprint": program.fingerprint(sizes=False),
            "sketch": self.sketch(program),
            "inputs": sum(s.producer < 0 for s in program.storages),
        }
        self.traces.append(trace_of(program, graph.kind, **header))
        return program, ()


class Recorder:
    """One forward and backward through the blocks: which graph each ran as, and what memory there was in between."""

    def __init__(self, watch: Watch) -> None:
        self._watch, self._compiler = watch, _Saving()
        self._graphs: dict[str, int] = {}  # of the blocks in the order of their calls; -1: it ran as none
        # What begins, of which block; the bytes that are reduced until the next; and when it begins.
        self._marks: list[list[Any]] = []
        # Of blocks under fully_shard: the names of parameters in shards, and the ranks that hold these.
        self._sharded: dict[str, tuple[list[str], set[int]]] = {}
        # The bytes of these once gathered, whether they reshard after forward, from how many ranks and machines.
        self._gathers: dict[str, list[Any]] = {}

    def watch(self, model: nn.Module) -> None:
        """Record the calls of its blocks from now on."""
        for path, block in blocks_of(inside(model)).items():
            shards = [name for name, p in block.named_parameters() if len(_holders(p)) > 1]
            if shards and hasattr(block, "set_reshard_after_forward"):
                self._sharded[path] = shards, _holders(block.get_parameter(shards[0]))
            install(block, self._compiler)
            block.register_forward_pre_hook(
                lambda m, args, kwargs, path=path: self._begin(path, m, args, kwargs), with_kwargs=True
            )
            block.register_forward_hook(lambda m, _, made, path=path: self._end(path, m, made))

    def mark(self, what: str, path: str = "") -> None:
        """Something begins."""
        self._marks.append([what, path, 0, now_us()])

    def reduce(self, reduce: Callable[..., Any], output: Any, input: Any, **given: Any) -> Any:
        """Call a reduce-scatter of torch's, and count its input."""
        if self._marks:
            self._marks[-1][2] += input.nbytes
        return reduce(output, input, **given)

    def _begin(self, path: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        if not trains(block):
            return
        if current_graph_task() >= 0:
            raise SpecError(
                f"{path} runs again in backward: the script checkpoints its blocks itself, which the plan is to do; "
                "leave its checkpointing out."
            )
        if any(is_traceable_wrapper_subclass(p) for p in block.parameters()):  # also where they are gathered
            raise SpecError(
                f"the parameters of {path} are DTensors while it runs (tensor parallel), and plans of blocks are for "
                "data-parallel ranks; rehearse without --budget."
            )
        if not self._graphs or path in self._graphs:
            self._graphs, self._marks, self._gathers = {}, [], {}
            _on_gradient((args, kwargs), lambda: self.mark(REST))
        self.mark(FORWARD, path)
        for name in self._sharded.get(path, ([],))[0]:
            self._gathers.setdefault(path, [0])[0] += block.get_parameter(name).untyped_storage().nbytes()
        self._before = self._steps()

    def _end(self, path: str, block: nn.Module, made: Any) -> None:
        if not trains(block):
            return
        steps = zip_longest(self._before, self._steps(), fillvalue=0)
        self._graphs[path] = next((k for k, (was, now) in enumerate(steps) if now > was), -1)
        if path in self._gathers:
            names, ranks = self._sharded[path]
            held = _holders(block.get_parameter(names[0]))
            nodes = {rank // int(os.environ["LOCAL_WORLD_SIZE"]) for rank in ranks}
            self._gathers[path] += [(held == ranks or None) if held else False, len(ranks), len(nodes)]
        _on_gradient(made, lambda: self.mark(BACKWARD, path))
        self.mark(LOSS)

    def _steps(self) -> list[int]:
        return [graph.steps for graph in self._compiler.compiled]

    def save(self, folder: Path) -> None:
        """Write what was seen last."""
        if not self._graphs:
            raise SpecError(
                "no model with blocks was called to train: blocks are what fully_shard shards below a root, and the "
                "alike members of a ModuleList, ModuleDict or Sequential."
            )
        self.mark(REST)
        for k, trace in enumerate(self._compiler.traces):
            store.save(trace, folder / str(k))
        held = self._watch.held([began_us for *_, began_us in self._marks])
        marks = [[*mark, by_category] for (*mark, _), by_category in zip(self._marks, held, strict=True)][:-1]
        told = {"graphs": [*self._graphs.items()], "marks": marks, "gathers": self._gathers}
        write_text(folder / STEP, canonical_json(told))


def _holders(parameter: nn.Parameter) -> set[int]:
    """The ranks of which each holds a shard of a parameter; none if it is whole."""
    placed: Any = parameter
    dims = [k for k, placement in enumerate(getattr(placed, "placements", ())) if placement.is_shard()]
    return {rank for k in dims for rank in dist.get_process_group_ranks(placed.device_mesh.get_group(k))}


def _on_gradient(values: Any, do: Callable[[], None]) -> None:
    """Call it when the gradient of the first tensor among values that gets one is there."""
    tensors = [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor) and x.requires_grad]
    if tensors:
        tensors[0].register_hook(lambda _: do())

"""Record the loss code and the optimizer around a captured model, and put all ops of the step in order.

The loop runs twice on fake tensors with a stand-in for the model that returns outputs and gradients of the right
layout; of the second round, when the optimizer has its state, the last call of the model is recorded, and what follows.
Gradients that are there by then, of earlier calls or iterations, exist throughout the step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch

from tracer.costs.cost import Cost, Measured, costs_of
from tracer.costs.rows import LibraryWorkspace, OpRow, StorageRow
from tracer.precision.policy import scaler_tensors
from tracer.record.eager import EagerRecorder, one_hot_as_run
from tracer.record.program import Program
from tracer.record.rows import created_bytes, tables_of, workspace_rows
from tracer.record.tiles import found_in
from tracer.step.loop import TrainingStep, fit_tangent, run_step
from tracer.step.optimizers import optimizer_tensors, stays_on_cpu
from tracer.step.release import check_alone, hand, hands_over
from tracer.step.user_errors import explained
from tracer.torch_api import FakeTensorMode, execution_engine, pytree
from traces.devices import Device
from traces.errors import CaptureError
from traces.records.store import validate
from traces.records.trace import (
    ACTIVATION,
    EAGER,
    FORWARD,
    GRADIENT,
    INPUT,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
    PHASES,
    ROWS,
    Stretch,
    Trace,
    TraceMeta,
    Untouched,
    eager_runs,
    fingerprint,
)

# By these cuBLAS asks for its buffer, in each thread: in backward's too, once they run again there.
CUBLAS: Final = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A step's rows in their order, and what they stand for. `finish` makes the trace, with these costs or others."""

    rows: tuple[OpRow, ...]  # by op id
    storages: tuple[StorageRow, ...]
    meta: TraceMeta  # without what the costs decide
    program: Program
    target: Device
    measured: Measured

    @cached_property
    def created_bytes(self) -> tuple[int, ...]:
        """By op id: bytes of the storages that the op makes."""
        return created_bytes(self.rows, self.storages)

    @cached_property
    def trace(self) -> Trace:
        """The trace with the costs that the step was recorded with."""
        return self.finish()

    @cached_property
    def priced(self) -> list[Cost]:
        """By op id: what it costs, as the step was recorded."""
        return costs_of(self.rows, self.created_bytes, self.target, self.measured)

    def finish(
        self,
        costs: Sequence[Cost] | None = None,
        workspaces: Iterable[LibraryWorkspace] | None = None,
        untouched: Untouched = Untouched(),  # noqa: B008
        **header: Any,
    ) -> Trace:
        """The trace.

        Args:
            costs: by op id; None: those that the step was recorded with.
            workspaces: what libraries were seen to keep; None: nobody looked.
            untouched: what the untouched loop asks of the allocator.

        Raises:
            TraceError: what was collected contradicts itself (a defect of the tracer).
        """
        costs = self.priced if costs is None else costs
        kept = workspace_rows(self.rows, workspaces or ())
        ops, storages = tables_of(self.rows, (*self.storages, *kept), costs)
        sources = dict(Counter(c.source for c in costs if c.source))
        meta = replace(self.meta, workspace=sources, fingerprint=fingerprint(ops, storages), **header)
        return validate(Trace(meta=meta, ops=ops, storages=storages, untouched=untouched))


def assemble(
    step: TrainingStep,
    program: Program,
    mode: FakeTensorMode,
    target: Device,
    meta: TraceMeta,
    measured: Measured,
) -> Draft:
    """Record the code around the model and put all rows in order: forward, loss, loss's backward, backward, rest.
    Raises CaptureError if the loss code or the optimizer fails, or looks at the data of a tensor.
    """
    parameters = dict(step.model.named_parameters())
    kind = next(iter(parameters.values())).device.type
    recorder = EagerRecorder([replace(s) for s in program.storages], kind)
    stub, calls = _Stub(program, recorder, parameters), itertools.count(1)
    gradients: set[int] = set()  # storages of the parameters'

    def begin(phase: str) -> None:
        if recorder.active:
            later = any(PHASES.index(row.phase) > PHASES.index(phase) for row in recorder.rows[-1:])
            if later and not stub.handing:
                phase = recorder.phase  # after the last backward nothing is forward or backward of a plan
            if phase == OPTIMIZER:
                given = _parameters(step).items()
                found = {recorder.known(p.grad): name for name, p in given if p.grad is not None}
                gradients.update(found)
                for row, name in ((recorder.storages[s], name) for s, name in found.items()):
                    if row.category == ACTIVATION:  # autograd may have made copies of the model's
                        row.name, row.category = f"gradient of {name}", GRADIENT
        recorder.phase = phase

    with mode, explained(step.name), recorder, one_hot_as_run(), contextlib.ExitStack() as until_last:
        until_last.enter_context(recorder.paused())

        def model(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 2 * step.loop.accumulate:
                for name, p in _parameters(step).items():  # of an earlier part or iteration
                    if p.grad is not None:
                        recorder.id_of(p.grad, recorder.row(p.grad, f"gradient of {name}", GRADIENT))
                until_last.close()
            return stub(*args, **kwargs)

        run_step(step, model, step.optimizer, begin)
        _know_residents(step, program, recorder)
        run_step(step, model, step.optimizer, begin)
        recorder.look()
    rows, storages, meta = _arrange(program, recorder, stub, gradients, meta)
    return Draft(rows=rows, storages=storages, meta=meta, program=program, target=target, measured=measured)


def arguments_of(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a model is called with, each once, in the order of a captured graph's arguments."""
    leaves = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    return list(dict.fromkeys(leaves))


def _know_residents(step: TrainingStep, program: Program, recorder: EagerRecorder) -> None:
    """Tell the recorder what is there before the step."""
    captured, model = program.captured, step.model
    own = captured.tensors_of(dict(model.named_parameters()), dict(model.named_buffers()))
    for x, n in zip([*own, *arguments_of(step.args, step.kwargs)], captured.placeholders, strict=False):
        recorder.know(x, program.storage_of[n][0])
    for x in step.tensors():
        recorder.id_of(x, recorder.row(x, "batch", INPUT))
    for name, p in _parameters(step).items():
        recorder.id_of(p, recorder.row(p, name, PARAMETER))
    for number, x in enumerate(optimizer_tensors(step.optimizer)):
        row = recorder.row(x, f"optimizer state {number}", OPTIMIZER_STATE)
        elsewhere = captured.target is not None and stays_on_cpu(x, step.optimizer)
        recorder.id_of(x, replace(row, nbytes=0) if elsewhere else row)
    for number, x in enumerate(scaler_tensors(step.scaler)):
        recorder.id_of(x, recorder.row(x, f"gradient scaler state {number}", OPTIMIZER_STATE))


class _Stub:
    """Stands for the captured model: outputs and gradients with the right layout, and no ops of its own."""

    def __init__(
        self, program: Program, recorder: EagerRecorder, parameters: dict[str, torch.Tensor]
    ) -> None:
        self.program = program
        self.recorder = recorder
        captured = program.captured
        self.parameters = [parameters[n] for n in captured.parameters]
        self.tangents: list[int] = []  # storages that the model's backward reads as its tangents
        self.rows_before_backward = 0  # eager rows recorded before the model's backward begins
        # The others stand behind the graph; or those from a row on (the first number) behind one of its ops.
        self.handed: list[tuple[int, int]] = []
        self.handing = False
        self._open = False  # a call whose backward has not run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        captured, program, recorder = self.program.captured, self.program, self.recorder

        class Model(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, _anchor: Any, *inputs: torch.Tensor) -> Any:
                with recorder.paused():
                    outs = [_empty_like(program.val(n)) for n in captured.outputs]
                for x, s in zip(outs, program.output_storages, strict=True):
                    recorder.know(x, s, watch=True)
                return captured.marked(ctx, tuple(outs))

            @staticmethod
            def backward(ctx: Any, *tangents: Any) -> Any:
                if torch.is_grad_enabled() or not self._open:
                    raise CaptureError(
                        "the loss takes a gradient through the model itself (torch.autograd.grad, as in a gradient "
                        "penalty), and a plan is of one backward. Plan with a loss without that term, and compute the "
                        "term from a call of the model inside `with unplanned(model):`."
                    )
                self._open = False
                recorder.look()
                for k, n in zip(captured.grad_outputs, captured.tangents, strict=True):
                    given = tangents[k]
                    with recorder.paused():
                        like = program.val(n)
                    fitting = fit_tangent(given, like)
                    if recorder.active:
                        row = recorder.row(fitting, "tangent", INPUT)
                        self.tangents.append(recorder.id_of(fitting, row))
                self.rows_before_backward = len(recorder.rows)
                del tangents, given, fitting, like
                with recorder.paused():
                    made = (*captured.parameter_grads, *captured.argument_grads)
                    grads = [None if g is None else _empty_like(program.val(g)) for g in made]
                for x, g in zip(grads, made, strict=True):
                    if x is not None:
                        recorder.know(x, program.storage_of[g][0], watch=True)
                if handing:
                    self.hand_over(grads)
                return None, *grads

        self._open = True
        self.tangents, self.handed = [], []
        given = arguments_of(args, kwargs)
        anchor, inputs, handing = None, self.parameters, hands_over(self.parameters)
        if handing:  # as in `executor.graphs.hand_over`: not through autograd's graph
            with recorder.paused():
                anchor, inputs = torch.empty(0, requires_grad=True), [p.detach() for p in inputs]
        return captured.outputs_from(Model.apply(anchor, *inputs, *given))

    def hand_over(self, grads: list[torch.Tensor | None]) -> None:
        """Give the parameters their gradients, each where a planned backward does, and note where that is; not before
        autograd has freed what it gave this backward."""
        with self.recorder.paused():
            check_alone(self.parameters, CaptureError)
        places = self.program.hand_over_places()
        boxes = {k: [g] for k, g in enumerate(grads[: len(places)]) if g is not None}
        grads[: len(places)] = [None] * len(places)

        def go() -> None:
            self.handing = True
            for place, k in sorted((places[k], k) for k in boxes):
                self.handed.append((len(self.recorder.rows), place))
                hand(self.parameters[k], boxes[k], self.recorder.paused())
            self.handed.append((len(self.recorder.rows), len(self.program.ops)))
            self.handing = False

        execution_engine.queue_callback(go)


def _empty_like(val: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)


def _arrange(
    program: Program,
    recorder: EagerRecorder,
    stub: _Stub,
    gradients: set[int],
    meta: TraceMeta,
) -> tuple[tuple[OpRow, ...], tuple[StorageRow, ...], TraceMeta]:
    """Put the rows of graph and recorder into one order and renumber what refers to op ids."""
    storages, eager = recorder.storages, recorder.rows
    n_forward, n_graph = program.forward_ops, len(program.ops)
    loss = stub.rows_before_backward
    places = [(2 * (i >= n_forward), i, -1) for i in range(n_graph)]
    places += [(1, 0, k) if k < loss else (2, n_graph, k) for k in range(len(eager))]
    for first, op in stub.handed:
        places[n_graph + first :] = [(2, op, k) for k in range(first, len(eager))]
    order = sorted(range(len(places)), key=places.__getitem__)
    ids = sorted(range(len(places)), key=order.__getitem__)
    graph_id, eager_id = ids[:n_graph], ids[n_graph:]
    rows = [replace(row, inputs=tuple(graph_id[j] for j in row.inputs)) for row in program.rows] + eager
    rows = [rows[j] for j in order]
    n_ops = len(rows)
    n_program_storages = len(program.storages)
    for s, storage in enumerate(storages):
        if storage.producer >= 0:
            ids = graph_id if s < n_program_storages else eager_id
            storage.producer = ids[storage.producer]

    def hold(s: int, op: int) -> None:
        if storages[s].producer >= 0:
            storages[s].hold = max(storages[s].hold, op)

    stay = {s for s in recorder._watched if storages[s].producer >= 0}
    replaced = _replacements(recorder, stay - gradients)
    for s, k in recorder.died_after.items():
        if storages[s].producer >= 0:
            before_loss = k < 0 and s in program.output_storages
            hold(s, n_forward - 1 if before_loss else eager_id[k])
    for heir, (s, k) in replaced.items():
        hold(heir, eager_id[k])
        _put_instead(rows[max(eager_id[k], storages[heir].producer) + 1 :], heir, s)
    for placeholder, seen in zip(program.tangent_storages, stub.tangents, strict=True):
        _put_instead(rows, placeholder, seen)
        storages[placeholder].nbytes, storages[placeholder].shape = 0, (0,)
    for s in (stay - replaced.keys()) | (set(program.gradient_storages) - recorder.died_after.keys()):
        hold(s, n_ops - 1)
    for s in program.output_storages:
        hold(s, n_forward - 1)

    again = {r.target for r in rows if r.phase == FORWARD} & CUBLAS if meta.device == "cuda" else ()
    meta = replace(
        meta,
        rerun_workspaces=dict.fromkeys(sorted(again), 0),
        forward_ops=n_forward,
        first_backward_graph_op=graph_id[n_forward] if n_graph > n_forward else n_ops,
        stretches=_stretches(program, graph_id, rows),
        within_backward=eager_runs([row.flags for row in rows], graph_id[n_forward:]),
    )
    return tuple(rows), tuple(storages), meta


def _stretches(program: Program, graph_id: Sequence[int], rows: Sequence[OpRow]) -> tuple[Stretch, ...]:
    """The stretches that could run in tiles; the code around the model must not read what then does not exist."""
    seen = {s for row in rows if row.flags & EAGER for s in row.reads}

    def hidden(x: Stretch) -> set[int]:
        made = {s for part in x.parts for i, how in part.body if how == ROWS for s in rows[i].writes}
        return made - {r.storage for part in x.parts for r in part.results}

    found = (x.record(program, graph_id) for x in found_in(program))
    return tuple(x for x in found if seen.isdisjoint(hidden(x)))


def _parameters(step: TrainingStep) -> dict[str, torch.Tensor]:
    return dict(step.model.named_parameters()) | step.loss_parameters


def _replacements(recorder: EagerRecorder, stay: set[int]) -> dict[int, tuple[int, int]]:
    """Return what the optimizer puts in the place of what was there before the step (`state["m"] = new`): the new
    storage -> the old one, and the row after which that is gone. From there on the old one stands for both, as it is
    the next step's; so as many bytes are there when the step ends as when it began. `stay`: the storages that the step
    makes and leaves behind, gradients apart.
    """
    storages = recorder.storages
    found: dict[int, tuple[int, int]] = {}
    gone = sorted((k, s) for s, k in recorder.died_after.items() if storages[s].producer < 0)
    for k, s in ((k, s) for k, s in gone if storages[s].category != GRADIENT):
        heir = min((t for t in stay - found.keys() if storages[t].nbytes == storages[s].nbytes), default=None)
        if heir is not None:
            found[heir] = s, k
    return found


def _put_instead(rows: Iterable[OpRow], storage: int, other: int) -> None:
    """Let rows read and write `other` where they have `storage`: a tangent's placeholder, or what was replaced."""
    for row in rows:
        for column in ("reads", "writes"):
            found = (other if s == storage else s for s in getattr(row, column))
            setattr(row, column, tuple(dict.fromkeys(found)))

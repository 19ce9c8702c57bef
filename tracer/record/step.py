"""Assemble the Trace of one whole training step in its steady state: the captured model, whose ops come from its graph,
and around it the loss code and the optimizer, recorded around a stand-in (`tracer.record.assemble`)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tracer.capture.capture import Wanted, capture
from tracer.capture.captured import Captured
from tracer.capture.refusals import check_step
from tracer.costs.cost import Measured
from tracer.environment import versions
from tracer.record.assemble import Draft, assemble
from tracer.record.program import program_of
from tracer.record.sketch import sketch
from tracer.step.batch import hidden_tensors, loss_in_outputs
from tracer.step.context import copies_of_constants
from tracer.step.loop import Enough, TrainingStep, run_step
from tracer.step.loop_options import ORDINARY
from tracer.step.step import BuildStep, load_spec
from tracer.step.user_errors import explained
from tracer.torch_api import FakeTensorMode, no_garbage, pytree, replaced
from traces.devices import Device, board_of
from traces.devices import device as device_entry
from traces.errors import CaptureError, SpecError
from traces.records.trace import OPTIMIZER, TraceMeta


def differentiated(step: TrainingStep, returned: Any) -> set[int]:
    """The ids of the outputs that the loss differentiates.

    If only one could have a gradient, it is that one; if the model computes the loss, it is the loss. Otherwise the
    loss is computed of them, and differentiated.

    Args:
        returned: what the model returns; its tensors are leaves of autograd's graph.
    """
    tensors = [x for x in pytree.tree_leaves(returned) if isinstance(x, torch.Tensor) and x.requires_grad]
    could = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    if len(could) <= 1:
        return set(map(id, could))
    if step.loss is loss_in_outputs:
        return {id(step.loss(returned))}

    def until_backward(phase: str) -> None:
        if phase == OPTIMIZER and any(x.grad is not None for x in could):
            raise Enough

    with contextlib.suppress(Enough), explained(step.name):
        run_step(replace(step, loop=ORDINARY), lambda *_, **__: returned, step.optimizer, until_backward)
    return {id(x) for x in could if x.grad is not None}


def wanted_by(step: TrainingStep) -> Wanted:
    """Return what finds the outputs that a step's loss differentiates among those that its model returned."""

    def wanted(returned: Any) -> set[int]:
        for leaf in pytree.tree_leaves(returned):
            if any(x.requires_grad for x in hidden_tensors(leaf)):
                name = type(leaf).__name__
                raise CaptureError(
                    f"{step.name}: the model returns a {name}, in which nobody finds its tensors, so that backward "
                    "would not reach them. Return them in a tuple or a dict and make it of them in the loss, or, if it "
                    f"is a dataclass, make it known with torch.export.register_dataclass({name})."
                )
        return differentiated(step, returned)

    return wanted


def capture_step(step: TrainingStep, target: Device | None = None) -> Captured:
    """Capture the model of a training step, with the outputs that its loss differentiates.

    Args:
        target: the GPU whose ops are wanted of a step on the CPU; None: those of the step's own device.
    """
    check_step(step)
    return capture(step.model, step.args, step.kwargs, wanted_by(step), target, step.autocast)


@no_garbage()
def trace_step(
    build: BuildStep,
    target: Device,
    *,
    device: str = "cpu",
    measured: Measured | None = None,
) -> Draft:
    """Record the step that `build` makes on fake tensors: sizes from torch, times by a roofline.

    Args:
        target: the device-table entry whose roofline gives the times. A GPU with `device` "cpu": the ops are the
            CPU's, but for attention.
        device: of the fake tensors; anything but "cpu" needs a build of torch for it.
        measured: costs of ops of another loop, by name (`costs_of`).
    """
    as_gpu = device == "cpu" and target.kind == "cuda"
    with fake_mode() as mode:
        # Of fake parameters torch chooses the loop wherever they are, and on a GPU foreach of real ones.
        step = build(device, optimizer_as_on=target.kind if device == "cpu" else device.partition(":")[0])
        captured = capture_step(step, target if as_gpu else None)
        return draft_of(step, captured, mode, build, target, device, measured or {})


def draft_of(
    step: TrainingStep,
    captured: Captured,
    mode: FakeTensorMode,
    build: BuildStep,
    target: Device,
    device: str,
    measured: Measured,
) -> Draft:
    """Record what is around the captured model of a step that `build` made in `mode`, which is `fake_mode`'s."""
    made = program_of(captured)
    dtype = next(p for p in step.model.parameters() if p.requires_grad).dtype
    meta = TraceMeta(
        model=build.model,
        options=dict(step.options),
        batch_size=step.batch_size,
        dtype=str(dtype).removeprefix("torch."),
        amp=step.autocast.dtype,
        loop=str(step.loop),
        optimizer=describe_optimizer(step.optimizer),
        seed=build.seed,
        mode="fake",
        device=target.kind if captured.target is not None else device.partition(":")[0],
        target=target.name,
        torch_version=torch.__version__,
        versions=versions(),
        grad_outputs=captured.differentiated,
        graph_fingerprint=made.fingerprint(),
        structure_fingerprint=made.fingerprint(sizes=False),
        sketch=sketch(made, step.model, step.args, step.kwargs),
        inputs=sum(s.producer < 0 for s in made.storages),
    )
    return assemble(step, made, mode, target, meta, measured)


def recorded_again(meta: TraceMeta, model: str = "", device: str = "cpu") -> Draft:
    """Record the step that a trace's header describes once more, on fake tensors. `model`: build this instead of what
    the header names.
    """
    try:
        target = device_entry(board_of(meta.target) or meta.target)
    except SpecError:
        # A GPU that the device table lacks: its times are another's, which pages say; sizes do not depend on it.
        target = device_entry("cpu" if device == "cpu" else "h200")
    build = load_spec(model or meta.model, dict(meta.options), seed=meta.seed)
    return trace_step(build, target, device=device)


@contextlib.contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """A fake mode that survives `copy.deepcopy` of its tensors (torch's own transformer stacks copy their layers), and
    in which gradients are clipped as lists, as real ones are on a CPU and on a GPU.
    """
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    mode.__deepcopy__ = lambda memo: mode
    clips = torch.nn.utils.clip_grad
    lists = replaced(clips, _has_foreach_support=lambda tensors, device: True)
    with mode, copies_of_constants(), lists, warnings.catch_warnings():
        # The copy looks at a data pointer, which fake tensors answer with a warning.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield mode


def describe_optimizer(optimizer: torch.optim.Optimizer | None) -> str:
    """The optimizer's class and the settings that decide its memory, as in "AdamW(foreach)"."""
    if optimizer is None:
        return "none"
    group = optimizer.param_groups[0]
    marks = [k for k in ("foreach", "fused", "capturable", "amsgrad", "nesterov") if group.get(k)]
    if group.get("foreach") is False and not group.get("fused"):
        marks.insert(0, "for-loop")
    if group.get("momentum"):
        marks.append(f"momentum={group['momentum']}")
    return type(optimizer).__name__ + (f"({', '.join(marks)})" if marks else "")

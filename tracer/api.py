"""`trace`: what the command does, for Python, and for objects that are in hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from tracer.step.loop_options import LOOP_OPTIONS
from tracer.step.step import BuildStep, check_device, load_spec
from tracer.torch_api import no_garbage, one_at_a_time, require_torch
from traces.devices import device as device_entry
from traces.errors import EnvironmentProblem, LowtideError, SpecError
from traces.records.trace import Trace

if TYPE_CHECKING:
    import torch
    from torch import nn


class Options(TypedDict, total=False):
    """Options of the step and of its loop; None: not given. `trace` says what they are."""

    batch_size: int | None
    seq_len: int | None
    image_size: int | None
    dtype: str | None
    dropout: float | None
    task: str | None
    attention: str | None
    zero_grad: str | None
    clip_grad_norm: float | None
    accumulate: int | None
    release_gradients: bool | None


GPU_UNKNOWN: Final = "h200"  # whose table entry a GPU has whose name is not known before it is measured


@one_at_a_time
def trace(
    model: nn.Module | str,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None = None,
    *,
    target: str | None = None,
    device: str | None = None,
    amp: str | None = None,
    seed: int = 0,
    rounds: int = 5,
    warmup: int = 2,
    say: Callable[[str], None] | None = None,
    **options: Unpack[Options],
) -> Trace:
    """Record one training step: `optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step()`.

        trace(net, (x, y), loss=F.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), target="h100")
        trace("resnet50", batch_size=32, target="a100-80")
        trace("my_training.py:build", batch_size=8)

    Without `device` nothing runs and nothing is allocated: the step is captured on fake tensors. The model, the
    optimizer, the random state of Python and torch and torch's settings are afterwards as they were before. Counts: the
    step in its steady state, the optimizer's state there. Ignores: the values of tensors, hooks on parameters.

    Args:
        model: a module in the mode in which it trains, on whatever device (meta too); a name that `trace models`
            lists; or "path/to/file.py:function", whose function makes model, batch, loss and optimizer.
        batch: of a module, one example batch: (inputs, targets), a mapping of `forward`'s arguments, or a tensor; see
            `tracer.step.batch`.
        loss: of a module, a function or module of its output and the targets; None: the model returns its loss.
        optimizer: of a module, its optimizer, or a class or function that makes one from parameters; or, as for a
            model by its name, "sgd", "adam", "adamw" or "none". None: of a module, the step ends with backward; of a
            name, the model's default.
        target: the device whose ops and times are wanted ("h100"; `trace targets` lists them); default: cpu.
        device: "cpu" or "cuda" (of several GPUs "cuda:1"): run the step there and measure it, instead of `target`. Of
            a module, this takes its memory once more.
        amp: autocast model and loss to "bfloat16" or "float16" (with a gradient scaler).
        seed: of Python's and torch's random generators while the step is built and measured.
        rounds, warmup: of a measurement: how many timed rounds, of which the median counts, and how many before them.
        say: told what happens, a line each time.
        options: for a model by its name, and for a function that names them: batch_size (examples), seq_len (tokens),
            image_size (pixels), dtype, dropout, task, attention. For every step, of its
            loop: zero_grad ("before" forward, "after" the optimizer's step, "keep": to zero, "none"), clip_grad_norm,
            accumulate (how often forward and backward run before the optimizer's step), release_gradients (each
            parameter is stepped in backward as soon as its gradient is there, which is freed).

    Returns:
        The trace: all sizes in bytes, all times in ns.

    Raises:
        SpecError: an unknown name, option or device, options that exclude one another, or an object of the wrong kind.
        CaptureError: the step could not be captured as a graph; names the op and the line.
        TraceError: the real step ran other ops than the captured one (`device`).
        EnvironmentProblem: torch or a GPU is missing; OutOfMemoryProblem: there is too little memory (`device`).
    """
    tell = say or (lambda text: None)
    if target is not None and device is not None:
        raise SpecError("--target predicts times and --device measures them; give one of the two.")
    entry = device_entry(target or ("cpu" if device in (None, "cpu") else GPU_UNKNOWN))
    with no_garbage():
        if device is not None or entry.kind != "cuda":  # else another process rehearses the step
            require_torch()
        if device is not None:
            check_device(device)
    if isinstance(model, str):
        if batch is not None or loss is not None:
            raise SpecError(
                f"{model} brings its own batch and loss; give batch and loss with a model in hand."
            )
        if not isinstance(optimizer, str | None):
            raise SpecError(f"{model}: the optimizer must be a name, such as adamw, or be left out.")
        given = {**options, "optimizer": optimizer, "amp": amp}
        name, objects = model, dict[str, Any]()
        request: dict[str, Any] = {"model": model, "optimizer": optimizer}
    else:
        around = {"amp": amp, **{k: v for k, v in options.items() if k in LOOP_OPTIONS}}
        build = in_hand(model, batch, loss, optimizer, options, around, seed)
        name, request = build.model, {}
        objects = {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer}
    if entry.kind == "cuda" and device is None:
        tell(f"Rehearsing {name} on {entry.name} ...")
        request |= {"amp": amp, "seed": seed, **options}
        from tracer.rehearsal.run import traced_on_null_driver

        try:
            return traced_on_null_driver(request, objects, entry, tell)
        except EnvironmentProblem as error:  # which says how to get what is missing
            require_torch()
            tell(f"approximate, by what ops return: {error}")
    if isinstance(model, str):  # a rehearsal builds it where it runs, and this process needs no torch
        build = load_spec(model, given, seed=seed)
    tell(f"Capturing {build.model} ...")
    with no_garbage():
        from tracer.recording import record_fake, record_real

    with left_as_found():
        if device is None:
            return record_fake(build, entry, tell)
        return record_real(build, entry, device, tell, rounds=rounds, warmup=warmup)


def trace_there(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """`trace` in a process on the null driver; the trace is saved in the folder, where objects in hand may be."""
    from inspect import unwrap

    from tracer.rehearsal.objects import load
    from tracer.rehearsal.perform import explained
    from tracer.rehearsal.run import OBJECTS, TRACE
    from tracer.step.context import initialisers_without_values
    from traces.records import store

    place, said = Path(folder), []  # type: ignore[var-annotated]
    given = load(place / OBJECTS) if (place / OBJECTS).exists() else {}
    try:
        with initialisers_without_values():
            record = unwrap(trace)(**given, **request, device="cuda", say=said.append)
    except LowtideError:
        raise
    except Exception as error:
        raise explained(error) from error
    store.save(record, place / TRACE)
    return {"said": said}


def in_hand(
    model: Any,
    batch: Any,
    loss: Any,
    optimizer: Any,
    options: Options,
    around: dict[str, Any],
    seed: int,
) -> BuildStep:
    """Return what builds the step of a model in hand."""
    from torch import nn

    from tracer.capture.refusals import check_capturable
    from tracer.step.in_hand import InHand
    from tracer.step.loop_options import parse_around
    from tracer.step.optimizers import check_optimizer

    if not isinstance(model, nn.Module):
        raise SpecError(
            f"a {type(model).__name__} is no model; give a torch.nn.Module, a name from `trace models`, or "
            '"path/to/file.py:build".'
        )
    if unknown := [k for k, v in options.items() if v is not None and k not in around]:
        raise SpecError(f"{unknown[0]} is for a model by its name; one in hand and its batch have theirs.")
    if batch is None:
        raise SpecError("a model in hand needs an example batch: trace(model, (inputs, targets), loss=...).")
    if isinstance(optimizer, str):
        check_optimizer(optimizer)
    check_capturable(model)
    chosen = parse_around(around)
    released = chosen.get("release_gradients", False)
    held = InHand(model=model, batch=batch, loss=loss, optimizer=optimizer, released=released)
    return BuildStep(model=held.label, options=chosen, seed=seed, make=held.step, policy=chosen)


@contextmanager
def left_as_found() -> Iterator[None]:
    """The body has gradients on and no autocast around it; random states and devices are restored after it."""
    import torch

    kinds = [k for k in ("cpu", "cuda") if torch.is_autocast_enabled(k)]
    state = random.getstate()
    live = torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count() if live else 0)
    current = torch.cuda.current_device() if live else 0
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
        random.setstate(state)
        if live:
            torch.cuda.set_device(current)

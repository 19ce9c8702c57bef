"""Record a training step as the command `trace` does: told on fake tensors, or measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from tracer.costs.cost import NONE
from tracer.measure.step import measure
from tracer.measure.untouched import untouched_loop
from tracer.record.step import trace_step
from tracer.step.step import BuildStep
from traces.devices import Device, board_of
from traces.devices import device as device_entry
from traces.progress import Say, silent
from traces.provenance import rehearsing
from traces.records.trace import Trace


def record_fake(build: BuildStep, target: Device, say: Say = silent) -> Trace:
    """A trace from fake tensors, its ops' times by the target's roofline, their bytes by what they return."""
    trace = trace_step(build, target).trace
    say(f"Approximate: {trace.meta.workspace.get(NONE, 0)} computing ops count by what they return alone.")
    return trace


def record_real(
    build: BuildStep,
    target: Device,
    device: str,
    say: Say = silent,
    *,
    rounds: int = 5,
    warmup: int = 2,
) -> Trace:
    """A trace measured on this machine.

    On a GPU that is not there (a rehearsal) the allocations are torch's own, the times the roofline's. Of a loop that
    frees gradients in backward, the ops are measured in one that ends in a step. For the arguments see `measure`.

    Raises:
        TraceError: the real step ran other ops than the captured one.
    """
    cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if cuda else "cpu"
    board = board_of(name) if cuda else "cpu"
    target = device_entry(board) if board else target
    releases = bool(build.policy.get("release_gradients"))
    ending = replace(build, policy={**build.policy, "release_gradients": False}) if releases else build
    draft = trace_step(ending, target, device=device)
    rehearsed = cuda and rehearsing()
    say(f"{'Rehearsing' if rehearsed else 'Measuring'} {len(draft.rows)} ops on {name} ...")
    costs, kept, header = measure(draft, ending, device, rounds=rounds, warmup=warmup, say=say)
    peak_bytes, requests = untouched_loop(build, device)
    if releases:
        by_name = {row.name: cost for row, cost in zip(draft.rows, costs, strict=True) if cost.source}
        draft = trace_step(build, target, device=device, measured=by_name)
    found = draft.priced if releases else costs
    return draft.finish(found, kept, requests, untouched_peak_bytes=peak_bytes, **header)

"""Record a training step as the command `trace` does: told on fake tensors, or measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tracer.costs.cost import APPROXIMATE, NONE, Costs
from tracer.measure.step import measure
from tracer.measure.untouched import untouched_loop
from tracer.record.one_graph import OneGraph
from tracer.record.program import Program
from tracer.record.step import trace_step
from tracer.step.loop import TrainingStep
from tracer.step.step import BuildStep
from traces.devices import Device, board_of
from traces.devices import device as device_entry
from traces.provenance import rehearsing
from traces.records.trace import Trace

Say = Callable[[str], None]  # told what happens, a line each time


def silent(text: str) -> None:
    """Say nothing."""


def record_fake(
    build: BuildStep,
    target: Device,
    say: Say = silent,
    *,
    device: str = "cpu",
    program: Callable[[TrainingStep], Program | None] = lambda step: None,
) -> Trace:
    """A trace from fake tensors, its ops' costs by the roofline and a few rules.

    Args:
        target: whose costs.
        device: of the fake tensors; anything but "cpu" needs a build of torch for it.
        program: what is known of a step's model already; None: it is captured.
    """
    trace = trace_step(build, target, device=device, program=program).trace
    counts = trace.meta.workspace
    say(
        f"Allocations inside the {sum(counts.values())} computing ops: {counts.get(APPROXIMATE, 0)} approximate, by a "
        f"few rules, {counts.get(NONE, 0)} by what they return alone."
    )
    return trace


def record_shapes(builds: Sequence[BuildStep], target: Device, each: Callable[[int, Trace], None]) -> None:
    """The traces of steps that differ in sizes alone: of one captured graph, where that is what capturing each comes
    to.

    Args:
        builds: in order of size.
        each: told of each trace as it is made, by its place among `builds`.
    """

    gpu = target if target.kind == "cuda" else None
    graph, last = OneGraph(gpu), len(builds) - 1
    for k in dict.fromkeys((last // 2, last, 0, *range(last))):
        each(k, record_fake(builds[k], target, program=graph.program))


def record_real(
    build: BuildStep, target: Device, device: str, say: Say = silent, *, rounds: int = 5, warmup: int = 2
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
    measured = measure(draft, ending, device, rounds=rounds, warmup=warmup, say=say)
    peak_bytes, requests = untouched_loop(build, device)
    if releases:
        draft = trace_step(build, target, device=device, costs=Costs(measured=measured.by_signature()))
    return measured.finish(draft, untouched=requests, untouched_peak_bytes=peak_bytes)

"""Compile a step by a plan before its first call: dynamo captures the user's own module, and keeps what it compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
from torch import nn

from executor.backend import Compiler
from executor.graphs.graph import Graph, compile_graph
from executor.graphs.match import fitted
from tracer.capture.capture import NO_BACKWARD, called
from tracer.capture.refusals import check_step, in_words
from tracer.record.assemble import Draft
from tracer.record.program import Program
from tracer.record.step import draft_of, fake_mode, wanted_by
from tracer.step.batch import split_batch, to_device
from tracer.step.step import BuildStep
from tracer.torch_api import dynamo_config, no_garbage, one_at_a_time, tracing, unset_fake_temporarily
from traces.devices import Device
from traces.errors import CaptureError
from traces.records.plan import Action, Plan

# As torch says it, with a list of what they are on: globals, which any capture leaves so, or something else.
EFFECTS: Final = "While compiling, we found certain side effects"
NOT_GLOBAL: Final = r".*?[\[ ](\"(?!G\[)|'<)"


@one_at_a_time
@no_garbage()
def compiled_ahead(
    compiler: Compiler,
    model: nn.Module,
    batch: Any,
    loss: Callable[..., Any] | None,
    build: BuildStep,
    target: Device,
    where: torch.device,
    plan: Callable[[Draft], Plan],
) -> bool:
    """Plan a step and compile it, in one capture. The first call in training finds it compiled.

    Args:
        compiler: without a plan; gets that, and what is compiled.
        model, batch, loss, build: the step, and what makes it on fake tensors.
        target, where: the device, its entry in the table and torch's.
        plan: makes the plan of the step as it is recorded.

    Returns:
        False: forward changes what outlives the call (a counter, a list), and a call that runs nothing would too, so
        nothing was done.

    Raises:
        CaptureError: the step cannot be captured. What `plan` raises.
    """
    device = str(where)

    def run(backend: Callable[..., Any]) -> Callable[..., Any]:
        compiler.first, compiler.run = backend, compiler.runner()
        return compiler.run

    with fake_mode() as mode, in_words(model):
        step = build(device, optimizer_as_on=where.type)
        check_step(step)
        warnings.filterwarnings("ignore", EFFECTS)
        warnings.filterwarnings("error", EFFECTS + NOT_GLOBAL)
        try:
            with unset_fake_temporarily(), dynamo_config.patch(side_effect_replay_policy="warn"):
                given = split_batch(model, to_device(batch, device, None), loss)
                call = called(model, given.args, given.kwargs, run, step.autocast, mode)
        except Exception as error:
            compiler.run = None
            if EFFECTS not in str(error):
                raise
            return False
        finally:
            compiler.first = None
        call.wanted = wanted_by(step)(call.returned)

        def decide(graph: Graph) -> tuple[Program, Sequence[Action]]:
            assert graph.module is not None
            captured, here = call.read(graph.module, graph.forward_outputs), torch.get_default_device()

            def planned() -> Plan:
                with mode, here:
                    return plan(draft_of(step, captured, mode, build, target, device, {}))

            # A thread has modes of its own, and not those in which torch compiles.
            with ThreadPoolExecutor(1) as apart:
                compiler.plan = apart.submit(planned).result()
            program, actions, graph.fit = fitted(graph, compiler.plan, lambda _: {})
            return program, actions

        released = step.loop.release_gradients
        with unset_fake_temporarily(), step.autocast.region(), tracing(call.context):
            graph, compiled = compile_graph(
                call.module, call.examples, decide, call.left_out, released=released
            )
    if compiler.plan is None:
        raise CaptureError(NO_BACKWARD)
    if graph.of_many_sizes:
        # Dynamo's guards lack what AOTAutograd has found of the sizes since they were made.
        compiler.run = None
        return True
    call.compiled[0] = compiled
    compiler.compiled.append(graph)
    return True

"""Train by a plan as a backend of `torch.compile`, called "lowtide".

step = torch.compile(step, backend="lowtide", options={"budget": "60%"}, fullgraph=True)

dynamo captures what is compiled and guards it, AOTAutograd makes the joint graph, a plan cuts it in two, and both
graphs run op by op. What is compiled is best a function that returns the loss; a model alone is planned for a loss that
differentiates all its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from executor.graphs.graph import Graph, compile_graph
from executor.training.match import fitted, left_out
from executor.training.planning import on_stderr
from simulator import api as simulator
from simulator.core.budget import check_budget, parse_budget
from simulator.core.limits import DEFAULTS
from simulator.core.problem import Problem
from simulator.planners.outcome import Infeasible
from tracer.api import GPU_UNKNOWN
from tracer.capture.compiling import differentiable
from tracer.costs.calibration import Costs
from tracer.costs.profiles import board_of
from tracer.record.program import Program
from tracer.record.rows import created_bytes
from tracer.torch_api import one_at_a_time
from traces.devices import device as device_entry
from traces.errors import PlanError, SpecError
from traces.records.plan import ALLOCATED, Action, Plan
from traces.records.trace import Trace
from traces.units import show_bytes, show_percent

OPTIONS: Final = ("plan", "budget", "planner", "seconds")


@one_at_a_time
def lowtide(module: fx.GraphModule, examples: Sequence[Any], *, options: Any = None) -> Any:
    """Compile a graph that dynamo captured; torch.compile calls this.

    Args:
        module, examples: the graph, and the values of its inputs.
        options: of torch.compile. "plan": a Plan or the path of one, made for this graph. "budget": of allocated
            memory in forward and backward: bytes, a size such as "8GiB", or a share such as "60%" of what the graph
            needs without a plan; the optimizer is left out. "planner", "seconds": as in `simulator.plan`.

    Raises:
        SpecError: there is no such option, or neither plan nor budget.
        PlanError: the plan is for another graph. BudgetError: no plan was found within a budget in bytes.
        CaptureError: no plan can hold the graph.
    """
    given: Mapping[str, Any] = options or {}
    if unknown := [k for k in given if k not in OPTIONS]:
        raise SpecError(f'backend "lowtide" has no option {unknown[0]!r}; it has {", ".join(OPTIONS)}.')
    if ("plan" in given) == ("budget" in given):
        raise SpecError('backend "lowtide" takes a plan or a budget: options={"budget": "60%"}.')
    if "budget" in given:
        check_budget(str(given["budget"]))
        return compile_graph(module, examples, lambda graph: _within(graph, given))[1]
    plan = given["plan"]
    plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))

    def decide(graph: Graph) -> tuple[Program, Sequence[Action]]:
        found = fitted(graph, plan, lambda _: {})
        return found.program, found.actions

    refused: list[str] = []
    for gone in left_out(plan, differentiable(module)):
        try:
            return compile_graph(module, examples, decide, None, gone)[1]
        except PlanError as error:
            refused.append(str(error))
    raise PlanError(refused[0])


def _within(graph: Graph, given: Mapping[str, Any]) -> tuple[Program, Sequence[Action]]:
    """A graph's program and the actions of a plan within the budget."""
    program = graph.read()
    problem = Problem(trace_of(program, graph.kind))
    baseline = problem.replay(()).timeline.peak_allocated_bytes
    limit, share = parse_budget(str(given["budget"]), baseline), "%" in str(given["budget"])
    try:
        plan = _plan(problem, limit, given)
    except Infeasible as error:
        if not share:
            raise
        on_stderr(f"no plan was found within {show_bytes(limit)}; the lowest is taken")
        plan = _plan(problem, error.figures["lowest_peak_bytes"], given)
    after = plan.predicted["plan"]
    on_stderr(
        f"a graph of {len(program.ops)} ops: peak {show_bytes(baseline)} -> "
        f"{show_bytes(after['peak_allocated_bytes'])}, {show_percent(after['overhead_percent'], signed=True)} time"
    )
    return program, plan.actions


def _plan(problem: Problem, limit: int, given: Mapping[str, Any]) -> Plan:
    seconds = float(given.get("seconds", DEFAULTS.seconds))
    planner = given.get("planner")
    return simulator.plan(problem, limit, planner=planner, budget_of=ALLOCATED, levers=(), seconds=seconds)


def trace_of(program: Program, kind: str) -> Trace:
    """A program's forward and backward as a trace with the costs of its ops, each run by itself.

    Counts: what goes in and the gradients of the outputs, throughout; outputs until forward ends, or as long as
    backward reads them; gradients from where they are made to the end. Ignores: the optimizer.
    """
    gpu = torch.cuda.get_device_name() if kind == "cuda" else ""
    target = device_entry((board_of(gpu) or GPU_UNKNOWN) if gpu else "cpu")
    rows, sts = program.rows, [replace(s) for s in program.storages]
    for s in program.output_storages:
        sts[s].hold = program.forward_ops - 1
    for s in program.gradient_storages:
        sts[s].hold = len(rows) - 1
    costs = [Costs().of(row, made, target) for row, made in zip(rows, created_bytes(rows, sts), strict=True)]
    of = replace(program, storages=tuple(sts))
    version = torch.__version__
    return of.trace(costs, model="torch.compile", device=kind, target=target.name, torch_version=version)

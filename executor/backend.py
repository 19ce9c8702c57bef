"""Train by a plan as a backend of `torch.compile`, called "lowtide".

dynamo captures what is compiled and guards it, AOTAutograd makes the joint graph, a plan cuts it in two, and both
graphs run op by op. What is compiled is best a function that returns the loss; a model alone is planned for a loss that
differentiates all its outputs. `executor.fit` and `apply_plan` go the same way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx

from executor.graphs.graph import Graph, compile_graph
from executor.graphs.match import HINT, SAVED, fitted, left_out
from simulator.core.limits import DEFAULTS, parse_budget
from simulator.core.problem import Problem
from simulator.planners.outcome import Infeasible
from simulator.prediction import ask as simulator
from tracer.api import GPU_UNKNOWN
from tracer.capture.compiling import SETTINGS, by_dynamo, differentiable
from tracer.costs.cost import costs_of
from tracer.record.program import Program
from tracer.record.rows import created_bytes
from tracer.step.user_errors import user_line
from tracer.torch_api import dynamo_config, one_at_a_time
from traces.devices import board_of
from traces.devices import device as device_entry
from traces.errors import LowtideError, PlanError, SpecError
from traces.progress import Say
from traces.records.plan import ALLOCATED, Action, Plan
from traces.records.trace import Trace
from traces.units import show_bytes, show_percent

OPTIONS: Final = ("plan", "budget", "planner", "seconds", "on_mismatch", "parts")
ERROR: Final = "error"  # what to do with a graph that the plan is not for: raise,
EAGER: Final = "eager"  # run it without a plan,
REPLAN: Final = "replan"  # or plan it within the same budget, and run it without a plan if that is impossible
REPLANNED: Final = "replanned"  # it is another graph, with a plan of its own
# What dynamo takes otherwise by default: it would run a call without its plan, unseen, or ignore a hook added later.
NEVER_UNSEEN: Final = ("fail_on_recompile_limit_hit", "skip_nnmodule_hook_guards")

Sketch = Callable[[Program], dict[str, Any]]


def on_stderr(text: str) -> None:
    sys.stderr.write(f"lowtide: {text}\n")
    sys.stderr.flush()


class ManySizes(PlanError):
    """The plan is not for a graph of many sizes; it may be for that of the call's own."""


def lowtide(module: fx.GraphModule, examples: Sequence[Any], *, options: Any = None) -> Any:
    """Compile a graph that dynamo captured; torch.compile calls this.

    From the first call on, torch.compile raises in this process where it would run code uncompiled after too many
    recompilations, and guards hooks of modules.

    Args:
        module, examples: the graph, and the values of its inputs.
        options: of torch.compile. "plan": a Plan or the path of one, made for this graph. "budget": of allocated
            memory in forward and backward: bytes, a size such as "8GiB", or a share such as "60%" of what the graph
            needs without a plan; the optimizer is left out. "planner", "seconds": as in `simulator.plan`.
            "on_mismatch": of a graph that the plan is not for, as in `executor.apply_plan`. "parts": where the graph
            breaks (fullgraph=False), each part is planned to its share.

    Raises:
        SpecError: there is no such option, or neither plan nor budget.
        PlanError: the plan is for another graph, or the graph breaks. BudgetError: no plan was found within a budget
            in bytes. CaptureError: no plan can hold the graph.
    """
    given: Mapping[str, Any] = options or {}
    if unknown := [k for k in given if k not in OPTIONS]:
        raise SpecError(f'backend "lowtide" has no option {unknown[0]!r}; it has {", ".join(OPTIONS)}.')
    if ("plan" in given) == ("budget" in given):
        raise SpecError('backend "lowtide" takes a plan or a budget: options={"budget": "60%"}.')
    settings = dict(given)
    plan = settings.get("plan")
    if plan is not None and not isinstance(plan, Plan):
        settings["plan"] = Plan.load(Path(str(plan)))
    for name in NEVER_UNSEEN:
        setattr(dynamo_config, name, SETTINGS[name])
    return Compiler(**settings)(module, examples)


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class Compiler:
    """Compiles what dynamo captures by a plan, or by plans within a budget: a backend of torch.compile.

    Attributes:
        plan, budget: one of them is given; see `lowtide`. The budget is also for graphs that the plan is not for.
        sketch: makes the sketch of the call that is being compiled, for messages.
        static: the graphs are of the sizes of one call each, as are those of a step that a plan changes.
        around_bytes: of the budget, what exists beside the graph throughout: the optimizer's states.
        say, warn: told of plans that are made, and of graphs without the plan.
        compiled: the graphs so far that run by a plan.
        without: calls of graphs that run without a plan, by the reason.
        breaks: why graphs ended before what was compiled did, with the lines.
    """

    plan: Plan | None = None
    budget: str | int | None = None
    on_mismatch: str = ERROR
    parts: bool = False
    planner: str | None = None
    seconds: float = DEFAULTS.seconds
    sketch: Sketch = lambda _: {}
    static: bool = True
    around_bytes: int = 0
    say: Say = on_stderr
    warn: Say = on_stderr
    compiled: list[Graph] = field(default_factory=list)
    without: Counter[str] = field(default_factory=Counter)
    breaks: list[str] = field(default_factory=list)
    # Calls what is compiled, of one module or of several that are alike.
    run: Callable[..., Any] | None = None
    first: Callable[..., Any] | None = None  # takes what dynamo captures, for as long as it is here

    def __post_init__(self) -> None:
        if self.on_mismatch not in (ERROR, EAGER, REPLAN):
            raise SpecError(f"on_mismatch {self.on_mismatch!r}: give {ERROR}, {EAGER} or {REPLAN}.")
        if self.budget is not None:
            parse_budget(str(self.budget))
            if self.parts and "%" not in str(self.budget):
                raise SpecError("parts of a step are planned to shares: give a budget such as 60%.")

    @one_at_a_time
    def __call__(self, module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Any:
        self._check_whole(module)
        if self.first is not None:
            return self.first(module, examples)
        try:
            graph, run, fit = self._planned(module, examples)
        except LowtideError as error:
            if isinstance(error, ManySizes) or (self.on_mismatch == ERROR and not self.parts):
                raise
            try:
                graph, run, fit = self._replan(module, examples, str(error))
            except LowtideError as refused:
                return self._unplanned(module, str(refused))
        if graph.rewritten is not None:
            graph.fit = fit
            self.compiled.append(graph)
        return run

    def runner(self) -> Callable[..., Any]:
        """Return what calls forwards by what is compiled of them here, as `by_dynamo` does."""
        fixed = self.static or (self.plan is not None and self.plan.rewrites)
        return by_dynamo(self, dynamic=False if fixed else None, whole=not self.parts)

    def steps(self) -> int:
        """How often graphs ran by a plan."""
        return sum(graph.steps for graph in self.compiled)

    def _check_whole(self, module: fx.GraphModule) -> None:
        """Raise PlanError if dynamo broke the graph off and parts are not asked for."""
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is None or not reason.graph_break:
            return
        why = " ".join(str(reason.reason).split("\n")[0].split())
        self.breaks.append(f"{why}{user_line(reason.user_stack)}")
        if not self.parts:
            raise PlanError(
                f"torch.compile breaks the graph: {self.breaks[-1]}. Mend that line, or let each part be planned to "
                "its share of the budget (parts=True, or options={..., 'parts': True})."
            )

    def _planned(self, module: fx.GraphModule, examples: Sequence[Any]) -> tuple[Graph, Any, str]:
        if self.plan is None:
            return (*compile_graph(module, examples, self._within), REPLANNED)
        plan, fits = self.plan, [SAVED]  # where nothing of the graph has a gradient

        def decide(graph: Graph) -> tuple[Program, Sequence[Action]]:
            program, actions, fit = fitted(graph, plan, self.sketch)
            fits.append(fit)
            return program, actions

        refused: list[str] = []
        freed = "release_gradients" in plan.meta.loop
        for gone in left_out(plan, differentiable(module)):
            try:
                graph, run = compile_graph(module, examples, decide, gone, released=freed)
            except PlanError as error:
                refused.append(str(error))
                continue
            return graph, run, fits[-1]
        many = not self.static and any(isinstance(x, torch.SymInt) for x in examples)
        raise (ManySizes if many else PlanError)(refused[0])

    def _replan(self, module: fx.GraphModule, examples: Sequence[Any], why: str) -> tuple[Graph, Any, str]:
        """Plan this graph alone. LowtideError: it is not to be, or there is no plan."""
        if self.plan is None or not (self.parts or self.on_mismatch == REPLAN):
            raise PlanError(why)
        try:
            made = compile_graph(module, examples, self._within)
        except LowtideError as error:
            raise PlanError(f"{why} No plan could be made for it: {error}") from None
        if not self.parts:
            self.warn(f"by a plan of its own: {why}")
        return (*made, REPLANNED)

    def _unplanned(self, module: fx.GraphModule, why: str) -> Callable[..., Any]:
        """The graph as it was captured; its calls are counted."""
        why = why.replace(HINT, ".")
        self.warn(f"without the plan: {why}")
        call = module.forward

        def run(*values: Any) -> Any:
            self.without[why] += 1
            return call(*values)

        return run

    def _within(self, graph: Graph) -> tuple[Program, Sequence[Action]]:
        """A graph's program and the actions of a plan within the budget."""
        program = graph.read()
        problem = Problem(trace_of(program, graph.kind))
        baseline = problem.replay(()).timeline.peak_allocated_bytes
        limit, must = self._limit(baseline)
        try:
            plan = self._plan_within(problem, limit)
        except Infeasible as error:
            if must:
                raise
            self.say(f"no plan was found within {show_bytes(limit)}; the lowest is taken")
            plan = self._plan_within(problem, error.figures["lowest_peak_bytes"])
        after = plan.predicted["plan"]
        self.say(
            f"a graph of {len(program.ops)} ops: peak {show_bytes(baseline)} -> "
            f"{show_bytes(after['peak_allocated_bytes'])}, {show_percent(after['overhead_percent'], signed=True)} time"
        )
        return program, plan.actions

    def _limit(self, baseline: int) -> tuple[int, bool]:
        """The bytes that a graph may take which needs `baseline` without a plan; and whether more is an error."""
        if self.plan is None:
            return parse_budget(str(self.budget), baseline), "%" not in str(self.budget)
        told = self.plan.predicted
        if self.parts:
            peaks = [told[which]["peak_allocated_bytes"] for which in ("plan", "baseline")]
            return baseline * peaks[0] // peaks[1], False
        of_memory = self.plan.budget_bytes if self.plan.budget_of == ALLOCATED else None
        whole = of_memory or told.get("plan", {}).get("peak_allocated_bytes") or baseline
        return max(whole - self.around_bytes, 1), False

    def _plan_within(self, problem: Problem, limit: int) -> Plan:
        return simulator.plan(
            problem, limit, planner=self.planner, budget_of=ALLOCATED, levers=(), seconds=float(self.seconds)
        )


def check_parts(**given: Any) -> None:
    """Raise SpecError if something is given that only a step captured whole can be planned by."""
    if unfit := [name for name, value in given.items() if value]:
        raise SpecError(
            f"{unfit[0]} is for a step that is captured whole, and parts of one (parts=True) are planned each for "
            "itself, to shares of its allocated memory: leave one of the two out."
        )


def trace_of(program: Program, kind: str, **header: Any) -> Trace:
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
    costs = costs_of(rows, created_bytes(rows, sts), target)
    of = replace(program, storages=tuple(sts))
    version = torch.__version__
    told = {"device": kind, "target": target.name, "torch_version": version, **header}
    return of.trace(costs, model="torch.compile", **told)

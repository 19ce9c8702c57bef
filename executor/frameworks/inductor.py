"""Let torch.compile save for backward, and compute again in it, what a plan says: the plan as Inductor's partition.

from executor.frameworks.inductor import PlanPartitioner
partitioner = PlanPartitioner(budget="60%")
model = torch.compile(model, options={"custom_partitioner_fn": partitioner})

torch.compile traces forward and backward as one graph, and a partitioner cuts it in two. This one plans that graph and
writes it again in the plan's order, with what runs again in backward before its first use there; torch's own
`default_partition` cuts it, and Inductor compiles both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from executor.rewrite import rewrite_joint
from executor.training.planning import Say, on_stderr
from simulator import api as simulator
from simulator.core.budget import check_budget, parse_budget
from simulator.core.limits import DEFAULTS
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from simulator.planners import DEFAULT
from simulator.planners.outcome import Infeasible, finish, refuse
from tracer.api import GPU_UNKNOWN
from tracer.costs.profiles import board_of
from tracer.record.compiled import FORWARD_TAGS, ORIGINAL, WHERE, compiled_program, trace_of
from tracer.record.program import Program
from tracer.record.torch_budget import Joint, SavedSet, Setting, saved_set
from tracer.torch_api import CustomPartitionerFn, current_compile_id, default_partition, get_hash_for_files
from traces.devices import device as device_entry
from traces.errors import SpecError
from traces.provenance import own_files
from traces.records.plan import ALLOCATED, SAVE, Action, Plan
from traces.records.trace import Trace
from traces.units import show_bytes, show_percent

SHARES: Final = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)  # of the budget, for which plans are looked for
DEPTHS: Final = (None, 1, 3)  # see `_shallow`
Pair = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """What was decided for one graph. All bytes are counted as if each op ran by itself."""

    name: str  # as torch names its compilations: frame/number, "0/0"
    plan: Plan
    torch_peak_bytes: int  # with what torch.compile saves without a plan
    trace: Trace  # of the graph, its parameters and arguments resident

    @property
    def peak_bytes(self) -> int:
        """With the plan."""
        return int(self.plan.predicted["plan"]["peak_allocated_bytes"])


class PlanPartitioner(CustomPartitionerFn):
    """The option `custom_partitioner_fn` of torch.compile: a plan for each graph that it compiles for training.

    A plan is for the ops that Inductor is given, one by one. What it fuses leaves no values in between, so that the
    measured peak is lower as a rule; where it runs ops together that the plan has one after another, it can be higher.
    Gradients are those of the compiled model without a plan: random ops draw their seeds once, and run again on them.
    `graphs` holds what was decided; a graph that Inductor has in its cache is decided already, and not there.
    """

    def __init__(
        self,
        budget: str | int,
        *,
        planner: str | None = None,
        seconds: float = DEFAULTS.seconds,
        say: Say = on_stderr,
    ) -> None:
        """
        Args:
            budget: of allocated memory while forward and backward run, the optimizer left out: a share such as "60%"
                of what each graph needs as torch.compile itself partitions it; or bytes, or a size such as "8GiB", of a
                model that is compiled as one graph.
            planner, seconds: how plans are looked for, as in `simulator.plan`.
            say: told what happens, a line each time.

        Raises:
            SpecError: it is no budget.
        """
        super().__init__()
        check_budget(str(budget))
        self.budget, self.planner, self.seconds, self.say = str(budget), planner, seconds, say
        self.graphs: list[CompiledGraph] = []
        self._frames: set[Any] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what differs from run to run: torch makes it a part of its cache's key, and has none otherwise."""
        return partial(PlanPartitioner, planner=self.planner, seconds=self.seconds), (self.budget,)

    def uuid(self) -> Any:
        """Changes with all that a plan follows from but the graph: what was asked for, and Lowtide's own code."""
        files = tuple(map(str, own_files(".py")))
        return get_hash_for_files(files, repr((self.budget, self.planner, self.seconds)))

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Pair:
        """Plan a joint graph and cut it.

        Raises:
            BudgetError: a budget in bytes, within which no plan was found.
            SpecError: a budget in bytes for a model of several graphs.
            CaptureError: see `compiled_program`.
        """
        kwargs.pop("compiler", None)
        name, is_share = self._name(), "%" in self.budget
        program = compiled_program(gm, kwargs["num_fwd_outputs"])
        vals = (n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder"))
        kinds = (x.device.type for x in vals if isinstance(x, torch.Tensor))
        kind = next((k for k in kinds if k != "cpu"), "cpu")
        gpu = torch.cuda.get_device_name() if kind == "cuda" else ""
        trace = trace_of(program, device_entry((board_of(gpu) or GPU_UNKNOWN) if gpu else "cpu"), kind)
        problem = Problem(trace)
        torchs_own = _torchs_own(program, gm, joint_inputs, **kwargs)
        torch_peak = problem.replay(
            actions_saving(problem, torchs_own.saved, torchs_own.recomputed)
        ).timeline.peak_allocated_bytes
        limit = parse_budget(self.budget, torch_peak)
        plan = self._plan(problem, limit)
        if plan.predicted["plan"]["peak_allocated_bytes"] > limit and not is_share:
            raise refuse(problem, plan.planner, limit, plan.predicted["plan"]["peak_allocated_bytes"])
        graph = CompiledGraph(name=name, plan=plan, torch_peak_bytes=torch_peak, trace=trace)
        self.graphs.append(graph)
        self.say(_in_words(graph, limit))
        joint = _written(program, problem.replay(plan.actions).schedule, gm)
        return default_partition(joint, joint_inputs, **kwargs)

    def _name(self) -> str:
        """Of the compilation that runs; SpecError if it is of another part of the model and the budget in bytes."""
        now = current_compile_id()
        self._frames.add(getattr(now, "frame_id", None))
        if len(self._frames) > 1 and "%" not in self.budget:
            raise SpecError(
                f"budget {self.budget}: torch.compile makes several graphs of this model (`fullgraph=True` says where "
                "it breaks), and each is planned by itself; give a share such as 60%, or one partitioner a model."
            )
        return str(now)

    def _plan(self, problem: Problem, limit: int) -> Plan:
        """The cheapest plan found within the limit, else the lowest, in which no op runs again twice.

        Of several copies of a value, Inductor makes those that it fuses at once, however far apart they are used.
        """
        found: list[tuple[int, int, tuple[Action, ...]]] = []
        for depth in DEPTHS:
            part = problem if depth is None else Problem(problem.trace, only=_shallow(problem, depth))
            wanted = [int(share * limit) for share in SHARES]
            while wanted:
                try:
                    plan = self._within(part, wanted.pop(0))
                except Infeasible as error:
                    plan, wanted = self._within(part, error.figures["lowest_peak_bytes"]), []
                actions = _once(problem, plan)
                line = problem.replay(actions).timeline
                over = max(0, line.peak_allocated_bytes - limit)
                found.append((over, line.step_time_ns, actions))
                if not over:
                    break
            if len(found) == 1 and not over:
                break
        over, _, actions = min(found, key=lambda x: x[:2])
        return finish(problem, self.planner or DEFAULT, limit + over, actions)

    def _within(self, problem: Problem, limit: int) -> Plan:
        seconds = self.seconds / len(SHARES)
        return simulator.plan(
            problem, limit, planner=self.planner, budget_of=ALLOCATED, levers=(), seconds=seconds
        )


def _shallow(problem: Problem, depth: int) -> set[int]:
    """The candidates that so many ops that are not fused make from values that are no such candidates.

    Counts: matrix products, convolutions and attention. Ignores: others that Inductor does not fuse.
    """
    ops, candidates, only = problem.trace.ops, set(problem.candidates), set[int]()
    deep: dict[int, int] = {}
    for i in range(problem.forward_end):
        d = max((deep.get(s, 0) for s in ops.reads[i]), default=0) + bool(ops.flops[i])
        made = candidates.intersection(problem.creates[i])
        only |= made if d <= depth else set()
        deep |= {s: 0 if s in made and d > depth else d for s in problem.creates[i]}
    return only


def _once(problem: Problem, plan: Plan) -> tuple[Action, ...]:
    """A plan's actions, but that each op runs again once, and what it makes stays until its last use."""
    schedule = problem.replay(plan.actions).schedule
    steps = zip(schedule.binds, schedule.recompute, strict=True)
    again = {s for bound, rerun in steps if rerun for s in bound}
    saved = {a.storage for a in plan.actions if a.recipe == SAVE} | {*problem.candidates} - again
    return actions_saving(problem, saved, again)


def actions_saving(problem: Problem, saved: Collection[int], again: Collection[int]) -> tuple[Action, ...]:
    """A plan that saves these storages and computes those again."""
    links = [
        s
        for s, op in enumerate(problem.trace.storages.producer)
        if 0 <= op < problem.forward_end and not problem.saved_by_default[s] and not problem.pinned[s]
    ]
    return (
        *(Action(storage=s) for s in problem.candidates if s not in saved),
        *(Action(storage=s, recipe=SAVE) for s in links if s in saved),
        *(Action(storage=s) for s in links if s in again and s not in saved and problem.rebuildable[s]),
    )


def _torchs_own(
    program: Program, gm: fx.GraphModule, inputs: Sequence[Any], num_fwd_outputs: int, **given: Any
) -> SavedSet:
    """What torch.compile would save without a plan."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {})).meta = dict(_output(gm).meta)
    copy = Joint(module=fx.GraphModule(gm, graph), forward_outputs=num_fwd_outputs, stands_for={})
    ops = range(len(program.ops))
    return saved_set(program, Setting(budget=1.0), ops, copy, inputs, compiler="inductor", **given)


def _written(program: Program, schedule: Schedule, gm: fx.GraphModule) -> fx.GraphModule:
    """The joint graph in the schedule's order, for `default_partition`."""
    graph, again, first = rewrite_joint(program, schedule)
    copies = {n.meta[ORIGINAL]: copy for n, copy in first.items()}
    for n in graph.nodes:
        n.meta = dict(n.meta[ORIGINAL].meta)
        if n in again:
            n.meta[WHERE] = "is_backward"
    old = _output(gm)
    output = graph.output(fx.node.map_arg(old.args[0], copies.__getitem__))
    output.meta = dict(old.meta)
    for n in list(graph.nodes):
        if n.meta.get(WHERE) == FORWARD_TAGS[1]:  # new values of buffers: behind all else, as they were
            output.prepend(n)
    graph.lint()
    return fx.GraphModule(gm, graph)


def _output(gm: fx.GraphModule) -> fx.Node:
    return next(iter(gm.graph.find_nodes(op="output")))


def _in_words(graph: CompiledGraph, limit: int) -> str:
    over = graph.plan.predicted["plan"]["overhead_percent"]
    text = (
        f"graph {graph.name}: {len(graph.plan.actions)} values are recomputed; peak "
        f"{show_bytes(graph.torch_peak_bytes)} -> {show_bytes(graph.peak_bytes)} of {show_bytes(limit)}, "
        f"{show_percent(over, signed=True)} time"
    )
    if graph.peak_bytes > limit:
        text = f"warning: {text}: no plan within the budget was found, and this is the lowest"
    return text

"""`ask(problem, question)`: a question parsed once from words, and its answer: the plan for a budget, what it comes to
and what no plan can beat; or why there is none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from simulator.allocator.device import (
    DeviceFit,
    DeviceMemory,
    Setting,
    device_memory,
    kind_of,
    setting_of,
    settings_to_try,
    size_of,
)
from simulator.allocator.settings import parse_alloc_conf
from simulator.bounds import Bound, bounder_of
from simulator.core.limits import BIT_EXACT, DEFAULTS, HOST_BYTES, MOST_BYTES, Levers, Limits, parse_budget
from simulator.core.problem import Problem, Replay, peak_by_category
from simulator.levers import rewritten_problem
from simulator.planners import DEFAULT, SAVE_ALL, find, plan_with
from simulator.planners.outcome import Infeasible, figures_of_plan
from simulator.prediction.levers import lower_bound, plan_with_levers
from simulator.prediction.step import Prediction, predict, provenance, texts
from traces.errors import BudgetError, LowtideError, SpecError
from traces.records.measurement import RunFigures
from traces.records.plan import ALLOCATED, RESERVED, Plan
from traces.records.store import check_fingerprints, load
from traces.records.trace import MOST, Trace, TraceMeta

if TYPE_CHECKING:
    from traces.progress import Say
    from traces.records.gradient_errors import GradientErrors

DEVICE: Final = "device"  # the budget that is the device's memory
NOTHING: Final = Levers(kinds=())
Device = str | int | DeviceMemory


class Words(TypedDict, total=False):
    """The words of a question: keywords of the API, options of the commands."""

    # ALLOCATED or RESERVED; None: reserved where a GPU is named, or its memory. Under a budget of reserved memory the
    # allocator's settings are chosen too, unless `alloc_conf` gives them; the plan carries them.
    budget_of: str | None
    planner: str | None  # a name of `simulate planners`; None: the default
    seconds: float  # 5: processor time after which all searches for one answer end with the best plan so far
    seed: int  # 0: of random choices; equal seeds make equal plans
    # As PYTORCH_ALLOC_CONF would be; None: as the trace was recorded. GPUs' traces only.
    alloc_conf: str | None
    gpu: str | None  # the device as a command says it, by the words of `device_memory`
    memory: str | None
    context: str | None
    # How a plan may change the step beside recomputing. "bit": gradients equal in every bit; "fp": but for rounding (a
    # loss head in tiles, whose logits then do not exist); "approximate": within a measured error.
    allow: str
    levers: Sequence[str] | str | None  # None: all that are allowed and need no name
    host_memory: str | None  # the pinned host memory that "offload" may take; None: 32 GiB
    host_bandwidth: str | None  # what it copies either way in a second; None: what the device table has
    max_gradient_error: float | None  # of an approximate plan, relative L2, by the `errors` of its parts
    errors: GradientErrors | str | Path | None  # what `execute errors` measured of this step, or its file


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about any trace; nothing in it is of one trace."""

    budget: str | int | None = None  # bytes, a size, a share of the step's own peak, DEVICE; None: no limit
    budget_of: str | None = None  # ALLOCATED or RESERVED; None: reserved where a GPU is named, or its memory
    planner: str | None = None  # None: everything saved where there is no budget, else the default
    limits: Limits = DEFAULTS
    levers: Levers = BIT_EXACT
    alone: bool = False  # the planner by itself: no levers, and no advice about them
    alloc_conf: str | None = None
    # The device's memory, by the kind of the trace that is to fit it (cuda or cpu, or None: as the device is).
    device: Callable[[str | None], DeviceMemory | None] = device_memory

    @property
    def planner_name(self) -> str:
        return self.planner or (SAVE_ALL if self.budget is None else DEFAULT)

    def setting(self, meta: TraceMeta) -> Setting:
        """The allocator settings and the device to ask about. Raises SpecError if the trace has none such."""
        return setting_of(meta, self.alloc_conf, self.device(kind_of(meta)))

    def limit(self, saved: Prediction) -> tuple[int | None, str]:
        """The budget in bytes (None: there is none), and what it limits, for the step with everything saved. Raises
        SpecError: no device is named whose memory the budget is, or a CPU's trace reserves no memory."""
        device, on_gpu = saved.setting.device, saved.setting.settings is not None
        by_device = RESERVED if on_gpu and device is not None else ALLOCATED
        if self.budget == DEVICE:
            if device is None:
                raise SpecError("--budget device: name the device with --gpu or --device-memory.")
            return device.usable_bytes, by_device
        if self.budget is None:
            return None, self.budget_of or ALLOCATED
        of = self.budget_of or by_device
        whole = saved.whole_bytes(of)
        return self.budget if isinstance(self.budget, int) else parse_budget(self.budget, whole), of

    def of_planner(self) -> Question:
        """Return the same of a planner by itself. Raises SpecError if it is of changes of the step beside."""
        if self.levers not in (BIT_EXACT, NOTHING):
            raise SpecError("planners are looked at by themselves here: leave allow and levers out.")
        return replace(self, levers=NOTHING, alone=True)


def question(
    budget: str | int | None = None, device: Device | None = None, **words: Unpack[Words]
) -> Question:
    """The question that words mean. `device`: what the plan is to fit: a name such as "a100-40", a size such as "40GiB"
    or in bytes, or the memory. Raises SpecError: a word means nothing in any trace; TypeError: there is no such word.
    """
    if unknown := words.keys() - Words.__annotations__.keys():
        raise TypeError(f"{sorted(unknown)[0]!r} is no word of a question.")
    budget_of, planner = words.get("budget_of"), words.get("planner")
    if budget is not None and budget != DEVICE:
        parse_budget(str(budget))
    if budget_of not in (None, ALLOCATED, RESERVED):
        raise SpecError(f"budget_of {budget_of!r}: give {ALLOCATED} or {RESERVED}.")
    seconds = words.get("seconds", DEFAULTS.seconds)
    if not isinstance(seconds, int | float) or not 0 <= seconds <= sys.float_info.max:
        raise SpecError(f"--seconds {seconds!r}: give a number of seconds such as 5.")
    if planner is not None:
        find(planner)
    if (alloc_conf := words.get("alloc_conf")) is not None:
        parse_alloc_conf(alloc_conf)
    return Question(
        budget=min(budget, MOST_BYTES) if isinstance(budget, int) else budget,
        budget_of=budget_of,
        planner=planner,
        limits=Limits(seconds=seconds, seed=words.get("seed", DEFAULTS.seed)),
        levers=_levers(words),
        alloc_conf=alloc_conf,
        device=_named_device(device, words),
    )


def _levers(words: Words) -> Levers:
    kinds, errors = words.get("levers"), words.get("errors")
    memory, bandwidth = words.get("host_memory"), words.get("host_bandwidth")
    if isinstance(kinds, str):
        kinds = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    if isinstance(errors, str | Path):
        from traces.records.gradient_errors import GradientErrors

        errors = GradientErrors.load(errors)
    return Levers(
        allow=words.get("allow", BIT_EXACT.allow),
        kinds=None if kinds is None else tuple(kinds),
        host_bytes=HOST_BYTES if memory is None else size_of("--host-memory", memory),
        host_bytes_per_s=0 if bandwidth is None else size_of("--host-bandwidth", bandwidth),
        max_gradient_error=words.get("max_gradient_error"),
        errors=errors,
    )


def _named_device(device: Device | None, words: Words) -> Callable[[str | None], DeviceMemory | None]:
    gpu, memory = words.get("gpu"), words.get("memory")
    if isinstance(device, DeviceMemory):
        return lambda kind: device
    if isinstance(device, str) and not device.strip()[:1].isdigit():  # a size begins with a digit
        gpu = device
    elif device is not None:
        memory = str(device)
    of = partial(device_memory, gpu=gpu, memory=memory, context=words.get("context"))
    of(None)  # which refuses what means nothing
    return of


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The question about one trace, and the plan that was found, or the refusal."""

    question: Question
    trace_name: str
    asked: Prediction  # everything saved, under the settings that were asked about
    budget_bytes: int | None
    budget_of: str
    solve_seconds: float = 0.0
    found: Prediction | None = None  # with the complete plan, under the settings that it carries
    refusal: LowtideError | None = None

    @property
    def planned(self) -> Prediction:
        """The step with the plan; raises the refusal if there is none."""
        if self.found is None:
            assert self.refusal is not None
            raise self.refusal
        return self.found

    @property
    def bound(self) -> Bound | None:
        """Return what every plan within the budget adds at least, with the levers that are allowed; None: no budget."""
        limit, levers = self.budget_bytes, self.question.levers
        if limit is None:
            return None
        return self.asked.problem.once(("least", limit, levers), lambda p: lower_bound(p, limit, levers))

    @property
    def gap_points(self) -> float | None:
        """The plan's overhead minus the certified bound, in percent of the step with everything saved."""
        if self.found is None or self.bound is None:
            return None
        times = (run.timeline.step_time_ns for run in (self.found.planned, self.found.saved))
        return self.bound.gap_points(*times)

    def to_json(self) -> dict[str, Any]:
        """Return what `simulate TRACE --json` prints: without a plan the same keys, its figures empty, and why."""
        from simulator.prediction.loop_peaks import planned_peaks, untouched_peaks

        c, bound = self.found or self.asked, self.bound
        meta = c.trace.meta
        out = {
            "trace": self.trace_name,
            "model": meta.model,
            "batch_size": meta.batch_size,
            "target": meta.target,
            "fingerprint": meta.fingerprint,
            "provenance": provenance(meta),
            "times": meta.times,
            "alloc_conf": c.setting.alloc_conf,
            "planner": self.question.planner_name if self.found is None else c.plan.planner,
            "solve_seconds": round(self.solve_seconds, 3),
            "bound": {"overhead_percent": None, "reason": "without a budget nothing bounds the added time from below"}
            if bound is None
            else bound.to_json(),
            "gap_points": self.gap_points,
            "warnings": [*texts(c)],
            "feasible": self.found is not None and c.planned_fit.fits is not False,
            **({} if self.found is None else {"budget_bytes": self.budget_bytes}),
            "budget_of": self.budget_of,
            "device_memory": _device(c.saved_fit, None if self.found is None else c.planned_fit),
            "untouched": untouched_peaks(self.asked).to_json(),
            "baseline": _run(c.trace, c.saved, c.saved_fit),
        }  # fmt: skip
        if self.found is None:
            unknown = dict.fromkeys(("overhead_percent", "recomputed_ops"))
            plan: dict[str, Any] = {**RunFigures().headline(), **unknown}
            figures = self.refusal.figures if isinstance(self.refusal, Infeasible) else {}
            return {**out, "plan": plan, "message": str(self.refusal), **figures}
        plan = {
            **_run(c.step.trace, c.planned, c.planned_fit),
            "overhead_percent": c.overhead_percent,
            "recomputed_ops": c.planned.timeline.recomputed_ops,
            "recomputed_storages": len(c.plan.recomputed),
            "recipes": c.plan.by_recipe,
            **_rewritten(c),
            **planned_peaks(c).parts(),
        }
        return {**out, "plan": plan}


def _rewritten(c: Prediction) -> dict[str, Any]:
    """How the step itself is changed, and what that means for its gradients; nothing where it is not."""
    rewrites = [{"kind": r.kind, "op": r.op, "number": r.number, "error": r.error} for r in c.plan.rewrites]
    if not rewrites:
        return {}
    from simulator.levers.offload import host_bytes

    copied = host_bytes(c.trace, c.plan.rewrites)
    told = {"rewrites": rewrites, "exactness": c.plan.exactness}
    return told | ({"host_bytes": copied} if copied else {})


def _run(trace: Trace, replay: Replay, fit: DeviceFit) -> dict[str, Any]:
    return {
        **fit.figures(replay.timeline.step_time_ns).headline(),
        "allocator": fit.allocator(),
        "peak_by_category": peak_by_category(trace, replay.schedule, replay.timeline),
    }


def _device(saved: DeviceFit, planned: DeviceFit | None) -> dict[str, Any] | None:
    """Return what the device has, and whether both runs fit; `planned` is None where there is no plan."""
    if saved.device is None:
        return None
    return {
        **saved.device.to_json(),
        "baseline_fits": saved.fits,
        "plan_fits": planned and planned.fits,
        "left_bytes": planned and planned.left_bytes,
        "baseline_retries_a_step": saved.retries_a_step,
        "plan_retries_a_step": planned and planned.retries_a_step,
    }


def ask(
    problem: Problem,
    question: Question,
    *,
    name: str = "",
    say: Say = lambda line: None,
    refusals: tuple[type[LowtideError], ...] = (BudgetError,),
) -> Answer:
    """Answer a question about a trace of that name; `refusals`: which errors of a planner are an answer. Raises
    SpecError: the question means nothing for this trace; LowtideError: whatever else the planner raises."""
    asked = predict(problem, question.setting(problem.trace.meta))
    limit, of = question.limit(asked)
    answer = Answer(question=question, trace_name=name, asked=asked, budget_bytes=limit, budget_of=of)
    _ = answer.bound  # which takes none of the planners' time
    say(f"planning with {question.planner_name}")
    begin = time.perf_counter()
    try:
        answer = replace(answer, found=_planned(answer, say))
    except refusals as error:
        answer = replace(answer, refusal=error)
    return replace(answer, solve_seconds=time.perf_counter() - begin)


def _planned(a: Answer, say: Say) -> Prediction:
    """The step with the cheapest plan that is found; raises BudgetError: none is within the budget."""
    problem, q, limit, setting = a.asked.problem, a.question, a.budget_bytes, a.asked.setting
    under: dict[Problem, Setting] = {}  # the allocator settings of a step's plan
    # The times of steps with the plans that were made, or looked for in vain.
    limits, made = q.limits.started(), list[int]()

    def make(step: Problem) -> Plan:
        best_ns, soon = min(made, default=MOST), made and limits.enough_ns
        if (limits.over and (best_ns < MOST or soon)) or best_ns <= limits.enough_ns:
            raise Infeasible("the time is over, and there is a plan.", {"lowest_peak_bytes": MOST})
        made.append(MOST)
        plan = (reserved if a.budget_of == RESERVED and limit is not None else one)(step)
        made[-1] = plan.predicted["plan"]["step_time_ns"]
        return plan

    def reserved(step: Problem) -> Plan:
        from simulator.prediction.reserved_budget import plan_within_reserved

        assert limit is not None
        settings = (setting,) if q.alloc_conf is not None else settings_to_try(step.trace.meta, setting)
        plan, under[step] = plan_within_reserved(step, q.planner_name, limits, settings, limit, say)
        return plan

    def one(step: Problem) -> Plan:
        return plan_with(q.planner_name, step, MOST_BYTES if limit is None else limit, limits)

    of = partial(plan_with_levers, helps=not limits.enough_ns)
    plan = make(problem) if limit is None or q.alone else of(problem, limit, q.levers, make)
    step = rewritten_problem(problem, plan.rewrites)
    plan = replace(plan, budget_bytes=limit, budget_of=a.budget_of)
    return completed(predict(problem, under.get(step, setting), plan))


def completed(c: Prediction) -> Prediction:
    """The prediction whose plan carries its figures, the allocator settings, and what to say beside them."""
    told = {"warnings": list(texts(c)), "provenance": provenance(c.trace.meta)}
    predicted = figures_of_plan(c.saved_figures, c.planned_figures, c.planned.timeline)
    conf = c.setting.alloc_conf
    meta = c.plan.meta if conf is None else replace(c.plan.meta, alloc_conf=conf)
    return replace(c, plan=replace(c.plan, meta=meta, predicted={**predicted, **told}).sealed())


# The questions that have one answer about a trace, as functions; the commands ask them too

# A trace, its directory or name in the gallery, or what is known of it.
Source = Trace | str | Path | Problem
Budget = str | int  # bytes, a size, a share of the step's own peak, or "device"


def problem_of(trace: Source) -> Problem:
    """One trace, which every function here takes in place of the trace, so that work is shared. Raises TraceError:
    there is no such trace, or it is malformed."""
    if isinstance(trace, Problem):
        return trace
    if not isinstance(trace, Trace):
        name, trace = str(trace), load(str(trace))
        check_fingerprints(trace, name)
    return Problem(trace)


def simulate(
    trace: Source,
    plan: Plan | str | Path | None = None,
    *,
    alloc_conf: str | None = None,
    device: Device | None = None,
) -> Prediction:
    """Replay a training step, as it is and with a plan.

    Args:
        plan: a Plan or its file; None: everything is saved.
        alloc_conf: as PYTORCH_ALLOC_CONF would be; None: as the plan says, or else as the trace was recorded.
        device: whether the step fits it: a name such as "a100-40", a size, or the memory as it is.

    Returns:
        peaks, times and reserved memory of both runs; in a notebook it shows the memory over the step.

    Raises:
        PlanError: the plan is of another trace, or malformed.
        SpecError: no such device or setting.
    """
    problem = problem_of(trace)
    if isinstance(plan, str | Path):
        plan = Plan.load(plan)
    if plan is not None and alloc_conf is None and plan.meta.alloc_conf != problem.trace.meta.alloc_conf:
        alloc_conf = plan.meta.alloc_conf
    setting = question(alloc_conf=alloc_conf, device=device).setting(problem.trace.meta)
    return predict(problem, setting, plan)


def plan(
    trace: Source,
    budget: Budget | None,
    *,
    device: Device | None = None,
    progress: Say = lambda line: None,
    **words: Unpack[Words],
) -> Plan:
    """Find what to recompute so that the step's peak stays within a budget, at the least added time.

    Args:
        budget: bytes, a size, a share of the step's own peak, or "device": what `device` has; None: no limit.
        device: of a budget "device", or of a plan that is to fit it.
        progress: told one line about each thing that is done.
        words: those of `simulator.prediction.ask.Words`, such as `allow="fp"` or `seconds=20`.

    Returns:
        the complete plan with its predicted figures, which `save` writes for `execute`.

    Raises:
        Infeasible: no plan was found within the budget; its `figures` hold the lowest peak that was reached and the
            floor below which no plan can go.
        SpecError: no such budget, planner or device.
    """
    asked = question(budget, device, **words)
    return ask(problem_of(trace), asked, say=progress).planned.plan


def bound(trace: Source, budget: Budget) -> Bound:
    """Return what every plan within a budget of allocated memory must add to the step's time at least, certified;
    `feasible` is False where certainly no plan fits. Raises SpecError: no such budget."""
    asked, problem = question(budget), problem_of(trace)
    limit, _ = asked.limit(predict(problem, asked.setting(problem.trace.meta)))
    assert limit is not None
    return bounder_of(problem).bound(limit)

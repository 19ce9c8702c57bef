"""The questions that can be asked about a trace, as functions; the commands ask them too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from simulator.core.limits import DEFAULTS, HOST_BYTES, Constraints, Levers, Limits
from simulator.core.problem import Problem
from traces.errors import SpecError
from traces.records.gradient_errors import GradientErrors
from traces.records.plan import ALLOCATED, RESERVED, Plan
from traces.records.trace import Trace

if TYPE_CHECKING:
    from simulator.allocator.device import DeviceMemory
    from simulator.allocator.device_fit import Setting
    from simulator.bounds.bound import Bound
    from simulator.prediction.step import Prediction
    from simulator.studies.comparison import Comparison
    from simulator.studies.max_batch import MaxBatch
    from simulator.studies.pareto import Front

    # A name such as "a100-40", a size such as "40GiB" or in bytes; or the memory, as it is or by the kind of a trace.
    Device = str | int | DeviceMemory | Callable[[str | None], DeviceMemory | None]

# A trace, its directory or name in the gallery, or it under its constraints.
Source = Trace | str | Path | Problem
Budget = str | int  # bytes, a size, or a share of the step's own peak
DEVICE = "device"  # the budget that is the device's memory


class Planning(TypedDict, total=False):
    """How to look for plans: every function that plans takes these."""

    seconds: float  # 5: processor time after which a search ends with the best plan so far
    seed: int  # 0: of random choices; equal seeds make equal plans
    never: Sequence[str]  # selectors of ops that must not run again
    always_save: Sequence[str]  # selectors of ops whose values must be saved
    # As PYTORCH_ALLOC_CONF would be; None: as the trace was recorded. GPUs' traces only.
    alloc_conf: str | None
    progress: Callable[[str], None]  # told one line about each thing that is done


def problem_of(trace: Source, never: Sequence[str] = (), always_save: Sequence[str] = ()) -> Problem:
    """One trace under constraints, which every function here takes in place of the trace, so that work is shared.

    Args:
        trace: a Trace, a directory, a name in the gallery, or a Problem, which has its constraints.
        never, always_save: as in `Planning`.

    Raises:
        TraceError: there is no such trace, or it is malformed.
        SpecError: a selector means nothing in this trace.
    """
    if isinstance(trace, Problem):
        return trace
    if not isinstance(trace, Trace):
        from traces.records.store import check_fingerprints, load

        name, trace = str(trace), load(str(trace))
        check_fingerprints(trace, name)
    return Problem(trace, Constraints(never=tuple(never), always_save=tuple(always_save)))


def simulate(
    trace: Source,
    plan: Plan | str | Path | None = None,
    *,
    alloc_conf: str | None = None,
    device: Device | None = None,
    budget_bytes: int | None = None,
) -> Prediction:
    """Replay a training step, as it is and with a plan.

    Args:
        plan: a Plan or its file; None: everything is saved.
        alloc_conf: as in `Planning`; None: also as the plan says.
        device: whether the step fits it.
        budget_bytes: shown beside the figures; None: the plan's own.

    Returns:
        peaks, times and reserved memory of both runs; in a notebook it shows the memory over the step.

    Raises:
        PlanError: the plan is of another trace, or malformed.
        SpecError: no such device or setting.
    """
    from simulator.prediction.step import predict

    problem = problem_of(trace)
    if isinstance(plan, str | Path):
        plan = Plan.load(plan)
    if budget_bytes is None and plan is not None:
        budget_bytes = plan.budget_bytes
    if alloc_conf is None and plan is not None and plan.meta.alloc_conf != problem.trace.meta.alloc_conf:
        alloc_conf = plan.meta.alloc_conf
    return predict(problem, _setting(problem, alloc_conf, device), plan, budget_bytes)


def plan(
    trace: Source,
    budget: Budget | None,
    *,
    planner: str | None = None,
    budget_of: str | None = None,
    device: Device | None = None,
    allow: str = "bit",
    levers: Sequence[str] | None = None,
    host_memory: str | None = None,
    host_bandwidth: str | None = None,
    max_gradient_error: float | None = None,
    errors: GradientErrors | str | Path | None = None,
    **options: Unpack[Planning],
) -> Plan:
    """Find what to recompute so that the step's peak stays within a budget, at the least added time.

    Args:
        budget: bytes, a size, a share of the step's own peak, or "device": what `device` has; None: no limit.
        planner: a name of `simulate planners`, or `module:function`; None: the default.
        budget_of: "allocated", or "reserved": what CUDA's allocator takes from the device; None: reserved where a GPU
            is named, or its memory. Under a budget of reserved memory the allocator's settings are chosen too, unless
            `alloc_conf` gives them; the plan carries them.
        device: of a budget "device", or of a plan that is to fit it.
        allow: how a plan may change the step beside recomputing: "bit" (gradients equal in every bit), "fp" (but for
            rounding: a loss head in tiles, whose logits then do not exist), "approximate" (within a measured error).
        levers: names of such changes (`simulate levers`); None: all that are allowed and need no name.
        host_memory, host_bandwidth: sizes, of pinned host memory and of what is copied to it or back in a second, for
            the change "offload"; None: 32 GiB, and what the device table has.
        max_gradient_error: of an approximate plan, relative L2, by the `errors` of its parts as if they were
            independent.
        errors: what `execute errors` measured of this step, or its file; without them no plan is approximate.
        options: those of `simulator.api.Planning`.

    Returns:
        the complete plan with its predicted figures, which `save` writes for `execute`.

    Raises:
        Infeasible: no plan was found within the budget; its `figures` hold the lowest peak that was reached and the
            floor below which no plan can go.
        SpecError: no such budget, planner, selector or device.
    """
    from simulator.planners import DEFAULT
    from simulator.prediction.planning import plan_for

    problem, limits, setting, progress = _asked(trace, device, **options)
    limit, of = budget_in_bytes(problem, budget, budget_of, setting)
    name = planner or DEFAULT
    made = plan_for(
        problem,
        name,
        limits,
        setting,
        budget_bytes=limit,
        budget_of=of,
        levers=levers_of(allow, levers, host_memory, host_bandwidth, max_gradient_error, errors),
        progress=progress,
    )
    return made.plan


def bound(
    trace: Source, budget: Budget, *, never: Sequence[str] = (), always_save: Sequence[str] = ()
) -> Bound:
    """What every plan within a budget of allocated memory must add to the step's time at least, certified.

    Returns:
        `added_time_ns`, `overhead_percent` and the `reason`; `feasible` is False where certainly no plan fits.

    Raises:
        SpecError: no such budget or selector.
    """
    from simulator.bounds.bound import lower_bound

    problem = problem_of(trace, never, always_save)
    return lower_bound(problem, _allocated_bytes(problem, budget, _setting(problem, None, None)))


def compare(
    trace: Source,
    budget: Budget,
    planners: Sequence[str] | None = None,
    *,
    device: Device | None = None,
    name: str = "",
    **options: Unpack[Planning],
) -> Comparison:
    """Set planners side by side on one trace and budget of allocated memory.

    Args:
        planners: names, or `module:function`; None: all.
        device: whether each plan fits it.
        name: of the trace, for the answer.
        options: those of `simulator.api.Planning`; `seconds` for each planner.

    Returns:
        a row for each planner: peak, added time, gap to the bound, or why it has no plan.

    Raises:
        SpecError: no such budget, planner, selector or device.
    """
    from simulator.planners import REGISTRY
    from simulator.studies.comparison import compare as compare_planners

    problem, limits, setting, progress = _asked(trace, device, **options)
    limit = _allocated_bytes(problem, budget, setting)
    chosen = tuple(REGISTRY) if planners is None else planners
    return compare_planners(problem, name, limit, chosen, limits, setting, progress)


def pareto(
    trace: Source,
    points: int = 20,
    *,
    planner: str | None = None,
    device: Device | None = None,
    name: str = "",
    **options: Unpack[Planning],
) -> Front:
    """The whole front of one trace: what each GiB costs.

    Args:
        points: number of budgets (at least 2), evenly from the floor to the peak with everything saved.
        planner, device, name: as for `plan` and `compare`.
        options: those of `simulator.api.Planning`; `seconds` for the whole front.

    Returns:
        a point for each budget with the cheapest plan, the certified bound and the price of a GiB; and the plans.

    Raises:
        SpecError: no such planner, selector or device, or the planner cannot plan this trace at all.
    """
    from simulator.planners import DEFAULT
    from simulator.studies.pareto import pareto as front

    if points < 2:
        raise SpecError(f"{points} points: a front has two at least.")
    problem, limits, setting, progress = _asked(trace, device, **options)
    return front(problem, name, planner or DEFAULT, points, limits, setting, progress)


def max_batch(
    model: str,
    device: Device,
    *,
    budget_overhead_percent: float = 30.0,
    directory: str | Path | None = None,
    planner: str | None = None,
    multiple_of: int = 1,
    maximum: int = 65536,
    trace_options: Sequence[str] = (),
    allow: str = "bit",
    levers: Sequence[str] | None = None,
    host_memory: str | None = None,
    host_bandwidth: str | None = None,
    **options: Unpack[Planning],
) -> MaxBatch:
    """The largest batch of a model that fits a device, without a plan and with one.

    Args:
        model: a name of `trace models`, or `file.py:function`; `trace` runs in processes of its own.
        device: as for `simulate`; a size alone is of a CPU's memory. On a GPU reserved memory must fit.
        budget_overhead_percent: what a plan may add to the time of a step.
        directory: of traces and plans, which are used again; None: `MODEL-max-batch`.
        planner: as for `plan`.
        multiple_of, maximum: of the batch sizes that are tried.
        trace_options: further words for `trace`, such as ["--seq-len", "512"].
        allow, levers, host_memory, host_bandwidth: as for `plan`.
        options: those of `simulator.api.Planning`; `seconds` for each plan.

    Returns:
        both batch sizes (0: not even the smallest fits) and everything that was tried.

    Raises:
        SpecError: no such device or planner.
        LowtideError: the model cannot be traced; with what `trace` said.
    """
    from simulator.allocator.device import CPU
    from simulator.planners import DEFAULT, find
    from simulator.studies.max_batch import Request
    from simulator.studies.max_batch import max_batch as search
    from traces.model_spec import short_name

    find(planner or DEFAULT)
    limits, constraints, alloc_conf, progress = _meant(**options)
    words = list(trace_options)
    memory = device_of(device, None)
    assert memory is not None
    placed = any(word.partition("=")[0] in ("--target", "--device") for word in words)
    if memory.kind != CPU and not placed:
        words += ["--target", memory.name]
    request = Request(
        model=model,
        device=memory,
        directory=Path(directory or f"{short_name(model)}-max-batch"),
        overhead_percent=budget_overhead_percent,
        planner=planner or DEFAULT,
        limits=limits,
        constraints=constraints,
        levers=levers_of(allow, levers, host_memory, host_bandwidth),
        alloc_conf=alloc_conf,
        multiple_of=multiple_of,
        maximum=maximum,
        tracer_options=tuple(words),
    )
    return search(request, lambda batch_size: request.trace(batch_size, progress), progress)


# What the words mean


def levers_of(
    allow: str,
    levers: Sequence[str] | None,
    host_memory: str | None = None,
    host_bandwidth: str | None = None,
    max_gradient_error: float | None = None,
    errors: GradientErrors | str | Path | None = None,
) -> Levers:
    """The rewrites that a plan may take; the arguments are those of `plan`."""
    from simulator.allocator.device import size_of

    return Levers(
        allow=allow,
        kinds=None if levers is None else tuple(levers),
        host_bytes=HOST_BYTES if host_memory is None else size_of("--host-memory", host_memory),
        host_bytes_per_s=0 if host_bandwidth is None else size_of("--host-bandwidth", host_bandwidth),
        max_gradient_error=max_gradient_error,
        errors=GradientErrors.load(errors) if isinstance(errors, str | Path) else errors,
    )


def _meant(
    *,
    seconds: float = DEFAULTS.seconds,
    seed: int = DEFAULTS.seed,
    never: Sequence[str] = (),
    always_save: Sequence[str] = (),
    alloc_conf: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Limits, Constraints, str | None, Callable[[str], None]]:
    """`Planning` with its defaults."""
    if not isinstance(seconds, int | float) or not 0 <= seconds <= sys.float_info.max:
        raise SpecError(f"seconds {seconds!r}: give a number such as 5.")
    constraints = Constraints(never=tuple(never), always_save=tuple(always_save))
    return Limits(seconds=seconds, seed=seed), constraints, alloc_conf, progress


def _asked(
    trace: Source, device: Device | None, **options: Unpack[Planning]
) -> tuple[Problem, Limits, Setting, Callable[[str], None]]:
    limits, constraints, alloc_conf, progress = _meant(**options)
    problem = problem_of(trace, constraints.never, constraints.always_save)
    return problem, limits, _setting(problem, alloc_conf, device), progress


def device_of(device: Device | None, kind: str | None) -> DeviceMemory | None:
    """A device's memory from its name, its size, or as it is; `kind`: cuda or cpu, of the trace that is to fit."""
    from simulator.allocator.device import DeviceMemory, device_memory

    if device is None or isinstance(device, DeviceMemory):
        return device
    if callable(device):
        return device(kind)
    named = isinstance(device, str) and not device.strip()[:1].isdigit()  # a size begins with a digit
    return device_memory(kind, **{"gpu" if named else "memory": str(device)})


def _setting(problem: Problem, alloc_conf: str | None, device: Device | None) -> Setting:
    from simulator.allocator.device_fit import kind_of, setting_of

    meta = problem.trace.meta
    return setting_of(meta, alloc_conf, device_of(device, kind_of(meta)))


def _allocated_bytes(problem: Problem, budget: Budget, setting: Setting) -> int:
    limit, _ = budget_in_bytes(problem, budget, ALLOCATED, setting)
    assert limit is not None
    return limit


def budget_in_bytes(
    problem: Problem, budget: Budget | None, budget_of: str | None, setting: Setting
) -> tuple[int | None, str]:
    """A budget in bytes, and of what memory it is; None: no limit. `budget_of`: as in `plan`.

    Raises:
        SpecError: it means nothing.
    """
    from simulator.core.budget import parse_budget
    from simulator.prediction.step import predict

    if budget_of is None:
        budget_of = (
            ALLOCATED if budget is None or setting.device is None or setting.settings is None else RESERVED
        )
    if budget_of not in (ALLOCATED, RESERVED):
        raise SpecError(f"budget_of {budget_of!r}: give {ALLOCATED} or {RESERVED}.")
    if budget is None:
        return None, budget_of
    if budget == DEVICE:
        if setting.device is None:
            raise SpecError("--budget device: name the device with --gpu or --device-memory.")
        return setting.device.usable_bytes, ALLOCATED if setting.settings is None else RESERVED
    return parse_budget(str(budget), predict(problem, setting).whole_bytes(budget_of)), budget_of

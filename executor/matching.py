"""Check whether a plan, and its predicted times, are for the device at hand."""

from __future__ import annotations

from simulator.allocator.settings import parse_alloc_conf
from traces.errors import EnvironmentProblem, PlanError, SpecError
from traces.model_spec import split_reference
from traces.provenance import alloc_conf
from traces.records.plan import Plan
from traces.records.store import load
from traces.records.trace import RANK, Trace, TraceMeta


def check_trusted(source: object, named: str, given: str, trust: bool) -> None:
    """Raise SpecError if the model `named` by a plan or a trace (`source`) is a Python file that the user has not
    `given` himself, nor trusts.
    """
    if not given and not trust and split_reference(named):
        raise SpecError(
            f"{source} names code of its own, {named}, which would run here. Give --trust if you know it, or name "
            f"it yourself: --model {named}."
        )


def check_alloc_conf(meta: TraceMeta, device: str) -> None:
    """Raise EnvironmentProblem if the environment's allocator settings are others than those of the plan, which the
    processes that measure get where the environment says nothing.
    """
    now = alloc_conf()
    if not device.startswith("cuda") or not meta.alloc_conf or not now:
        return
    if parse_alloc_conf(now) != parse_alloc_conf(meta.alloc_conf):
        raise EnvironmentProblem(
            f"the plan was made for PYTORCH_ALLOC_CONF={meta.alloc_conf}, and the environment says {now}, under which "
            "the step reserves other memory: unset PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, or plan again with "
            f"--alloc-conf {now}."
        )


def check_kind(meta: TraceMeta, device: str) -> None:
    """Raise PlanError if a plan is for a GPU's graph and the device is the CPU, or of a rank's step as a whole; what
    else there is, the graphs' structures decide."""
    if meta.device == RANK:
        raise PlanError(
            "the plan is of a rank's step as `execute rehearse --trace` recorded it, for looking at alone: plans that "
            "its blocks can train by come from `execute rehearse --budget`."
        )
    if meta.device.startswith("cuda") and device.startswith("cpu"):
        raise PlanError(
            f"the plan is for the graph that {meta.target} runs, and the CPU runs other ops (attention, batch norm): "
            "run it with --device cuda, or trace again without --target for a plan that runs on the CPU."
        )


def times_apply(meta: TraceMeta, device: str, gpu: str = "") -> bool:
    """Return whether the times of a trace are those of the device, of GPUs of the same board (`gpu`: its name as the
    driver gives it), so that they can be set beside measured ones.
    """
    from traces.devices import board_of

    if device.startswith("cpu"):
        return meta.target.lower() == "cpu"
    return bool(gpu) and meta.target == (gpu if meta.mode == "real" else board_of(gpu))


def trace_of(plan: Plan, model: str, device: str, name: str | None = None) -> Trace:
    """The trace behind a plan: in a directory of that name, or recorded again on fake tensors of a device, of `model`
    instead of what the plan names. Raises PlanError if the trace in the directory is another one.
    """
    if name is not None:
        trace = load(name)
        if trace.meta.fingerprint != plan.meta.fingerprint:
            raise PlanError(
                f"{name}: this trace ({trace.meta.fingerprint}) is not the plan's ({plan.meta.fingerprint}); leave "
                "--trace out, and the step is recorded again."
            )
        return trace
    from tracer.record.step import recorded_again

    return recorded_again(plan.meta, model, device).trace

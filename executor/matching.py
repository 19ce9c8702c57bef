"""Check whether a plan, and its predicted times, are for the device at hand."""

from __future__ import annotations

from traces.errors import EnvironmentProblem, PlanError, SpecError
from traces.model_spec import is_build_function
from traces.provenance import alloc_conf
from traces.records.plan import Plan
from traces.records.trace import Trace, TraceMeta


def check_trusted(source: object, named: str, given: str, trust: bool) -> None:
    """Raise SpecError if the model of a plan or a trace is a Python file that only this plan or trace names.

    Args:
        source: the plan or the trace, for the message.
        named: the model that it names.
        given: the model that the user named instead; empty: none.
        trust: the user lets that file run.
    """
    if not given and not trust and is_build_function(named):
        raise SpecError(
            f"{source} names code of its own, {named}, which would run here. Give --trust if you know it, or name "
            f"it yourself: --model {named}."
        )


def check_alloc_conf(meta: TraceMeta, device: str) -> None:
    """Raise EnvironmentProblem if the environment's allocator settings are others than those of the plan.

    Torch reads them once, before CUDA starts. Where the environment says nothing, the processes that measure get the
    plan's; a plan made under torch's default settings is measured under whatever the environment says.
    """
    from simulator.allocator.settings import parse_alloc_conf

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
    """Raise PlanError if a plan is for a GPU's graph and the device is the CPU.

    The other way round the structures of the graphs decide: where a model has neither attention nor batch norm, the
    CPU's graph and the GPU's are the same.
    """
    if meta.device.startswith("cuda") and device.startswith("cpu"):
        raise PlanError(
            f"the plan is for the graph that {meta.target} runs, and the CPU runs other ops (attention, batch norm): "
            "run it with --device cuda, or trace again without --target for a plan that runs on the CPU."
        )


def times_apply(meta: TraceMeta, device: str, gpu: str = "") -> bool:
    """Return whether the times of a trace are those of the device, so that they can be set beside measured ones.

    Counts: the kind of device; of GPUs the board, by the driver's name (measured) or the entry in the device table
    (fake). Ignores: which CPU it is, since the table has one entry for all of them. `gpu`: the GPU's name as the driver
    gives it.
    """
    from traces.devices import board_of

    if device.startswith("cpu"):
        return meta.target.lower() == "cpu"
    return bool(gpu) and meta.target == (gpu if meta.mode == "real" else board_of(gpu))


def trace_of(plan: Plan, model: str, device: str, name: str | None = None) -> Trace:
    """The trace behind a plan: in a directory of that name, or recorded again on fake tensors of a device.

    Args:
        model: build this instead of what the plan names.

    Raises:
        PlanError: the trace in the directory is another one.
    """
    if name is not None:
        from traces.records.store import load

        trace = load(name)
        if trace.meta.fingerprint != plan.meta.fingerprint:
            raise PlanError(
                f"{name}: this trace ({trace.meta.fingerprint}) is not the plan's ({plan.meta.fingerprint}); leave "
                "--trace out, and the step is recorded again."
            )
        return trace
    from tracer.record.step import recorded_again

    return recorded_again(plan.meta, model, device).trace

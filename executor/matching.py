"""Whether a plan, and its predicted times, are for the device at hand."""

from __future__ import annotations

from traces.alloc_conf import alloc_conf
from traces.errors import EnvironmentProblem, PlanError
from traces.records.trace import TraceMeta


def check_alloc_conf(meta: TraceMeta, device: str) -> None:
    """Raise EnvironmentProblem if the environment's allocator settings are others than those of the plan.

    Torch reads them once, before CUDA starts. Where the environment says nothing, the processes that measure get the
    plan's; a plan made under torch's default settings is measured under whatever the environment says.

    Args:
        meta: of the plan's trace.
        device: "cpu", "cuda" or "cuda:1".
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

    Args:
        meta: of the plan's trace.
        device: "cpu", "cuda" or "cuda:1".
    """
    planned, kind = meta.device.partition(":")[0], device.partition(":")[0]
    if planned == "cuda" and kind == "cpu":
        raise PlanError(
            f"the plan is for the graph that {meta.target} runs, and the CPU runs other ops (attention, batch norm): "
            "run it with --device cuda, or trace again without --target for a plan that runs on the CPU."
        )


def times_apply(meta: TraceMeta, device: str, gpu: str = "") -> bool:
    """Whether the times of a trace are those of the device, so that they can be set beside measured ones.

    Counts: the kind of device; of GPUs the board, by the driver's name (measured) or the entry in the device table
    (fake). Ignores: which CPU it is, since the table has one entry for all of them.

    Args:
        meta: of the plan's trace.
        device: "cpu", "cuda" or "cuda:1".
        gpu: the GPU's name as the driver gives it.
    """
    from tracer.costs.profiles import board_of

    if device.partition(":")[0] == "cpu":
        return meta.target.lower() == "cpu"
    return bool(gpu) and meta.target == (gpu if meta.mode == "real" else board_of(gpu))

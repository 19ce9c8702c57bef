"""Whether a plan, and its predicted times, are for the device at hand."""

from __future__ import annotations

from traces.errors import PlanError
from traces.trace import TraceMeta


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

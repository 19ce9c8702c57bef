"""Check that a plan was made for the kind of device that it is to run on."""

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

"""Turn an op's signature into what the op allocates while it runs on a GPU, by rules instead of measurements.

The table of rules belongs here: one row a kind of op, each with the source that it was read from. There is none yet, so
every answer is None. The rules of the CPU are in `tracer.workspaces_cpu`.
"""

from __future__ import annotations

from tracer.signature import Signature
from traces.devices import Device


def rule_events(signature: Signature, device: Device) -> tuple[int, ...] | None:
    """What the op allocates (+bytes) and frees (-bytes) on a device, in order; None: no rule says.

    The events sum to the bytes of the outputs that the op leaves, as `traces.trace.Ops.events` demands.

    Args:
        signature: the call.
        device: where it runs.
    """
    return None

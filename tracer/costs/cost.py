"""Work out what an op costs on the target: its time and what it allocates while it runs.

What was measured for it in another loop, or else a roofline's time, and the outputs alone count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from tracer.costs.roofline import op_time_ns
from tracer.costs.rows import OpRow
from traces.devices import Device
from traces.records.trace import VIEW

MEASURED: Final = "measured"
REHEARSED: Final = "rehearsed"  # torch's own code on a GPU that is not there
NONE: Final = "none"  # the outputs alone count


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one op, and who says so."""

    time_ns: int
    events: tuple[int, ...]  # as `Ops.events`
    source: str  # one of these; "" for a view, which computes nothing


NO_COST: Final = Cost(time_ns=0, events=(), source="")
Measured = Mapping[str, Cost]  # of ops of another loop, by name
# What the host needs to ask for an op: 18 us beside an A100 and an RTX 4090, 43 us beside an H100 and an H200, each of
# which has another. Assumed for all.
HOST_NS: Final = 18_000


def costs_of(
    rows: Sequence[OpRow], created_bytes: Sequence[int], device: Device, measured: Measured | None = None
) -> list[Cost]:
    """The costs of a step's ops in a trace that is not measured itself. `created_bytes`: of the storages that an op
    creates; what was `measured` counts where its events sum to that.

    Counts: that a GPU waits for the host where that needs more time for all ops than the GPU; times are as much longer
    then, and none is less than the host's. Ignores: that it waits in a part of a step.
    """
    costs = []
    for row, created in zip(rows, created_bytes, strict=True):
        known = (measured or {}).get(row.name)
        live = list(accumulate(known.events, initial=0)) if known is not None else [-1]
        if row.flags & VIEW:
            costs.append(NO_COST)
        elif known is not None and min(live) >= 0 and live[-1] == created:
            costs.append(known)  # its events never free what they have not allocated
        else:
            time_ns = op_time_ns(row.flops, row.bytes_moved, row.dtype, device, row.kind)
            costs.append(Cost(time_ns=time_ns, events=(), source=NONE))
    host_ns = HOST_NS * sum(c.source == NONE for c in costs)
    if device.kind != "cuda" or host_ns <= sum(c.time_ns for c in costs):
        return costs
    floored = [replace(c, time_ns=max(c.time_ns, HOST_NS)) if c.source == NONE else c for c in costs]
    total_ns = sum(c.time_ns for c in floored)
    return [replace(c, time_ns=c.time_ns * host_ns // total_ns) for c in floored]

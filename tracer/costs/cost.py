"""Work out what an op costs on the target: its time and what it allocates while it runs.

What was measured for it in another loop, or else a roofline's time, and the outputs alone count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from tracer.costs.roofline import op_time_ns, uses_tf32
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


Measured = Mapping[str, Cost]  # of ops of another loop, by name
NOBODY_S: Final[Measured] = MappingProxyType({})


def cost_of(row: OpRow, created_bytes: int, device: Device, measured: Measured = NOBODY_S) -> Cost:
    """The cost of an op in a trace that is not measured itself. `created_bytes`: of the storages that it creates;
    what was `measured` counts where its events sum to that."""
    if row.flags & VIEW:
        return Cost(time_ns=0, events=(), source="")
    known = measured.get(row.name)
    live = list(accumulate(known.events, initial=0)) if known is not None else [-1]
    if known is not None and min(live) >= 0 and live[-1] == created_bytes:
        return known  # its events never free what they have not allocated
    time_ns = op_time_ns(row.flops, row.bytes_moved, row.dtype, device, tf32=uses_tf32(row.target))
    return Cost(time_ns=time_ns, events=(), source=NONE)

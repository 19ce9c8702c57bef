"""Turn an op's row into what it costs on the target: its time and what it allocates while it runs.

In this order: what was measured for this very signature; what a profile's other shapes of the same op say; a row of
the rules table; nothing, so that the outputs alone count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tracer.builder import OpRow
from tracer.cost import op_time_ns, uses_tf32
from tracer.workspaces import rule_events
from traces.devices import Device
from traces.trace import VIEW

MEASURED: Final = "measured"
INTERPOLATED: Final = "interpolated"
RULES: Final = "rules"
NONE: Final = "none"
SOURCES: Final = (MEASURED, INTERPOLATED, RULES, NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one op costs, and who says so."""

    time_ns: int
    events: tuple[int, ...]  # as `Ops.events`
    source: str  # one of SOURCES; "" for a view, which computes nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What ops cost in a trace that is not measured.

    rules: whether the rules table is asked.
    """

    rules: bool = True

    def of(self, row: OpRow, created_bytes: int, device: Device) -> Cost:
        """The cost of an op.

        Args:
            row: the op, with its signature.
            created_bytes: of the storages that it creates, which its events must sum to. What says otherwise does
                not describe this call, and the next source is asked.
            device: the target.
        """
        if row.flags & VIEW:
            return Cost(time_ns=0, events=(), source="")
        time_ns = op_time_ns(row.flops, row.bytes_moved, row.dtype, device, tf32=uses_tf32(row.target))
        if self.rules and row.signature is not None:
            events = rule_events(row.signature, device)
            if events is not None and sum(events) == created_bytes:
                return Cost(time_ns=time_ns, events=events, source=RULES)
        return Cost(time_ns=time_ns, events=(), source=NONE)

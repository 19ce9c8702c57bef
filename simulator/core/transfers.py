"""Copies to and from host memory: the ops that ask for them, and what they take.

A copy runs beside the ops, on one of two more resources: out to host memory, and in from it. Each does one copy after
the other, in the order in which the schedule asks for them, and none begins before the step that asks for it.

- `OFFLOAD` makes a ticket of a value, and its copy out begins.
- `RELOAD` makes the value of its ticket: at first it hands on the memory that is there; run again, memory is allocated,
  and the copy in begins.
- `WAIT_OUT`, which reads the value and its ticket, waits until the copy out is complete: the memory is freed behind it.
- `PREFETCH` reads the value so that it is reloaded there; what else reads it waits for its copy in.

Counts: the bytes by one rate, and a latency for each copy. Ignores: that ops slow down while memory is copied, and that
both directions together may be slower. On a CPU nothing runs beside: each copy takes its time where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from traces.records.trace import Trace

OFFLOAD: Final = "lowtide.offload.default"
RELOAD: Final = "lowtide.reload.default"
WAIT_OUT: Final = "lowtide.wait_out.default"
PREFETCH: Final = "lowtide.prefetch.default"
LATENCY_NS: Final = 15_000  # until a copy begins: a rule of thumb, not measured here


def copy_ns(nbytes: int, bytes_per_s: int) -> int:
    """The time that a copy takes either way."""
    return LATENCY_NS - (-nbytes * 10**9 // bytes_per_s)


def pinned_bytes(nbytes: int) -> int:
    """The host memory that a copy takes: torch's allocator of pinned memory rounds up to a power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


def transfer_ns(trace: Trace, op: int) -> int:
    """The time of the copy that an `OFFLOAD` or `RELOAD` asks for."""
    ids = trace.ops.reads[op] if trace.ops.target[op] == OFFLOAD else trace.ops.writes[op]
    return copy_ns(trace.storages.nbytes[ids[0]], trace.meta.rates["host_bytes_per_s"])


def waiting_ns(trace: Trace, op: Sequence[int], duration_ns: Sequence[int]) -> int:
    """How long the steps of a schedule wait for copies out."""
    steps = zip(op, duration_ns, strict=True)
    return sum(ns for i, ns in steps if trace.ops.target[i] in (OFFLOAD, WAIT_OUT))

"""How fast this machine's GPU copies to and from pinned host memory, timed with the GPU's own events.

Has run with a timer of the tests' own, on no GPU yet. Counts: one large copy at a time, the slower of both ways.
Ignores: both ways at once, and ops that run beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

COPY_BYTES: Final = 256 << 20
ROUNDS: Final = 5  # of which the quickest counts


def timed_ns(to_host: bool) -> int:
    """Return what one copy takes on the current GPU."""
    import torch

    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    if to_host:
        here.copy_(there, non_blocking=True)
    else:
        there.copy_(here, non_blocking=True)
    end.record()
    end.synchronize()
    return int(begin.elapsed_time(end) * 1e6)


def host_bytes_per_s(copy_ns: Callable[[bool], int] = timed_ns) -> int:
    """The rate of the slower way.

    Args:
        copy_ns: what a copy of `COPY_BYTES` takes, to the host or from it.
    """
    slower_ns = max(min(copy_ns(to_host) for _ in range(ROUNDS)) for to_host in (True, False))
    return COPY_BYTES * 10**9 // max(1, slower_ns)

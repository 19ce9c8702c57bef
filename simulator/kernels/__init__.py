"""The inner loops of planning and simulation, compiled; and the planners' clock: processor time of this thread, less
what compiling took."""

from __future__ import annotations

import time

_excused_seconds = [0.0]


def now() -> float:
    """Seconds that this thread has had of a processor, without those that were excused.

    Not those that went by: a machine that does other things beside gives the same plan, only later.
    """
    return time.thread_time() - _excused_seconds[0]


def excuse(seconds: float) -> None:
    """Let every clock run so much longer: compiling the inner loops, once on a machine, is no search for a plan."""
    _excused_seconds[0] += seconds

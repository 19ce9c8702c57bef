"""Time training steps: one alone, or two in turns, so that both see the same machine.

A machine's speed drifts by more than what a plan costs: clocks, other processes, a neighbour on the same host. Two
steps that are timed in different processes, minutes apart, differ by that too. Run in turns, the two of a pair are a
moment apart, and the median over pairs of (plan / keep-all) is the slow-down.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Step = Callable[[], object]
Wait = Callable[[], object]
Times = tuple[int, ...]


def alone(step: Step, *, warmup: int, runs: int, wait: Wait) -> Times:
    """Time a step `runs` times, after `warmup` times.

    Args:
        wait: returns when the device has done all that was asked of it.
    """
    for _ in range(warmup):
        step()
    return tuple(_timed(step, wait) for _ in range(runs))


def in_turns(first: Step, second: Step, *, warmup: int, runs: int, wait: Wait) -> tuple[Times, Times]:
    """Time two steps in `runs` pairs, after `warmup` pairs; who begins a pair alternates. The k-th times of both make a
    pair."""
    for _ in range(warmup):
        first()
        second()
    times: tuple[list[int], list[int]] = ([], [])
    for k in range(runs):
        for which in (0, 1) if k % 2 == 0 else (1, 0):
            times[which].append(_timed((first, second)[which], wait))
    return tuple(times[0]), tuple(times[1])


def _timed(step: Step, wait: Wait) -> int:
    wait()
    begin = time.perf_counter_ns()
    step()
    wait()
    return time.perf_counter_ns() - begin

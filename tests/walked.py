"""What one evaluation of a planner's state comes to, step by step, as lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from simulator.core.evaluator import Evaluator, State
from simulator.levers import edited
from simulator.levers.edit import Editing
from traces.records.plan import SAVE, Action, Rewrite
from traces.records.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One evaluation. Steps are numbered as the schedule's, views left out: forward first, recomputations included."""

    peak_bytes: int
    time_ns: int
    peak_step: int  # the first step at the peak; -1: nothing runs
    seq: list[int]  # position of the op of every step after forward
    again: list[bool]  # whether that step is a recomputation
    peaks: list[int]  # the most that is allocated while each step runs, forward included


def evaluate(evaluator: Evaluator, state: State) -> Result:
    """Peak and time of a plan, and what happens on the way; raises PlanError as `Evaluator.walk` does."""
    peak_bytes, added_ns, peak_step, steps = evaluator.walk(state)
    seq = evaluator.sequence(steps)
    again = seq < 0
    return Result(
        peak_bytes=peak_bytes,
        time_ns=evaluator.base_time_ns + added_ns,
        peak_step=peak_step,
        seq=np.where(again, ~seq, seq).tolist(),
        again=again.tolist(),
        peaks=evaluator.peaks(steps).tolist(),
    )


def state_of(evaluator: Evaluator, actions: Iterable[Action]) -> State:
    """The state that a plan's actions mean, if they evict nothing in forward and swap nothing."""
    state, pinned = evaluator.state(), evaluator.problem.pinned
    for a in actions:
        state.saved[a.storage] = a.recipe == SAVE or pinned[a.storage]
        state.retained[a.storage] = a.retain
        for c in a.evict_after:
            k = max(evaluator.before[c], evaluator.forward - 1)
            state.evictions[k] = (*state.evictions.get(k, ()), a.storage)
    return state


def rewritten(of: Trace, rewrites: Iterable[Rewrite]) -> Trace:
    """The trace of a step that rewrites change."""
    return edited(Editing(of), rewrites).trace()

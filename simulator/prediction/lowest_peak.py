"""The lowest peak that a short search finds, for the refusal of a budget below the proven floor.

The greedy ends where no single step lowers the peak, which can be some percent above what plans reach. Coarse walks
(`annealing`) for a budget of the floor itself go on from there, until a plan meets the floor or the time is over.

Counts: the exact peak of every plan tried. Ignores: the time that such plans add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from simulator.bounds.bound import bounder_of
from simulator.core.evaluator import evaluator_of
from simulator.core.limits import Limits
from simulator.core.problem import Problem
from simulator.planners.annealing import Annealer
from simulator.planners.outcome import Infeasible, refuse
from simulator.planners.search import STEP_NS, STEP_NS_PER_OP
from simulator.planners.segmented import segmentations

NAME: Final = "search"
SECONDS: Final = 0.35  # at 0.5 and 0.35 the same peaks in ResNet-152, at 0.25 one 2 % higher
ANY_NS: Final = 1 << 61  # as a target: the first plan within the budget will do


def with_lowest_peak(problem: Problem, refusal: Infeasible, limits: Limits) -> Infeasible:
    """The refusal of `search`, or the same with a lower peak; one of a budget that is not below the floor as it is."""
    known, budget_bytes = refusal.figures["lowest_peak_bytes"], refusal.figures["budget_bytes"]
    floor_bytes = bounder_of(problem).floor.peak_bytes
    if not budget_bytes < floor_bytes < known:
        return refusal
    ev = evaluator_of(problem)
    annealer = Annealer(ev, problem, floor_bytes, limits.seed)
    seconds = min(SECONDS, limits.seconds)
    clock = replace(limits, seconds=seconds).clock()
    starts = [ev.state(), min(segmentations(ev), key=lambda found: found.peak_bytes).state]
    steps = int(seconds * 1e9 / (STEP_NS + STEP_NS_PER_OP * len(ev.op_id)))
    for start in starts:
        annealer.run(start, steps // len(starts), clock=clock, target_ns=ANY_NS, coarse=True)
    lowest = min(known, annealer.lowest_peak_bytes)
    return refuse(problem, NAME, budget_bytes, lowest) if lowest < known else refusal

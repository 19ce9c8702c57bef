"""Make a plan reserve less: annealing whose every state is judged by the allocator.

What a plan reserves beyond what it allocates depends on which values are saved where, often by chance: of two plans of
one cost one may reserve a tenth more. So a walk starts at a plan for about as many allocated bytes, which may reserve
too much, and each byte beyond the limit costs time, at a price that rises while the walk stays over it and falls while
it does not (`simulator.kernels.squeeze`).

Counts: what `simulator.allocator.evaluated` does. Ignores: that memory may be given back where a device runs short.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from simulator.allocator.evaluated import Reserver
from simulator.allocator.settings import AllocatorSettings
from simulator.bounds.bound import bounder_of
from simulator.core.evaluator import State, evaluator_of
from simulator.core.limits import Clock
from simulator.core.problem import Problem
from simulator.core.swaps import taken, with_swaps
from simulator.kernels.squeeze import SQUEEZED, squeeze
from simulator.planners.annealing import CHEAPER, COLD, DEARER, HOT, UNKNOWN, Annealer, Walk, state_of
from simulator.planners.greedy import Search
from simulator.planners.outcome import finish
from traces.errors import PlanError
from traces.records.plan import RECOMPUTE, SAVE, Plan

# Tried on ResNet-152, BERT-base and GPT-2 at 60 and 50 % of reserved memory: ten times as hot or as dear found worse.
HEAT, COOL = 2.0, 0.25  # the first temperature, in those of other walks; and of the walk from the best state
PRICE, MARGIN = 40.0, 2.0  # of the largest value, in median times of an op; of a byte, in what the bound says
REVIEWS: Final = 60  # corrections of the price in a walk
MOST_MOVES: Final = 40  # for each that the allocator judges
JUDGE_NS: Final = 450  # what it takes for each request of an iteration, reckoned with three of these


Squeezed = tuple[int, int, State]  # added time, reserved bytes


def squeezed(
    problem: Problem,
    name: str,
    starts: Iterable[Plan],
    limit_bytes: int,
    settings: AllocatorSettings,
    *,
    seconds: float,
    seed: int,
    clock: Clock,
) -> list[Plan]:
    """The plans that walks from these find within the limit; one a start at most, and one from the best of them.

    Args:
        name: of the planner, for the plans.
        starts: plans for the same problem.
        limit_bytes: of reserved memory.
        seconds: reckoned, for each walk.
        seed: of the first walk; each has the next one.
        clock: when to end before that.
    """
    found: list[tuple[Squeezed, Problem]] = []
    for k, start in enumerate(starts):
        swapped = taken(problem)[0]
        if all(a.recipe in (SAVE, RECOMPUTE) for a in start.actions):
            swapped = problem
        # A plan with swaps is one for the problem in which they are made: what is swapped is absent there.
        actions = [a if a.recipe == SAVE else replace(a, recipe=RECOMPUTE) for a in start.actions]
        try:
            state = evaluator_of(swapped).state(actions)
        except PlanError:  # it evicts while forward runs
            continue
        walked = _walk(
            swapped, state, limit_bytes, settings, HEAT, seconds=seconds, seed=seed + k, clock=clock
        )
        found += [(walked, swapped)] if walked is not None else []
    if not found:
        return []
    (_, _, best), of = min(found, key=lambda f: f[0][:2])
    cooled = _walk(of, best, limit_bytes, settings, COOL, seconds=seconds, seed=seed, clock=clock)
    found += [(cooled, of)] if cooled is not None else []
    return [_plan(problem, name, limit_bytes, walked, swapped) for walked, swapped in found]


def _plan(problem: Problem, name: str, limit_bytes: int, found: Squeezed, swapped: Problem) -> Plan:
    actions = Search(swapped, limit_bytes).actions(found[2])
    recipes = () if swapped is problem else taken(problem)[1]
    return finish(problem, name, limit_bytes, with_swaps(recipes, actions))


def _walk(
    problem: Problem,
    state: State,
    limit_bytes: int,
    settings: AllocatorSettings,
    heat: float,
    *,
    seconds: float,
    seed: int,
    clock: Clock,
) -> Squeezed | None:
    """The cheapest state within the limit of one walk, of equal ones that which reserves least; None if none is."""
    ev, bound = evaluator_of(problem), bounder_of(problem).bound(limit_bytes)
    annealer, reserver = Annealer(ev, problem, limit_bytes, seed), Reserver(ev, settings)
    if not annealer.candidates:
        return None
    walk = Walk(annealer, state, coarse=False)
    figures, walked = walk.figures, walk.walked
    told = np.zeros(1, SQUEEZED)
    of = told[0]
    of["reserved_bytes"] = reserver.reserved_bytes(state)
    figures["best_added_ns"] = of["best_reserved_bytes"] = UNKNOWN
    if of["reserved_bytes"] <= limit_bytes:
        figures["best_added_ns"], of["best_reserved_bytes"] = figures["added_ns"], of["reserved_bytes"]
        figures["best_evictions"] = figures["evictions"]
        walked.best_evictions[:] = walked.evictions
    count = max(1, int(seconds * 1e9 / (JUDGE_NS * max(1, reserver.requests))))
    hot, cold = heat * HOT * annealer.unit_ns, COLD * annealer.unit_ns
    price = max(
        PRICE * annealer.unit_ns / max(1, annealer.largest), MARGIN * bound.price_ns / bound.price_bytes
    )
    for k in range(REVIEWS):
        if clock.over or of["full"]:
            break
        reserver.make_room(len(walk.work.peak_bytes))
        temperature, until = hot * (cold / hot) ** (k / REVIEWS), (k + 1) * count // REVIEWS
        most = MOST_MOVES * (1 + count // REVIEWS)
        squeeze(
            until, most, temperature, price, limit_bytes, walk.moves, ev.facts, walk.work, walked,
            annealer.retaining.storages, reserver.asks, reserver.stream, reserver.rows, reserver.memory, told,
        )  # fmt: skip
        price *= DEARER if of["reserved_bytes"] > limit_bytes else CHEAPER
    if figures["best_added_ns"] == UNKNOWN:
        return None
    best = state_of(
        walked.best[0], walked.best[1], walked.best_evictions[:, : int(figures["best_evictions"])]
    )
    return int(figures["best_added_ns"]), int(of["best_reserved_bytes"]), best

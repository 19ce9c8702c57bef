"""The certified bound is never above the true optimum, found by building and replaying every plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from simulator import bounds
from simulator.bounds import Instant, Instants, bounder_of, networks
from simulator.core.problem import Problem
from tests.exhaust import budgets, draw_trace, frontier, optimum
from tests.strategies import traces
from traces.records.trace import Trace

# Of the traces that are compared in every run: each of the MUTATIONS must be seen in one of them.
SEEDS = (*range(50), *range(330, 430))


@dataclass
class Tally:
    """What a run of the comparison has seen."""

    traces: int = 0
    skipped: int = 0  # too many plans
    budgets: int = 0
    positive: int = 0  # budgets at which the bound is above zero
    tight: int = 0  # of these, equal to the optimum
    infeasible: int = 0  # budgets that the bound rules out


def compare(
    of: Trace, tally: Tally, *, drops: int = 0, most: int = 4_000, drawn: random.Random | None = None
) -> str | None:
    """What is wrong with the bound on one trace, at every budget of interest; None if nothing is."""
    problem = Problem(of)
    front = frontier(of, drops=drops, anywhere=True, most=most, drawn=drawn)
    if front is None:
        tally.skipped += 1
        return None
    tally.traces += 1
    assert front, "keeping everything is always a plan"
    bounder = bounder_of(problem)
    for budget in budgets(front):
        tally.budgets += 1
        truth, found = optimum(front, budget), bounder.bound(budget)
        if not found.feasible:
            tally.infeasible += 1
            if truth is not None:
                return f"budget {budget}: {found.reason}, and a plan adds {truth} ns"
        elif truth is not None and found.added_time_ns > truth:
            return f"budget {budget}: bound {found.added_time_ns} ns at op {found.op}, and a plan adds {truth} ns"
        tally.positive += found.added_time_ns > 0
        tally.tight += found.added_time_ns == truth and truth > 0
        # Every single instant is a bound, also those that are not worth a look.
        for op in range(-1, len(of.ops)):
            alone = bounder.at(op).added(budget)
            if truth is not None and (alone is None or alone[0] > truth):
                return f"budget {budget}: instant {op} says {alone}, and a plan adds {truth} ns"
    return None


def sweep(seeds: Sequence[int], *, drops: int = 0, most: int, draws: bool = False) -> Tally:
    tally = Tally()
    for seed in seeds:
        drawn = random.Random(seed) if draws else None
        wrong = compare(draw_trace(seed), tally, drops=drops, most=most, drawn=drawn)
        assert wrong is None, f"seed {seed}: {wrong}"
    return tally


def test_bound_holds_on_seeded_traces() -> None:
    tally = sweep(SEEDS, most=300)
    assert tally.traces >= 100
    assert tally.positive >= 150  # or the comparison says little
    assert tally.tight >= 30


def test_bound_holds_with_values_evicted_in_between() -> None:
    """In forward and in backward, saved ones and those that were made again: every plan of small traces."""
    assert sweep(range(10_000_000, 10_000_120), drops=1, most=1_000).traces >= 20


def test_bound_holds_with_plans_drawn_from_all() -> None:
    assert sweep(range(20_000_000, 20_000_060), drops=2, most=200, draws=True).traces == 60


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(of=traces(max_forward=4, max_backward=5))
def test_bound_holds_on_any_trace(of: Trace) -> None:
    tally = Tally()
    wrong = compare(of, tally, most=300)
    assume(not tally.skipped)
    assert wrong is None, wrong


@pytest.mark.slow
def test_bound_holds_on_ten_thousand_traces() -> None:
    tally = sweep(range(1_000_000, 1_014_000), most=500)
    sweep(range(30_000_000, 30_002_000), drops=2, most=500, draws=True)
    assert tally.traces >= 10_000, tally


MUTATIONS = (
    "reads twice",
    "no takeover",
    "links never saved",
    "outputs paid each",
    "nothing forced is free",
    "what forward reads again is there",
)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_catches_a_bound_that_claims_too_much(
    mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mutation is a plausible mistake that lifts the bound; the exhaustive search must see it."""
    mutate(mutation, monkeypatch)
    drops = 1 if mutation == "what forward reads again is there" else 0
    assert any(compare(draw_trace(s), Tally(), drops=drops, most=300, drawn=random.Random(s)) for s in SEEDS)


def mutate(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true_instant = Instants.at
    solved = networks.corners

    if mutation == "what forward reads again is there":
        true_weigh = Instants._weigh

        def forced(self: Instants, reader: Any, read: Any) -> None:
            early = reader < self.turn
            np.maximum.at(self.until, read[early], reader[early])
            self.forced_until = self.until.tolist()
            true_weigh(self, reader, read)

        monkeypatch.setattr(Instants, "_weigh", forced)
    elif mutation in ("reads twice", "no takeover"):

        def instant(self: Instants, op: int) -> Instant:
            found, ops, sts = true_instant(self, op), self.trace.ops, self.trace.storages
            reads = [s for s in ops.reads[op] if sts.producer[s] >= 0] if op >= 0 else []
            over = [s for s in ops.overwrites[op : op + 1] if s >= 0 and not self.problem.resident[s]]
            taken = [s for s in over if self.forced_until[s] <= op]
            extra = sum(sts.nbytes[s] for s in (reads if mutation == "reads twice" else taken))
            return replace(found, unavoidable_bytes=found.unavoidable_bytes + extra)

        monkeypatch.setattr(Instants, "at", instant)
    elif mutation == "links never saved":
        monkeypatch.setattr(
            networks,
            "corners",
            lambda ops, links: solved(ops, tuple(replace(x, nbytes=10**9) for x in links)),
        )
    elif mutation == "outputs paid each":
        true_steps = networks.steps_of
        monkeypatch.setattr(
            bounds, "steps_of", lambda part: [(2 * time_ns, nbytes) for time_ns, nbytes in true_steps(part)]
        )
    else:
        true_components = networks.components

        # What t reads is in memory and paid for; forgetting that makes it cost time again.
        def without_forced(problem: Problem, wanted: list[bool], link: list[bool]) -> Any:
            made = problem.trace.storages.producer
            last = max((p for p, *of in zip(made, wanted, link, strict=True) if any(of)), default=-1)
            all_links = [not w and 0 <= p <= last for p, w in zip(made, wanted, strict=True)]
            return true_components(problem, wanted, all_links)

        monkeypatch.setattr(bounds, "components", without_forced)

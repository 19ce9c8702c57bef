"""What single instants demand, worked out from arrays and from what has changed, is what the definition says."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.bounds import TURN, Cut, Instants
from simulator.bounds.networks import Link, Rerun, corners
from simulator.core.limits import Constraints
from simulator.core.problem import Problem
from tests.exhaust import draw_trace
from tests.strategies import traces
from tests.synthetic import resnet
from tests.tiny import bwd, fwd, trace
from traces.records.store import load
from traces.records.trace import EAGER, Trace


class Slow:
    """One instant, op by op and storage by storage."""

    def __init__(self, instants: Instants, op: int) -> None:
        of, problem = instants.trace, instants.problem
        ops, sts, turn = of.ops, of.storages, problem.forward_end
        self.instants = instants
        last_read, until = [-1] * len(sts), list(sts.hold)
        for i in range(len(ops)):
            for s in ops.reads[i]:
                last_read[s] = i
                stays = problem.pinned[s] or not problem.rebuildable[s]
                saved = problem.pinned[s] or problem.saved_by_default[s] or sts.producer[s] >= turn
                if (stays and (saved or i < turn)) or (i < turn and ops.flags[i] & EAGER):
                    until[s] = max(until[s], i)
        at, after = (turn, turn - 1) if op == TURN else (op, op)
        now = () if op == TURN else ops.reads[op]
        made = [s for s in range(len(sts)) if 0 <= sts.producer[s] < at]
        forced = {s for s in made if until[s] >= at or s in now}
        self.unavoidable_bytes = of.resident_bytes
        if op != TURN:
            self.unavoidable_bytes += problem.transient_bytes[op]
            taken = ops.overwrites[op]
            if taken in forced and until[taken] <= op:
                forced.discard(taken)
        self.unavoidable_bytes += sum(sts.nbytes[s] for s in forced)
        self.forced = forced
        self.wanted = {s for s in made if sts.producer[s] < turn and s not in forced and last_read[s] > after}
        self.links = {s for s in made if sts.producer[s] < turn} - forced - self.wanted

    def components(self) -> Iterable[tuple[list[int], list[int]]]:
        """Ops and links of each component: grown from the ops with wanted outputs until nothing more belongs to it."""
        reads, producer = self.instants.trace.ops.reads, self.instants.trace.storages.producer
        needed = {producer[s] for s in self.wanted}
        while more := {producer[s] for p in needed for s in reads[p] if s in self.links} - needed:
            needed |= more
        links = {s for p in needed for s in reads[p] if s in self.links}
        while needed:
            ops = {min(needed)}
            while True:
                own = {s for s in links if producer[s] in ops or any(s in reads[p] for p in ops)}
                grown = {producer[s] for s in own} | {p for p in needed if own.intersection(reads[p])} | ops
                if grown == ops:
                    break
                ops = grown
            yield sorted(ops), sorted(own)
            needed -= ops

    def solve(self) -> tuple[int, list[tuple[int, int]], list[Cut]]:
        """Bytes with everything wanted kept, the savings by price, and the cuts by price."""
        of, problem = self.instants.trace, self.instants.problem
        nbytes, producer = of.storages.nbytes, of.storages.producer
        most, steps, cuts = 0, [], []
        for ops, links in self.components():
            outputs = [[s for s in problem.creates[p] if s in self.wanted] for p in ops]
            found = corners(
                tuple(
                    Rerun(of.ops.time_ns[p] if problem.may_rerun[p] else -1, sum(nbytes[s] for s in mine))
                    for p, mine in zip(ops, outputs, strict=True)
                ),
                tuple(
                    Link(
                        nbytes[s],
                        ops.index(producer[s]),
                        tuple(k for k, p in enumerate(ops) if s in of.ops.reads[p]),
                    )
                    for s in links
                ),
            )
            most += found[0].nbytes
            saved = [(b.time_ns - a.time_ns, a.nbytes - b.nbytes) for a, b in pairwise(found)]
            steps += saved
            for price, corner in zip([Fraction(-1), *(Fraction(*x) for x in saved)], found, strict=True):
                cut = Cut(
                    component=ops[0],
                    evicted=tuple(s for p in corner.again for s in outputs[p]),
                    saved=tuple(links[x] for x in corner.saved),
                )
                if cut.evicted or cut.saved:
                    cuts.append((price, cut))
        steps.sort(key=lambda step: (Fraction(*step), step))
        return most, steps, [c for _, c in sorted(cuts, key=lambda c: (c[0], c[1].component))]


def check(instants: Instants, ops: Iterable[int]) -> int:
    """One after the other, in that order; how many components with links there were."""
    linked = 0
    for op in ops:
        slow, setting = Slow(instants, op), instants.setting(op)
        assert setting.unavoidable_bytes == slow.unavoidable_bytes
        assert set(setting.wanted.nonzero()[0].tolist()) == slow.wanted
        assert set(setting.forced.nonzero()[0].tolist()) == slow.forced
        if op != TURN:
            assert instants.unavoidable_bytes[op] == slow.unavoidable_bytes
        most, steps, cuts = slow.solve()
        instant = instants.at(op)
        assert (instant.unavoidable_bytes, instant.most_bytes) == (slow.unavoidable_bytes, most)
        assert list(instant.steps) == steps
        assert list(instants.cuts(op)) == cuts
        linked += sum(bool(links) for _, links in slow.components())
    return linked


def any_order(of: Trace, seed: int, most: int = 1 << 30) -> list[int]:
    """Instants of a trace, the turn among them, in an order that no planner would take."""
    ops = [TURN, *range(len(of.ops))]
    draw = random.Random(seed)
    chosen = draw.sample(ops, min(most, len(ops)))
    return sorted(chosen, reverse=seed % 4 == 1) if seed % 2 else chosen


def test_every_instant_of_seeded_traces() -> None:
    linked = 0
    for seed in range(250):
        of = draw_trace(seed)
        instants = Instants(Problem(of))
        assert instants.peaks == list(Problem(of).saved.timeline.peak_bytes)
        linked += check(instants, any_order(of, seed))
    assert linked > 300


@settings(max_examples=150, deadline=None)
@given(of=traces(max_forward=14, max_backward=10), seed=st.integers(0, 7))
def test_every_instant_of_any_trace(of: Trace, seed: int) -> None:
    check(Instants(Problem(of)), any_order(of, seed))


def test_under_constraints() -> None:
    seen = 0
    for seed in range(150):
        plain = draw_trace(seed)
        names = tuple(f"test.op{i}.default" for i in range(len(plain.ops)))
        of = replace(plain, ops=replace(plain.ops, target=names))
        problem = Problem(of)
        free = [i for i in range(problem.forward_end) if problem.may_rerun[i] and not problem.is_view[i]]
        if len(free) < 2:
            continue
        seen += 1
        never, keep = random.Random(seed).sample(free, 2)
        constraints = Constraints(never=(f":: op{never}",), always_save=(f":: op{keep}",))
        check(Instants(Problem(of, constraints)), any_order(of, seed))
    assert seen > 100


def test_a_network() -> None:
    of = resnet((1, 1, 1, 1), batch=2, side=64)
    assert check(Instants(Problem(of)), any_order(of, 2, 60)) > 60
    check(Instants(Problem(of)), any_order(of, 1, 60))


@pytest.mark.parametrize("name", ["resnet152", "bert-base", "bert-base-cpu/trace-b16"])
def test_the_gallery(name: str) -> None:
    of = load(name)
    check(Instants(Problem(of)), any_order(of, 0, 3))


def test_a_component_is_joined_by_a_new_reader() -> None:
    """a is read by x alone until y, too, is wanted: then x's component has one op more.

    y is there for its reader in forward until op 4; before that, at the instant of op 3, it need not be made again.
    """
    of = trace(
        [
            fwd({"a": 8}, "w"),
            fwd({"x": 4}, "a", time_ns=3),
            fwd({"y": 4}, "a", time_ns=5),
            fwd({"z": 4}, "x"),
            fwd({"e": 4}, "y"),
            fwd({"f": 4}, "e"),
            bwd({"g": 4}, "x", "y", "f"),
        ],
        {"w": 4},
    )
    instants = Instants(Problem(of))
    assert check(instants, [4, 5, 4, 5]) == 4
    for op, ops in ((4, (0, 1)), (5, (0, 1, 2))):
        assert [p.ops for p in instants._components(instants.setting(op)) if p.links] == [ops]

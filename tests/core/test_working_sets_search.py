"""What working sets cost: the compiled search is as good as one without a direction, and never above an optimum."""

from __future__ import annotations

import heapq
from fractions import Fraction
from itertools import count

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.bounds.components import Network
from simulator.bounds.instants import TURN, Instants
from simulator.bounds.working_sets import WorkingSets
from simulator.core.problem import Problem
from simulator.kernels.prices import grow
from tests.exhaust import draw_trace
from tests.strategies import traces
from traces.records.trace import Trace

MANY = 1 << 80


class Plain:
    """The same bound from sets, Dijkstra's algorithm to the end, and one minimum cut for each demand."""

    def __init__(self, instants: Instants, op: int, price: Fraction) -> None:
        self.instants, self.price = instants, price
        self.first = instants.turn if op == TURN else op + 1
        self.setting = instants.setting(op)
        trace = instants.trace
        made = [0 <= p < instants.turn for p in trace.storages.producer]
        self.forward = {s for s in range(len(trace.storages)) if made[s]}
        self.decided = {s for s in self.forward if not self.setting.forced[s]}
        self.first_read: dict[int, int] = {}
        for i in range(len(trace.ops) - 1, self.first - 1, -1):
            self.first_read.update(dict.fromkeys(trace.ops.reads[i], i))
        self._cuts: dict[frozenset[int], int] = {}

    def cut(self, demanded: frozenset[int]) -> int:
        """F of the demands, times the price's denominator."""
        if demanded not in self._cuts:
            self._cuts[demanded] = self._cut(demanded)
        return self._cuts[demanded]

    def _cut(self, demanded: frozenset[int]) -> int:
        trace, problem, turn = self.instants.trace, self.instants.problem, self.instants.turn
        edges: list[
            tuple[int, int, int]
        ] = []  # node 0 is the source, 1 the sink, then the ops, then the storages
        for s in self.decided:
            p, node = trace.storages.producer[s], 2 + turn + s
            edges.append(
                (node, 2 + p if problem.may_rerun[p] else 1, self.price.numerator * trace.storages.nbytes[s])
            )
            if s in demanded:
                edges.append((0, node, MANY))
        for p in range(turn):
            if problem.may_rerun[p]:
                edges.append((2 + p, 1, self.price.denominator * trace.ops.time_ns[p]))
                edges += [(2 + p, 2 + turn + s, MANY) for s in set(trace.ops.reads[p]) & self.decided]
        network = Network(2 + turn + len(trace.storages))
        for edge in edges:
            network.edge(*edge)
        inside = network.source_side(0, 1)
        return sum(c for a, b, c in edges if inside[a] and not inside[b])

    def added_ns(self, budget_bytes: int) -> int | None:
        """The bound; None: there is no way back at all."""
        instants, trace, problem = self.instants, self.instants.trace, self.instants.problem
        nbytes, producer, reads = trace.storages.nbytes, trace.storages.producer, trace.ops.reads
        wanted = {s for s in self.decided if self.setting.wanted[s]}
        worth = self.price.numerator * (budget_bytes - self.setting.unavoidable_bytes)
        root = self.cut(frozenset(wanted)) - worth
        base, need, until = instants.sure_bytes, instants.unavoidable_bytes, instants.forced_until
        number = count()
        start = (len(trace.ops), frozenset[int](), frozenset[int]())
        queue = [(0, next(number), start)]
        done: set[tuple[int, frozenset[int], frozenset[int]]] = set()
        best: int | None = None
        while queue:
            time_ns, _, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            gap, held, asked_for = state
            if gap == self.first:
                so_far = {s for s in wanted if self.first_read[s] < gap} | (held & self.decided)
                total = self.price.denominator * time_ns + max(0, self.cut(frozenset(so_far)) - worth)
                best = total if best is None else min(best, total)
                continue
            for q in {producer[s] for s in asked_for if problem.may_rerun[producer[s]]}:
                rest = {s for s in held if producer[s] != q}
                asked = rest | {s for s in reads[q] if s in self.forward and until[s] < gap}
                rise = problem.transient_bytes[q]
                taken = trace.ops.overwrites[q]
                if taken in asked and taken not in rest:
                    rise -= nbytes[taken]
                if base[gap] + sum(nbytes[s] for s in asked) + rise <= budget_bytes:
                    more = (asked_for & rest) | (asked & set(reads[q]))
                    state = (gap, frozenset(asked), frozenset(more))
                    heapq.heappush(queue, (time_ns + trace.ops.time_ns[q], next(number), state))
            ran = gap - 1
            beside = sum(
                nbytes[s]
                for s in held
                if trace.ops.overwrites[ran] == s or (s not in reads[ran] and until[s] < ran)
            )
            if beside + need[ran] <= budget_bytes:
                now = held | {s for s in reads[ran] if s in self.forward}
                left = frozenset(s for s in now if until[s] < ran)
                state = (ran, left, left & set(reads[ran]))
                heapq.heappush(queue, (time_ns, next(number), state))
        if best is None:
            return None
        return max(0, max(root, best) // self.price.denominator)


PRICES = st.fractions(0, 40, max_denominator=30)


@settings(max_examples=150, deadline=None)
@given(of=traces(max_forward=5, max_backward=5), price=PRICES, share=st.floats(0, 1), data=st.data())
def test_the_search_finds_what_a_plain_one_does(
    of: Trace, price: Fraction, share: float, data: st.DataObject
) -> None:
    instants = Instants(Problem(of))
    ops = [i for i in range(instants.turn, len(of.ops)) if of.ops.phase[i] == of.ops.phase[instants.turn]]
    check(instants, data.draw(st.sampled_from([TURN, *ops])), price, share)


def check(instants: Instants, op: int, price: Fraction, share: float) -> bool:
    """Compare at a budget between what must be in memory at the instant and the peak; whether there is a way back."""
    least, most = instants.setting(op).unavoidable_bytes, max(instants.peaks)
    budget = int(least + share * max(0, most - least))
    truth = Plain(instants, op, price).added_ns(budget)
    found = WorkingSets(instants).added_ns(budget, op, price.numerator, price.denominator)
    if truth is None:
        return False
    assert found is not None
    # The price is rounded down to a multiple of 2^-24 ns a byte.
    assert truth - 1 <= found <= truth
    return True


def test_seeded_traces() -> None:
    ways = 0
    for seed in range(400):
        instants = Instants(Problem(draw_trace(seed)))
        ways += check(instants, TURN, Fraction(seed % 13, 1 + seed % 7), 0.7 + (seed % 4) / 10)
    assert ways >= 150


@settings(max_examples=100, deadline=None)
@given(of=traces(max_forward=6, max_backward=5), price=st.integers(0, 40))
def test_what_is_demanded_from_gap_to_gap_is_cut_as_if_alone(of: Trace, price: int) -> None:
    check_cuts(Instants(Problem(of)), price)


def test_cuts_of_seeded_traces() -> None:
    assert sum(check_cuts(Instants(Problem(draw_trace(seed))), seed % 13) for seed in range(100)) >= 300


def check_cuts(instants: Instants, price: int) -> int:
    """Compare at every gap after the turn what its row demands with a minimum cut, and with more demanded beside it."""
    plain, setting, sets = (
        Plain(instants, TURN, Fraction(price)),
        instants.setting(TURN),
        WorkingSets(instants),
    )
    first_read = np.full(len(instants.nbytes), 1 << 40)
    first_read[list(plain.first_read)] = list(plain.first_read.values())
    wanted = [s for s in plain.decided if setting.wanted[s]]
    positive = 0
    for gap in range(plain.first, len(instants.trace.ops) + 1):
        cuts, node, row = sets._cuts(setting, 0, price, first_read)
        before = frozenset(s for s in wanted if first_read[s] < gap)
        assert cuts.total[row[gap]] == plain.cut(before)
        for s in plain.decided:
            last = cuts._replace(left=cuts.left[[row[gap], 0]], total=cuts.total[[row[gap], 0]])
            # Its only row goes on from that of the gap; what was dead by then is found again.
            fresh = last._replace(dead_from=np.full_like(cuts.dead_from, 1 << 40))
            grow(node[[s]], np.zeros(1, np.int64), 1 << 20, fresh)
            assert fresh.total[0] == plain.cut(before | {s})
            positive += fresh.total[0] > cuts.total[row[gap]]
    return positive

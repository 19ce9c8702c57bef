"""A lower bound on added time, at a budget and a price for bytes, that counts what has to run again twice.

The argument
------------
`bounds.bound` looks at one instant, and counts an op that must run again once. Near the floor that is far from enough:
what the last ops of backward read is brought together from little, and what was made for one of them has to go before
the next. So take a plan within the budget B, and follow its step backwards from the end. A *state* is a gap before an
op u of backward and a set S of storages made in forward that must all be in memory at some moment in that gap. At the
end S is empty. One moves back as in `bounds.lowest`:

- either nothing of S was made in the gap. Then all of S was in memory while the op before u ran, beside that op's own
  need, which must be within B; and what that op reads was there, too: it joins S, one gap earlier;
- or some op q ran again in the gap and made a part of S; take the last such run. While it ran, the rest of S and what q
  reads were in memory, with what q adds: that must be within B. The state before is the rest with these reads, and the
  time of q has been added *after* it. As `schedule.build` brings back only what the op after the gap takes, q made a
  value that this op reads, or that an op reads which ran again after q in the same gap.

So to each moment of the plan belongs a state with a time that was added after it at least. What was added *before* it,
and after an instant t of `bounds.bound`? Let Y be S with all that the ops of backward between t and u read. Each
storage of Y was in memory at t, or its op ran again between t and the moment. With a price λ per byte, that took at
least F(Y) - λ C, and never less than nothing: F(Y) is the minimum cut of the network in `bounds.bound` with Y demanded,
C what is free at t. Hence

    added time  >=  after(state) + max(0, F(Y) - λ C)        for each moment of the plan after t.

A best-first search (A*, Hart, Nilsson, Raphael 1968) from the end back to t visits states by this sum. Every plan leads
through a state in its queue, so the least sum there is a bound whenever the search stops, and it never falls; if the
queue is empty, there is no plan. It begins at what `bounds.bound` says of t for that price. What the ops between t and
u read is demanded for all u beforehand, one after the other; S is demanded beside it when a state comes first in the
queue, which then may lose its place.

Everything is an int: times and λ per byte are multiplied by one power of two and λ is rounded to that.

Counts: that working sets must be brought together within the budget, op after op, from the end of the step back to
where the search stops, and what all this takes from what is saved before. Ignores: storages so small that they hardly
matter (SMALL, FEW), and of a state all but the largest `pebbles.WIDTH`; before where the search stops, working sets.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from simulator.bounds.instants import TURN, Instants, Setting

# Storages smaller than these shares of what is free at the instant, and of the largest one, are left out.
SMALL, FEW = 64, 8
MOST_STATES: Final = 300_000  # looked at for one budget
ROOM: Final = 3  # states noted for each that is looked at
STALE_STATES: Final = 20_000  # looked at without a gain
MOST_GROWN: Final = 20_000_000  # edges of the network looked at beforehand
MOST_VISITS: Final = 1 << 30  # and for states; after that only what was demanded beforehand counts
MOST_LEFT: Final = 1 << 20  # capacities noted beforehand, for fewer gaps in a larger network
BITS: Final = 54  # of the largest sum, so that adding some of them stays within 64
MOST_SHIFT: Final = 24
NEVER: Final = 1 << 40  # an op that there is not


class WorkingSets:
    """The facts that all budgets share, for one trace."""

    def __init__(self, instants: Instants) -> None:
        self.instants = instants
        trace, turn = instants.trace, instants.turn
        self._nbytes, self._producer, self._until = instants.nbytes, instants.producer, instants.until
        self._forward = (self._producer >= 0) & (self._producer < turn)
        self._time_ns = np.array(trace.ops.time_ns[:turn], np.int64)
        self._may = np.array(instants.problem.may_rerun[:turn], np.bool_)

    def added_ns(self, budget_bytes: int, op: int, price_ns: int, price_bytes: int) -> int | None:
        """What every plan within the budget adds at least after an instant, rounded down; None: there is no plan.

        Args:
            budget_bytes: at least what is in memory at the instant, whatever the plan.
            op: the instant, the turn or that of an op of backward.
            price_ns: time per `price_bytes`, as the bound of that instant has it; any price gives a bound.
            price_bytes: see there.
        """
        from simulator.kernels.pebbles import NO_WAY, NODE, OP, STORAGE, WIDTH, Nodes, Way, walk_back

        instants, turn = self.instants, self.instants.turn
        first = turn if op == TURN else op + 1
        setting = instants.setting(op)
        free_bytes = budget_bytes - setting.unavoidable_bytes
        first_read = np.full(len(self._nbytes), NEVER, np.int64)
        later = instants.reader >= first
        np.minimum.at(first_read, instants.read[later], instants.reader[later])
        largest = int(self._nbytes[self._forward].max(initial=0))
        least_bytes = max(1, min(free_bytes // SMALL, largest // FEW))
        tracked = np.flatnonzero(self._forward & (self._nbytes >= least_bytes))
        tracked = tracked[np.argsort(-self._nbytes[tracked], kind="stable")]
        rank = np.full(len(self._nbytes), -1, np.int64)
        rank[tracked] = np.arange(len(tracked))
        looks = rank[instants.read] >= 0
        reader, read = instants.reader[looks], instants.read[looks]
        brought = reader[(reader >= first) & (self._until[read] < reader)]
        if not len(brought):
            return 0

        worth_ns = price_ns * int(self._nbytes[self._forward].sum()) // price_bytes
        shift = min(MOST_SHIFT, max(0, BITS - (int(self._time_ns.sum()) + worth_ns).bit_length()))
        price = (price_ns << shift) // price_bytes
        cuts, node, row = self._cuts(setting, shift, price, first_read)
        total = cuts.total - price * free_bytes

        n_ops = len(instants.trace.ops)
        asks = self._asked(rank)
        reads_at = np.zeros(n_ops + 1, np.int64)
        np.cumsum(np.bincount(reader, minlength=n_ops), out=reads_at[1:])
        overwrites, rise = self._taken(rank)
        n_states = ROOM * MOST_STATES + 2 * WIDTH
        n_forward = len(rise)
        ops = np.zeros(n_ops + 2, OP)
        ops["time"][:n_forward], ops["rise_bytes"][:n_forward] = self._time_ns << shift, rise
        ops["may_rerun"][:n_forward], ops["overwrites"][:n_ops] = self._may, overwrites
        ops["base_bytes"][: len(instants.sure_bytes)] = instants.sure_bytes
        ops["need_bytes"][: len(instants.unavoidable_bytes)] = instants.unavoidable_bytes
        ops["least_before"], ops["row"], ops["reads_at"][: n_ops + 1] = total[row], row, reads_at
        ops["asks_at"][1 : n_ops + 1] = np.cumsum([len(a) for a in asks])
        storages = np.zeros(len(tracked), STORAGE)
        storages["nbytes"], storages["node"] = self._nbytes[tracked], node[tracked]
        storages["producer"], storages["until"] = self._producer[tracked], self._until[tracked]
        found = Nodes(
            nodes=np.empty(n_states, NODE),
            states=np.empty((n_states, WIDTH), np.int32),
            table=np.zeros(
                1 << (2 * n_states).bit_length(), np.int32
            ),  # 8 MiB, of which few pages are touched
            heap=np.empty(n_states, np.int32),
            state=np.empty(WIDTH, np.int32),
        )
        root = int(total[-2])
        asked = np.concatenate([np.zeros(0, np.int64), *asks])
        way = Way(ops, storages, rank[read], asked, cuts, MOST_VISITS)
        least, _ = walk_back(
            budget_bytes, first, int(brought.max()) + 1, root, MOST_STATES, STALE_STATES, way, found
        )
        return None if least == NO_WAY else max(0, int(least) >> shift)

    def _asked(self, rank: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """[op]: the tracked storages that can be brought back for its sake, if need be by way of untracked ones."""
        problem, reads = self.instants.problem, self.instants.trace.ops.reads
        ranks = rank.tolist()
        through = [0] * len(ranks)  # by storage, as the bits of an int
        members = {0: np.zeros(0, np.int64)}
        out = []
        for op, read in enumerate(reads):
            bits = 0
            for s in read:
                bits |= through[s]
            if bits not in members:
                row = np.frombuffer(bits.to_bytes(-(-bits.bit_length() // 8), "little"), np.uint8)
                members[bits] = np.flatnonzero(np.unpackbits(row, bitorder="little"))
            out.append(members[bits])
            for s in problem.creates[op] if op < self.instants.turn else ():
                through[s] = 1 << ranks[s] if ranks[s] >= 0 else bits if problem.is_evictable(s) else 0
        return out

    def _taken(self, rank: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[op]: the tracked storage that it takes over, or -1; [op of forward]: bytes that it adds beside others."""
        turn = self.instants.turn
        taken = np.array(self.instants.trace.ops.overwrites, np.int64)
        rise = np.array(self.instants.problem.transient_bytes[:turn], np.int64)
        first = taken[:turn]
        small = (first >= 0) & self._forward[first] & (rank[first] < 0)
        rise[small] -= self._nbytes[first[small]]
        return np.where(taken >= 0, rank[taken], -1), rise

    def _cuts(
        self, setting: Setting, shift: int, price: int, first_read: NDArray[np.int64]
    ) -> tuple[Any, NDArray[np.int64], NDArray[np.int64]]:
        """The network with what is wanted demanded from gap to gap; each storage's node, and each gap's row."""
        from simulator.kernels import prices

        instants, turn = self.instants, self.instants.turn
        decided = self._forward & ~setting.forced  # by a plan
        made = np.flatnonzero(decided)
        node = np.zeros(len(self._nbytes), np.int64)  # 0 is the sink, then come the ops, then the storages
        node[made] = 1 + turn + np.arange(len(made))
        maker = self._producer[made]
        again = np.flatnonzero(self._may)
        needs = (instants.reader < turn) & decided[instants.read]
        needs[needs] = self._may[instants.reader[needs]]
        tail = np.concatenate((node[made], 1 + again, 1 + instants.reader[needs]))
        head = np.concatenate(
            (np.where(self._may[maker], 1 + maker, 0), np.zeros_like(again), node[instants.read[needs]])
        )
        endless = np.full(int(needs.sum()), prices.NO_LIMIT)
        left = np.concatenate((price * self._nbytes[made], self._time_ns[again] << shift, endless))
        n_nodes, n_edges = 1 + turn + len(made), len(tail)
        tails = np.concatenate((tail, head))
        by_tail = np.argsort(tails, kind="stable")
        place = np.empty_like(by_tail)
        place[by_tail] = np.arange(2 * n_edges)
        opposite = np.concatenate((np.arange(n_edges, 2 * n_edges), np.arange(n_edges)))
        out = np.stack((np.concatenate((head, tail))[by_tail], place[opposite][by_tail]))
        out_at = np.zeros(n_nodes + 1, np.int64)
        np.cumsum(np.bincount(tails, minlength=n_nodes), out=out_at[1:])

        wanted = np.flatnonzero(setting.wanted)
        wanted = wanted[np.argsort(first_read[wanted], kind="stable")]
        times, of_time = np.unique(first_read[wanted], return_inverse=True)
        n_rows = 1 + min(len(times), max(1, MOST_LEFT // (2 * n_edges)))
        row = 1 + np.arange(len(times) + 1) * (n_rows - 1) // max(1, len(times))  # of the demands of a time
        cuts = prices.Cuts(
            out_at,
            out,
            left=np.zeros((n_rows + 1, 2 * n_edges), np.int64),
            total=np.zeros(n_rows + 1, np.int64),
            dead_from=np.full(n_nodes, prices.NEVER),
            seen=np.zeros(n_nodes, np.int64),
            came=np.zeros(n_nodes, np.int64),
            queue=np.zeros(n_nodes, np.int64),
        )
        cuts.left[0] = np.concatenate((left, np.zeros_like(left)))[by_tail]
        prices.grow(node[wanted], row[of_time], MOST_GROWN, cuts)
        gaps = np.arange(len(instants.trace.ops) + 2)
        return cuts, node, row[np.searchsorted(times, gaps)] - 1

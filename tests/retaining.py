"""What becomes of rebuilt values where a plan says only what is saved: `simulator.kernels.retain` in plain words.

What this counts and ignores stands there; tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import sqrt

from simulator.core.evaluator import Evaluator

SAVED, STAYS, NEW, PASSING = "saved", "stays", "new", "passing"
DEAREST = 1e15


def evictions(
    evaluator: Evaluator, budget_bytes: int, saved: Collection[int], weight: Mapping[int, float]
) -> dict[int, set[int]]:
    """Op by position -> the storages that go once it has run, if they stay for as long as there is room.

    Args:
        evaluator: of the problem.
        budget_bytes: what a step may take.
        saved: storages of forward that are saved.
        weight: storage -> how much sooner (above 1) or later it goes; 1 where it is not named.
    """
    return _Walk(evaluator, budget_bytes, saved, weight).run()


class _Walk:
    """Where one walk over backward is."""

    def __init__(
        self, ev: Evaluator, budget_bytes: int, saved: Collection[int], weight: Mapping[int, float]
    ) -> None:
        self.ev, self.budget_bytes, self.weight = ev, budget_bytes, weight
        self.may_stay = frozenset(ev.problem.candidates)
        self.last_use = [ev.before[i] if i >= 0 else -1 for i in ev.last_backward_use]
        self.here = {s: SAVED for s in ev.made_forward if s in saved}
        self.live = sum(ev.nbytes[s] for s in self.here)
        self.fixed = ev.most_resident_bytes + sum(ev.settled[: ev.forward])
        self.held: list[int] = []  # rebuilt values that stay
        self.last_at: dict[int, int] = {}  # and the last op that each stayed for
        self.out: dict[int, set[int]] = {}
        self.cost: dict[int, float] = {}  # to make each again, if all that may stay is there
        for s in sorted(ev.made_forward, key=lambda s: (ev.producer[s], s)):
            k = ev.producer[s]
            behind = (self.cost[y] for y in ev.needs[k] if y not in self.here and y not in self.may_stay)
            self.cost[s] = min(sum(behind, ev.time_ns[k] + 1.0), DEAREST)

    def run(self) -> dict[int, set[int]]:
        ev = self.ev
        done = self._done()
        for c in range(ev.forward, len(ev.op_id)):
            order, demanded = self._chain(c)
            read_in = {s: k for k, b in enumerate(order) for s in ev.reads[b]}  # the last step of the chain
            for k, b in enumerate(order):
                self._make_room(c, k, b, read_in)
                if k < len(order) - 1:
                    self._bind(c, k, b, demanded, read_in)
                for s in ev.reads[b]:
                    if self.here.get(s) == PASSING and read_in[s] == k:
                        self._leave(s)
            self.last_at.update((s, c) for s in self.held if s in read_in)
            for s in [s for s in self.held if self.last_use[s] <= c]:
                self._leave(s)
            self.held = [s for s in self.held if s in self.here]
            self.here.update((s, STAYS) for s in self.held)
            self.live -= sum(ev.nbytes[s] for s in done.get(c, ()) if self.here.get(s) == SAVED)
            self.fixed += ev.settled[c]
        return self.out

    def _done(self) -> dict[int, list[int]]:
        """Op -> the storages that neither it nor what it makes again is the last to need."""
        ev = self.ev
        until = [max(a, b) for a, b in zip(self.last_use, ev.hold, strict=True)]
        for k in reversed(range(ev.forward)):
            for s in ev.needs[k]:
                until[s] = max((until[s], *(until[made] for made in ev.creates[k])))
        out: dict[int, list[int]] = {}
        for s in ev.made_forward:
            out.setdefault(until[s], []).append(s)
        return out

    def _chain(self, c: int) -> tuple[Sequence[int], set[int]]:
        """The ops that run for op c, itself last, and the storages that they are wanted for."""
        ev, order, demanded, seen = self.ev, list[int](), set[int](), set[int]()
        stack = [(c, False)]
        while stack:
            b, ready = stack.pop()
            if ready:
                order.append(b)
            elif b not in seen:
                seen.add(b)
                missing = [x for x in ev.needs[b] if x not in self.here]
                demanded.update(missing)
                stack += [(b, True), *((ev.producer[x], False) for x in reversed(missing))]
        return order, demanded

    def _make_room(self, c: int, k: int, b: int, read_in: Mapping[int, int]) -> None:
        """Let what is idle go until step k of the chain for op c, which runs op b, is within the budget."""
        ev, s = self.ev, self.ev.overwrites[b]
        level = self.live + self.fixed + ev.rise[b]
        if s >= 0 and self.here.get(s) == PASSING and read_in[s] == k:
            level -= ev.nbytes[s]
        while level > self.budget_bytes:
            idle = [j for j, s in enumerate(self.held) if read_in.get(s, -1) < k]
            if not idle:
                break
            j = max(idle, key=lambda j: (self._score(self.held[j], c), -j))
            s, last = self.held[j], self.held.pop()
            if j < len(self.held):
                self.held[j] = last
            self.out.setdefault(c if s in read_in else self.last_at[s], set()).add(s)
            self._leave(s)
            level -= ev.nbytes[s]

    def _score(self, s: int, c: int) -> float:
        later = sqrt(self.last_use[s] - c + 1.0)
        return self.ev.nbytes[s] / self.cost[s] * later * self.weight.get(s, 1.0)

    def _bind(self, c: int, k: int, b: int, demanded: Collection[int], read_in: dict[int, int]) -> None:
        """What running op b again for op c brings back."""
        for s in self.ev.creates[b]:
            stay = s in self.may_stay and self.last_use[s] > c
            if s in self.here or not (s in demanded or stay):
                continue
            self.live += self.ev.nbytes[s]
            self.here[s] = NEW if stay else PASSING
            if stay:
                self.held.append(s)
            elif read_in.setdefault(s, k) <= k:
                self._leave(s)
            read_in.setdefault(s, k)

    def _leave(self, s: int) -> None:
        del self.here[s]
        self.live -= self.ev.nbytes[s]

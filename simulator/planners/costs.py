"""The time that evicting one more value adds to a plan, and that saving one again takes off it.

Counts: the exact union of ops that run again beside those that do already. Ignores: that links of a chain which are
not retained may run again more than once.
"""

from __future__ import annotations

from simulator.core.evaluator import Evaluator, State


class Costs:
    """The time that evicting one more value adds, given what is evicted already.

    A value's chain is its producer and the ops behind it up to values that backward needs anyway; which of those are
    saved does not matter, since the ops behind evicted ones run again already.
    """

    def __init__(self, evaluator: Evaluator, state: State) -> None:
        self.evaluator, self.is_saved = evaluator, state.saved
        self.used = [0] * evaluator.forward  # op -> how many evicted values have it in their chain
        self.chains: dict[int, tuple[int, ...]] = {}
        self.added: dict[int, int] = {}  # value -> what `of` says, as long as values are only evicted
        # Op -> the values in `added` with it in their chain.
        self.behind: list[list[int]] = [[] for _ in self.used]
        for s in evaluator.problem.candidates:
            if not state.saved[s]:
                self.evicted(s)

    def chain(self, s: int) -> tuple[int, ...]:
        known = self.chains.get(s)
        if known is not None:
            return known
        ev, wanted = self.evaluator, self.evaluator.problem.saved_by_default
        seen = {ev.producer[s]}
        stack = [ev.producer[s]]
        while stack:
            for y in ev.needs[stack.pop()]:
                p = ev.producer[y]
                if not wanted[y] and not self.is_saved[y] and p not in seen:
                    seen.add(p)
                    stack.append(p)
        self.chains[s] = tuple(sorted(seen))
        return self.chains[s]

    def of(self, s: int) -> int:
        """Added time if s is evicted too."""
        known = self.added.get(s)
        if known is None:
            known = sum(self.evaluator.time_ns[k] for k in self.chain(s) if not self.used[k])
            self.added[s] = known
            for k in self.chain(s):
                self.behind[k].append(s)
        return known

    def saves_ns(self, s: int) -> int:
        """Time that it takes off if the evicted s is saved again."""
        time_ns, used = self.evaluator.time_ns, self.used
        return sum(time_ns[k] for k in self.chain(s) if used[k] == 1)

    def evicted(self, s: int) -> list[int]:
        """Count s as evicted; returns the values that this makes cheaper."""
        cheaper: list[int] = []
        for k in self.chain(s):
            if not self.used[k] and self.evaluator.time_ns[k]:
                for t in self.behind[k]:
                    self.added[t] -= self.evaluator.time_ns[k]
                cheaper += self.behind[k]
            self.used[k] += 1
        return cheaper

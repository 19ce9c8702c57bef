"""One trace under constraints: the facts that no plan changes, and whatever is worked out from them once.

Whoever asks a question (a command, a study, a notebook) makes one `Problem` and hands it down. Nothing below makes
another from the trace, so what is worked out once (arrays, floors, the replay with everything saved) serves all.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from simulator.core.facts import Facts
from simulator.core.replay import Replay, replay
from traces.records.plan import Action, Plan


class Problem(Facts):
    """The facts about one trace, with the replay of plans."""

    _replayed: tuple[tuple[Action, ...], Replay] | None = None  # what was asked last

    def replay(self, actions: Iterable[Action] = ()) -> Replay:
        """Return what a plan's actions come to, by the exact replay; asked at once for the same ones, the same. Raises
        PlanError if an action is impossible, or a chain needs an op that may not run again.
        """
        wanted = tuple(actions)
        if self._replayed is None or self._replayed[0] != wanted:
            self._replayed = (wanted, replay(self, wanted))
        return self._replayed[1]

    @cached_property
    def joined(self) -> Problem | None:
        """That of model and loss function captured as one, if the trace has it."""
        return None if self.trace.joined is None else Problem(self.trace.joined, self.constraints)

    def planned_by(self, plan: Plan) -> Problem:
        """Itself, or `joined` if a plan is of that."""
        joined = self.joined
        return joined if joined and plan.meta.fingerprint == joined.trace.meta.fingerprint else self

    @cached_property
    def saved(self) -> Replay:
        """The step with everything saved."""
        return replay(self, ())

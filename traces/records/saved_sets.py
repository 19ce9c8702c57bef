"""SavedSets: which values another system keeps for backward under its settings, as data that its plans are made from.

The file carries the header of the trace whose graph the other system was given, and for each setting the storages that
it keeps and those that its backward makes again. It is JSON, so that who runs the other system and who judges its
choice need not be the same process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from traces.errors import PlanError
from traces.files.json_records import Form, JsonRecord
from traces.records.trace import TraceMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSet:
    """One choice of the other system. Storages and ops by their ids in the trace."""

    label: str  # a name for this choice, such as `dp-0.5`
    settings: Mapping[str, Any]  # what it was asked for, such as budget and solver
    solve_seconds: float  # for this choice alone, the capture of the graph left out
    saved: tuple[int, ...]  # storages that forward makes and keeps for backward
    recomputed: tuple[int, ...]  # storages that forward makes and backward makes again
    recomputed_ops: int  # ops of forward, views left out, that its backward runs again
    # Of these, the ops that draw new random numbers: its gradients are wrong then.
    random_again: tuple[int, ...]

    @property
    def valid(self) -> bool:
        """Whether the other system would compute the gradients of the step as it is."""
        return not self.random_again


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSets(JsonRecord):
    """What one run of the other system chose, for one trace."""

    form: ClassVar = Form(
        name="saved sets",
        version_key="saved_version",
        version=1,
        advice="make them with `python -m tests.bench.baselines.torch_budget TRACE -o FILE`",
        error=PlanError,
    )
    trace: TraceMeta
    source: str  # the other system, in words
    capture_seconds: float  # to build and capture the graph, once for all sets
    sets: tuple[SavedSet, ...] = field(default=())

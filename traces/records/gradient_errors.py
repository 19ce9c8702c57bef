"""By how much packing saved values changes a step's gradient, as it was measured on the user's own batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from traces.errors import PlanError
from traces.files import Form, JsonRecord
from traces.records.plan import ERRORS_COMMAND, Rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Values that were packed together in one format, and nothing else."""

    kind: str
    storages: tuple[int, ...]
    error: float  # relative L2 of the step's whole gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientErrors(JsonRecord):
    """The measured errors of one step."""

    form: ClassVar = Form(
        name="gradient-errors",
        version=1,
        advice=f"make it with `{ERRORS_COMMAND}`",
        error=PlanError,
    )
    fingerprint: str  # of the trace's graph
    parts: tuple[Part, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The formats that were measured."""
        return tuple(dict.fromkeys(p.kind for p in self.parts))

    def of(self, rewrites: Iterable[Rewrite]) -> float:
        """The error of rewrites together: the root of the sum of the squares of the parts that they are of.

        Counts: each part of which a value is taken, whole; as if errors were independent, as those of random rounding
        are. Ignores: that rounding to nearest, and few bits, may err in one direction. Infinite where a value was not
        measured.
        """
        left = {(r.kind, r.storage) for r in rewrites}
        square = 0.0
        for part in self.parts:
            mine = {(part.kind, s) for s in part.storages}
            if left & mine:
                square += part.error**2
                left -= mine
        return math.inf if left else math.sqrt(square)

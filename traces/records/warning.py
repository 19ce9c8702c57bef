"""PredictionWarning: one thing that must be said beside a prediction, as data; its prose is made where it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionWarning:
    """A code, what it is about, and the figures that its prose needs.

    `figures` hold bytes, counts and percents as numbers, and names as text.
    """

    code: str
    subject: str = ""
    figures: Mapping[str, int | float | str] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for warnings whose prose differs in its numbers alone."""
        parts = ((k, v if isinstance(v, str) else bool(v)) for k, v in sorted(self.figures.items()))
        return (self.code, self.subject, *parts)

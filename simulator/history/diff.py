"""Compare two runs: their peaks, and by how much each category, module and line holds more at the one or the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from simulator.history.run import PARTS, UNNAMED, History
from simulator.show.tables import Table, table


class Change(NamedTuple):
    """Bytes of one name at both peaks."""

    name: str
    before: int
    after: int

    @property
    def grown(self) -> int:
        return self.after - self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Two runs, of which the second is looked at from the first."""

    before: History
    after: History

    def changes(self, part: str) -> list[Change]:
        """By one of PARTS, what changed most first; nothing where the runs have no name in common."""
        a, b = (h.parts.get(part, {}) for h in (self.before, self.after))
        if not a.keys() & b.keys() - {""}:
            return []
        names = dict.fromkeys((*a, *b))
        found = [Change(name or UNNAMED, a.get(name, 0), b.get(name, 0)) for name in names]
        return sorted((c for c in found if c.grown), key=lambda c: -abs(c.grown))

    def notes(self) -> list[str]:
        """What must be said beside them."""
        missing = [part for part in PARTS if not self.changes(part) and self.before.parts != self.after.parts]
        said = [f"The two name no {' and no '.join(missing)} alike, or do not know any."] if missing else []
        return list(dict.fromkeys((*self.before.notes, *self.after.notes, *said)))

    def peaks(self) -> list[Change]:
        found = [Change("peak requested", self.before.peak_bytes, self.after.peak_bytes)]
        reserved = self.before.reserved_bytes, self.after.reserved_bytes
        if None not in reserved:
            found.append(Change("reserved there", reserved[0] or 0, reserved[1] or 0))
        return found

    def tables(self, most: int) -> Iterator[Table]:
        """Both peaks, and what changed, a table a part."""
        for title, rows in (("", self.peaks()), *((part, self.changes(part)[:most]) for part in PARTS)):
            if rows:
                yield table(
                    rows,
                    (
                        (title, "", lambda c: c.name),
                        (self.before.name, "bytes", lambda c: c.before),
                        (self.after.name, "bytes", lambda c: c.after),
                        ("difference", "+bytes", lambda c: c.grown),
                    ),
                )

    def to_json(self) -> dict[str, Any]:
        def rows(changes: list[Change]) -> list[dict[str, Any]]:
            return [{**c._asdict(), "grown": c.grown} for c in changes]

        return {
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "peaks": rows(self.peaks()),
            **{f"by_{part}": rows(self.changes(part)) for part in PARTS},
        }

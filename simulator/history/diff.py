"""Compare two runs: their peaks, and by how much each category, module and line holds more at the one or the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from simulator.history.run import PARTS, UNNAMED, History
from simulator.show.tables import Table, table

PEAKS = "peaks"
Change = tuple[str, int, int]  # a name, and its bytes at both peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Two runs, of which the second is looked at from the first."""

    before: History
    after: History

    def changes(self, part: str) -> list[Change]:
        """The PEAKS; or by one of PARTS what changed, most first, nothing where the runs have no name in common."""
        if part == PEAKS:
            after = self.after.peaks
            return [(k, n, after[k]) for k, n in self.before.peaks.items() if k in after]
        a, b = (h.parts.get(part, {}) for h in (self.before, self.after))
        if not a.keys() & b.keys() - {""}:
            return []
        found = [(name or UNNAMED, a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys((*a, *b))]
        return sorted((c for c in found if c[1] != c[2]), key=lambda c: -abs(c[2] - c[1]))

    def tables(self, most: int) -> Iterator[Table]:
        """Both peaks, and what changed, a table a part."""
        for part in (PEAKS, *PARTS):
            if rows := self.changes(part)[:most]:
                yield table(
                    rows,
                    (
                        (part, "", lambda c: c[0]),
                        (self.before.name, "bytes", lambda c: c[1]),
                        (self.after.name, "bytes", lambda c: c[2]),
                        ("difference", "+bytes", lambda c: c[2] - c[1]),
                    ),
                )

    def to_json(self) -> dict[str, Any]:
        def rows(part: str) -> list[dict[str, Any]]:
            return [{"name": n, "before": a, "after": b, "grown": b - a} for n, a, b in self.changes(part)]

        by_part = {PEAKS: rows(PEAKS), **{f"by_{part}": rows(part) for part in PARTS}}
        return {"before": self.before.to_json(), "after": self.after.to_json(), **by_part}

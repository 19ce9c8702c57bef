"""Tables of answers: what a column shows of each record, for a terminal, a notebook and a page alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, ClassVar, Final, TypeVar

from traces.records.measurement import RunFigures, signed_error_percent
from traces.units import show_bytes, show_percent, show_time

CODE, NUMBER, UNKNOWN = "code", "number", "–"
WIDEST: Final = 110  # characters of a cell in a terminal; JSON and pages have it whole


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: what is shown, the number to sort by, and a tone (`good`, `bad`, `quiet`)."""

    text: str
    sort: float | None = None
    tone: str = ""


def time_cell(time_ns: int | float | None) -> Cell:
    return Cell(text=show_time(time_ns), sort=time_ns)


def percent_cell(value: float | None, *, signed: bool = False, digits: int = 2) -> Cell:
    return Cell(text=show_percent(value, signed=signed, digits=digits), sort=value)


def yes(text: str = "yes") -> Cell:
    """Show what is as it should be."""
    return Cell(text, tone="good")


def no(text: str = "no") -> Cell:
    """Show what is not as it should be."""
    return Cell(text, tone="bad")


# How the columns of `table` show a value; what is not here is shown as it is.
SHOWN: Final[Mapping[str, Callable[[Any], Cell]]] = {
    "bytes": lambda value: Cell(show_bytes(value), value),
    "+bytes": lambda value: Cell("+" * (value > 0) + show_bytes(value), value),
    "time": time_cell,
    "count": lambda value: Cell(UNKNOWN if value is None else f"{value:,}", value),
    "percent": percent_cell,
    "+percent": lambda value: percent_cell(value, signed=True),
    "share": lambda value: percent_cell(value, digits=1),
    "points": lambda value: Cell(UNKNOWN if value is None else f"{value:.2f}", value),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; the columns named in `numbers` are aligned right, those in `code` are set as code."""

    kind: ClassVar[str] = "table"
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    numbers: frozenset[int] = frozenset()
    code: frozenset[int] = frozenset()
    total: tuple[Cell | str, ...] = ()
    caption: str = ""

    def texts(self) -> list[tuple[str, ...]]:
        """Return what every row shows."""
        return [tuple(map(_text, row)) for row in self.rows]

    def _only(self, at: Sequence[int]) -> Table:
        return replace(
            self,
            columns=tuple(self.columns[k] for k in at),
            rows=tuple(tuple(row[k] for k in at) for row in self.rows),
            numbers=frozenset(new for new, k in enumerate(at) if k in self.numbers),
            code=frozenset(new for new, k in enumerate(at) if k in self.code),
            total=tuple(self.total[k] for k in at) if self.total else (),
        )

    def without(self, *titles: str) -> Table:
        """The table without the columns of these titles."""
        return self._only([k for k, title in enumerate(self.columns) if title not in titles])

    def known(self) -> Table:
        """The table without the columns of which no row knows anything (a CPU has no reserved memory)."""
        texts = self.texts()
        columns = range(len(self.columns))
        return self._only([k for k in columns if not texts or any(row[k] != UNKNOWN for row in texts)])

    def lines(self) -> list[str]:
        """The table for a terminal."""
        rows = [*self.texts(), *([tuple(_text(c) for c in self.total)] if self.total else [])]
        texts = [tuple(t if len(t) <= WIDEST else t[: WIDEST - 1] + "…" for t in row) for row in rows]
        return aligned([self.columns, *texts], left=set(range(len(self.columns))) - self.numbers)

    def html(self) -> str:
        """The table for a notebook."""
        rows = [("th", self.columns), *(("td", row) for row in self.texts())]
        cells = ("".join(f"<{tag}>{escape(text)}</{tag}>" for text in row) for tag, row in rows)
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _text(cell: Cell | str) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def aligned(rows: Sequence[Sequence[object]], left: Collection[int] = ()) -> list[str]:
    """Rows as lines: the columns in `left` to the left, the others to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    sides = ["<" if k in left else ">" for k in range(len(widths))]
    return [
        "  ".join(f"{t:{side}{w}}" for t, side, w in zip(row, sides, widths, strict=True)).rstrip()
        for row in texts
    ]


T = TypeVar("T")


def table(
    rows: Iterable[T],
    columns: Sequence[tuple[str, str, Callable[[T], Any]]],
    *,
    total: Sequence[Any] = (),
    **more: str,
) -> Table:
    """A table with one row for each of `rows`, and `total`, the values of the last. A column is its title, its kind (a
    key of SHOWN, CODE, NUMBER for a number that comes ready as a Cell, or "") and the value of a row. A value that is a
    Cell or text already stays as it is.
    """

    def shown(kind: str, value: Any) -> Cell | str:
        return value if isinstance(value, Cell | str) or kind not in SHOWN else SHOWN[kind](value)

    kinds = [kind for _, kind, _ in columns]
    return Table(
        columns=tuple(title for title, _, _ in columns),
        rows=tuple(tuple(shown(kind, value(row)) for _, kind, value in columns) for row in rows),
        numbers=frozenset(k for k, kind in enumerate(kinds) if kind in SHOWN or kind == NUMBER),
        code=frozenset(k for k, kind in enumerate(kinds) if kind == CODE),
        total=tuple(shown(kind, value) for kind, value in zip(kinds, total, strict=True)) if total else (),
        **more,
    )


def figures_table(
    runs: Sequence[tuple[Any, ...]],
    *more: tuple[str, str, Callable[[Any], Any]],
    title: str = "",
) -> Table:
    """A row for each way to run the step: its name, and its RunFigures; `more`: further columns. What nobody knows is
    left out."""
    return table(
        runs,
        (
            (title, "", lambda run: run[0]),
            ("peak allocated", "bytes", lambda run: run[1].peak_allocated_bytes),
            ("in blocks", "bytes", lambda run: run[1].peak_block_bytes),
            ("peak reserved", "bytes", lambda run: run[1].peak_reserved_bytes),
            ("step time", "time", lambda run: run[1].step_time_ns),
            *more,
        ),
    ).known()


# Of each figure: what it is called, and how it is shown.
FIGURES: Final = {
    "peak_allocated_bytes": ("peak allocated", "bytes"),
    "peak_block_bytes": ("peak in the allocator's blocks", "bytes"),
    "peak_reserved_bytes": ("peak reserved", "bytes"),
    "step_time_ns": ("step time", "time"),
}
Run = tuple[str, RunFigures, RunFigures]  # its name, what was predicted, what was measured


def beside(runs: Iterable[Run], where: str) -> Table:
    """A row for each figure of each run that was predicted or measured."""
    rows = []
    for name, predicted, measured in runs:
        errors = signed_error_percent(predicted, measured)
        before, after = predicted.headline(), measured.headline()
        known = (key for key in FIGURES if (before[key], after[key]) != (None, None))
        rows += [(name, key, before[key], after[key], errors[key]) for key in known]
    return table(
        rows,
        (
            ("run", "", lambda row: row[0]),
            ("figure", "", lambda row: FIGURES[row[1]][0]),
            ("predicted", NUMBER, lambda row: SHOWN[FIGURES[row[1]][1]](row[2])),
            (f"measured on {where}", NUMBER, lambda row: SHOWN[FIGURES[row[1]][1]](row[3])),
            ("error", NUMBER, lambda row: percent_cell(row[4], signed=True, digits=3)),
        ),
        caption="Error is 100·(predicted − measured)/measured; negative: the prediction was too low.",
    )

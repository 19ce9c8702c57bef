"""The blocks that pages are made of (figures, tables, charts, text), and one HTML file that needs no network.

Names of models, modules and ops are other people's text: jinja2 escapes them, and JSON inside a script
element has its `<` escaped. The page holds one copy of the Vega bundle, whatever the number of charts, and a
content security policy that forbids it every request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from traces.errors import EnvironmentProblem
from traces.files import write_text
from traces.units import show_bytes, show_percent, show_time

TEMPLATES: Final = Path(__file__).parent / "templates"
INSTALL: Final = "install it with `pip install 'lowtide[all]'`"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: what is shown, the number to sort by, and a tone (`good`, `bad`, `quiet`)."""

    text: str
    sort: float | None = None
    tone: str = ""


def bytes_cell(nbytes: int | None) -> Cell:
    return Cell(text=show_bytes(nbytes), sort=nbytes)


def time_cell(time_ns: int | float | None) -> Cell:
    return Cell(text=show_time(time_ns), sort=time_ns)


def percent_cell(value: float | None, *, signed: bool = False, digits: int = 2) -> Cell:
    return Cell(text=show_percent(value, signed=signed, digits=digits), sort=value)


def count_cell(value: int | None) -> Cell:
    return Cell(text="–" if value is None else f"{value:,}", sort=value)


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; tone `note` sets it apart, `warning` more so."""

    kind: ClassVar[str] = "text"
    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """One headline figure."""

    label: str
    value: str
    detail: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """A row of headline figures."""

    kind: ClassVar[str] = "figures"
    figures: tuple[Figure, ...]


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
    folded: str = ""  # when set, the table starts folded under this summary


T = TypeVar("T")
CODE, NUMBER = "code", "number"
# How the columns of `table` show a value; what is not here is shown as it is.
SHOWN: Final[Mapping[str, Callable[[Any], Cell]]] = {
    "bytes": bytes_cell,
    "time": time_cell,
    "count": count_cell,
    "percent": percent_cell,
    "+percent": lambda value: percent_cell(value, signed=True),
    "share": lambda value: percent_cell(value, digits=1),
    "points": lambda value: Cell("–" if value is None else f"{value:.2f}", value),
}


def table(
    rows: Iterable[T],
    columns: Sequence[tuple[str, str, Callable[[T], Any]]],
    *,
    total: Sequence[Any] = (),
    **more: str,
) -> Table:
    """A table with one row for each of `rows`.

    Args:
        columns: the title, the kind (a key of SHOWN, CODE, NUMBER for a number that comes ready as a Cell, or "") and
            the value of a row. A value that is a Cell or text already stays as it is.
        total: the values of the last row, shown like the others.
        more: `caption` and `folded`.
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


def yes(text: str = "yes") -> Cell:
    """What is as it should be."""
    return Cell(text, tone="good")


def no(text: str = "no") -> Cell:
    """What is not."""
    return Cell(text, tone="bad")


def warned(texts: Iterable[str]) -> tuple[Text, ...]:
    """What must be said beside figures."""
    return tuple(Text(text, "warning") for text in texts)


def known_columns(table: Table) -> Table:
    """The table without the columns of which no row knows anything (a CPU has no reserved memory)."""
    kept = [
        k
        for k in range(len(table.columns))
        if not table.rows
        or any((c.text if isinstance(c, Cell) else c) != "–" for c in (r[k] for r in table.rows))
    ]
    return replace(
        table,
        columns=tuple(table.columns[k] for k in kept),
        rows=tuple(tuple(row[k] for k in kept) for row in table.rows),
        numbers=frozenset(new for new, k in enumerate(kept) if k in table.numbers),
        code=frozenset(new for new, k in enumerate(kept) if k in table.code),
        total=tuple(table.total[k] for k in kept) if table.total else (),
    )


@dataclass(frozen=True, slots=True)
class Chart:
    """A Vega-Lite specification, with the sentence that says what to see in it."""

    kind: ClassVar[str] = "chart"
    spec: Mapping[str, Any]
    caption: str = ""
    title: str = ""


@dataclass(frozen=True, slots=True)
class Switch:
    """A choice that sets a named parameter of every chart that has it."""

    kind: ClassVar[str] = "switch"
    signal: str
    label: str
    choices: tuple[tuple[str, str], ...]  # value, label; the first is chosen


Block = Text | Figures | Table | Chart | Switch


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A whole page."""

    title: str
    subtitle: str
    sections: Sequence[Section] = field(default_factory=tuple)


def paragraphs(text: str, *, tone: str = "") -> tuple[Text, ...]:
    """One block a paragraph; paragraphs are set apart by empty lines."""
    return tuple(Text(text=" ".join(p.split()), tone=tone) for p in re.split(r"\n\s*\n", text) if p.strip())


def script_json(data: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


@cache
def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that asks the network for nothing.

    Links of the libraries to their editor, schemas and issues lose their scheme, so that the only addresses
    left are the names of the SVG standard's namespaces, which nobody fetches.

    Raises:
        EnvironmentProblem: vl-convert is not installed.
    """
    try:
        import vl_convert
    except ImportError:
        raise EnvironmentProblem(f"a report needs the package vl-convert-python; {INSTALL}.") from None
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    script = re.sub(r"https?://(?!www\.w3\.org/)", "", script)
    return re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)


def render(page: Page) -> str:
    """The page as HTML.

    Raises:
        EnvironmentProblem: jinja2 or vl-convert is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise EnvironmentProblem(f"a report needs the package jinja2; {INSTALL}.") from None
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = any(block.kind == "chart" for section in page.sections for block in section.blocks)
    environment.filters["script_json"] = script_json
    environment.filters["cell"] = lambda c: c if isinstance(c, Cell) else Cell(text=str(c))
    return environment.get_template("page.html").render(page=page, bundle=bundle() if charts else "")


def write_page(path: str | Path, page: Page) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem like `render`."""
    return write_text(path, render(page))

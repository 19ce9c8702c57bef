"""The blocks that pages are made of (tables, charts, text), and one HTML file that needs no network.

Names of models, modules and ops are other people's text: jinja2 escapes them, and `simulator.show.picture` in charts. A
content security policy forbids the page every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from simulator.show.tables import Cell, Table
from traces.files import write_text

TEMPLATES: Final = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; tone `note` sets it apart, `warning` more so, `answer` is what one reads first."""

    kind: ClassVar[str] = "text"
    text: str
    tone: str = ""


def warned(texts: Iterable[str]) -> tuple[Text, ...]:
    return tuple(Text(text, "warning") for text in texts)


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture as SVG, with the sentence that says what to see in it."""

    kind: ClassVar[str] = "chart"
    svg: str
    caption: str = ""
    title: str = ""


Block = Text | Table | Chart


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    subtitle: str
    sections: Sequence[Section] = field(default_factory=tuple)


def render(page: Page) -> str:
    """The page as HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = lambda c: c if isinstance(c, Cell) else Cell(text=str(c))
    text: str = environment.get_template("page.html").render(page=page)
    return text


def write_page(path: str | Path, page: Page) -> Path:
    """Write the page, whole or not at all."""
    return write_text(path, render(page))

"""The blocks that pages are made of (tables, charts, text), and one HTML file that needs no network.

Names of models, modules and ops are other people's text: jinja2 escapes them, also in the JSON inside a script
element. The page holds one copy of the Vega bundle, whatever the number of charts, and a
content security policy that forbids it every request.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any, ClassVar, Final

from simulator.show.tables import Cell, Table
from traces.errors import EnvironmentProblem
from traces.files import write_text

TEMPLATES: Final = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; tone `note` sets it apart, `warning` more so."""

    kind: ClassVar[str] = "text"
    text: str
    tone: str = ""


def warned(texts: Iterable[str]) -> tuple[Text, ...]:
    return tuple(Text(text, "warning") for text in texts)


@dataclass(frozen=True, slots=True)
class Chart:
    """A Vega-Lite specification, with the sentence that says what to see in it."""

    kind: ClassVar[str] = "chart"
    spec: Mapping[str, Any]
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


def needed(module: str) -> Any:
    """A module that pages need; raises EnvironmentProblem if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise EnvironmentProblem(
            f"a report needs {module}; install it with `pip install 'lowtide[all]'`."
        ) from None


@cache
def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that asks the network for nothing.

    Links of the libraries to their editor, schemas and issues lose their scheme, so that the only addresses left are
    the names of the SVG standard's namespaces, which nobody fetches. To make it takes seconds, so it stays beside this
    module's bytecode, where that may be written. Raises EnvironmentProblem if vl-convert is not installed.
    """
    vl_convert = needed("vl_convert")
    place = Path(cache_from_source(__file__)).with_name(f"vega-{vl_convert.__version__}.js")
    with contextlib.suppress(OSError):
        return place.read_text(encoding="utf-8")
    script: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    script = re.sub(r"https?://(?!www\.w3\.org/)", "", script)
    script = re.sub(r"<(?=/script|!--)", r"\\x3c", script, flags=re.IGNORECASE)
    if not sys.dont_write_bytecode:
        with contextlib.suppress(OSError):
            write_text(place, script)
    return script


def render(page: Page) -> str:
    """The page as HTML. Raises EnvironmentProblem if jinja2 or vl-convert is not installed."""
    jinja2 = needed("jinja2")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts = any(block.kind == "chart" for section in page.sections for block in section.blocks)
    dense = {"separators": (",", ":"), "sort_keys": True, "ensure_ascii": False}
    environment.policies["json.dumps_kwargs"] = dense
    environment.filters["cell"] = lambda c: c if isinstance(c, Cell) else Cell(text=str(c))
    return str(environment.get_template("page.html").render(page=page, bundle=bundle() if charts else ""))


def write_page(path: str | Path, page: Page) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem like `render`."""
    return write_text(path, render(page))

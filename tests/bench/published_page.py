"""The page of figures that others measured, beside rehearsals, made of the blocks of every report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.report.page import Page, Section, Text, write_page
from simulator.show.tables import NUMBER, table
from traces.provenance import REHEARSED


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the page of rows as `tests.bench.published` makes them.

    Raises:
        EnvironmentProblem: a package that pages need is not installed.
    """
    sections = []
    for figure in ("allocated", "reserved", "requested"):
        of = [
            r["rehearsed"][figure]["off_bytes"]
            for r in rows
            if figure in r["measured"] and figure in r["rehearsed"]
        ]
        told = Text(f"{of.count(0)} of {len(of)} figures are 0 bytes off.")
        sections.append(Section(f"Peak {figure}", (told,)))
    sections.append(Section("All figures", (_table(rows),)))
    subtitle = (
        f"Steps that others measured on GPUs; rehearsed: {REHEARSED}; Lowtide has measured none of them."
    )
    write_page(path, Page("Measured by others, rehearsed", subtitle, sections))


def _table(rows: Sequence[dict[str, Any]]) -> Any:
    lines = [(r, figure) for r in rows for figure in r["measured"]]

    def off(way: str) -> Any:
        return lambda line: line[0][way].get(line[1], {}).get("off_percent")

    return table(
        lines,
        (
            ("step", "code", lambda line: line[0]["name"]),
            ("what it is", "", lambda line: line[0]["config"]),
            ("figure", "", lambda line: line[1]),
            ("measured by others", NUMBER, lambda line: f"{line[0]['measured'][line[1]]:,}"),
            ("rehearsed, off", "+percent", off("rehearsed")),
            ("source", "", lambda line: line[0]["source"]),
        ),
    )

"""The page of a capacity study: a heat map of devices and batch sizes, and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from simulator.report import charts
from simulator.report.page import Chart, Page, Section, Text, needed, warned, write_page
from simulator.studies.capacity import FITS, NOT, PLANNED, Capacity, in_words, verdict

COLOURS: Final = {FITS: charts.GREEN, PLANNED: charts.ORANGE, NOT: charts.GREY}


def write_capacity(path: str | Path, found: Capacity) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem: a package that reports need is not installed."""
    text = (
        f"Green: the untouched model fits, and reserves so much. Orange: it fits with a plan that adds so much time, "
        f"the paler the less. Grey: it does not fit, with no plan of at most +{found.price_percent:g} %."
    )
    note = Text(f"{' '.join(found.notes)}. Every figure on this page is predicted.", "note")
    blocks = (Text(found.words), Chart(heat_map(found), text), found.table, note)
    return write_page(
        path, Page(found.short, "", (Section("Answer", (*blocks, *warned(found.data["warnings"]))),))
    )


def heat_map(found: Capacity) -> dict[str, Any]:
    """A field for each device and batch size, by what is true of it."""
    alt, price = needed("altair"), found.price_percent
    rows = [
        (gpu, str(p.batch_size), verdict(p), (p.overhead_percent or 0) / (price or 1) if verdict(p) == PLANNED else 1,
         in_words(p) if verdict(p) != NOT else "", f"{verdict(p)}: {p.message or in_words(p)}")
        for gpu, of in found.found.items()
        for p in of.rows
        if p.batch_size in found.batch_sizes
    ]  # fmt: skip
    base = charts.drawn("device:N batch:N verdict:N share:Q words:N note:N", rows).encode(
        alt.X("batch:N").sort([str(n) for n in found.batch_sizes]).title("batch size").axis(labelAngle=0),
        alt.Y("device:N").sort(list(found.found)).title(None),
    )
    shade = alt.FillOpacity("share:Q").scale(domain=[0, 1], range=[0.3, 0.9]).legend(None)
    fields = base.mark_rect(stroke="white").encode(
        charts.colour("verdict", COLOURS), shade, tooltip=["device:N", "batch:N", "note:N"]
    )
    text = base.mark_text(color=charts.INK).encode(text="words:N")
    return charts.finish(alt.layer(fields, text), height=40 + 40 * len(found.found))

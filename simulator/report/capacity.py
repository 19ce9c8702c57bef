"""The heat map of a capacity study: a field for each device and batch size, by what is true of it."""

from __future__ import annotations

from typing import Final

from simulator.report import charts
from simulator.report.page import Chart, needed
from simulator.studies.capacity import FITS, NOT, PLANNED, in_words, verdict
from simulator.studies.max_batch import RANKS, MaxBatch
from simulator.studies.rows import Study

COLOURS: Final = {FITS: charts.GREEN, PLANNED: charts.ORANGE, NOT: charts.GREY}


def heat_map(found: Study[MaxBatch]) -> Chart:
    alt, price, sizes = needed("altair"), found.data["budget_overhead_percent"], found.data["batch_sizes"]
    names = {of.device: f"{of.device}, at most {of.with_plan}" for of in found.rows}
    probes = [(names[of.device], of.probe(n)) for of in found.rows for n in sizes]
    rows = [
        (gpu, str(p.batch_size), verdict(p), (p.overhead_percent or 0) / (price or 1) if verdict(p) == PLANNED else 1,
         f"{verdict(p)}: {p.message or in_words(p)}")
        for gpu, p in probes
    ]  # fmt: skip
    base = charts.drawn("device:N batch:N verdict:N share:Q note:N", rows).encode(
        alt.X("batch:N").sort([str(n) for n in sizes]).title("batch size").axis(labelAngle=0),
        alt.Y("device:N").sort([*names.values()]).title(None),
    )
    shade = alt.FillOpacity("share:Q").scale(domain=[0, 1], range=[0.3, 0.9]).legend(None)
    fields = base.mark_rect(stroke="white").encode(
        charts.colour("verdict", COLOURS), shade, tooltip=["device:N", "batch:N", "note:N"]
    )
    caption = (
        "Green: the untouched model fits. Orange: it fits with a plan, the paler the less that adds. Grey: it does "
        f"not fit, with no plan of at most +{price:g} %."
    )
    if max(of.data["ranks"] for of in found.rows) > 1:
        caption += f" {RANKS}"
    return Chart(charts.finish(fields, height=40 + 40 * len(found.rows)), caption)

"""The page of `simulate max-batch`: the two batch sizes, every probe, and what is uncertain."""

from __future__ import annotations

from pathlib import Path

from simulator.report import charts
from simulator.report.page import Chart, Figure, Figures, Page, Section, Text, warned, write_page
from simulator.studies.max_batch import MaxBatch
from traces.units import show_bytes, show_percent


def write_max_batch(path: str | Path, found: MaxBatch) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem if a package that reports need is missing."""
    return write_page(path, max_batch_page(found))


def max_batch_page(found: MaxBatch) -> Page:
    """The page of an answer."""
    r = found.request
    planned = found.probe(found.with_plan)
    price = None if planned is None else planned.overhead_percent
    figures = (
        Figure("Largest batch without a plan", str(found.without_plan), f"on {r.device.name}"),
        Figure(
            f"With a plan of at most +{r.overhead_percent:g} %",
            str(found.with_plan),
            "" if price is None else f"at {show_percent(price, signed=True)}",
        ),
        Figure("Memory to use", show_bytes(r.device.usable_bytes), r.device.describe()),
    )
    bars = [
        charts.Bar(str(p.batch_size), way, False, value)
        for p in found.probes
        for way, run in (("eager", p.untouched), ("plan", p.plan))
        if (value := found.peak_bytes(run)) is not None
    ]
    limits = {str(p.batch_size): r.device.usable_bytes for p in found.probes}
    return Page(
        f"{r.model}: the largest batch on {r.device.name}",
        " ".join(("trace", r.model, *r.tracer_options)),
        (
            Section(
                "Answer",
                (
                    Figures(figures),
                    Text(f"Every figure is predicted: {found.provenance}.", "note"),
                    *warned(found.warnings),
                ),
            ),
            Section(
                "Probes",
                (
                    Chart(
                        charts.grouped(
                            bars,
                            f"peak {found.memory}",
                            group_title="batch size",
                            is_bytes=True,
                            limits=limits,
                        ),
                        "eager is the untouched model. The red line is the memory that there is to use.",
                    ),
                    found.table(),
                ),
            ),
        ),
    )

"""Turn the answer of `simulate max-batch` into a page: the two batch sizes, every probe, and what is uncertain."""

from __future__ import annotations

from pathlib import Path

from simulator.report import bars
from simulator.report.page import (
    Cell,
    Chart,
    Figure,
    Figures,
    Page,
    Section,
    Table,
    Text,
    bytes_cell,
    count_cell,
    percent_cell,
    write_page,
)
from simulator.studies.max_batch import MaxBatch
from traces.units import show_bytes, show_percent


def write_max_batch(path: str | Path, found: MaxBatch) -> Path:
    """Write the page, whole or not at all; raises EnvironmentProblem if a package that reports need is missing."""
    return write_page(path, max_batch_page(found))


def max_batch_page(found: MaxBatch) -> Page:
    """The page of an answer."""
    r = found.request
    gpu = r.device.kind != "cpu"
    what, key = ("reserved", "peak_reserved_bytes") if gpu else ("allocated", "peak_allocated_bytes")
    planned = found.probe(found.with_plan)
    price = None if planned is None else planned.overhead_percent
    figures = (
        Figure(
            label="Largest batch without a plan", value=str(found.without_plan), detail=f"on {r.device.name}"
        ),
        Figure(
            label=f"With a plan of at most +{r.overhead_percent:g} %",
            value=str(found.with_plan),
            detail=f"at {show_percent(price, signed=True)}" if price is not None else "",
        ),
        Figure(label="Memory to use", value=show_bytes(r.device.usable_bytes), detail=r.device.describe()),
    )
    chart: list[bars.Bar] = []
    rows: list[tuple[Cell | str, ...]] = []
    for p in found.probes:
        runs = (("eager", p.untouched), ("plan", p.plan))
        for way, run in runs:
            value = None if run is None else run.headline()[key]
            if value is not None:
                chart.append(
                    bars.Bar(group=str(p.batch_size), way=way, measured=False, value=value, where="")
                )
        verdict = "" if p.plan_fits is None else "yes" if p.plan_fits else f"no: {p.message}"
        rows.append(
            (
                count_cell(p.batch_size),
                bytes_cell(p.untouched.headline()[key]),
                Cell(text="yes", tone="good") if p.fits else Cell(text="no", tone="bad"),
                bytes_cell(None if p.plan is None else p.plan.headline()[key]),
                percent_cell(p.overhead_percent, signed=True),
                Cell(text=verdict, tone="good" if p.plan_fits else "bad" if verdict else ""),
            )
        )
    limits = {str(p.batch_size): r.device.usable_bytes for p in found.probes}
    return Page(
        title=f"{r.model}: the largest batch on {r.device.name}",
        subtitle=" ".join(("trace", r.model, *r.tracer_options)),
        sections=(
            Section(
                title="Answer",
                blocks=(
                    Figures(figures=figures),
                    Text(text=f"Every figure is predicted: {found.provenance}.", tone="note"),
                    *(Text(text=text, tone="warning") for text in found.warnings),
                ),
            ),
            Section(
                title="Probes",
                blocks=(
                    Chart(
                        spec=bars.grouped(
                            chart,
                            title=f"peak {what}",
                            group_title="batch size",
                            is_bytes=True,
                            limits=limits,
                        ),
                        caption="eager is the untouched model. The red line is the memory that there is to use.",
                    ),
                    Table(
                        columns=(
                            "batch",
                            f"peak {what}",
                            "fits",
                            f"{what} with a plan",
                            "overhead",
                            "plan fits",
                        ),
                        rows=tuple(rows),
                        numbers=frozenset({0, 1, 3, 4}),
                        caption="Every batch size that was traced. Where no plan was made, the overhead is what any "
                        "plan must at least cost.",
                    ),
                ),
            ),
        ),
    )

"""What others measured on GPUs, beside what torch's own CUDA code takes without one, and what Lowtide predicts.

python -m tests.bench.published [ROW ...] [-o FILE.json] [--table FILE.md] [--report FILE.html] [--again] [--json]

The rows are tests/published/rows.toml, the steps its build functions, and the loops tests/published/loops.py. Needs a
CUDA build of torch; rows for another release than the one that is here stay as FILE has them, unless they are named.
Every row is added to FILE as soon as it is there, and rows that FILE has are made again only if they are named or with
`--again`, so that table and page need no torch. A row of torch's activation_memory_budget is rehearsed alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import click

from simulator import api
from simulator.core.problem import Problem
from simulator.prediction.loop_peaks import LoopPeaks, untouched_peaks
from tracer import trace
from tracer.rehearsal import run
from tracer.rehearsal.driver import find_cuda_torch
from tracer.rehearsal.record import Peaks, Rehearsal
from traces.errors import EnvironmentProblem, LowtideError
from traces.provenance import REHEARSED
from traces.records.measurement import RunFigures

FOLDER = Path("tests/published")
ROWS = FOLDER / "rows.toml"
LOOPS = FOLDER / "loops.py"
FIGURES = ("requested", "allocated", "reserved")
FIRST = "first"
BUDGET = "torch_budget"


def rows() -> dict[str, dict[str, Any]]:
    """The table, by name."""
    table: dict[str, dict[str, Any]] = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    return table


WAYS = ("rehearsed", "predicted")


def made(name: str, row: Mapping[str, Any], ways: Sequence[str] = WAYS) -> dict[str, Any]:
    """One row: measured by others, rehearsed, predicted, and by how much the two are off; empty: not asked for."""
    out = told(name, row)
    with environment(row.get("environment", {})):
        out["torch"] = find_cuda_torch().release
        out["rehearsed"] = compared(rehearsed(row) if "rehearsed" in ways else {}, row)
        found = predicted(row) if "predicted" in ways and BUDGET not in row else {}
        out["predicted"] = compared(found, row, sum(n for n, _ in row.get("held", ())))
    return out


def told(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the table says of a row."""
    out: dict[str, Any] = {"name": name, **{k: row[k] for k in ("source", "config", "figure", "gpu")}}
    return {**out, "measured": {f: row[f] for f in FIGURES if f in row}}


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables set while the body runs."""
    before = {k: os.environ.get(k) for k in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for k, old in before.items():
            os.environ.pop(k) if old is None else os.environ.update({k: old})


def rehearsed(row: Mapping[str, Any]) -> dict[str, int]:
    """The loop as it was measured, on the null driver."""
    arguments = (row.get("loop_build", row["build"]), row["loop"], *row.get("arguments", ()))
    iterations = row["iterations"]
    found = _rehearsal(row["gpu"], iterations, arguments)
    phases = found.iterations[iterations - 1].phases
    peaks = Peaks(requested_bytes=0, allocated_bytes=0, reserved_bytes=0)
    for phase, figures in phases.items():
        if phase in row.get("phases", phases):
            peaks = peaks | figures
    return {f: getattr(peaks, f"{f}_bytes") - row.get("resident", 0) for f in FIGURES}


@lru_cache(maxsize=2)  # neighbours in the table
def _rehearsal(gpu: str, iterations: int, arguments: tuple[str, ...]) -> Rehearsal:
    return run.rehearse(str(LOOPS), gpu, script=True, arguments=arguments, iterations=iterations)


@lru_cache(maxsize=2)
def step_of(build: str, gpu: str, options: tuple[tuple[str, Any], ...] = ()) -> Problem:
    """The step that a build function describes, with these options of its loop, traced for a GPU."""
    given: dict[str, Any] = dict(options)
    return Problem(trace(spec_of(build), target=gpu, profile=False, **given))


def spec_of(build: str) -> str:
    """Where a build function is."""
    from tests.published import models

    return f"{FOLDER / ('models.py' if hasattr(models, build) else 'variants.py')}:{build}"


def predicted(row: Mapping[str, Any]) -> dict[str, int]:
    """Of the untouched loop, its first or its steady iteration, or phases of that."""
    options = tuple(row.get("options", {}).items())
    loop = untouched_peaks(api.simulate(step_of(row["build"], row["gpu"], options)))
    if "phases" in row:
        return _highest(loop.phases[p] for p in row["phases"] if p in loop.phases)
    return _highest([_iteration(loop, row)])


def _iteration(loop: LoopPeaks, row: Mapping[str, Any]) -> RunFigures:
    return loop.first if row["iterations"] == 1 else loop.steady


def _highest(found: Any) -> dict[str, int]:
    keys = ("peak_allocated_bytes", "peak_block_bytes", "peak_reserved_bytes")
    of = list(found)
    return {f: max(getattr(x, key) for x in of) for f, key in zip(FIGURES, keys, strict=True)}


def compared(found: Mapping[str, int], row: Mapping[str, Any], held: int = 0) -> dict[str, Any]:
    """Bytes beside what was measured, with what is known to be missing added to requested and allocated memory.

    A figure that was rounded down is met anywhere within its rounding.
    """
    out: dict[str, Any] = {}
    for f in FIGURES:
        if f in found and f in row:
            bytes_ = found[f] + (held if f != "reserved" else 0)
            more = bytes_ - row[f]
            within = row.get("rounded_bytes", 0)
            more = 0 if 0 <= more < within else more - within + 1 if within and more > 0 else more
            out[f] = {"bytes": bytes_, "off_bytes": more, "off_percent": round(100 * more / row[f], 4)}
    return out


def markdown(of: list[dict[str, Any]]) -> str:
    """A line for each figure of each row."""
    lines = [
        "| step, as it was measured | figure | measured | rehearsed | predicted |",
        "|---|---|--:|--:|--:|",
    ]
    for r in of:
        for k, (f, n) in enumerate(r["measured"].items()):
            cells = ["" if k else f"{r['name']}: {r['config']}; {r['gpu']}", f, f"{n:,}"]
            cells += [_off(r[way].get(f)) for way in ("rehearsed", "predicted")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _off(figure: Mapping[str, Any] | None) -> str:
    if figure is None:
        return "-"
    return f"{figure['off_bytes']:+,} ({figure['off_percent']:+.3f} %)" if figure["off_bytes"] else "0"


def _written(of: list[dict[str, Any]]) -> str:
    """JSON with a line for each row."""
    lines = ",\n  ".join(map(json.dumps, of))
    return f'{{"rehearsed": {json.dumps(REHEARSED)}, "rows": [\n  {lines}\n ]}}\n'


def release(*, needed: bool) -> str:
    """Of the CUDA build of torch that is here; none, where the rows that are there suffice."""
    try:
        return find_cuda_torch().release
    except EnvironmentProblem:
        if needed:
            raise
        return "none"


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Rows that are there, and to which to add."
)
@click.option("--table", type=click.Path(path_type=Path), help="Write the rows as a Markdown table.")
@click.option("--report", type=click.Path(path_type=Path), help="Write the rows as a page (HTML).")
@click.option("--again", is_flag=True, help="Make rows again that are there.")
@click.option("--only", type=click.Choice(WAYS), help="Make this alone; the other stays as it is.")
@click.option("--json", "as_json", is_flag=True)
def main(
    names: tuple[str, ...],
    output: Path | None,
    table: Path | None,
    report: Path | None,
    again: bool,
    only: str | None,
    as_json: bool,
) -> None:
    """Set side by side what was measured, rehearsed and predicted, for all rows or for NAMES."""
    there: dict[str, dict[str, Any]] = {}
    if output and output.exists():
        there = {r["name"]: r for r in json.loads(output.read_text(encoding="utf-8"))["rows"]}
    table_rows = rows()
    here = release(needed=bool(names))
    for name, row in table_rows.items():
        wanted = name in names if names else here.startswith(row["torch"])
        if not wanted or (
            there.get(name, {}).get(only or WAYS[BUDGET not in row]) and not names and not again
        ):
            continue
        try:
            now = made(name, row, [only] if only else WAYS)
            there[name] = {
                **there.get(name, {}),
                **{k: v for k, v in now.items() if v or k not in there.get(name, {})},
            }
            click.echo(json.dumps(there[name]), err=True)
        except LowtideError as error:
            click.echo(f"{name}: {error}", err=True)
        if output:
            output.write_text(_written([there[n] for n in table_rows if n in there]), encoding="utf-8")
    found = [{**there[n], **told(n, row)} for n, row in table_rows.items() if n in there]
    if output:
        output.write_text(_written(found), encoding="utf-8")
    if table:
        table.write_text(page_of(found), encoding="utf-8")
    if report:
        from tests.bench import published_page

        published_page.write(report, found)
    click.echo(_written(found) if as_json else markdown(found))


HEAD = f"""# Measured by others, rehearsed, predicted

Bytes; by how much the rehearsal and the prediction are above what was measured. Rehearsed: {REHEARSED}.
Predictions include what the measured loop holds beside the step (`held` in rows.toml), but for reserved memory. Made by
`python -m tests.bench.published`; sources in rows.toml.

"""


def page_of(of: list[dict[str, Any]]) -> str:
    """All tables in Markdown."""
    return HEAD + markdown(of)


def readme(of: list[dict[str, Any]]) -> str:
    """The README's table: by source, how far the worst row is off, and how many figures are met to the byte."""
    lines = [
        "| measured by others | figures | rehearsed: 0 bytes off, worst | predicted: 0 bytes off, worst |",
        "|---|--:|--:|--:|",
    ]
    sources: dict[tuple[str, str], list[tuple[dict[str, Any], str]]] = {}
    for r in of:
        for f in r["measured"]:
            sources.setdefault((r["source"].split("@")[0].split(" ")[0], f), []).append((r, f))
    for (source, figure), found in sources.items():
        cells = [f"{source}, {figure}", str(len(found))]
        for way in ("rehearsed", "predicted"):
            off = [r[way][f] for r, f in found if f in r[way]]
            worst = max((f["off_percent"] for f in off), key=abs, default=None)
            met = sum(not f["off_bytes"] for f in off)
            cells.append("-" if worst is None else f"{met} of {len(off)}, {worst:+.2f} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

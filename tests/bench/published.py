"""What others measured on GPUs, beside what torch's own CUDA code takes without one.

python -m tests.bench.published [ROW ...] [-o FILE.json] [--table FILE.md] [--again] [--json]

The rows are tests/published/rows.toml, the steps its build functions, and the loops tests/published/loops.py. Needs a
CUDA build of torch; rows for another release than the one that is here stay as FILE has them, unless they are named;
torchtitan's do too where TITAN and TITAN25 name no checkouts of it (tests/published/titan.py). Every row is added to
FILE as soon as it is there, and rows that FILE has are made again only if they are named or with `--again`, so that
table and page need no torch.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import click

from tracer.rehearsal import run
from tracer.rehearsal.driver import find_cuda_torch
from tracer.rehearsal.jobs import GPUS, Job
from tracer.rehearsal.record import Peaks, Rehearsal
from traces.errors import EnvironmentProblem, LowtideError
from traces.provenance import REHEARSED

FOLDER = Path("tests/published")
ROWS = FOLDER / "rows.toml"
LOOPS = FOLDER / "loops.py"
FIGURES = ("requested", "allocated", "reserved")


def rows() -> dict[str, dict[str, Any]]:
    """The table, by name."""
    table: dict[str, dict[str, Any]] = tomllib.loads(ROWS.read_text(encoding="utf-8"))
    return table


def made(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """One row: measured by others, rehearsed, and by how much that is off."""
    with mock.patch.dict(os.environ, row.get("environment", {})):
        return {
            **told(name, row),
            "torch": find_cuda_torch().release,
            "rehearsed": compared(rehearsed(row), row),
        }


def told(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """What the table says of a row."""
    out: dict[str, Any] = {"name": name, **{k: row[k] for k in ("source", "config", "figure", "gpu")}}
    return {**out, "measured": {f: row[f] for f in FIGURES if f in row}}


def rehearsed(row: Mapping[str, Any]) -> dict[str, int]:
    """The loop as it was measured, on the null driver."""
    script = FOLDER / row.get("script", LOOPS.name)
    arguments = (*(row[word] for word in ("build", "loop") if word in row), *row.get("arguments", ()))
    iterations = row["iterations"]
    conf = row.get("alloc_conf", "")
    found = _rehearsal(script, row["gpu"], iterations, arguments, row.get("ranks", 0), conf)
    phases = found.iterations[iterations - 1].phases
    peaks = Peaks(requested_bytes=0, allocated_bytes=0, reserved_bytes=0)
    for phase, figures in phases.items():
        if phase in row.get("phases", phases):
            peaks = peaks | figures
    return {f: getattr(peaks, f"{f}_bytes") - row.get("resident", 0) for f in FIGURES}


@lru_cache(maxsize=2)  # neighbours in the table
def _rehearsal(
    script: Path, gpu: str, iterations: int, arguments: tuple[str, ...], ranks: int, conf: str
) -> Rehearsal:
    job = Job(ranks=ranks, nodes=max(1, ranks // GPUS)) if ranks else None
    return run.rehearse(
        str(script), gpu, script=True, arguments=arguments, iterations=iterations, job=job, alloc_conf=conf
    )


def compared(found: Mapping[str, int], row: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes beside what was measured.

    A figure that was rounded down is met anywhere within its rounding.
    """
    out: dict[str, Any] = {}
    for f in FIGURES:
        if f in found and f in row:
            more = found[f] - row[f]
            within = row.get("rounded_bytes", 0)
            more = 0 if 0 <= more < within else more - within + 1 if within and more > 0 else more
            out[f] = {"bytes": found[f], "off_bytes": more, "off_percent": round(100 * more / row[f], 4)}
    return out


def markdown(of: list[dict[str, Any]]) -> str:
    """A line for each figure of each row."""
    lines = ["| step, as it was measured | figure | measured | rehearsed |", "|---|---|--:|--:|"]
    for r in of:
        for k, (f, n) in enumerate(r["measured"].items()):
            cells = ["" if k else f"{r['name']}: {r['config']}; {r['gpu']}", f, f"{n:,}"]
            cells.append(_off(r["rehearsed"].get(f)))
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
@click.option("--again", is_flag=True, help="Make rows again that are there.")
@click.option("--json", "as_json", is_flag=True)
def main(names: tuple[str, ...], output: Path | None, table: Path | None, again: bool, as_json: bool) -> None:
    """Set side by side what was measured and rehearsed, for all rows or for NAMES."""
    there: dict[str, dict[str, Any]] = {}
    if output and output.exists():
        there = {r["name"]: r for r in json.loads(output.read_text(encoding="utf-8"))["rows"]}
    table_rows = rows()
    here = release(needed=bool(names))
    for name, row in table_rows.items():
        wanted = name in names if names else here.startswith(row["torch"])
        wanted = wanted and row.get("needs", "PATH") in os.environ
        if not wanted or (name in there and not names and not again):
            continue
        try:
            there[name] = made(name, row)
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
    click.echo(_written(found) if as_json else markdown(found))


HEAD = f"""# Measured by others, rehearsed

Bytes; by how much the rehearsal is above what was measured. Rehearsed: {REHEARSED}. Made by
`python -m tests.bench.published`; sources in rows.toml.

"""


def page_of(of: list[dict[str, Any]]) -> str:
    """All tables in Markdown."""
    return HEAD + markdown(of)


def readme(of: list[dict[str, Any]]) -> str:
    """The README's table: by source, how many figures are met to the byte, and how far the worst is off."""
    lines = ["| measured by others | requested | allocated | reserved |", "|---|--:|--:|--:|"]
    sources: dict[str, list[dict[str, Any]]] = {}
    for r in of:
        sources.setdefault(r["source"].split("@")[0].split(" ")[0], []).append(r)
    for source, found in sources.items():
        cells = [source]
        for figure in FIGURES:
            off = [r["rehearsed"][figure] for r in found if figure in r["measured"]]
            worst = max((f["off_percent"] for f in off), key=abs, default=0.0)
            cells.append(
                f"{sum(not f['off_bytes'] for f in off)} of {len(off)}, {worst:+.2f} %" if off else ""
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

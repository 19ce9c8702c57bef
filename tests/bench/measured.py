"""What steps take on a GPU, beside what the null driver tells without one.

python -m tests.bench.measured take -o gpu.jsonl                            on the GPU; each case is a process
python -m tests.bench.measured take -o rehearsed.jsonl --rehearse h200      without one, by the same release of torch
python -m tests.bench.measured table gpu.jsonl rehearsed.jsonl -o measured.md

The cases: the models of `tests.bench.rehearsed`, one after the other in float32 and under autocast; the loops of
tests/gpu/loops.py; and those in which others measured (tests/published/rows.toml). Both sides run the same code: the
ordinary loop or the script as it is, watched by torch's own hooks. Every case is added to FILE as soon as it is there;
those that FILE has are not made again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from tests.bench.published import FIGURES, LOOPS, rows
from tests.bench.rehearsed import MODELS
from tracer.rehearsal.jobs import Job
from tracer.rehearsal.run import is_script, rehearse
from traces.errors import LowtideError
from traces.isolated import run_fresh
from traces.provenance import MEASURED_CUDA, REHEARSED

OWN = Path("tests/gpu/loops.py")
ALONE = ("sharded", "replicated")  # loops that are one rank of a job of one
WAYS = (
    "plain", "fused", "checkpointed", "compiled", "graphs", "scaled", "recurrent", "accumulated", "trainer",
    "trainer_checkpointed", "lightning", "adapters", "gan", "sharded", "replicated", "resident", "planned",
)  # fmt: skip
ITERATIONS = 4
HEAD = f"""# Measured on a GPU, and rehearsed without one

Peaks in bytes of the first iteration and of the last, of untouched loops on an H200, and by how much the rehearsal is
above them. Measured: {MEASURED_CUDA}. Rehearsed: {REHEARSED}. Made by `python -m tests.bench.measured`.

"""


def cases() -> Iterator[dict[str, Any]]:
    """By name: what is run, with what, for how many iterations."""
    for way in WAYS:
        yield {
            "name": way, "model": str(OWN), "arguments": [way], "iterations": ITERATIONS, "ranks": int(way in ALONE)
        }  # fmt: skip
    for k, (name, given) in enumerate(MODELS.items()):
        options = {**given, **({"amp": "bfloat16"} if k % 2 else {})}
        yield {"name": name.rpartition(":")[2], "model": name, "options": options, "iterations": 3}
    for name, row in rows().items():
        if "script" not in row and "environment" not in row:
            asked = (row["build"], row["loop"], *row.get("arguments", ()))
            yield {
                "name": f"published {name}", "model": str(LOOPS), "arguments": asked, "iterations": row["iterations"]
            }  # fmt: skip


def measured(case: Mapping[str, Any]) -> dict[str, Any]:
    """What `tracer.rehearsal.run.rehearse` finds, on the GPU that is here."""
    job = Job(ranks=1).variables(0) if case.get("ranks") else {}
    port = {"MASTER_PORT": str(29500 + WAYS.index(case["name"]))} if job else {}
    given = {
        "model": case["model"], "script": is_script(case["model"]), "arguments": case.get("arguments", ()),
        "options": case.get("options", {}), "seed": 0, "apply": (), "around": (), "shard": (),
        "iterations": case["iterations"], "snapshot": "", "context_bytes": 0, "gpu": "h200", "memory_bytes": 0,
    }  # fmt: skip
    return run_fresh("tests.bench.measured:on_the_gpu", given, what="measured", overriding={**job, **port})


def on_the_gpu(**given: Any) -> dict[str, Any]:
    """A rehearsal's process without the null driver."""
    from tracer.rehearsal import perform, watch
    from tracer.torch_api import replaced

    seen: list[dict[str, Any]] = []

    class Nobody:
        """In the null driver's place, which hears of nothing."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_: b""

    class Measured(watch.Watch):
        def _masks_select_all(self) -> Any:
            return None

        def communicators(self) -> Any:
            seen.append(self.snapshot)
            return (), 0

    with (
        replaced(watch, null_driver=Nobody, untimed=lambda compiling: compiling),
        replaced(perform, Watch=Measured, null_driver=Nobody, initialisers_without_values=nullcontext),
    ):
        found = perform.do(**given)
    events = seen[0]["device_traces"][0]
    asked, got = (
        [(e["addr"], e["size"]) for e in events if e["action"] == a] for a in ("alloc", "segment_alloc")
    )
    return {**found, "provenance": MEASURED_CUDA, "allocations": asked, "segments": got}


def rehearsed(case: Mapping[str, Any], gpu: str) -> dict[str, Any]:
    """The same case on the null driver."""
    given = {k: case[k] for k in ("options", "iterations") if k in case}
    job = Job(ranks=1) if case.get("ranks") else None
    return rehearse(
        case["model"], gpu, arguments=tuple(case.get("arguments", ())), job=job, **given
    ).to_json()


def row_of(case: Mapping[str, Any], found: Mapping[str, Any], more: tuple[str, ...] = ()) -> dict[str, Any]:
    """What is kept: the peaks of every phase of every iteration, and `more`."""
    kept = ("provenance", "environment", "iterations", "out_of_memory", "at_the_peak", *more)
    return {"name": case["name"], **{k: found[k] for k in kept}}


def peaks(row: Mapping[str, Any], which: int) -> dict[str, int]:
    """The peaks of an iteration in bytes."""
    phases = row["iterations"][which].values() if row["iterations"] else ()
    return {f: max((p[f"{f}_bytes"] for i in phases for p in i.values()), default=0) for f in FIGURES}


def compared(gpu: list[dict[str, Any]], without: list[dict[str, Any]]) -> str:
    """A line for each case that both have: the first iteration and the last, measured, and how far off."""
    others = {r["name"]: r for r in without if "failed" not in r}
    gpu = [r for r in gpu if "failed" not in r]
    lines = [
        "| case | iteration | requested | allocated | reserved | off | off | off |",
        "|---|---|" + "--:|" * 6,
    ]
    off: dict[str, list[float]] = {f: [] for f in FIGURES}
    for row in gpu:
        if (other := others.get(row["name"])) is None:
            continue
        for which, name in ((0, "first"), (-1, "last")):
            here, there = peaks(row, which), peaks(other, which)
            cells = [row["name"] if which == 0 else "", name, *(f"{here[f]:,}" for f in FIGURES)]
            for f in FIGURES:
                more = there[f] - here[f]
                off[f].append(100 * more / here[f])
                cells.append(f"{more:+,} ({off[f][-1]:+.3f} %)" if more else "0")
            lines.append("| " + " | ".join(cells) + " |")
    head = ["| figure | rows | equal | median | within 1 % | lowest | highest |", "|---|" + "--:|" * 6]
    for f, found in off.items():
        if found:
            size = [abs(x) for x in found]
            cells = [f, len(found), sum(not x for x in size), f"{statistics.median(size):.4f} %"]
            cells += [sum(x <= 1 for x in size), f"{min(found):+.3f} %", f"{max(found):+.3f} %"]
            head.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*head, "", *lines]) + "\n"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@click.group()
def main() -> None:
    """Measure, rehearse, compare."""


def run(ask: Any, output: Path, processes: int, names: tuple[str, ...], more: tuple[str, ...] = ()) -> None:
    """Ask for all cases, some at once."""
    there = {r["name"] for r in read(output)}

    def make(case: dict[str, Any]) -> dict[str, Any]:
        try:
            return row_of(case, ask(case), more)
        except LowtideError as error:
            return {"name": case["name"], "failed": " ".join(str(error).split())[-600:]}

    wanted = [c for c in cases() if c["name"] not in there and (not names or c["name"] in names)]
    with ThreadPoolExecutor(processes) as pool, output.open("a") as file:
        for row in pool.map(make, wanted):
            file.write(json.dumps(row) + "\n")
            file.flush()
            click.echo(f"{row['name']} {row.get('failed', 'done')[:300]}", err=True)


@main.command()
@click.argument("names", nargs=-1)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option(
    "--rehearse", "gpu", default="", help="Take none, and rehearse on the null driver for this GPU."
)
@click.option("--processes", type=int, default=4)
@click.option("--allocations", is_flag=True, help="Keep every request on the GPU, and where segments lie.")
def take(names: tuple[str, ...], output: Path, gpu: str, processes: int, allocations: bool) -> None:
    """Measure on the GPU that is here, or rehearse without one."""
    ask = (lambda case: rehearsed(case, gpu)) if gpu else measured
    run(ask, output, processes, names, ("allocations", "segments") if allocations and not gpu else ())


@main.command()
@click.argument("measured_rows", type=click.Path(path_type=Path, exists=True))
@click.argument("rehearsed_rows", type=click.Path(path_type=Path, exists=True))
@click.option("-o", "--output", type=click.Path(path_type=Path))
def table(measured_rows: Path, rehearsed_rows: Path, output: Path | None) -> None:
    """Both side by side."""
    text = compared(read(measured_rows), read(rehearsed_rows))
    if output:
        output.write_text(HEAD + text)
    click.echo(text)


if __name__ == "__main__":
    main()

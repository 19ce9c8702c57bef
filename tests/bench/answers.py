"""A replay of every answer that the commands give, so that a change that shall change none can show that it does not.

    python -m tests.bench.answers check --quick   ask now; exit code 1 if the committed digests differ
    python -m tests.bench.answers write           ask now, and commit the digests of what is answered

For every day: `check --quick` (the gallery at one budget). Before a large change is done: `check`. `--only 'GLOB'` asks
only about rows whose names match.

Each row is a command: plans for every trace of the gallery at several budgets, a few of each other question, and three
runs of `trace`. Of each there are digests of the exit code, the message if it was refused, the whole JSON answer in its
own order, and every file that was written: JSON whole, Parquet by column. Nothing of the product is imported: only its
commands and files are used.

The clock decides nothing here. How much the default planner tries follows from `--seconds`, but two things look at the
processor's clock: its emergency brake, and `pareto`, which shares out the time that is left; both depend on the machine
and on what else runs there. So the commands run with a processor clock that stands still (a `sitecustomize`, on their
path only): then equal seeds make equal plans on any load. A planner that waits for the clock would never end; it is
stopped after LONGEST_SECONDS. ENOUGH keeps the rows short; the two main models have the default.

A difference reads `row | key: before -> after`, by digests and main figures; for the values themselves, run the row's
command, which is shown, here and in the earlier checkout. Rows whose trace is another than the recorded one (another
torch or Python) are named and not compared.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

ROOT: Final = Path(__file__).resolve().parents[2]
TRACES: Final = ROOT / "traces"
GOLDEN: Final = ROOT / "tests" / "data" / "answers.json"
# Keys that are left out of every answer and file, and why.
CLOCK: Final = {
    "solve_seconds": "how long the planner took, by the wall clock",
    "seconds": "how long `trace` took, by the wall clock",
}
# What makes a trace besides the product: printed by the interpreter that runs it.
VERSIONS: Final = """
import platform
from importlib.metadata import version
print("python", platform.python_version(), *(f"{p} {version(p)}" for p in ("torch", "torchvision", "transformers")))
"""
STOPPED_CLOCK: Final = "import time\ntime.thread_time = time.process_time = lambda: 0.0\n"
ENOUGH: Final = ("--seconds", "1")
RESNET, BERT, CPU = "gallery/resnet152", "gallery/bert-base", "gallery/resnet152-cpu/trace-b8"
MAIN_BUDGETS: Final = ("90%", "70%", "50%", "30%", "20%")
BUDGETS: Final = ("80%", "60%", "40%")
QUICK_BUDGET: Final = "60%"
PLANS: Final = (  # one or two of each kind of budget that is no share of what is allocated
    (RESNET, "60%", "--budget-of", "reserved"),
    (BERT, "80%", "--budget-of", "reserved"),
    (RESNET, "5GiB", "--alloc-conf", "expandable_segments:True", "--gpu", "a100-40"),
    (BERT, "device", "--device-memory", "9GiB"),
    (BERT, "1GiB", "--device-memory", "9GiB"),
    (RESNET, "50%", "--seed", "3"),
)
STUDIES: Final = (
    *(
        (f"compare {name} {b}", f"compare {name} --budget {b}")
        for name, b in ((RESNET, "60%"), (BERT, "70%"), (CPU, "60%"))
    ),
    *((f"pareto {name} 5", f"pareto {name} --points 5") for name in (RESNET, CPU)),
)
FAKE: Final = {  # questions that make their own traces, and the traces themselves
    "max-batch bert-tiny": "simulator max-batch bert-tiny --gpu h200 --device-memory 1536MiB --multiple-of 8 --max 48 "
    "--seq-len 64 --seconds 1 -o {out}/max --json -q",
    "sweep resnet18": "simulator sweep resnet18 --batch-sizes 64,128 --budget 80% --target h200 --image-size 64 "
    "--seconds 1 -o {out}/sweep --json -q",
    "trace resnet18": "tracer resnet18 --batch-size 4 --image-size 64 --target h200 -q --json -o {out}/trace",
    "trace gpt2-tiny": "tracer gpt2-tiny --batch-size 2 --seq-len 64 --target h200 --amp bfloat16 -q --json "
    "-o {out}/trace",
    "trace bert-tiny-cpu": "tracer bert-tiny --batch-size 2 --seq-len 32 --target cpu -q --json -o {out}/trace",
}
WRITTEN: Final = "written"  # key of the digests of whole texts
LONGEST_SECONDS: Final = 900  # of one command; more is a fault, not an answer
SHOWN: Final = 8  # differences of one row


class Row(NamedTuple):
    """One question: a command. `{out}` in a word: where it may write; `trace`: the one of TRACES that it is about."""

    name: str
    words: tuple[str, ...]
    trace: str = ""


# What is asked


def rows_of(*, quick: bool) -> list[Row]:
    """Every question about the gallery, and, unless `quick`, those that need no trace."""
    names = [p.parent.relative_to(TRACES).as_posix() for p in sorted(TRACES.glob("gallery/**/ops.parquet"))]
    rows = [_plan(name, QUICK_BUDGET, *ENOUGH) for name in names]
    if quick:
        return rows
    for name in names:
        main = name in (RESNET, BERT)
        more = [_plan(name, b, *(() if main else ENOUGH)) for b in (MAIN_BUDGETS if main else BUDGETS)]
        rows += [row for row in more if row not in rows]
    rows += [_plan(*words, *ENOUGH) for words in PLANS]
    for name, words in STUDIES:
        asked = ("simulator", *words.split(), *ENOUGH, "--json", "-q")
        rows.append(Row(name, asked, words.split()[1]))
    rows += [
        Row(f"{name} as it is", ("simulator", name, "--json", "-q"), name) for name in (RESNET, BERT, CPU)
    ]
    return rows + [Row(name, tuple(words.split())) for name, words in FAKE.items()]


def _plan(name: str, budget: str, *options: str) -> Row:
    extra = [word for word in options if word not in ENOUGH]
    words = ("simulator", name, "--budget", budget, *options, "-o", "{out}/plan.json", "--json", "-q")
    return Row(" ".join(["plan", name, budget, *extra]), words, name)


# Asking


class Asker:
    """Runs commands, one after the other, without the processor's clock."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        (scratch / "clock").mkdir()
        (scratch / "clock" / "sitecustomize.py").write_text(STOPPED_CLOCK)
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONSTARTUP"} | {
            "PYTHONPATH": f"{scratch / 'clock'}{os.pathsep}{ROOT}",
            "PYTHONSAFEPATH": "1",  # the traces' folder holds nothing to import
            "XDG_CACHE_HOME": str(scratch / "cache"),
        }
        self.versions = self._run(["-c", VERSIONS], scratch).stdout.strip()

    def answer(self, row: Row) -> dict[str, Any]:
        """What the row's command answered and wrote."""
        out = Path(tempfile.mkdtemp(dir=self.scratch))
        words = [word.replace("{out}", str(out)) for word in row.words]
        done = self._run(["-m", *words], TRACES if row.trace else out)
        if done.returncode not in (0, 1, 2):
            raise click.ClickException(f"{row.name}: exit code {done.returncode}\n{done.stderr}")
        stdout = done.stdout.replace(str(out), "OUT")
        files = {p.relative_to(out).as_posix(): p for p in sorted(out.rglob("*")) if p.is_file()}
        found = {
            # What the answer is about and does not decide: the trace, or the versions that make one.
            "trace": trace_digest(TRACES / row.trace) if row.trace else self.versions,
            "exit": done.returncode,
            "message": done.stderr.replace(str(out), "OUT").strip() if done.returncode else "",
            "answer": timeless(_json_or_text(stdout)),
            "files": {name: content(path, out) for name, path in files.items()},
            WRITTEN: {"": text_digest(stdout)}
            | {n: text_digest(_text(p, out)) for n, p in files.items() if p.suffix == ".json"},
        }
        shutil.rmtree(out)
        return found

    def _run(self, words: Sequence[str], where: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words],
            cwd=where,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_SECONDS,
        )


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def timeless(value: Any) -> Any:
    """The same without what only the clock decides, in the same order."""
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in CLOCK}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def text_digest(text: str) -> str:
    """A digest of JSON as it is written, to the byte, but for what only the clock decides."""
    return digest(re.sub(rf'("(?:{"|".join(CLOCK)})": *)[-+.\w]+', r"\1", text))


def _text(path: Path, out: Path) -> str:
    return path.read_text().replace(str(out), "OUT")


def content(path: Path, out: Path) -> Any:
    """What a file says: JSON whole, Parquet by column, anything else as a digest."""
    if path.suffix == ".json":
        return timeless(_json_or_text(_text(path, out)))
    return columns(path) if path.suffix == ".parquet" else digest(path.read_bytes())


def columns(path: Path) -> dict[str, Any]:
    """Column -> its type and a digest of its values, whatever way the file encodes them; and the file's metadata."""
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(path).read()
    found = {
        name: f"{table.schema.field(name).type} {digest(json.dumps(table.column(name).to_pylist(), default=str))}"
        for name in table.column_names
    }
    metadata = {k.decode(): _json_or_text(v.decode()) for k, v in (table.schema.metadata or {}).items()}
    return found | {f"metadata {k}": v for k, v in metadata.items() if k != "ARROW:schema"}


def trace_digest(directory: Path) -> str:
    """One digest of a trace: which trace the answers are about."""
    return digest(json.dumps([columns(path) for path in sorted(directory.glob("*.parquet"))]))


def digest(data: bytes | str) -> str:
    """Sixteen hexadecimal digits."""
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()[:16]


def shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as the committed digests hold it: a digest of each part, and the main figures."""
    answer = row["answer"] if isinstance(row["answer"], dict) else {"text": row["answer"]}
    plan, bound = answer.get("plan") or {}, answer.get("bound") or {}
    figures = {
        "peak_bytes": plan.get("peak_allocated_bytes"),
        "step_ns": plan.get("step_time_ns"),
        "bound_added_ns": bound.get("added_time_ns"),
        "gap_points": answer.get("gap_points"),
    }
    return {
        "trace": row["trace"],
        "exit": row["exit"],
        "message": digest(row["message"])[:8] if row["message"] else "",
        **{k: v for k, v in figures.items() if v is not None},
        WRITTEN: digest(json.dumps(row[WRITTEN]))[:8],
        "answer": {k: digest(json.dumps(v))[:8] for k, v in answer.items()},
        "files": {k: digest(json.dumps(v))[:8] for k, v in row["files"].items()},
    }


def golden_rows() -> dict[str, dict[str, Any]]:
    """Row -> its committed digests."""
    return {row.pop("row"): row for row in json.loads(GOLDEN.read_text())["rows"]}


# Comparing


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Key path -> digest or figure."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        inner = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        found |= inner
    return found


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(key path, `before -> after`) of all that differs, also if only the order of keys or the bytes between do."""
    old, new = flat(before), flat(after)
    found = [
        (path, f"{old.get(path, '(none)')} -> {new.get(path, '(none)')}")
        for path in dict.fromkeys((*old, *new))
        if path != WRITTEN and old.get(path) != new.get(path)
    ]
    if not found and before != after:
        found.append(("(text)", "the same keys and values, written in another way"))
    return found


def show_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Print what differs of the rows that were asked, and a summary; whether anything does."""
    by_key: Counter[str] = Counter()
    changed = fresh = other_trace = 0
    for name in after:
        if name not in before:
            fresh += 1
            click.echo(f"{name} | only after")
        elif before[name]["trace"] != after[name]["trace"]:
            other_trace += 1
            click.echo(f"{name} | another trace than the recorded one: not compared")
        elif found := differences(before[name], after[name]):
            changed += 1
            by_key.update(path for path, _ in found)
            for path, change in found[:SHOWN]:
                click.echo(f"{name} | {path}: {change}")
            if len(found) > SHOWN:
                click.echo(f"{name} | and {len(found) - SHOWN} more")
    if by_key:
        click.echo("Rows by key: " + ", ".join(f"{key} {n}" for key, n in by_key.most_common(20)))
    compared = len(after) - fresh - other_trace
    click.echo(
        f"{compared} rows compared: {changed} differ; {fresh} only after, {other_trace} about another trace."
    )
    return bool(changed or fresh or other_trace or not compared)


# Commands


def ask(quick: bool, only: str) -> dict[str, dict[str, Any]]:
    """Row -> its digests as of now, of every chosen row."""
    rows = [row for row in rows_of(quick=quick) if fnmatch.fnmatchcase(row.name, only)]
    found = {}
    with tempfile.TemporaryDirectory(prefix="answers-") as scratch:
        asker = Asker(Path(scratch).resolve())
        for k, row in enumerate(rows):
            start = time.perf_counter()
            found[row.name] = shortened(asker.answer(row))
            seconds = time.perf_counter() - start
            click.echo(f"[{k + 1}/{len(rows)}] {row.name}: {seconds:.1f} s: {' '.join(row.words)}", err=True)
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("what", type=click.Choice(["check", "write"]))
@click.option("--quick", is_flag=True, help="The gallery at one budget.")
@click.option("--only", default="*", help="Rows whose names match this glob.")
def main(what: str, quick: bool, only: str) -> None:
    """Ask, and print what differs from the committed digests, or write those; see the module's docstring."""
    after = ask(quick, only)
    if what == "check":
        sys.exit(show_differences(golden_rows(), after))
    part = quick or only != "*"  # then what was not asked stays
    rows = (golden_rows() if part else {}) | after
    lines = [json.dumps({"row": name, **rows[name]}, separators=(",", ":")) for name in sorted(rows)]
    GOLDEN.write_text('{"record": "answers", "rows": [\n' + ",\n".join(lines) + "\n]}\n")
    click.echo(f"{GOLDEN}: {len(rows)} rows, {GOLDEN.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

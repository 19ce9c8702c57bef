"""A replay of every answer that the commands give, so that a change that shall change none can show that it does not.

    python -m tests.bench.answers record DIR                    every answer of this checkout, one file each
    python -m tests.bench.answers check --quick                 ask now; exit code 1 if the committed digests differ
    python -m tests.bench.answers check --quick --against DIR   ask now, and compare with what was recorded
    python -m tests.bench.answers golden DIR                    write the committed digests from a recording

For every day: `check --quick` (the gallery at one budget). Before a large change is done: `check --against DIR`
(everything). `--only 'GLOB'` asks only about rows whose names match; `--root PATH` asks another checkout.

Each row is a command: plans for every trace of the gallery at several budgets, a few of each other question, and three
runs of `trace`. Recorded are the exit code, the message if it was refused, the whole JSON answer in its own order, and
every file that was written: JSON whole, Parquet as a digest of each column. Nothing of the product is imported: only
its commands and files are used, so that a recording can be compared with code that is arranged quite differently.

The clock decides nothing here. How much the default planner tries follows from `--seconds`, but two things look at the
processor's clock: its emergency brake, and `pareto`, which shares out the time that is left; both depend on the machine
and on what else runs there. So the commands run with a processor clock that stands still (a `sitecustomize`, on their
path only): then equal seeds make equal plans on any load. A planner that waits for the clock would never end; it is
stopped after LONGEST_SECONDS. ENOUGH keeps the rows short; the two main models have the default.

A difference reads `row | key path: before -> after`. The committed digests say which part of an answer differs and show
its main figures; for the values themselves, record the earlier checkout (`git worktree add`, `record --root`) and check
against that. Rows whose trace is another than the recorded one (another torch or Python) are named and not compared.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

ROOT: Final = Path(__file__).resolve().parents[2]
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
MAIN: Final = ("gallery/resnet152", "gallery/bert-base")
MAIN_BUDGETS: Final = ("90%", "70%", "50%", "30%", "20%")
BUDGETS: Final = ("80%", "60%", "40%")
QUICK_BUDGET: Final = "60%"
FAKE: Final = ("-q",)
TRACED: Final = {
    "resnet18": "resnet18 --batch-size 4 --image-size 64 --target h200",
    "gpt2-tiny": "gpt2-tiny --batch-size 2 --seq-len 64 --target h200 --amp bfloat16",
    "bert-tiny-cpu": "bert-tiny --batch-size 2 --seq-len 32 --target cpu",
}
SWEEP: Final = (
    "simulator sweep resnet18 --batch-sizes 64,128 --budget 80% --target h200 --image-size 64 "
    "--seconds 1 -o {out}/sweep --json -q"
)
MAX_BATCH: Final = (
    "simulator max-batch bert-tiny --gpu h200 --device-memory 1536MiB --multiple-of 8 --max 48 --seq-len 64 "
    "--seconds 1 -o {out}/max --json -q"
)
ABOUT: Final = ("planner", "storage")  # keys that tell the entries of a list apart
WRITTEN: Final = "written"  # key of the digests of whole texts
LONGEST_SECONDS: Final = 900  # of one command; more is a fault, not an answer
SHOWN: Final = 8  # differences of one row


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One question: a command.

    `{out}` in a word: where it may write. `directory`: where it runs (None: there); `trace`: the one that it is about.
    """

    name: str
    words: tuple[str, ...]
    directory: Path | None = None
    trace: str = ""


# What is asked


def rows_of(folder: Path, *, quick: bool) -> list[Row]:
    """Every question about the traces in `folder`, and, unless `quick`, those that need none."""
    names = [p.parent.relative_to(folder).as_posix() for p in sorted(folder.glob("gallery/**/ops.parquet"))]
    daily = [_plan(folder, name, QUICK_BUDGET, *ENOUGH) for name in names]
    if quick:
        return daily
    rows = [
        _plan(folder, name, budget, *(() if name in MAIN else ENOUGH))
        for name in names
        for budget in (MAIN_BUDGETS if name in MAIN else BUDGETS)
    ]
    rows = daily + [row for row in rows if row not in daily]
    return rows + _about_some(folder, set(names)) + _without_trace()


def _plan(folder: Path, name: str, budget: str, *options: str) -> Row:
    extra = [word for word in options if word not in ENOUGH]
    return Row(
        name=" ".join(["plan", name, budget, *extra]),
        words=("simulator", name, "--budget", budget, *options, "-o", "{out}/plan.json", "--json", "-q"),
        directory=folder,
        trace=name,
    )


def _about_some(folder: Path, there: set[str]) -> list[Row]:
    """One or two of each kind of question besides plain budgets."""
    resnet, bert, cpu = "gallery/resnet152", "gallery/bert-base", "gallery/resnet152-cpu/trace-b8"
    reserved = ("--budget-of", "reserved", *ENOUGH)
    rows = [
        _plan(folder, resnet, "60%", *reserved),
        _plan(folder, bert, "80%", *reserved),
        _plan(
            folder, resnet, "5GiB", "--alloc-conf", "expandable_segments:True", "--gpu", "a100-40", *ENOUGH
        ),
        _plan(folder, bert, "device", "--device-memory", "9GiB", *ENOUGH),
        _plan(folder, bert, "1GiB", "--device-memory", "9GiB", *ENOUGH),
        _plan(folder, resnet, "50%", "--seed", "3", *ENOUGH),
    ]
    studies = {
        resnet: ("compare 60%", "pareto 5", "as it is"),
        bert: ("compare 70%", "as it is"),
        cpu: ("compare 60%", "pareto 5", "as it is"),
    }
    words = {"compare": ("compare", "{}", "--budget"), "pareto": ("pareto", "{}", "--points"), "as": ("{}",)}
    for name, asked in studies.items():
        for study in asked:
            kind, rest = study.split(" ", 1)
            start = tuple(w.format(name) for w in words[kind])
            end = () if kind == "as" else (rest, *ENOUGH)
            row_name = f"{name} as it is" if kind == "as" else f"{kind} {name} {rest}"
            rows.append(
                Row(
                    name=row_name,
                    words=("simulator", *start, *end, "--json", "-q"),
                    directory=folder,
                    trace=name,
                )
            )
    return [row for row in rows if row.trace in there]


def _without_trace() -> list[Row]:
    """Questions that make their own traces, and the traces themselves."""
    rows = [
        Row(name="max-batch bert-tiny", words=tuple(MAX_BATCH.split())),
        Row(name="sweep resnet18", words=tuple(SWEEP.split())),
    ]
    return rows + [
        Row(name=f"trace {name}", words=("tracer", *words.split(), *FAKE, "--json", "-o", "{out}/trace"))
        for name, words in TRACED.items()
    ]


# Asking


class Asker:
    """Runs the commands of one checkout, one after the other, without the processor's clock."""

    def __init__(self, root: Path, python: str, scratch: Path) -> None:
        self.python, self.scratch = python, scratch
        (scratch / "clock").mkdir()
        (scratch / "clock" / "sitecustomize.py").write_text(STOPPED_CLOCK)
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONSTARTUP"} | {
            "PYTHONPATH": f"{scratch / 'clock'}{os.pathsep}{root}",
            "PYTHONSAFEPATH": "1",  # the traces' folder holds nothing to import
            "XDG_CACHE_HOME": str(scratch / "cache"),
        }
        done = self._run(["-c", "import simulator; print(simulator.__file__)"], scratch)
        self.versions = self._run(["-c", VERSIONS], scratch).stdout.strip()
        if not done.stdout.startswith(f"{root}{os.sep}"):
            raise click.ClickException(f"{python} runs {done.stdout.strip() or done.stderr}, not {root}.")

    def answer(self, row: Row) -> dict[str, Any]:
        """What the row's command answered and wrote."""
        out = Path(tempfile.mkdtemp(dir=self.scratch))
        words = [word.replace("{out}", str(out)) for word in row.words]
        done = self._run(["-m", *words], row.directory or out)
        if done.returncode not in (0, 1, 2):
            raise click.ClickException(f"{row.name}: exit code {done.returncode}\n{done.stderr}")
        stdout = done.stdout.replace(str(out), "OUT")
        files = {p.relative_to(out).as_posix(): p for p in sorted(out.rglob("*")) if p.is_file()}
        found = {
            "trace": self._about(row),
            "exit": done.returncode,
            "message": done.stderr.replace(str(out), "OUT").strip() if done.returncode else "",
            "answer": timeless(_json_or_text(stdout)),
            "files": {name: content(path, out) for name, path in files.items()},
            WRITTEN: {"": text_digest(stdout)}
            | {n: text_digest(_text(p, out)) for n, p in files.items() if p.suffix == ".json"},
        }
        shutil.rmtree(out)
        return found

    def _about(self, row: Row) -> str:
        """What the answer is about and does not decide: the trace, or the versions that make one."""
        if row.directory is None:
            return self.versions
        return trace_digest(row.directory / row.trace) if row.trace else ""

    def _run(self, words: Sequence[str], where: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *words],
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
    metadata = {
        k.decode(): _json_or_text(v.decode())
        for k, v in (table.schema.metadata or {}).items()
        if k != b"ARROW:schema"
    }
    return found | {f"metadata {k}": v for k, v in metadata.items()}


def trace_digest(directory: Path) -> str:
    """One digest of a trace: which trace the answers are about."""
    return digest(json.dumps([columns(path) for path in sorted(directory.glob("*.parquet"))]))


def digest(data: bytes | str) -> str:
    """Sixteen hexadecimal digits."""
    return hashlib.sha256(data if isinstance(data, bytes) else data.encode()).hexdigest()[:16]


# Recordings


def file_of(name: str) -> str:
    """A row's file: its name in letters that every file system takes, and a digest, since those may be the same."""
    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return f"{plain[:100]}-{digest(name)[:6]}.json"


def recorded(directory: Path) -> dict[str, dict[str, Any]]:
    """Row -> what was recorded for it."""
    if not directory.is_dir():
        raise click.ClickException(f"{directory} holds no recording.")
    found = {}
    for path in sorted(directory.glob("*.json")):
        row = json.loads(path.read_text())
        name = row.pop("row")
        del row["command"]  # the question, which an option's new name changes
        found[name] = row
    return found


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


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Key paths with their values; an empty dict or list is a value.

    What a list holds is named by its place, or by what it is about, so that one entry more does not move all others.
    """
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for name, inner in zip(_names(value), value, strict=True):
            yield from flat(inner, f"{path}[{name}]")
    else:
        yield path, value


def _names(items: list[Any]) -> list[Any]:
    for key in ABOUT:
        names = [item.get(key) if isinstance(item, dict) else None for item in items]
        if None not in names and len(set(names)) == len(names):
            return names
    return list(range(len(items)))


def differences(before: Any, after: Any) -> list[tuple[str, str]]:
    """(key path, `before -> after`) of all that differs, also if only the order of keys or the bytes between do."""
    old, new = ({k: v for k, v in flat(row) if not k.startswith(WRITTEN)} for row in (before, after))
    absent = object()
    found = []
    for path in [*old, *(p for p in new if p not in old)]:
        a, b = old.get(path, absent), new.get(path, absent)
        if (type(a), a) != (type(b), b):
            found.append((path, " -> ".join("(none)" if v is absent else _short(v) for v in (a, b))))
    if not found and json.dumps(before) != json.dumps(after):
        found.append(("(text)", "the same keys and values, written in another way"))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:100]} ... {text[-50:]}"


def show_differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Print what differs of the rows that were asked, and a summary; whether anything does."""
    both = [name for name in after if name in before]
    by_key: Counter[str] = Counter()
    changed, other_trace = 0, 0
    for name in both:
        if before[name]["trace"] != after[name]["trace"]:
            other_trace += 1
            click.echo(f"{name} | another trace than the recorded one: not compared")
            continue
        found = differences(before[name], after[name])
        changed += bool(found)
        by_key.update({_general(path) for path, _ in found})
        for path, change in found[:SHOWN]:
            click.echo(f"{name} | {path}: {change}")
        if len(found) > SHOWN:
            click.echo(f"{name} | and {len(found) - SHOWN} more")
    fresh = [name for name in after if name not in before]
    for name in fresh:
        click.echo(f"{name} | only after")
    if by_key:
        click.echo("Rows by key: " + ", ".join(f"{key} {n}" for key, n in by_key.most_common(20)))
    click.echo(
        f"{len(both) - other_trace} rows compared: {changed} differ; {len(fresh)} only after, "
        f"{other_trace} about another trace."
    )
    return bool(changed or fresh or other_trace or not both)


def _general(path: str) -> str:
    """A key path without its indices and deeper parts: what the summary counts by."""
    return ".".join(path.split("[")[0].split(".")[:3])


# Commands


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Record every answer of the commands and compare two recordings; see the module's docstring."""


def _asking(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option(
            "--root", type=click.Path(path_type=Path, exists=True), default=ROOT, help="The checkout."
        ),
        click.option("--python", default=sys.executable, help="The interpreter that runs it."),
        click.option("--quick", is_flag=True, help="The gallery at one budget."),
        click.option("--only", default="*", help="Rows whose names match this glob."),
    ):
        command = option(command)
    return command


def _ask(
    root: Path, python: str, quick: bool, only: str, take: Callable[[Row, dict[str, Any]], None]
) -> None:
    """Ask every chosen row and hand on its answer, in order."""
    rows = [row for row in rows_of(ROOT / "traces", quick=quick) if fnmatch.fnmatchcase(row.name, only)]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="answers-") as scratch:
        asker = Asker(root.resolve(), python, Path(scratch).resolve())
        for k, row in enumerate(rows):
            start = time.perf_counter()
            take(row, asker.answer(row))
            click.echo(f"[{k + 1}/{len(rows)}] {row.name}: {time.perf_counter() - start:.1f} s", err=True)
    click.echo(f"{len(rows)} rows asked in {time.perf_counter() - begin:.0f} s", err=True)


@main.command("record")
@click.argument("directory", type=click.Path(path_type=Path))
@_asking
def record_command(directory: Path, root: Path, python: str, quick: bool, only: str) -> None:
    """Ask, and write a file a row to DIRECTORY; rows of the same name that are there are replaced."""
    directory.mkdir(parents=True, exist_ok=True)

    def write(row: Row, answer: dict[str, Any]) -> None:
        whole = {"row": row.name, "command": row.words, **answer}
        (directory / file_of(row.name)).write_text(json.dumps(whole, indent=1) + "\n")

    _ask(root, python, quick, only, write)


@main.command("check")
@click.option(
    "--against", type=click.Path(path_type=Path), help="A recording (default: the committed digests)."
)
@_asking
def check_command(against: Path | None, root: Path, python: str, quick: bool, only: str) -> None:
    """Ask now, and print what differs from what was recorded."""
    before = golden_rows() if against is None else recorded(against)
    after: dict[str, Any] = {}

    def take(row: Row, answer: dict[str, Any]) -> None:
        after[row.name] = shortened(answer) if against is None else answer

    _ask(root, python, quick, only, take)
    if show_differences(before, after):
        sys.exit(1)


@main.command("golden")
@click.argument("directory", type=click.Path(path_type=Path))
def golden_command(directory: Path) -> None:
    """Write the committed digests from the recording in DIRECTORY."""
    rows = recorded(directory)
    lines = [
        json.dumps({"row": name, **shortened(rows[name])}, separators=(",", ":")) for name in sorted(rows)
    ]
    GOLDEN.write_text('{"record": "answers", "rows": [\n' + ",\n".join(lines) + "\n]}\n")
    click.echo(f"{GOLDEN}: {len(rows)} rows, {GOLDEN.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

"""Run `trace` and `execute rehearse`, the other commands that simulate starts, use an answer again while it is what
would be made, and work out what a trace would say from two others.

An answer is used again while the command, the user's file and the versions are those that made it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from traces.errors import EnvironmentProblem, LowtideError, TraceError
from traces.files import canonical_json, write_text
from traces.isolated import run_fresh
from traces.model_spec import short_name, source_digest
from traces.processes import ending_with_this
from traces.progress import Say, counted
from traces.records.store import load
from traces.records.trace import Trace, Untouched, as_named, settle

PACKAGES: Final = ("torch", "torchvision", "transformers")  # whose code is in the graph
AT_ONCE: Final = 2  # processes
# How a rank is rehearsed whose step is recorded, unless words say otherwise.
RECORDED: Final = ("--iterations", "3", "--alloc-conf", "expandable_segments:True")
WAIT_S: Final = 10  # for Dask's scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A model that is traced at several batch sizes."""

    model: str
    directory: Path  # of traces and plans, which are used again
    words: tuple[str, ...] = ()  # further ones for `trace`, such as --seq-len 512
    dask: str = ""  # address of the scheduler whose workers, on the same files, run `trace`; "": it runs here
    key: str = field(default_factory=lambda: uuid4().hex)  # of processes that trace one size after another

    @classmethod
    def of(
        cls, model: str, directory: str | Path | None, study: str, words: Sequence[str], dask: str
    ) -> Traced:
        """A model in a directory; None: `MODEL-study`."""
        place = Path(directory or f"{short_name(model)}-{study}")
        return cls(model=model, directory=place.absolute() if dask else place, words=tuple(words), dask=dask)

    def path(self, batch_size: int) -> Path:
        """Where a trace lies: other words, another file of the user's or other versions have another place."""
        versions = {}
        for name in PACKAGES:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        made_by = canonical_json([self.model, self.words, source_digest(self.model), versions])
        return self.directory / f"traces-{sha256(made_by.encode()).hexdigest()[:8]}" / f"b{batch_size}"

    @property
    def at_once(self) -> int:
        """How many sizes are traced at once: where they are measured, one."""
        measured = any(word.partition("=")[0] == "--device" for word in self.words)
        return 1 if measured else AT_ONCE * (2 if self.dask else 1)

    def each(self, batch_sizes: Sequence[int], say: Say) -> list[Trace]:
        """The traces at some batch sizes, used again or made: two at once, by processes that go on to other sizes, or
        one by one where they are measured. Raises LowtideError: `trace` failed; with what it wrote."""
        found: dict[int, Trace] = {}
        for n in batch_sizes:
            with suppress(TraceError):
                found[n] = load(self.path(n))
                say(f"batch {n}: using {self.path(n)}")
        words = ["tracer", self.model, *self.words, "--force", "--batch-size"]
        places = {n: str(self.path(n)) for n in batch_sizes if n not in found}
        kept = self.key if self.at_once > 1 else ""
        jobs = [([*words, str(n), "-o", at], f"batch {n}", "", kept) for n, at in places.items()]
        self._run(jobs, "traced", self.at_once, say)
        return [found[n] if n in found else load(self.path(n)) for n in batch_sizes]

    def rehearsed(self, batch_sizes: Sequence[int], say: Say, recorded: bool = False) -> list[dict[str, Any]]:
        """What `execute rehearse --json` says at some batch sizes, used again or asked; `recorded`: of steps that are
        recorded too. Raises as `each`."""
        places = {n: self.path(n).with_suffix(".saved.json" if recorded else ".json") for n in batch_sizes}
        words = ["executor", "rehearse", self.model, *RECORDED * recorded, *self.words, "--json"]
        at = {n: ["--batch-size", str(n), *["--trace", str(self.path(n))] * recorded] for n in places}
        jobs = [([*words, *at[n]], f"batch {n}", str(to)) for n, to in places.items() if not to.exists()]
        self._run(jobs, "rehearsed", AT_ONCE, say)
        return [json.loads(place.read_text("utf-8")) for place in places.values()]

    def _run(self, jobs: Sequence[tuple[Any, ...]], done: str, at_once: int, say: Say) -> None:
        """Have `run_command` do each of some jobs, so many at a time."""
        if jobs:
            say(f"{', '.join(what for _, what, *_ in jobs)}: to be {done}")
            with workers(self.dask, at_once) as pool:
                answers = pool.map(run_command, *zip(*jobs, strict=True))
                list(counted(answers, lambda _: done, say, len(jobs)) if len(jobs) > 1 else answers)


@contextmanager
def workers(dask: str, at_once: int) -> Iterator[Executor]:
    """What runs commands or a campaign's cases: threads that wait for processes of this machine, or the workers of the
    Dask cluster whose scheduler has that address."""
    if not dask:
        with ThreadPoolExecutor(at_once) as pool:
            yield pool
        return
    try:
        distributed: Any = import_module("distributed")
    except ImportError:
        raise EnvironmentProblem("--dask needs Dask: `pip install 'lowtide[dask]'`.") from None
    try:
        client = distributed.Client(dask, timeout=WAIT_S)
    except (OSError, ValueError) as error:
        raise EnvironmentProblem(f"--dask {dask}: no scheduler answers there ({error}).") from None
    with client, client.get_executor(pure=False) as pool:
        yield pool


def of_one_structure(a: Trace, b: Trace) -> bool:
    """Return whether two steps are of the same ops on the same storages, whatever the sizes; a slice that takes all is
    an alias."""
    same = ("phase", "inputs", "reads", "writes", "flags")
    return (
        as_named(a.ops.target, b.ops.target) == b.ops.target
        and all(getattr(a.ops, k) == getattr(b.ops, k) for k in same)
        and a.storages.producer == b.storages.producer
    )


def between(low: tuple[int, Trace], high: tuple[int, Trace], size: int) -> Trace:
    """What the trace of a step at another size comes to, on the straight line through those at two.

    Counts: bytes and times, wherever the two have both. Ignores: what is no straight line: times that are a launch's
    at the one and the data's at the other, kernels that are chosen by size.
    """
    (begin, a), (end, b) = low, high

    def on_the_line(x: Any, y: Any) -> Any:
        if x == y:
            return y
        if isinstance(y, int):
            # Of bytes that are given back as of those that are asked for.
            n = max(0, abs(x) + (abs(y) - abs(x)) * (size - begin) // (end - begin))
            return n if (y or x) > 0 else -n
        if isinstance(y, tuple) and len(x) == len(y):
            return tuple(map(on_the_line, x, y))
        if is_dataclass(y) and not isinstance(y, type):
            return replace(
                y, **{f.name: on_the_line(getattr(x, f.name), getattr(y, f.name)) for f in fields(y)}
            )
        return y

    asked = [(u.block, u.once, u.phase) for u in (a.untouched, b.untouched)]
    if asked[0] != asked[1]:
        a, b = (replace(t, untouched=Untouched()) for t in (a, b))
    made: Trace = on_the_line(a, b)
    created = [0] * (len(made.ops) + 1)  # the last: of inputs
    for op, nbytes in zip(made.storages.producer, made.storages.nbytes, strict=True):
        created[op] += nbytes
    events = tuple(e and settle(e, n) for e, n in zip(made.ops.events, created, strict=False))
    options = {k: size if k == "batch_size" else v for k, v in made.meta.options.items()}
    return replace(made, ops=replace(made.ops, events=events), meta=replace(made.meta, options=options))


def run_command(words: Sequence[str], what: str, answer: str = "", kept: str = "") -> None:
    """Run `python -m` with these words in a process of its own; the JSON that it answers, if any, goes to a file.
    `kept`: `trace` runs in a process that may have run it before, for the same key.

    Raises:
        LowtideError: it failed; with what it wrote. That a GPU's memory does not suffice is an answer.
    """
    of, *others = words
    if kept:
        try:
            run_fresh(f"{of}.cli.main:answer", {"words": [*others, "-q"]}, what=f"traced {what}", kept=kept)
        except LowtideError as error:
            raise LowtideError(f"{what} could not be traced: {error}") from None
        return
    command = [sys.executable, "-m", *words, "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **ending_with_this())
    if answer and done.stdout.startswith("{"):
        write_text(answer, done.stdout)
    elif done.returncode:
        said = done.stderr.strip().removeprefix("Error: ")
        told = said or f"`{of}` ended with exit code {done.returncode}"
        raise LowtideError(f"{what} could not be {'rehearsed' if answer else 'traced'}: {told}")

"""Run `trace`, the one other command that simulate starts, use a trace again while it is what would be made, and work
out what one would say from two others.

Beside each trace lies a stamp of the command, the user's file and the versions, so that a trace that went stale is
noticed; what was measured of a device since then is not looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from simulator.prediction.ask import Say
from traces.errors import LowtideError, TraceError
from traces.files import canonical_json, read_json, write_text
from traces.model_spec import short_name, source_digest
from traces.processes import ending_with_this
from traces.records.store import load
from traces.records.trace import Trace, Untouched, as_named

PACKAGES: Final = ("torch", "torchvision", "transformers")  # whose code is in the graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A model that is traced at several batch sizes."""

    model: str
    directory: Path  # of traces and plans, which are used again
    words: tuple[str, ...] = ()  # further ones for `trace`, such as --seq-len 512

    @classmethod
    def of(cls, model: str, directory: str | Path | None, study: str, words: Sequence[str]) -> Traced:
        """A model in a directory; None: `MODEL-study`."""
        place = Path(directory or f"{short_name(model)}-{study}")
        return cls(model=model, directory=place, words=tuple(words))

    def at(self, batch_size: int, say: Say) -> Trace:
        """The trace at a batch size, made by `trace` in a process of its own, or used again. Raises LowtideError:
        `trace` failed; with what it wrote."""
        place = self.directory / f"trace-b{batch_size}"
        words = [self.model, "--batch-size", str(batch_size), *self.words]
        stamp = {"command": words, "source": source_digest(self.model), "versions": versions()}
        note = place.with_name(f"{place.name}.json")
        if found := _made_before(note, place, stamp):
            say(f"batch {batch_size}: using {place}")
            return found
        say(f"batch {batch_size}: tracing")
        run_trace([*words, "-o", str(place), "--force"], f"batch {batch_size}")
        found = load(place)
        write_text(note, canonical_json({**stamp, "fingerprint": found.meta.fingerprint}) + "\n")
        return found

    def each(self, batch_sizes: Sequence[int], say: Say) -> list[Trace]:
        """The traces at some batch sizes, made side by side, or one after another where they are measured."""
        measured = any(word.partition("=")[0] == "--device" for word in self.words)
        with ThreadPoolExecutor(1 if measured else os.cpu_count()) as pool:
            return list(pool.map(lambda size: self.at(size, say), batch_sizes))


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
            return n if y > 0 else -n
        if isinstance(y, tuple) and len(x) == len(y):
            return tuple(map(on_the_line, x, y))
        if is_dataclass(y):
            values = {f.name: on_the_line(getattr(x, f.name), getattr(y, f.name)) for f in fields(y)}
            kind: Any = type(y)
            return kind(**values)
        return y

    asked = [(u.block, u.once, u.phase) for u in (a.untouched, b.untouched)]
    if asked[0] != asked[1]:
        a, b = (replace(t, untouched=Untouched()) for t in (a, b))
    made: Trace = on_the_line(a, b)
    return made


def run_trace(words: Sequence[str], what: str) -> None:
    """Run `trace` with these words, in a process of its own; raises LowtideError with what it wrote if it failed."""
    command = [sys.executable, "-m", "tracer", *words, "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **ending_with_this())
    if done.returncode:
        said = done.stderr.strip().removeprefix("Error: ")
        told = said or f"`trace` ended with exit code {done.returncode}"
        raise LowtideError(f"{what} could not be traced: {told}")


def _made_before(note: Path, place: Path, stamp: dict[str, Any]) -> Trace | None:
    """The trace that stands there, if it is what `trace` would make now; without a torch here, whichever made it."""
    try:
        made, found = read_json(note), load(place)
        if not stamp["versions"]:
            made["versions"] = {}
        return found if made == {**stamp, "fingerprint": found.meta.fingerprint} else None
    except (OSError, ValueError, TypeError, TraceError):
        return None


def versions() -> dict[str, str]:
    """The installed packages that make the graph; empty where there are none, as `simulate` needs none."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

"""Runs `trace`, the one other command that simulate starts, and uses a trace again while it is what would be made.

Beside each trace lies a stamp of the command, the user's file and the versions, so that a trace that went stale is
noticed; what was measured of a device since then is not looked at.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from simulator.prediction.ask import Say
from traces.errors import LowtideError, TraceError
from traces.files import canonical_json, read_json, write_text
from traces.model_spec import short_name, source_digest
from traces.processes import ending_with_this
from traces.records.store import load
from traces.records.trace import Trace

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
        return cls(
            model=model, directory=Path(directory or f"{short_name(model)}-{study}"), words=tuple(words)
        )

    def at(self, batch_size: int, say: Say) -> Trace:
        """The trace at a batch size, made by `trace` or used again; raises as `ensure_trace` does."""
        place = self.directory / f"trace-b{batch_size}"
        ensure_trace(self.model, batch_size, self.words, place, say)
        return load(place)


def ensure_trace(model: str, batch_size: int, words: Sequence[str], directory: Path, say: Say) -> None:
    """Run `trace` in a process of its own, unless the trace that stands there already is what it would make. Raises
    LowtideError: `trace` failed; with what it wrote.
    """
    words = [model, "--batch-size", str(batch_size), *words]
    note = directory.with_name(f"{directory.name}.json")
    if _fresh(note, directory, stamp(model, words)):
        say(f"batch {batch_size}: using {directory}")
        return
    say(f"batch {batch_size}: tracing")
    run_trace([*words, "-o", str(directory), "--force"], f"batch {batch_size}")
    write_text(note, canonical_json({**stamp(model, words), "fingerprint": _fingerprint(directory)}) + "\n")


def run_trace(words: Sequence[str], what: str) -> None:
    """Run `trace` with these words, in a process of its own; raises LowtideError with what it wrote if it failed."""
    command = [sys.executable, "-m", "tracer", *words, "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **ending_with_this())
    if done.returncode:
        said = done.stderr.strip().removeprefix("Error: ")
        told = said or f"`trace` ended with exit code {done.returncode}"
        raise LowtideError(f"{what} could not be traced: {told}")


def _fresh(note: Path, directory: Path, now: dict[str, Any]) -> bool:
    try:
        data = read_json(note)
        return same(data, {**now, "fingerprint": _fingerprint(directory)})
    except (OSError, ValueError, TypeError, TraceError):
        return False


def _fingerprint(directory: Path) -> str:
    return load(directory).meta.fingerprint


def stamp(model: str, words: Sequence[str]) -> dict[str, Any]:
    """The command, the user's own file, and the versions that are installed here."""
    return {"command": list(words), "source": source_digest(model), "versions": versions()}


def versions() -> dict[str, str]:
    """The installed packages that make the graph; empty where there are none, as `simulate` needs none."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def same(made: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether a trace made under one stamp is what `trace` would make now; without a torch here, whichever it
    was.
    """
    if not now["versions"]:
        made = {**made, "versions": {}}
    return made == now

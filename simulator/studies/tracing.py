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

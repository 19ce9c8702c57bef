"""Runs `trace`, the one other command that simulate starts, and uses a trace again while it is what would be made.

Beside each trace lies a stamp of all that the command's result depends on, so that a trace that went stale is noticed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from simulator.prediction.ask import Say
from traces.errors import LowtideError, TraceError
from traces.files.json_records import canonical_json, read_json
from traces.files.whole import write_text
from traces.model_spec import file_digest, short_name, source_digest
from traces.processes import ending_with_this
from traces.records.device_profile import cache_directory
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
    made = stamp(model, words)  # with what was added to the profile meanwhile
    write_text(note, canonical_json({**made, "fingerprint": _fingerprint(directory)}) + "\n")


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
    """The command, the user's own file, the versions that are installed here, and the device profiles."""
    return {
        "command": list(words),
        "source": source_digest(model),
        "versions": versions(),
        "profiles": _profiles(words),
    }


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


def _profiles(words: Sequence[str]) -> str:
    """A digest of the profiles that the command may read; empty if it reads none."""
    # Measured: profiles are written only.
    if "--no-profile" in words or _value(words, "--device") is not None:
        return ""
    named = _value(words, "--profile")
    paths = sorted(cache_directory().glob("*.profile.json")) if named is None else [Path(named)]
    parts = [file_digest(path) for path in paths]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16] if parts else ""


def _value(words: Sequence[str], option: str) -> str | None:
    """Return what stands after an option, or behind its =; the last one counts."""
    found = None
    for k, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key == option:
            found = value if equals else words[k + 1] if k + 1 < len(words) else ""
    return found

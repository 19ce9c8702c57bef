"""Turn a model's name and options into a fake trace that is recorded once and read from a directory afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from traces.records.store import load
from traces.records.trace import Trace

BENCH = Path(__file__).resolve().parent
CACHE = Path.home() / ".cache" / "lowtide-bench"


def trace_of(cache: Path, model: str, **options: Any) -> Trace:
    """The trace of `trace MODEL` with these options (underscores for dashes), recorded at the first call.

    Raises:
        RuntimeError: `trace` failed; with what it wrote.
    """
    directory = directory_of(cache, model, **options)
    if not directory.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        words = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        command = [sys.executable, "-m", "tracer", model, *words, "-o", str(directory), "-q"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"trace {model} ended with {done.returncode}")
    return load(directory)


def directory_of(cache: Path, model: str, **options: Any) -> Path:
    """Where `trace_of` keeps that trace."""
    stem = Path(model).name.replace(".py", "").replace(":", "-")
    return cache / "-".join([stem, *(f"{k}={v}" for k, v in options.items())])

"""Turn a model's name and options into a fake trace that is recorded once and read from a directory afterwards."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.baselines.saved_sets import SavedSets
from traces.records.store import load, save
from traces.records.trace import VIEW, WORKSPACE, Trace

BENCH = Path(__file__).resolve().parent
CACHE = Path.home() / ".cache" / "lowtide-bench"
# Peak rates behind the published figures that are compared with: A100 40 GB, tensor cores on TF32, nothing fused.
A100_FLOPS_PER_S = 156e12
A100_BYTES_PER_S = 1_555e9


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


def tensors_alone(trace: Trace) -> Trace:
    """The same trace without what ops and libraries allocate beside their tensors."""
    ops, sts = trace.ops, trace.storages
    nbytes = tuple(0 if c == WORKSPACE else n for n, c in zip(sts.nbytes, sts.category, strict=True))
    return replace(trace, ops=replace(ops, events=((),) * len(ops)), storages=replace(sts, nbytes=nbytes))


def published_flops(trace: Trace) -> Trace:
    """The same trace with FLOPs as the published comparison counted them: none for attention on the CPU.

    torch's own FLOP counter has no formula for that op; Lowtide's has.
    """
    ops = trace.ops
    uncounted = "_flash_attention_for_cpu"
    flops = tuple(0 if uncounted in t else n for t, n in zip(ops.target, ops.flops, strict=True))
    return replace(trace, ops=replace(ops, flops=flops))


def with_times(trace: Trace, times_ns: list[int]) -> Trace:
    """The same trace with other op times; its fingerprint does not depend on them."""
    return replace(trace, ops=replace(trace.ops, time_ns=tuple(times_ns)))


def a100_times(trace: Trace) -> Trace:
    """Op times by the roofline of an A100 without fusion: the longer of FLOPs and traffic, no launch, full peaks."""
    ops = trace.ops
    return with_times(
        trace,
        [
            0 if f & VIEW else round(1e9 * max(n / A100_FLOPS_PER_S, b / A100_BYTES_PER_S))
            for n, b, f in zip(ops.flops, ops.bytes_moved, ops.flags, strict=True)
        ],
    )


def flops_as_times(trace: Trace) -> Trace:
    """A nanosecond for each thousand FLOPs, and one for each op that runs at all, so that FLOPs are what is saved."""
    ops = trace.ops
    return with_times(
        trace, [0 if f & VIEW else n // 1000 + 1 for n, f in zip(ops.flops, ops.flags, strict=True)]
    )


def ask_torch(trace: Trace, budgets: Sequence[float], solvers: Sequence[str]) -> SavedSets:
    """What `baselines.torch_budget` says of a trace; RuntimeError if it failed, with what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        directory, output = Path(folder) / "trace", Path(folder) / "saved.json"
        save(trace, directory)
        asked = ["--budgets", ",".join(map(str, budgets)), "--solvers", ",".join(solvers)]
        command = [
            sys.executable,
            "-m",
            "tests.bench.baselines.torch_budget",
            str(directory),
            *asked,
            "-o",
            str(output),
            "-q",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return SavedSets.load(output)

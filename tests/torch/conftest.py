"""What tests with torch share: commands in fresh processes, and one process that measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from executor.measuring import Job
from tests.commands import ROOT, python
from tests.forked import forking
from tests.torch.steps import measured
from tracer.rehearsal import run
from tracer.step.step import load_spec
from traces.errors import EnvironmentProblem
from traces.records.plan import Plan
from traces.records.trace import Trace


def call(folder: Path, module: str, *words: str) -> dict[str, Any]:
    """The object that a command prints with --json, run in a fresh process in a folder."""
    done = python("-m", module, *words, "--json", cwd=folder)
    assert "Traceback" not in done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)  # exactly one object
    return answer


@pytest.fixture(scope="module")
def trace(request: pytest.FixtureRequest) -> Trace:  # the measured step of a module's SPEC
    return measured(load_spec(request.module.SPEC, {}))


# Reads jobs, one a line, and answers with the peak of each iteration.
CHILD = """
import gc, json, sys, warnings
warnings.simplefilter("ignore")
from executor.measuring import Job, perform
for line in sys.stdin:
    peaks = perform(Job(**json.loads(line))).figures.peaks_bytes
    gc.collect(), gc.freeze()
    print("PEAKS", json.dumps(peaks), flush=True)
"""


class Measurer:
    """A process in which steps run under the profiler, one after the other: torch is imported once for all of them."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def peaks(self, job: Job) -> list[int]:
        """The peak of each iteration."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asdict(job)) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("PEAKS "):
                return list(json.loads(line.removeprefix("PEAKS ")))
        raise AssertionError(f"the measuring process ended with code {self.process.wait()}")

    def steady_peak(self, plan: Plan, folder: Path, variant: str = "plan") -> int:
        """The highest peak on the CPU from the third iteration of a planned step on; the plan goes into the folder."""
        path = str(plan.save(folder / "plan.json"))
        job = Job(variant=variant, plan_path=path, device="cpu", memory_steps=3, warmup=0, runs=1, steps=0)
        return max(self.peaks(job)[2:])

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def by_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace for a GPU is told by what ops return, as where no CUDA build of torch is: in this process, at once."""

    def missing() -> None:
        raise EnvironmentProblem("no CUDA build of torch")

    monkeypatch.setattr(run, "find_cuda_torch", missing)


@pytest.fixture
def forked(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands start processes that have imported torch already."""
    modules = ("torch._dynamo", "executor.measuring")
    with forking(tmp_path_factory.mktemp("forks"), os.environ.get("LD_PRELOAD", ""), *modules) as client:
        monkeypatch.setattr(sys, "executable", client)
        yield


@pytest.fixture(scope="session")
def measurer() -> Iterator[Measurer]:
    """A process that measures one job after the other."""
    made = Measurer()
    yield made
    made.close()

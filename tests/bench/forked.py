"""Rehearse one step after another in forks of a process that has imported torch once.

A rehearsal in a process of its own spends most of its time on imports (`executor.rehearsal.rehearse`). Nothing of CUDA
has begun where the fork is made, so each fork begins as a fresh process does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from executor.rehearsal.driver import driver_environment, find_cuda_torch
from executor.rehearsal.record import Rehearsal, Task
from simulator.allocator.device import CONTEXT_BYTES
from simulator.allocator.reserved import ITERATIONS
from traces.devices import device
from traces.errors import LowtideError
from traces.files.json_records import from_json

IMPORTS = ("executor.rehearsal.perform", "torchvision", "transformers", "timm")  # diffusers asks for GPUs


class Forked:
    """One process for each GPU that is asked for, until `close`."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def rehearse(
        self, model: str, gpu: str, options: dict[str, Any], *, plan: str = "", iterations: int = ITERATIONS
    ) -> Rehearsal:
        """As `executor.rehearsal.rehearse`.

        Raises:
            LowtideError: the step failed, its memory does not suffice, or its process died.
        """
        board = device(gpu)
        fields = {"gpu": board.name, "memory_bytes": board.memory_bytes, "context_bytes": CONTEXT_BYTES}
        task = Task(model=model, options=options, plan=plan, iterations=iterations)
        process = self._processes.get(gpu)
        if process is None:
            environment = driver_environment(find_cuda_torch(), board, context_bytes=CONTEXT_BYTES)
            process = self._processes[gpu] = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.forked"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", **environment},
            )
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps({"task": asdict(task), **fields}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or '{"error": "the process that rehearses died"}')
        if "error" in answer:
            raise LowtideError(answer["error"])
        found = from_json(Rehearsal, answer)
        if found.out_of_memory:
            raise LowtideError(found.out_of_memory)
        return found

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.communicate()
        self._processes.clear()


def serve() -> None:
    """Answer each line on stdin, the arguments of `executor.rehearsal.perform.do`, by a line on stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a model prints
    for name in IMPORTS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        answers, mine = os.pipe()
        child = os.fork()
        if not child:
            with os.fdopen(mine, "w") as pipe:
                json.dump(_done(json.loads(line)), pipe)
            os._exit(0)
        os.close(mine)
        with os.fdopen(answers) as pipe:
            answer = pipe.read().strip()
        os.waitpid(child, 0)
        out.write((answer or '{"error": "the fork died"}') + "\n")
        out.flush()


def _done(arguments: dict[str, Any]) -> dict[str, Any]:
    from executor.rehearsal.perform import do

    try:
        return do(**arguments)
    except LowtideError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    serve()

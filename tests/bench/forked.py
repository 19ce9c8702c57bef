"""Rehearse one step after another in forks of a process that has imported torch once.

A rehearsal in a process of its own spends most of its time on imports (`executor.rehearsal.rehearse`). Nothing of CUDA
has begun where the fork is made, so each fork begins as a fresh process does.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from executor.isolated import forking
from executor.rehearsal.record import Rehearsal, Task
from executor.rehearsal.run import run_on_null_driver
from simulator.allocator.device import CONTEXT_BYTES
from simulator.allocator.reserved import ITERATIONS
from traces.devices import device
from traces.errors import LowtideError
from traces.files.json_records import from_json

LIBRARIES = ("torchvision", "transformers", "timm")  # diffusers asks for GPUs


class Forked:
    """One process for each GPU that is asked for, until `close`."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._open.enter_context(forking("executor.rehearsal.perform", *filter(find_spec, LIBRARIES)))

    def rehearse(
        self, model: str, gpu: str, options: dict[str, Any], *, plan: str = "", iterations: int = ITERATIONS
    ) -> Rehearsal:
        """As `executor.rehearsal.rehearse`.

        Raises:
            LowtideError: the step failed, its memory does not suffice, or its process died.
        """
        board = device(gpu)
        task = Task(model=model, options=options, plan=plan, iterations=iterations)
        fields = {"gpu": board.name, "memory_bytes": board.memory_bytes, "context_bytes": CONTEXT_BYTES}
        answer = run_on_null_driver(
            "executor.rehearsal.perform:do",
            {"task": asdict(task), **fields},
            board,
            what=f"rehearsed {model}",
        )
        found = from_json(Rehearsal, answer)
        if found.out_of_memory:
            raise LowtideError(found.out_of_memory)
        return found

    def close(self) -> None:
        """End the processes."""
        self._open.close()

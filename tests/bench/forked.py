"""Rehearse one step after another in forks of a process that has imported torch once.

A rehearsal in a process of its own spends most of its time on imports (`tracer.rehearsal.rehearse`). Nothing of CUDA
has begun where the fork is made, so each fork begins as a fresh process does.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from executor.cli.rehearse import APPLY
from tracer.rehearsal.record import Rehearsal, Task
from tracer.rehearsal.run import run_on_null_driver
from traces.devices import CONTEXT_BYTES, device
from traces.errors import LowtideError
from traces.files.json_records import from_json
from traces.isolated import forking
from traces.records.measurement import ITERATIONS

LIBRARIES = ("torchvision", "transformers", "timm")  # diffusers asks for GPUs


class Forked:
    """One process for each GPU that is asked for, until `close`."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._open.enter_context(forking("tracer.rehearsal.perform", *filter(find_spec, LIBRARIES)))

    def rehearse(
        self, model: str, gpu: str, options: dict[str, Any], *, plan: str = "", iterations: int = ITERATIONS
    ) -> Rehearsal:
        """As `tracer.rehearsal.rehearse`.

        Raises:
            LowtideError: the step failed, its memory does not suffice, or its process died.
        """
        board = device(gpu)
        task = Task(model=model, options=options, plan=plan, apply=APPLY, iterations=iterations)
        fields = {"gpu": board.name, "memory_bytes": board.memory_bytes, "context_bytes": CONTEXT_BYTES}
        answer = run_on_null_driver(
            "tracer.rehearsal.perform:do",
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

"""Compile a kernel in a process of its own, on a machine's second processor, while this one goes on to the same place.

Compiling happens once on a machine (`compiled`): two processors halve the wait. What is compiled here is found on disk
by the process that needs it, which waits for the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

from simulator.kernels.compiled import on_disk
from traces.processes import ending_with_this

_running: list[subprocess.Popen[bytes]] = []


def begin(kernel: Any, module: str, function: str) -> None:
    """Have a kernel compiled by `module.function()`, unless it is on disk, or there is no second processor.

    Args:
        kernel: what is looked for on disk; without a place for it there, nothing begins.
        module: where the function is.
        function: its name; it takes nothing, and compiles the kernel.
    """
    if _running or on_disk(kernel) is not False or (os.cpu_count() or 1) < 2:
        return
    # What compiling makes stays: to look through it at every turn takes a tenth of the time.
    code = f"import gc; gc.disable(); import {module} as m; m.{function}()"
    with suppress(OSError):
        _running.append(
            subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                **ending_with_this(),
            )
        )


def wait() -> None:
    """Until what was begun has ended, well or not: what is not on disk then, this process compiles."""
    while _running:
        _running.pop().wait()

"""How commands end: with their exit code while they still import, and with them the processes that they started."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def run_command(place: str, name: str) -> None:
    """Import a command, "module:function", and run it under its name. Ctrl-C while it imports ends the process as it
    ends the command later: exit code 130."""
    module, _, function = place.partition(":")
    try:
        command = getattr(import_module(module), function)
    except KeyboardInterrupt:
        sys.stderr.write("Error: stopped.\n")
        sys.exit(130)
    command(prog_name=name)


def ending_with_this() -> dict[str, Any]:
    """Arguments of `subprocess.run` and `Popen` by which the child is killed when the thread that starts it ends.

    So a killed command leaves nothing running. Counts: Linux. Ignores: other systems, where only an interrupt that the
    command can answer ends its children.
    """
    if sys.platform != "linux":
        return {}
    prctl: Callable[..., int] = ctypes.CDLL(None).prctl  # resolved here: the child must not load anything
    return {"preexec_fn": lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)}

"""Child processes that end with the command that started them, however that ends."""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def ending_with_this() -> dict[str, Any]:
    """Arguments of `subprocess.run` and `Popen` by which the child is killed when the thread that starts it ends.

    So a killed command leaves nothing running. Counts: Linux. Ignores: other systems, where only an interrupt that the
    command can answer ends its children.
    """
    if sys.platform != "linux":
        return {}
    prctl: Callable[..., int] = ctypes.CDLL(None).prctl  # resolved here: the child must not load anything
    return {"preexec_fn": lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)}

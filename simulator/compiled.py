"""Turn a Python function over arrays into machine code, kept on disk between runs.

numba keeps it in the first of these places that can be written to: $NUMBA_CACHE_DIR, the `__pycache__` beside the
module, the user's cache directory. Where none can be, every process compiles anew, which takes seconds. Code is kept
for the version of the module that made it, so a kernel calls only kernels of its own module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import event

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger("lowtide")


def compiled(function: F) -> F:
    """The function, compiled at its first call; its arguments are numbers and arrays."""
    try:
        return cast(F, numba.njit(cache=True, error_model="numpy")(function))
    except RuntimeError:  # nowhere to keep it
        return cast(F, numba.njit(error_model="numpy")(function))


class _Announcement(event.Listener):  # type: ignore[misc]
    """Says once that something is being compiled, since that takes seconds."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: Any) -> None:
        if not self.said:
            self.said = True
            log.info("compiling the inner loops, which takes some seconds; the result is kept for later runs")

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Announcement())

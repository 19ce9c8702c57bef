"""Compile Python functions over arrays to machine code, and save it on disk for later runs.

numba saves it in the first of these places that can be written to: $NUMBA_CACHE_DIR, the `__pycache__` beside the
module, the user's cache directory. Where none can be, every process compiles anew, which takes seconds. numba looks at
the age of a kernel's own module only, but kernels call kernels of other modules of this package: so what is older than
any module of the package is thrown away here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba
from numba.core import event, options

from simulator.kernels import excuse

log = logging.getLogger("lowtide")
F = TypeVar("F", bound=Callable[..., Any])
NUMBA_OPTIONS: Final[dict[str, Any]] = {"error_model": "numpy", "nogil": True}
if hasattr(options.DefaultOptions, "_nrt"):
    NUMBA_OPTIONS["_nrt"] = False  # nothing is counted that kernels make: they make no arrays
CHANGED = max(source.stat().st_mtime for source in Path(__file__).parent.glob("*.py"))


def compiled(function: F) -> F:
    """The function, compiled at its first call; its arguments are numbers and arrays. Other threads run beside it."""
    try:
        kernel = numba.njit(cache=True, **NUMBA_OPTIONS)(function)
    except RuntimeError:  # no place for it
        return cast(F, numba.njit(**NUMBA_OPTIONS)(function))
    # Machine code that is on disk needs none of numba's registries of types and functions, which take 0.2 s to load,
    # unless it counts what it makes.
    cache = kernel._cache
    if hasattr(cache, "_load_overload") and "_nrt" in NUMBA_OPTIONS:
        cache.load_overload = cache._load_overload
    save = cache.save_overload

    def saved_if_possible(*given: Any) -> None:
        with suppress(OSError):  # the disk is full: the next process compiles again
            save(*given)

    cache.save_overload = saved_if_possible
    with suppress(OSError):
        module = function.__module__.rpartition(".")[2]
        for index in Path(kernel.stats.cache_path).glob(f"{module}.{function.__qualname__}-*.nbi"):
            if index.stat().st_mtime < CHANGED:
                index.unlink()
    return cast(F, kernel)


def inner(function: F) -> F:
    """The function, for kernels to call and nobody else; it is saved on disk with its callers."""
    return cast(F, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **NUMBA_OPTIONS)(function))


def inlined(function: F) -> F:
    """The function, written into each kernel that calls it."""
    return cast(F, numba.njit(inline="always", **NUMBA_OPTIONS)(function))


class _Announcement(event.Listener):  # type: ignore[misc]
    """Says once that something is being compiled, which takes seconds, and takes these off the planners' clocks."""

    def __init__(self) -> None:
        self.said = False
        self.depth = 0  # a kernel's compilation compiles those that it calls
        self.begin = 0.0

    def on_start(self, event: Any) -> None:
        if not self.depth:
            self.begin = time.thread_time()
        self.depth += 1
        if not self.said:
            self.said = True
            log.info("compiling the inner loops, some seconds, once: the result is saved for later runs")

    def on_end(self, event: Any) -> None:
        self.depth -= 1
        if not self.depth:
            excuse(time.thread_time() - self.begin)


event.register("numba:compile", _Announcement())

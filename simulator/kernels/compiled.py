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
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import LoweringPass, PassManager, register_pass

from simulator.kernels.clock import excuse

F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger("lowtide")
# numba's passes for Python that kernels do not use (closures, overloads to be inlined, loops over tuples, arrays as
# values), and those that tidy up what LLVM tidies up again: a seventh of the time.
UNUSED: Final = (
    "WithLifting", "InlineClosureLikes", "RewriteSemanticConstants", "DeadBranchPrune", "MakeFunctionToJitFunction",
    "FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads", "NopythonRewrites",
)  # fmt: skip
CHANGED = max(source.stat().st_mtime for source in Path(__file__).parent.glob("*.py"))


class _Linked(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that only kernels call: LLVM optimizes it, and makes machine code of it, with theirs."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # there is none

    @property
    def codegen(self) -> _Linked:
        return self

    def set_env(self, name: str, environment: object) -> None:
        """Nothing: the kernel's own is used."""


@register_pass(mutates_CFG=False, analysis_only=True)
class _Link(LoweringPass):  # type: ignore[misc]
    """Choose where the code of a function goes."""

    _name = "link"

    def __init__(self) -> None:
        LoweringPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        if state.flags.no_cpython_wrapper:
            state.library = _Linked(state.targetctx.codegen(), state.func_id.func_qualname)
        return False


class _Compiler(CompilerBase):  # type: ignore[misc]
    """numba's compiler without the UNUSED passes, and with `_Link`."""

    def define_pipelines(self) -> list[Any]:
        builder, pipeline = DefaultPassBuilder, PassManager("kernels")
        for stage in (
            builder.define_untyped_pipeline,
            builder.define_typed_pipeline,
            builder.define_nopython_lowering_pipeline,
        ):
            for p in stage(self.state).passes:
                if p[0].__name__ == "NativeLowering":
                    pipeline.add_pass(_Link, "choose where the code goes")
                if p[0].__name__ not in UNUSED:
                    pipeline.passes.append(p)
        pipeline.finalize()
        return [pipeline]


OPTIONS: Final[dict[str, Any]] = {"error_model": "numpy", "pipeline_class": _Compiler}
if hasattr(options.DefaultOptions, "_nrt"):
    OPTIONS["_nrt"] = False  # nothing is counted that kernels make: they make no arrays


def compiled(function: F) -> F:
    """The function, compiled at its first call; its arguments are numbers and arrays. Other threads run beside it."""
    try:
        kernel = numba.njit(cache=True, nogil=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    except RuntimeError:  # no place for it
        return cast(F, numba.njit(nogil=True, **OPTIONS)(function))
    # Machine code that is on disk needs none of numba's registries of types and functions, which take 0.2 s to load.
    cache = kernel._cache
    if hasattr(cache, "_load_overload"):
        cache.load_overload = cache._load_overload
    save = cache.save_overload

    def saved_if_possible(*given: Any) -> None:
        with suppress(OSError):  # the disk is full: the next process compiles again
            save(*given)

    cache.save_overload = saved_if_possible
    with suppress(OSError):
        for index in _indices(kernel):
            if index.stat().st_mtime < CHANGED:
                index.unlink()
    return cast(F, kernel)


def _indices(kernel: Any) -> list[Path]:
    """The files on disk that list what of a kernel is there."""
    module = kernel.__module__.rpartition(".")[2]
    return list(Path(kernel.stats.cache_path).glob(f"{module}.{kernel.__qualname__}-*.nbi"))


def on_disk(kernel: Any) -> bool | None:
    """Whether a kernel is on disk as it is now; None: there is no place for it."""
    return bool(_indices(kernel)) if kernel.stats.cache_path else None


def inner(function: F) -> F:
    """The function, for kernels to call and nobody else; it makes no arrays, and is saved on disk with its callers."""
    wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(F, numba.njit(**wrappers, **OPTIONS)(function))


def inlined(function: F) -> F:
    """The function, written into each kernel that calls it."""
    return cast(F, numba.njit(inline="always", **OPTIONS)(function))


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

"""Say what failed while a step was built, captured or run, in a message that names the user's line."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import torch

from tracer.torch_api import DataDependentOutputException, DynamicOutputShapeException, replaced
from traces.errors import CaptureError, LowtideError, OutOfMemoryProblem, SpecError, is_out_of_memory

# Directories whose frames are not the user's: torch's, and Lowtide's own rooms.
_ROOT, _TORCH = Path(__file__).resolve().parents[2], Path(torch.__file__).resolve().parent
_OWN: Final = [_ROOT / room for room in ("tracer", "executor", "traces")]
_FOREIGN: Final = tuple(f"{directory}{os.sep}" for directory in (_TORCH, *_OWN))
_LAYERS: Final = f"{_TORCH / 'nn' / 'modules'}{os.sep}"


def is_foreign(file: str) -> bool:
    """Return whether a frame of this file is not of the user's code: torch's, Lowtide's, or of no file."""
    return file.startswith(("<", *_FOREIGN))


def is_library(file: str) -> bool:
    """Return whether code of this file is of something installed: torch, wherever it lies, or any other package."""
    path = Path(file)
    named = file.startswith(_FOREIGN) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return named or any(path.relative_to(p).parts[0] in _installed(p) for p in path.parents)


@cache
def _installed(folder: Path) -> set[str]:
    """What pip put into a folder of any name (`--target`), as each package's RECORD beside it tells."""
    records = (record.read_text(encoding="utf-8") for record in folder.glob("*.dist-info/RECORD"))
    return {line.partition(",")[0].partition("/")[0] for text in records for line in text.splitlines()}


def is_data_dependent(error: BaseException) -> bool:
    return isinstance(error, DataDependentOutputException) or "data-dependent" in str(error).lower()


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn what the user's loss or optimizer raises in the body into a CaptureError that names its line; where memory
    ran out, into an OutOfMemoryProblem."""
    try:
        with without_torch_log():
            yield
    except LowtideError:
        raise
    except Exception as error:
        raise _memory(error, name) or explain(error, name) from error


@contextlib.contextmanager
def built(name: str) -> Iterator[None]:
    """Turn what building a step raises in the body for its sizes into a SpecError; where memory ran out, into an
    OutOfMemoryProblem."""
    try:
        with without_torch_log():
            yield
    except LowtideError as error:
        problem = _memory(error, name)
        if problem is None or problem is error:
            raise
        raise problem from error
    except (RuntimeError, ValueError, TypeError, OverflowError, MemoryError) as error:
        raise _memory(error, name) or SpecError(
            f"{name} cannot be built with these options: {type(error).__name__}: {first_line(error)}; other "
            "sizes may do."
        ) from error


def _memory(error: Exception, name: str) -> OutOfMemoryProblem | None:
    """Return what is to be said if an error means that memory ran out."""
    if isinstance(error, OutOfMemoryProblem):
        return error
    if not is_out_of_memory(error):
        return None
    return OutOfMemoryProblem(
        f"{name} ran out of memory ({first_line(error)}); take a smaller batch, or leave --device out: a fake trace "
        "needs no memory for the step."
    )


def without_torch_log() -> contextlib.AbstractContextManager[None]:
    """Keep torch from logging a traceback of an error on fake tensors, which is explained here in a sentence."""
    return replaced(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)


def explain(error: BaseException, name: str) -> CaptureError:
    """A CaptureError that names the op and the line of the user's code; foreign errors keep their text."""
    line = blame(error)
    ragged = "shape_env must not be None" in str(error)  # a nested tensor's rows have lengths that are data
    if is_data_dependent(error) or ragged or isinstance(error, DynamicOutputShapeException):
        op = getattr(error, "func", None) or "there"
        what = f"the op {op} makes Python look at the data of a tensor, or has an output whose shape depends on data"
        return on_data(name, what, line)
    return CaptureError(f"{name} cannot be captured: {type(error).__name__}: {first_line(error)}{line}.")


def on_data(name: str, what: str, where: str, hint: str = ".") -> CaptureError:
    """The error for a model whose ops depend on the data of tensors."""
    return CaptureError(
        f"{name} cannot be captured: {what}{where}. Only one fixed sequence of ops can be planned; replace the branch "
        f"by torch.where or by a Python value that is known beforehand{hint}"
    )


def first_line(error: BaseException) -> str:
    """Return what an error says, without the stack of C++ frames that torch's go on with."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:400].rstrip(".")


def blame(error: BaseException) -> str:
    """ " at file:line, in function" of what raised an error: see `user_line`."""
    return user_line(traceback.extract_tb(error.__traceback__))


def user_line(frames: traceback.StackSummary) -> str:
    """ " at file:line, in function" for the innermost frame outside torch and Lowtide, or else in torch's layers; "" if
    there is neither."""
    own = [f for f in reversed(frames) if not is_foreign(f.filename)]
    for frame in (*own, *(f for f in reversed(frames) if f.filename.startswith(_LAYERS))):
        return f" (at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"
    return ""

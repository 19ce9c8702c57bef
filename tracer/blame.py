"""Turn an exception from a capture into a message that names the op and the line of the user's code."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from traces.errors import CaptureError, LowtideError

# Directories whose frames are not the user's: torch's, and Lowtide's own rooms.
_ROOT: Final = Path(__file__).resolve().parent.parent
_FOREIGN: Final = tuple(
    f"{directory}{os.sep}"
    for directory in (
        Path(torch.__file__).resolve().parent,
        *(_ROOT / r for r in ("tracer", "executor", "traces")),
    )
)
_LAYERS: Final = f"{Path(torch.__file__).resolve().parent / 'nn' / 'modules'}{os.sep}"
_DISTRIBUTIONS: Final = f"{Path(torch.__file__).resolve().parent / 'distributions'}{os.sep}"


def is_data_dependent(error: BaseException) -> bool:
    return isinstance(error, DataDependentOutputException) or "data-dependent" in str(error).lower()


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn what the user's loss or optimizer raises in the body into a CaptureError that names its line."""
    try:
        with without_torch_log():
            yield
    except LowtideError:
        raise
    except Exception as error:
        raise _in_words(error, name) from error


@contextlib.contextmanager
def without_torch_log() -> Iterator[None]:
    """Keep torch from logging a traceback of an error on fake tensors, which is explained here in a sentence."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def explain(error: BaseException, model: nn.Module) -> BaseException:
    """A CaptureError that names the op and the line of the user's code; foreign errors keep their text."""
    if isinstance(error, CaptureError):
        return error
    return _in_words(error, type(model).__name__)


def _in_words(error: BaseException, name: str) -> CaptureError:
    line = blame(error)
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.filename.startswith(_DISTRIBUTIONS) for frame in frames):
        line += ", where a distribution checks its arguments; validate_args=False leaves that out"
    if is_data_dependent(error) or isinstance(error, DynamicOutputShapeException):
        op = getattr(error, "func", None)
        return CaptureError(
            f"{name} cannot be captured: the op {op or 'there'} makes Python look at the data of a tensor, or has an "
            f"output whose shape depends on data{line}. Only one fixed sequence of ops can be planned; replace the "
            "branch by torch.where or by a Python value that is known beforehand."
        )
    text = (str(error).strip().splitlines() or [""])[0][:400].rstrip(".")
    return CaptureError(f"{name} cannot be captured: {type(error).__name__}: {text}{line}.")


def blame(error: BaseException) -> str:
    """ " at file:line, in function" for the innermost frame outside torch and Lowtide, or else in torch's layers; "" if
    there is neither."""
    frames = list(reversed(traceback.extract_tb(error.__traceback__)))
    own = [f for f in frames if not f.filename.startswith(("<", *_FOREIGN))]
    for frame in (*own, *(f for f in frames if f.filename.startswith(_LAYERS))):
        return f" (at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"
    return ""

"""Turn an exception from a capture into a message that names the op and the line of the user's code."""

from __future__ import annotations

import traceback

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from traces.errors import CaptureError


def is_data_dependent(error: BaseException) -> bool:
    return isinstance(error, DataDependentOutputException) or "data-dependent" in str(error).lower()


def explain(error: BaseException, model: nn.Module) -> BaseException:
    """A CaptureError that names the op and the line of the user's code; foreign errors keep their text."""
    if isinstance(error, CaptureError):
        return error
    line = blame(error)
    name = type(model).__name__
    if is_data_dependent(error) or isinstance(error, DynamicOutputShapeException):
        op = getattr(error, "func", None)
        return CaptureError(
            f"{name} cannot be captured: the op {op or 'there'} makes Python look at the data of a tensor, or has an "
            f"output whose shape depends on data{line}. Only one fixed sequence of ops can be planned; replace the "
            "branch by torch.where or by a Python value that is known beforehand."
        )
    text = (str(error).strip().splitlines() or [""])[0][:400]
    return CaptureError(f"{name} cannot be captured: {type(error).__name__}: {text}{line}.")


def blame(error: BaseException) -> str:
    """ " at file:line, in function" for the innermost frame outside torch and Lowtide; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = ("/torch/", "\\torch\\", "/tracer/", "/executor/", "/traces/", "<")
    for frame in reversed(frames):
        if not any(part in frame.filename for part in own):
            return f" (at {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line})"
    return ""

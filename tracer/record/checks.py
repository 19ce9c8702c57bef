"""Let the checks of torch's distributions and losses pass in loss code on fake tensors, which have no data."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import distributions, nn
from torch.overrides import TorchFunctionMode

# What the check of a file goes on with: distributions ask whether all is right, a loss whether anything is wrong.
GOES_ON: Final = {
    inspect.getfile(distributions.distribution): True,
    inspect.getfile(distributions.constraints): True,
    inspect.getfile(nn.functional): False,
}


class _Checked(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__:
            answer = GOES_ON.get(sys._getframe(1).f_code.co_filename)
            if answer is not None:
                return answer
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """In the body a check goes on."""
    with _Checked():
        yield

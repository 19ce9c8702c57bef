"""Tell fake tensors that these gradients are contiguous, as torch's kernels make them, however what is given lies.

torch's Python functions for fake tensors compute them of whole tensors, so there they lie as the inputs do
(layer_norm_kernel.cu, layer_norm_kernel.cpp, SoftMax.cpp). Who reads them then is taken to copy, or not to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tracer.torch_api import decomposition_table

aten = torch.ops.aten
OPS: Final = (
    aten.native_layer_norm_backward.default,
    aten._fused_rms_norm_backward.default,
    aten._log_softmax_backward_data.default,
)


@contextmanager
def contiguous_gradients() -> Iterator[None]:
    """In the body, the first result of each of the ops is contiguous."""
    before = {op: decomposition_table[op] for op in OPS}
    decomposition_table.update({op: _contiguous(function) for op, function in before.items()})
    try:
        yield
    finally:
        decomposition_table.update(before)


def _contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # whose name and module torch asks for
    def call(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            return out.contiguous()
        return (None if out[0] is None else out[0].contiguous(), *out[1:])

    return call

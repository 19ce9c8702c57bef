"""Tell fake tensors what torch's grouped matrix product returns, as its kernels do and its meta function does not.

`aten::_grouped_mm` multiplies the tokens of each expert of a mixture by that expert's weights; transformers' mixtures
of experts are made of it. Its kernels take float32, float16 and bfloat16 (`_grouped_mm_validate_inputs` in
aten/src/ATen/native/GroupedMMUtils.h) and give each row of the result a stride of a multiple of 16 bytes
(`create_grouped_gemm_output_tensor` there). The function for fake tensors pads only if
torch was built for CUDA, and up to 2.13 refuses all but bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tracer.capture.torch_fixes.contiguous import contiguous_gradients
from tracer.torch_api import meta_registrations, replaced

_ALIGNMENT_BYTES: Final = 16


@contextmanager
def true_results() -> Iterator[None]:
    """In the body, results of fake tensors have the types and strides that the kernels would give them."""
    original = meta_registrations._meta_grouped_mm_common

    def product(a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scaled = kwargs.get("scale_a", args[0] if args else None) is not None
        if scaled or a.dtype != b.dtype or a.dim() not in (2, 3) or b.dim() not in (2, 3):
            return original(a, b, *args, **kwargs)
        offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
        return _result(a, b, offsets, kwargs.get("out_dtype") or a.dtype)

    with replaced(meta_registrations, _meta_grouped_mm_common=product), contiguous_gradients():
        yield


def _result(a: torch.Tensor, b: torch.Tensor, offsets: Any, dtype: torch.dtype) -> torch.Tensor:
    """An empty result; a matrix is split by `offsets` into groups, a stack of matrices has one for each."""
    rows, columns = a.shape[-2], b.shape[-1]
    step = _ALIGNMENT_BYTES // dtype.itemsize
    padded = columns if torch.version.hip else -(-columns // step) * step
    if a.dim() != b.dim():
        return a.new_empty_strided((rows, columns), (padded, 1), dtype=dtype)
    groups = a.shape[0] if a.dim() == 3 else offsets.shape[0]
    return a.new_empty_strided((groups, rows, columns), (rows * padded, padded, 1), dtype=dtype)

"""A row of a trace for a call of an op on fake tensors, or for a storage; graph and recorder make them alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tracer.costs.builder import OpRow, StorageRow
from tracer.costs.roofline import compute_dtype, op_bytes, op_flops
from tracer.costs.signature import of_call
from tracer.torch_api import pytree
from traces.trace import VIEW


def op_row(
    func: Any, args: Any, kwargs: Any, out: Any, given: Sequence[torch.Tensor], *, flags: int, **known: Any
) -> OpRow:
    """The row of a call, without its costs.

    Args:
        func, args, kwargs, out: the call, and what it returned.
        given: the tensors that it was given.
        flags: of the op; a view computes nothing and moves nothing.
        known: the row's other fields.
    """
    view = bool(flags & VIEW)
    return OpRow(
        target=str(func),
        flops=0 if view else op_flops(func, args, kwargs, out),
        bytes_moved=0 if view else op_bytes(given, list(tensors_in(out)), func),
        flags=flags,
        dtype=compute_dtype(given),
        signature=of_call(func, args, kwargs, out),
        **known,
    )


def storage_row(x: torch.Tensor, name: str, category: str, producer: int = -1) -> StorageRow:
    """The row of a tensor's storage."""
    return StorageRow(
        name=name,
        nbytes=x.untyped_storage().nbytes(),
        category=category,
        producer=producer,
        dtype=str(x.dtype).removeprefix("torch."),
        shape=tuple(int(d) for d in x.shape),
    )


def storage_key(x: torch.Tensor) -> int:
    """What two tensors have in common exactly if they share a storage."""
    return int(x.untyped_storage()._cdata)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors anywhere in a value."""
    return (x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))

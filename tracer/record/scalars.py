"""Follow the single numbers that an optimizer keeps in tensors through ops on fake tensors, which have no values.

An optimizer asks tensors on the CPU for its step counter, NAdam for the product of its momenta too. They start from
numbers that are known, and what becomes of them depends on nothing else; so each op on them runs once more, on real
tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tracer.record.rows import overwritten, storage_key, tensors_in
from tracer.torch_api import FakeTensor, disable_current_modes, pytree


class Scalars:
    """The known values of fake tensors that are single numbers on the CPU with a storage of their own."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[StorageWeakRef, torch.Tensor]] = {}

    def value(self, x: torch.Tensor) -> Any:
        """The number in a tensor; None if it is not known."""
        known = self._known(x)
        if known is None:
            return None
        with disable_current_modes():
            return known.item()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an op, and follow what it does to single numbers."""
        given = list(tensors_in((args, kwargs)))
        values = {id(x): self._known(x) for x in given}
        follow = (
            all(v is not None for v in values.values())
            and torch.Tag.nondeterministic_seeded not in func.tags
            and func.namespace == "aten"
        )
        if not follow and not self._values:
            return func(*args, **kwargs)
        copies: dict[int, torch.Tensor] = {}
        if follow:
            with disable_current_modes():
                copies = {k: v.clone() for k, v in values.items() if v is not None}
        out = func(*args, **kwargs)
        made = list(tensors_in(out))
        changed = list(tensors_in(overwritten(func, args, kwargs)))
        for x in changed:
            self._values.pop(storage_key(x), None)
        if not follow or not all(_single(x) for x in (*given, *made)):
            return out
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, lambda x: copies[id(x)], (args, kwargs))
        with disable_current_modes():
            real = list(tensors_in(func(*real_args, **real_kwargs)))
        for x, value in (*zip(made, real, strict=True), *((x, copies[id(x)]) for x in changed)):
            if isinstance(x, FakeTensor):
                self._values[storage_key(x)] = (StorageWeakRef(x.untyped_storage()), value)
        return out

    def _known(self, x: torch.Tensor) -> torch.Tensor | None:
        if not _single(x):
            return None
        if not isinstance(x, FakeTensor):
            return x
        ref, value = self._values.get(storage_key(x), (None, None))
        if ref is not None and not ref.expired():
            return value
        return x.constant  # what torch itself still knows of torch.tensor(0.0), until an op writes into it


def _single(x: torch.Tensor) -> bool:
    """Whether a tensor is one number on the CPU, and all that is in its storage."""
    return (
        x.dim() == 0
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and x.untyped_storage().nbytes() == x.element_size()
    )

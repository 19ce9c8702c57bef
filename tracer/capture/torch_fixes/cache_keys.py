"""Look up at once what an op makes of fake tensors, where torch goes through arguments and results field by field.

torch remembers what an op makes of fake tensors by a key of all that its arguments are like. Making the keys, and the
results from what is remembered, takes a fifth of a trace. Of tensors without symbolic sizes, a few fields say it all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from tracer.torch_api import (
    DisableTorchDispatch,
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    default_device,
    dispatch_keys,
    make_subclass,
    proxy_tensor,
    replaced,
    throw_on_mutable_data_ptr,
    warn_on_mutable_data_ptr,
)

# What stands for itself, beside its type: 1 and 1.0 are the same key.
_PLAIN: Final = frozenset({
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip


@contextmanager
def quick_keys() -> Iterator[None]:
    """In the body, calls with fake tensors whose sizes are numbers have such keys, and their results are made so."""
    slow_key, slow_output = FakeTensorMode._cache_key, FakeTensorMode._get_output_tensor_from_cache_entry
    slow_alias = proxy_tensor.snapshot_fake
    fields: dict[Any, dict[str, Any]] = {}  # of new fake tensors, by mode and device

    def fake(mode: Any, device: Any, x: torch.Tensor, *, requires_grad: bool) -> Any:
        """A fake tensor of that device with the storage of `x`, while no mode and no subclass is asked."""
        place = mode, device
        if place not in fields:
            fields[place] = vars(FakeTensor(mode, torch.empty(0, device="meta"), device))
        made = make_subclass(
            FakeTensor, x, requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        (warn_on_mutable_data_ptr if mode._allow_unsafe_data_ptr_access else throw_on_mutable_data_ptr)(made)
        vars(made).update(fields[place])
        return made

    def key_of(mode: Any, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if mode.shape_env is None:
            # Not, as torch has it, whether ops are being traced: that matters where sizes are symbols.
            inferring = torch.is_inference_mode_enabled()
            key = [func, torch.get_default_dtype(), default_device(), inferring, *kwargs]
            with DisableTorchFunction():
                if _noted(args, mode, key) and _noted(kwargs.values(), mode, key):
                    return tuple(key)
        return slow_key(mode, state, func, args, kwargs)

    def output_of(mode: Any, state: Any, entry: Any, key: Any, *call: Any) -> Any:
        # torch remembers no entry whose result, made like this, has other dispatch keys.
        like = entry.metadata
        if type(key) is not tuple or like is None:
            return slow_output(mode, state, entry, key, *call)
        shape, stride = like.shape, like.stride
        with DisableTorchDispatch(), DisableTorchFunction():
            x = torch.empty_strided(shape, stride, dtype=like.dtype, device="meta")
            if entry.view_idx is not None:
                x.set_(call[-1][entry.view_idx].untyped_storage(), like.storage_offset, shape, stride)
            return fake(mode, like.device, x, requires_grad=like.requires_grad)

    def alias_of(x: Any, include_real: bool = False) -> Any:
        """A graph's nodes have one of each value."""
        if type(x) is not FakeTensor or x.fake_mode.shape_env is not None or x.real_tensor is not None:
            return slow_alias(x, include_real)
        with DisableTorchDispatch(), DisableTorchFunction():
            return fake(x.fake_mode, x.fake_device, x, requires_grad=False)

    with (
        replaced(FakeTensorMode, _cache_key=key_of, _get_output_tensor_from_cache_entry=output_of),
        replaced(proxy_tensor, snapshot_fake=alias_of),
    ):
        yield


def _noted(values: Iterable[Any], mode: Any, key: list[Any]) -> bool:
    """Whether `key` could be given all that these arguments are like."""
    for x in values:
        kind = type(x)
        if kind is FakeTensor:
            if x.fake_mode is not mode or x.constant is not None or x.layout is not torch.strided:
                return False
            key.append((
                x.dtype, x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes(), x.fake_device,
                x.requires_grad, dispatch_keys(x).raw_repr(),
            ))  # fmt: skip
        elif kind in _PLAIN:
            key += kind, x
        elif isinstance(x, list | tuple):
            key += kind, len(x)
            if not _noted(x, mode, key):
                return False
        else:
            return False
    return True

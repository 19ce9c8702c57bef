"""The signature of one call of an op: its name and its arguments, with shapes in place of tensors.

What an op allocates while it runs follows from its signature (on one device, torch and set of flags), so
that measured costs are found by it.
"""

from __future__ import annotations

from typing import Any, Final

DEVICE: Final = "device"  # stands for every argument that is a device
Signature = tuple[Any, ...]  # hashable; a tensor is its shape, its stride in elements, and its type


def of_call(func: Any, args: Any, kwargs: Any, out: Any) -> Signature:
    """The signature of a call that has been made."""
    return str(func), _plain(args), _plain([x for pair in sorted(kwargs.items()) for x in pair]), _plain(out)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    if hasattr(value, "untyped_storage"):
        strided = str(value.layout) == "torch.strided"
        stride = tuple(int(d) for d in value.stride()) if strided else ()
        return tuple(int(d) for d in value.shape), stride, str(value.dtype)
    if type(value).__name__ == "device":
        return DEVICE  # the same call on a laptop's fake tensors and on the GPU
    text = str(value)  # a dtype, a layout, a memory format
    return text if len(text) < 64 and "0x" not in text else type(value).__name__

"""Carry objects in hand to another process: code by its name, tensors by their layout, small ones with their values.

Values mean nothing on the null driver, so a model of any size is a small file; but whole numbers and whatever is small
(lengths, indices, flags) may decide what forward does on the host.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from traces.errors import SpecError

SMALL_BYTES: Final = 1 << 16  # a storage that keeps its values


class _Storage:
    """What stands for a storage: pickle makes one of it, however many tensors share it."""

    def __init__(self, nbytes: int, values: bytes) -> None:
        self.nbytes, self.values = nbytes, values
        self._made: Any = None

    def made(self) -> Any:
        """The storage in this process: untouched pages, which take no memory, where it has no values."""
        if self._made is None:
            self._made = torch.UntypedStorage(self.nbytes)
            if self.values:
                self._made.copy_(
                    torch.frombuffer(bytearray(self.values), dtype=torch.uint8).untyped_storage()
                )
        return self._made

    def __reduce__(self) -> Any:
        return _Storage, (self.nbytes, self.values)


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)
        self._storages: dict[int, _Storage] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return torch.Generator, ()
        if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            return NotImplemented
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            values = b""
            if value.device.type == "cpu" and 0 < storage.nbytes() <= SMALL_BYTES:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                values = bytes(whole.numpy())
            self._storages[key] = _Storage(storage.nbytes(), values)
        layout = str(value.dtype), value.storage_offset(), tuple(value.shape), value.stride()
        return _rebuilt, (type(value), self._storages[key], *layout, value.requires_grad)


def _rebuilt(
    kind: type, storage: _Storage, dtype: str, offset: int, shape: Any, stride: Any, requires_grad: bool
) -> torch.Tensor:
    x = torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")))
    x.set_(storage.made(), offset, shape, stride)
    if kind is nn.Parameter:
        return nn.Parameter(x, requires_grad)
    return x.requires_grad_(requires_grad)


def save(objects: Any, path: Path) -> None:
    """Write objects to a file.

    Raises:
        SpecError: they cannot be carried; says which and why.
    """
    file = io.BytesIO()
    try:
        _Pickler(file).dump(objects)
    except Exception as error:  # whatever an object's own code raises
        text = " ".join(str(error).split())[:200]
        raise SpecError(f"these objects cannot be carried to another process: {text}") from None
    if b"__main__" in file.getvalue():
        raise SpecError("they are made by code of the script that runs, which another process does not have")
    path.write_bytes(file.getvalue())


def load(path: Path) -> Any:
    """The objects in a file that `save` wrote in this user's own process."""
    return pickle.loads(path.read_bytes())

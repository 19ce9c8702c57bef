"""Carry objects in hand to another process: tensors by their layout, small ones with their values, and their code.

Values mean nothing on the null driver, so a model of any size is a small file; but what is small (lengths, indices,
flags) may decide what forward does on the host. Code goes by its name where another process can import it; a script's
or a notebook's own functions and classes, and lambdas, go as they are.
"""

from __future__ import annotations

import io
import marshal
import pickle
import sys
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from traces.errors import SpecError

SMALL_BYTES: Final = 1 << 16  # a storage that keeps its values


class _Storage:
    """The stand-in for a storage: pickle makes one of it, however many tensors share it."""

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
        if isinstance(value, types.ModuleType):
            return import_module, (value.__name__,)
        if isinstance(value, staticmethod | classmethod):
            return type(value), (value.__func__,)
        if isinstance(value, property):
            return property, (value.fget, value.fset, value.fdel, value.__doc__)
        if isinstance(value, types.FunctionType) and not _importable(value):
            # By its code and what that refers to, which may be the function itself.
            used = {k: value.__globals__[k] for k in _names(value.__code__) if k in value.__globals__}
            cells = [c.cell_contents for c in value.__closure__ or ()]
            defaults = {"defaults": value.__defaults__, "by_name": value.__kwdefaults__}
            made = marshal.dumps(value.__code__), len(cells)
            return _function, made, {"globals": used, "cells": cells, **defaults}, None, None, _completed
        if isinstance(value, type) and value.__module__ == "__main__":
            own = {k: v for k, v in vars(value).items() if k not in ("__dict__", "__weakref__")}
            return types.new_class, (value.__name__, value.__bases__), own, None, None, _filled
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


def _importable(value: Any) -> bool:
    """True if another process finds the very function by its name."""
    found: Any = sys.modules.get(value.__module__) if value.__module__ != "__main__" else None
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _function(code: bytes, cells: int) -> types.FunctionType:
    own: dict[str, Any] = {"__builtins__": __builtins__, "__name__": "carried"}
    closure = tuple(types.CellType() for _ in range(cells))
    return types.FunctionType(marshal.loads(code), own, closure=closure)


def _completed(function: types.FunctionType, state: dict[str, Any]) -> None:
    function.__globals__.update(state["globals"])
    for cell, value in zip(function.__closure__ or (), state["cells"], strict=True):
        cell.cell_contents = value
    function.__defaults__, function.__kwdefaults__ = state["defaults"], state["by_name"]


def _filled(made: type, own: dict[str, Any]) -> None:
    for name, value in own.items():
        setattr(made, name, value)


def _rebuilt(
    kind: type, storage: _Storage, dtype: str, offset: int, shape: Any, stride: Any, requires_grad: bool
) -> torch.Tensor:
    x = torch.empty(0, dtype=getattr(torch, dtype.removeprefix("torch.")))
    x.set_(storage.made(), offset, shape, stride)
    if kind is nn.Parameter:
        return nn.Parameter(x, requires_grad)
    return x.requires_grad_(requires_grad)


def save(objects: Any, path: Path) -> None:
    """Write objects to a file. Raises SpecError: they cannot be carried; says which and why."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(objects)
    except Exception as error:  # whatever an object's own code raises
        text = " ".join(str(error).split())[:200]
        raise SpecError(
            f"these objects cannot be carried to another process: {text}. Put what makes them into a function of a "
            "file and trace that (file.py:build), or trace with --device cuda on the GPU."
        ) from None
    path.write_bytes(file.getvalue())


def load(path: Path) -> Any:
    """The objects in a file that `save` wrote in this user's own process."""
    return pickle.loads(path.read_bytes())

"""Empty the caches in which a model's code keeps tensors between calls, so that no fake one outlives its capture.

`functools.lru_cache` around a function that makes a table (an index of relative positions, say) gives the tensor of
the first call to all later ones. Made on fake tensors, it would turn up in another capture, or in the real step.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Final

from torch import nn

_SIGNS: Final = ("Unexpected fake buffer", "in tensor_tracker")  # how torch says so; the second is 2.11's


@contextmanager
def emptied_caches(model: nn.Module) -> Iterator[None]:
    """The caches of functions in the classes and files of a model's modules are empty when the body begins and ends."""
    caches = list(_caches(model))
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


def holds_kept_tensor(error: BaseException) -> bool:
    """Whether a capture failed on a tensor that its own first pass had left in a cache."""
    return any(sign in str(error) for sign in _SIGNS)


def _caches(model: nn.Module) -> Iterator[Any]:
    classes = {c for m in model.modules() for c in type(m).__mro__ if not c.__module__.startswith("torch.")}
    spaces = [*classes, *(sys.modules[n] for n in {c.__module__ for c in classes} if n in sys.modules)]
    found = {}
    for space in spaces:
        if space is object or getattr(space, "__name__", "") in sys.builtin_module_names:
            continue
        for value in vars(space).values():
            try:
                function = getattr(value, "__func__", value)  # of a static or a class method
            except Exception:  # a lazy import that says what to install
                continue
            cells = function.__closure__ or () if isinstance(function, FunctionType) else ()
            inside = [c.cell_contents for c in cells if c != type(c)()]  # an empty cell has no contents
            for candidate in (function, *inside):
                if isinstance(candidate, functools._lru_cache_wrapper):
                    found[id(candidate)] = candidate
    yield from found.values()

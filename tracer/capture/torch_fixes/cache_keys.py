"""Tell apart the fake tensors that an op is given by one tuple each, where torch goes through their sizes one by one.

torch remembers what an op makes of fake tensors by a key of all that its arguments are like. Making the keys takes a
tenth of a trace; of a tensor without symbolic sizes, its fields are a key as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final

from tracer.torch_api import TensorMetadata, replaced

_FIELDS: Final = attrgetter(*(f.name for f in dataclasses.fields(TensorMetadata)))


@contextmanager
def quick_keys() -> Iterator[None]:
    """In the body, fake tensors whose sizes are numbers have such keys."""
    one_by_one = TensorMetadata._flatten_into

    def at_once(self: Any, result: list[Any], mode: Any, state: Any) -> None:
        if mode.shape_env is None:
            result.append(_FIELDS(self))
        else:
            one_by_one(self, result, mode, state)

    with replaced(TensorMetadata, _flatten_into=at_once):
        yield

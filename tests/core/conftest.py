"""The tests of this tier run where there is no torch; where there is one, they cannot import it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

TORCH = ("torch", "torchvision", "transformers")


@pytest.fixture(autouse=True, scope="module")
def no_torch() -> Iterator[None]:
    loaded = {name for name in sys.modules if name.partition(".")[0] in TORCH}
    with pytest.MonkeyPatch.context() as patch:
        for name in loaded.union(TORCH):
            patch.setitem(sys.modules, name, None)
        yield

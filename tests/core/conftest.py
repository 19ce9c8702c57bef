"""The tests of this tier run where there is no torch; where there is one, they cannot import it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torch", "torchvision", "transformers"):
            patch.setitem(sys.modules, name, None)
        yield

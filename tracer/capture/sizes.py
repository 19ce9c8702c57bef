"""Put known sizes in the place of the symbols of a graph for calls of many sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Known = Mapping[Any, Any]  # symbol -> size


def number(x: Any, known: Known) -> int:
    """The value of a size or stride."""
    return x if isinstance(x, int) else int(x.node.expr.xreplace(known))


def at(x: torch.Tensor, known: Known) -> torch.Tensor:
    """A fake tensor like `x`, at sizes that are known; `x` itself if none of its own varies."""
    if all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return x
    shape, stride = (tuple(number(n, known) for n in ns) for ns in (x.shape, x.stride()))
    with x.fake_mode:
        return torch.empty_strided(
            shape, stride, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
        )

"""Compiled loops over the memory of CPU tensors, in as many threads as torch has."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from simulator.kernels.compiled import compiled

LEAST: Final = 1 << 16  # rows of a thread

__all__ = ["compiled", "over", "words"]


def words(x: torch.Tensor) -> np.ndarray:
    """The memory of a tensor without gaps, in the order in which it lies; numbers of 16 bits and of 8 as their bits."""
    flat = x.detach().as_strided((x.numel(),), (1,))
    bits = {1: torch.uint8, 2: torch.uint16}.get(x.itemsize)
    made: np.ndarray = (flat if bits is None else flat.view(bits)).numpy()
    return made


def over(loop: Callable[..., None], rows: int, *given: Any) -> None:
    """Run `loop(*given, begin, end)` over so many rows, which do not depend on each other.

    Threads are made anew each time: those of a process are not there after a fork.
    """
    threads = max(1, min(torch.get_num_threads(), rows // LEAST))
    if threads == 1:
        loop(*given, 0, rows)
        return
    edges = [rows * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda begin, end: loop(*given, begin, end), edges[:-1], edges[1:]))

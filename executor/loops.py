"""Compiled loops over the memory of CPU tensors, in as many threads as torch has."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

LEAST: Final = 1 << 19  # numbers of a thread


def bits_of(x: torch.Tensor) -> np.ndarray[Any, Any]:
    """The numbers of a tensor without gaps as their bits, in the order in which they lie in memory."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[x.itemsize]
    made: np.ndarray[Any, Any] = x.detach().as_strided((x.numel(),), (1,)).view(unsigned).numpy()
    return made


def over(loop: Callable[[int, int], None], rows: int, numbers: int) -> None:
    """Run `loop(begin, end)` over so many rows, of so many numbers in all, which do not depend on each other.

    Threads are made anew each time: those of a process are not there after a fork.
    """
    threads = max(1, min(torch.get_num_threads(), numbers // LEAST))
    if threads == 1:
        loop(0, rows)
        return
    edges = [rows * k // threads for k in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(loop, edges[:-1], edges[1:]))

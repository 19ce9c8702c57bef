"""Few-bit derivatives: intervals of an activation's input, and of each a point where its derivative is the mean there.

The intervals are those in which constants are nearest to the derivative, in squares over `REACH` on both sides of 0,
found by dynamic programming over a grid (Few-Bit Backward, Novikov et al. 2022, arXiv:2202.00441, section 3). What
comes back of an input is its interval's point, so that torch's own backward op gives the interval's constant.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Final

import torch

from executor.inverted.formulas import FORWARD

REACH: Final = 10.0
GRID: Final = 1000  # points


@cache
def intervals(activation: str, count: int) -> tuple[list[float], list[float]]:
    """So many best intervals' inner bounds, and their points."""
    edges = torch.linspace(-REACH, REACH, GRID + 1, dtype=torch.float64)
    slope = FORWARD[activation](edges).diff() / (2 * REACH / GRID)  # its mean between neighbours on the grid
    sums, squares = (torch.cat([v.new_zeros(1), v.cumsum(0)]) for v in (slope, slope * slope))
    size = torch.arange(GRID + 1)[None, :] - torch.arange(GRID + 1)[:, None]  # of the interval [row, column)
    means = (sums[None, :] - sums[:, None]) / size.clamp(min=1)
    costs = squares[None, :] - squares[:, None] - size * means * means
    costs[size <= 0] = float("inf")
    least, ways = costs[0], []
    for _ in range(count - 1):
        least, way = (least[:, None] + costs).min(0)
        ways.append(way)
    ends = [GRID]
    for way in reversed(ways):
        ends.append(int(way[ends[-1]]))
    parts = list(pairwise((0, *reversed(ends))))
    points = [a + int((slope[a:b] - means[a, b]).abs().argmin()) for a, b in parts]
    return edges[[a for a, _ in parts[1:]]].tolist(), (edges[points] + REACH / GRID).tolist()

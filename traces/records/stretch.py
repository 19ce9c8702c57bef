"""Stretch: ops of forward and backward around one wide value that can run in tiles, so that it never exists whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# How what an op makes grows with the tile.
ROWS: Final = "rows"  # as many rows as the tile has
WHOLE: Final = "whole"  # the same in every tile
SUM: Final = "sum"  # added up over the tiles
PRODUCT: Final = "product"  # added up by the matrix product itself, which makes no summand


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result of a tiled stretch."""

    op: int  # of the trace: the one that makes it there
    storage: int
    grows: str  # ROWS, SUM or PRODUCT


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Ops that run tile by tile in one call."""

    body: tuple[tuple[int, str], ...]  # the ops, in order, and how what they make grows
    inputs: tuple[tuple[int, int], ...]  # what they take from outside: the op (-1: none), and the storage
    results: tuple[Result, ...]  # what is left when all tiles are done


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch around a wide value, each row of which is made and used by itself; ids are of the trace.

    Either it leads from a matrix product to a sum over its rows, and backward is linear in one number, the factor,
    which is what it takes beside `inputs`: then all of it can run in forward, tile by tile, for a factor of one;
    backward multiplies the gradients by what it is. Or it leaves something narrow, and its backward is a part by
    itself, which makes again in each tile what it needs of forward.
    """

    storage: int  # the wide value
    rows: int  # how many it has: the most tiles
    body: tuple[tuple[int, str], ...]  # the ops, in order, and how what they make grows
    inputs: tuple[tuple[int, int], ...]  # what they take from outside: the op (-1: none), and the storage
    losses: tuple[Result, ...]  # what it leaves: sums; rows, too, if it has a backward
    gradients: tuple[Result, ...]  # none if it has a backward, whose results they are
    # Of each cross entropy, whose targets' weight is counted first: how many there are.
    weights: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()  # numbers of the model's outputs that do not exist any more
    backward: Part | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return what runs in one call each, by its phase."""
        first = Part(body=self.body, inputs=self.inputs, results=(*self.losses, *self.gradients))
        return (first,) if self.backward is None else (first, self.backward)

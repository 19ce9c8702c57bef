"""What cuDNN's recurrent nets need beside their inputs and outputs: the buffer of all weights, workspace and reserve.

cuDNN alone knows workspace and reserve (`cudnnGetRNNTempSpaceSizes`), and has published neither. So they are assumed,
here and nowhere else: the null driver's C is compiled with the tables below, and gives torch's own code that answer.

Counts: for backward the gates, the state and, of an LSTM, the cell of each step, layer and direction; while it runs,
the gates of one layer. Ignores: the algorithm (persistent kernels and those for small states differ), what dropout
between the layers keeps and its generator's state, padding, the steps that shorter sequences of a packed batch lack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

# By the cell's number in cuDNN: a net with relu, with tanh, LSTM, GRU.
GATES: Final = (1, 1, 4, 3)
RESERVED: Final = (2, 2, 6, 4)  # states of one step that are kept


def temporary_bytes(
    cell: int, hidden: Any, layers: int, ways: int, longest: Any, batch: Any, item_bytes: int
) -> tuple[Any, Any]:
    """Workspace of each call, and reserve from forward to backward.

    Args:
        cell: see GATES. hidden: size of the state, before a projection. ways: directions. longest: steps.
    """
    states = longest * batch * ways * hidden * item_bytes
    return states * GATES[cell], states * layers * RESERVED[cell]


def flat_weights(
    cell: int, inputs: int, hidden: int, projection: int, layers: int, ways: int
) -> tuple[int, list[list[int]]]:
    """The one buffer of all weights: how many elements it has, and by layer and direction where the weights begin, in
    torch's order (of the input, of the state, their biases, a projection). There is room for biases also without."""
    out, rows = projection or hidden, GATES[cell] * hidden
    places, at = [], 0
    for layer in range(layers * ways):
        columns = inputs if layer < ways else out * ways
        places.append([at, at + rows * columns, at + rows * (columns + out)])
        at += rows * (columns + out) + projection * hidden
    for k, (of_input, of_state, projected) in enumerate(places):
        biases = at + 2 * rows * k
        places[k] = [of_input, of_state, biases, biases + rows, *([projected] if projection else [])]
    return at + 2 * rows * len(places), places


def steps(x: Any, batch_first: bool, batch_sizes: Sequence[int]) -> tuple[Any, Any]:
    """Steps of the longest sequence, and how many sequences there are; `batch_sizes` of a packed batch, else empty."""
    if batch_sizes:
        return len(batch_sizes), batch_sizes[0]
    return (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])


def recurrent_workspace(
    x: Any, cell: int, hidden: int, batch_first: bool, both_ways: bool, batch_sizes: Any
) -> int:
    """Bytes of the workspace of a call with the input `x`."""
    longest, batch = steps(x, batch_first, batch_sizes)
    return int(temporary_bytes(cell, hidden, 1, 1 + both_ways, longest, batch, x.item_bytes)[0])


def flops(x: Any, weights: Sequence[Any]) -> int:
    """Of forward: each step of each sequence is multiplied by every weight; twice as many in backward."""
    return 2 * math.prod(x.shape[:-1]) * sum(math.prod(w.shape) for w in weights)


def definitions() -> Iterator[str]:
    """The tables as the C compiler's arguments."""
    for name, table in (("GATES", GATES), ("RESERVED", RESERVED)):
        yield f"-DRNN_{name}={','.join(map(str, table))}"

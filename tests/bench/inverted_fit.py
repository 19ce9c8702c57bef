"""The coefficients of `executor/inverted/fits.py`: each activation's derivative as a function of its output.

python -m tests.bench.inverted_fit

A least squares fit with weights that are raised where the error is large (Lawson, 1961) comes to the one whose largest
error is least; a denominator is taken from the round before (Sanathanan and Koerner, 1963). All in double precision.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable

import click
import numpy as np

Array = np.ndarray
Function = Callable[[Array], Array]

erfc = np.vectorize(math.erfc, otypes=[float])


def sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x > 0, 1, small) / (1 + small)


def gelu(x: Array) -> Array:
    return x / 2 * erfc(-x / math.sqrt(2))


def gelu_slope(x: Array) -> Array:
    return erfc(-x / math.sqrt(2)) / 2 + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


TANH = 2 * math.sqrt(2 / math.pi)


def gelu_tanh(x: Array) -> Array:
    return x * sigmoid(TANH * (x + 0.044715 * x**3))


def gelu_tanh_slope(x: Array) -> Array:
    z = TANH * (x + 0.044715 * x**3)
    return sigmoid(z) * (1 + x * sigmoid(-z) * TANH * (1 + 3 * 0.044715 * x * x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def silu_slope(x: Array) -> Array:
    return sigmoid(x) * (1 + x * sigmoid(-x))


# The function, its derivative, and the output from which on the derivative is taken to be constant: 1 within 1e-6.
FUNCTIONS: dict[str, tuple[Function, Function, float]] = {
    "gelu": (gelu, gelu_slope, 5.5),
    "gelu_tanh": (gelu_tanh, gelu_tanh_slope, 5.2),
    "silu": (silu, silu_slope, 16.0),
}


def minimum(slope: Function) -> float:
    low, high = -2.0, -0.3
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(np.array([middle]))[0] < 0 else (low, middle)
    return (low + high) / 2


def minimax(columns: Array, wanted: Array, bottoms: int = 0) -> tuple[float, Array]:
    """Coefficients with the least largest error; the last `bottoms` columns belong to the denominator 1 + ..."""
    weight, below = np.ones(len(wanted)), np.ones(len(wanted))
    tops = columns.shape[1] - bottoms
    best = (math.inf, np.zeros(columns.shape[1]))
    matrix = np.concatenate([columns[:, :tops], -wanted[:, None] * columns[:, tops:]], axis=1)
    for _ in range(400):
        rows = matrix * (np.sqrt(weight) / below)[:, None]
        scale = np.linalg.norm(rows, axis=0)
        found = np.linalg.lstsq(rows / scale, wanted * np.sqrt(weight) / below, rcond=None)[0] / scale
        bottom = 1 + columns[:, tops:] @ found[tops:]
        error = np.abs(columns[:, :tops] @ found[:tops] / bottom - wanted)
        if (bottom > 0).all() and error.max() < best[0]:
            best = (float(error.max()), found)
        below = np.where(bottom > 0, bottom, 1e-3)
        weight *= error + 1e-3 * error.max()
        weight /= weight.max()
    return best


def powers(t: Array, first: int, last: int) -> Array:
    return np.stack([t**k for k in range(first, last + 1)], axis=1)


def right_points(name: str) -> tuple[Array, Array]:
    """The square root of y - y_min, as dense at its ends as Chebyshev's points, and f'."""
    f, slope, top = FUNCTIONS[name]
    x_min = minimum(slope)
    y_min = f(np.array([x_min]))[0]
    x = np.linspace(x_min, top + 0.1, 400_001)
    root = np.sqrt(np.maximum(f(x) - y_min, 0))
    x = np.interp(math.sqrt(top - y_min) * (1 - np.cos(np.linspace(0, np.pi, 4000))) / 2, root, x)
    return np.sqrt(np.maximum(f(x) - y_min, 0)), slope(x)


def left_points(name: str) -> tuple[Array, Array, Array]:
    """The square root of -log(y / y_min), y / y_min down to 1e-37, and f'."""
    f, slope, _ = FUNCTIONS[name]
    x_min = minimum(slope)
    x = x_min - np.concatenate([3 * np.linspace(0, 1, 2000) ** 2, np.geomspace(3, 90, 3000)])
    share = np.minimum(f(x) / f(np.array([x_min]))[0], 1)
    x, share = x[share > 1e-37], share[share > 1e-37]
    return np.sqrt(-np.log(share)), share, slope(x)


def main() -> None:
    for name, (f, slope, top) in FUNCTIONS.items():
        x_min = minimum(slope)
        y_min = float(f(np.array([x_min]))[0])
        s, wanted = right_points(name)
        middle = round(math.sqrt(top - y_min) / 2, 2)  # powers of s itself would lose digits in float32
        t = s - middle
        columns = np.concatenate([s[:, None] * powers(t, 0, 6), powers(t, 1, 7)], axis=1)
        error, right = minimax(columns, wanted, bottoms=7)
        u, share, falling = left_points(name)
        left_error, left = minimax(share[:, None] * powers(u, 0, 8), falling)
        click.echo(
            f'    "{name}": Fit(\n        x_min={x_min!r}, y_min={y_min!r}, y_top={top}, middle={middle},'
        )
        for word, numbers in (("over", right[:7]), ("under", [1, *right[7:]]), ("left", left)):
            text = ", ".join(f"{float(c):.8g}" for c in numbers)
            click.echo(
                textwrap.fill(f"{word}=({text}),", 109, initial_indent=" " * 8, subsequent_indent=" " * 12)
            )
        click.echo(f"        error={max(error, left_error):.1e},\n    ),")


if __name__ == "__main__":
    main()

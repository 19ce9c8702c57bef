"""What packing and unpacking a value cost in each format, in processor time of one thread.

python -m tests.bench.packing [--elements 4194304] [--rounds 7]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click


@click.command()
@click.option("--elements", type=int, default=1 << 22, show_default=True)
@click.option("--rounds", type=int, default=7, show_default=True)
def main(elements: int, rounds: int) -> None:
    """Time each format on normal numbers, the least of so many rounds, in turns."""
    import torch

    from executor.codecs.payloads import pack, unpack
    from simulator.core.formats import FORMATS

    torch.set_num_threads(1)
    ways: dict[tuple[str, str, str], Callable[[], Any]] = {}
    for name, rule in FORMATS.items():
        format = f"{name}:gelu" if rule.of_activations else name
        for dtype in rule.dtypes:
            x = (torch.randn(elements).abs() * 9).to(getattr(torch, dtype))
            payload = pack(x, format)
            given = (payload, format, x.shape, x.stride(), x.dtype)
            ways[name, dtype, "pack"] = lambda x=x, format=format: pack(x, format)
            ways[name, dtype, "unpack"] = lambda given=given: unpack(*given)
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, run in ways.items():
            begin = time.process_time_ns()
            run()
            best[way] = min(best[way], (time.process_time_ns() - begin) / 1e6)
    click.echo(f"{'ms':24}{'pack':>8}{'unpack':>8}")
    for name, dtype, what in ways:
        if what == "pack":
            times = best[name, dtype, "pack"], best[name, dtype, "unpack"]
            click.echo(f"{f'{name} {dtype}':24}{times[0]:8.2f}{times[1]:8.2f}")


if __name__ == "__main__":
    main()

"""What backward from the output costs beside torch's own, and what it saves, in processor time and bytes.

python -m tests.bench.inverted [--elements 4194304] [--device cpu] [--json]

On the CPU one thread, processor time; on a GPU the time between events. The best of `--rounds`, in turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import click


@click.command()
@click.option("--elements", type=int, default=1 << 22, show_default=True)
@click.option("--rounds", type=int, default=15, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(elements: int, rounds: int, device: str, as_json: bool) -> None:
    """Time forward and backward of each activation both ways, and count what an MLP of four layers saves."""
    import torch

    torch.set_num_threads(1)
    rows = [
        times(kind, dtype, elements, rounds, device)
        for dtype in (torch.float32, torch.bfloat16)
        for kind in ("gelu", "gelu_tanh", "silu", "mish", "hardswish")
    ]
    answer = {"elements": elements, "device": device, "times_ms": rows, "saved_bytes": saved(device)}
    if as_json:
        click.echo(json.dumps(answer))
        return
    click.echo(f"{'ms':20}{'forward':>9}{'+ side':>9}{'backward':>10}{'from y':>9}{'ratio':>7}{'to gelu':>9}")
    for row in rows:
        gelu = next(r["backward"] for r in rows if r["dtype"] == row["dtype"])
        name = f"{row['kind']} {row['dtype']}"
        click.echo(
            f"{name:20}{row['forward']:9.2f}{row['forward_and_side']:9.2f}{row['backward']:10.2f}"
            f"{row['from_output']:9.2f}{row['from_output'] / row['backward']:7.2f}{row['from_output'] / gelu:9.2f}"
        )
    click.echo(
        "saved for backward, bytes: {torch:,} by torch, {inverted:,} from outputs".format(
            **answer["saved_bytes"]
        )
    )


def times(kind: str, dtype: Any, elements: int, rounds: int, device: str) -> dict[str, Any]:
    """Milliseconds of forward and backward, torch's and from the output."""
    import torch

    from executor.inverted import ops
    from executor.inverted.formulas import FORWARD

    x, grad = (torch.randn(elements, device=device).to(dtype) for _ in range(2))
    torchs = getattr(torch.ops.aten, f"{kind.removesuffix('_tanh')}_backward")
    options = {"approximate": "tanh"} if kind == "gelu_tanh" else {}
    y, side = ops.activate(x, kind)
    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: FORWARD[kind](x),
        "forward_and_side": lambda: ops.activate(x, kind),
        "backward": lambda: torchs(grad, x, **options),
        "from_output": lambda: ops.backward_from_output(grad, y, side, kind),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds + 2):
        for name, way in ways.items():
            best[name] = min(best[name], milliseconds(way, device))
    return {"kind": kind, "dtype": str(dtype).removeprefix("torch."), **best}


def milliseconds(way: Callable[[], Any], device: str) -> float:
    import torch

    if device == "cpu":
        begin = time.process_time_ns()
        way()
        return (time.process_time_ns() - begin) / 1e6
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    way()
    events[1].record()
    torch.cuda.synchronize()
    return float(events[0].elapsed_time(events[1]))


def saved(device: str) -> dict[str, int]:
    """What four layers of 1024 × (256 → 1024 → 256) save, with layer norms."""
    import torch
    from torch import nn

    from executor.inverted import convert

    found = {}
    for name in ("torch", "inverted"):
        blocks = [
            (nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        ]
        model = nn.Sequential(*(m for block in blocks for m in block)).to(device)
        if name == "inverted":
            convert(model)
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes: dict[int, int] = {}

        def note(t: Any, known: set[int] = known, sizes: dict[int, int] = sizes) -> Any:
            if t.untyped_storage().data_ptr() not in known:
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = model(torch.randn(1024, 256, device=device, requires_grad=True))
        found[name] = sum(sizes.values())
        del out
    return found


if __name__ == "__main__":
    main()

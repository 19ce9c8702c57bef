"""Step times that others measured on GPUs, beside those that the roofline predicts.

python -m tests.bench.times [-o FILE.json] [--table FILE.md]

The rows are tests/published/times.csv: models of timm in their benchmark (AMP, SGD), and the transformers of Stanford's
course CS336 (forward and backward, with or without the course's AdamW), by the mean step time that was published (see
SOURCES). Every second row of each GPU is fitted: the efficiencies are chosen for these rows and judged on the others.
Every row is added to FILE as soon as it is there. Needs no GPU, and no CUDA build of torch.

Counts: the sum of the times of all ops, each by itself. Ignores: what the host takes to ask for them, which decides
where a GPU is faster than Python; what is measured is then more than what is predicted.
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch

from tests.published.models import SIZES, AdamW, Transformer, cross_entropy
from tracer import trace
from tracer.costs import roofline
from traces.devices import Device, device
from traces.errors import LowtideError
from traces.records.trace import VIEW, Trace

ROWS = Path("tests/published/times.csv")
SOURCES = {
    "timm": "huggingface/pytorch-image-models results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv",
    "id-l4-h100": "a student's results of CS336 on an L4 and an H100, context 256 (repository not known)",
    "rtx4090": "a student's 'RTX 4090 Formal Benchmark Results', 2026-04-27 (repository not known)",
    "rtx4090-wsl": "a student's 'Benchmark Summary', RTX 4090 under WSL2, float16 (repository not known)",
    "yyin": "yyin-dev/cs336-a2 data/e2e_benchmark, an A100 with 40 GB",
    "gao": "GAOYUEtianc/Stanford-CS336-assignments assignment2-systems/answers.md, an A100 PCIe; its float32 is TF32",
}
KEYS = ("model", "batch_size", "size", "types", "optimizer", "gpu")


class Fit(NamedTuple):
    """What of a device's peaks is reached, and microseconds that each op takes beside its work."""

    compute: float
    bandwidth: float
    launch_us: float


NOW = Fit(roofline.COMPUTE_EFFICIENCY, roofline.BANDWIDTH_EFFICIENCY, device("h100").launch_ns / 1e3)
GRID = [
    Fit(c / 20, b / 20, launch)
    for c, b, launch in itertools.product(range(8, 20), range(6, 20), (0, 3, 5, 8, 12, 16, 20, 25))
]


def rows() -> list[dict[str, str]]:
    """The table."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def step_of(row: dict[str, str]) -> Trace:
    """The row's step, recorded for its GPU."""
    kind, _, name = row["model"].partition(":")
    batch, size, types = int(row["batch_size"]), int(row["size"]), row["types"]
    amp = types if types in ("float16", "bfloat16") else None
    if kind == "timm":
        return trace(
            row["model"],
            optimizer=row["optimizer"],
            target=row["gpu"],
            amp=amp,
            batch_size=batch,
            image_size=size,
        )
    with torch.device("meta"):
        model = Transformer(size, *SIZES[name])
        ids = torch.zeros(batch, size, dtype=torch.long)
    if types == "half":
        model = model.half()
    optimizer = AdamW if row["optimizer"] == "course" else None
    torch.backends.cuda.matmul.allow_tf32 = types == "tf32"
    return trace(model, (ids, ids), loss=cross_entropy, optimizer=optimizer, target=row["gpu"], amp=amp)


def made(row: dict[str, str]) -> dict[str, Any]:
    """What the row's ops are: how many, and of each its arithmetic and bytes."""
    ops = step_of(row).ops
    work = [
        (f, b) for f, b, flags in zip(ops.flops, ops.bytes_moved, ops.flags, strict=True) if not flags & VIEW
    ]
    return {**{k: row[k] for k in KEYS}, "work": work}


def seconds(work: np.ndarray, row: dict[str, str], fit: Fit) -> float:
    """The sum of the ops' times: `tracer.costs.roofline.op_time_ns` with other efficiencies."""
    board: Device = device(row["gpu"])
    types = {"": "float32", "tf32": "float32", "half": "float16"}.get(row["types"], row["types"])
    peak = board.peak_flops_per_s(types, tf32=row["types"] == "tf32")
    flops, moved = work.T
    each = np.maximum(flops / (fit.compute * peak), moved / (fit.bandwidth * board.bandwidth_bytes_per_s))
    return float(each.sum() + len(work) * fit.launch_us * 1e-6)


def off(found: Iterable[dict[str, Any]], fit: Fit) -> list[float]:
    """By how much predictions are above what was measured, in percent."""
    return [100 * (1e3 * seconds(r["work"], r, fit) / float(r["ms"]) - 1) for r in found]


def median(found: Iterable[dict[str, Any]], fit: Fit) -> float:
    """The median of the errors' sizes, in percent."""
    return statistics.median(map(abs, off(found, fit)))


def halves(found: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every second row of each GPU, and the others."""
    by_gpu = sorted(found, key=lambda r: r["gpu"])
    groups = [list(g) for _, g in itertools.groupby(by_gpu, key=lambda r: r["gpu"])]
    return [r for g in groups for r in g[::2]], [r for g in groups for r in g[1::2]]


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("times.json"))
@click.option("--table", type=click.Path(path_type=Path), help="Write all rows as a Markdown table.")
def main(output: Path, table: Path | None) -> None:
    """Record what is not in FILE yet, and print the errors."""
    there = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for row in rows():
        key = " ".join(row[k] for k in KEYS)
        if key not in there:
            try:
                there[key] = made(row)
            except LowtideError as error:
                click.echo(f"{key}: {error}", err=True)
                continue
            output.write_text(json.dumps(there), encoding="utf-8")
    measured = {" ".join(row[k] for k in KEYS): row["ms"] for row in rows()}
    for r in there.values():
        r["work"] = np.asarray(r["work"], float)
    found = [{**r, "ms": measured[key]} for key, r in there.items() if key in measured]
    fitted, judged = halves(found)
    best = min(GRID, key=lambda fit: median(fitted, fit))
    lines = [f"{len(found)} rows; now {NOW}: median error {median(found, NOW):.1f} %"]
    lines.append(
        f"fitted {best}: {median(fitted, best):.1f} % on its half, {median(judged, best):.1f} % on the other"
    )
    for gpu in sorted({r["gpu"] for r in found}):
        of = [r for r in found if r["gpu"] == gpu]
        lines.append(
            f"  {gpu:9} {len(of):3} rows: now {median(of, NOW):5.1f} %, fitted {median(of, best):5.1f} %"
        )
    click.echo("\n".join(lines))
    if table:
        head = "| step | GPU | measured, ms | now | fitted |\n|---|---|--:|--:|--:|\n"
        body = [
            f"| {r['model']} {r['batch_size']} x {r['size']} {r['types']} {r['optimizer']} | {r['gpu']} | {r['ms']} "
            f"| {off([r], NOW)[0]:+.0f} % | {off([r], best)[0]:+.0f} % |"
            for r in found
        ]
        table.write_text(head + "\n".join(body) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

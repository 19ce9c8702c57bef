"""Step times that were measured on GPUs, beside those that the roofline predicts.

python -m tests.bench.times [-o FILE.json]

The rows are tests/published/times.csv: models of timm in their benchmark (AMP, SGD), the transformers of Stanford's
course CS336 (forward and backward, with or without the course's AdamW), and steps that were measured here, by the mean
or median step time (see SOURCES). Every second row of each GPU is fitted: the numbers of tracer.costs were chosen for
these rows and are judged on the others. Every row is added to FILE as soon as it is there. Needs no GPU, and no CUDA
build of torch.
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch

from tests.published.models import SIZES, AdamW, Transformer, cross_entropy
from tracer import trace
from tracer.costs.cost import costs_of
from tracer.costs.roofline import PRODUCTS, compute_dtype, op_kind
from tracer.costs.rows import OpRow
from traces.devices import device
from traces.errors import LowtideError
from traces.records.trace import VIEW, Trace

ROWS = Path("tests/published/times.csv")
OWN: Final = "own"
SOURCES = {
    OWN: "a plain loop, the median of 10 steps, torch 2.11 with CUDA 13, measured here",
    "timm": "huggingface/pytorch-image-models results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv",
    "id-l4-h100": "a student's results of CS336 on an L4 and an H100, context 256 (repository not known)",
    "rtx4090": "a student's 'RTX 4090 Formal Benchmark Results', 2026-04-27 (repository not known)",
    "rtx4090-wsl": "a student's 'Benchmark Summary', RTX 4090 under WSL2, float16 (repository not known)",
    "yyin": "yyin-dev/cs336-a2 data/e2e_benchmark, an A100 with 40 GB",
    "gao": "GAOYUEtianc/Stanford-CS336-assignments assignment2-systems/answers.md, an A100 PCIe; its float32 is TF32",
}
KEYS = ("model", "batch_size", "size", "types", "optimizer", "gpu")


def rows() -> list[dict[str, str]]:
    """The table."""
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def step_of(row: dict[str, str]) -> Trace:
    """The row's step, recorded for its GPU."""
    kind, _, name = row["model"].partition(":")
    batch, size, types = int(row["batch_size"] or 0), int(row["size"] or 0), row["types"]
    amp = types if types in ("float16", "bfloat16") else None
    torch.backends.cuda.matmul.allow_tf32 = types == "tf32"
    if row["source"] == OWN:
        given: dict[str, Any] = {"batch_size": batch, "seq_len": size, "amp": amp}
        return trace(row["model"], target=row["gpu"], **{k: v for k, v in given.items() if v})
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
    return trace(model, (ids, ids), loss=cross_entropy, optimizer=optimizer, target=row["gpu"], amp=amp)


def made(row: dict[str, str]) -> dict[str, Any]:
    """What the row's ops are: of each its arithmetic and bytes, and as what they are looked up."""
    step = step_of(row)
    ops, storages, work = step.ops, step.storages, []
    for i, target in enumerate(ops.target):
        if ops.flags[i] & VIEW:
            continue
        tensors = [
            torch.empty(storages.shape[s], dtype=getattr(torch, storages.dtype[s]), device="meta")
            for s in (*ops.reads[i], *ops.writes[i])
        ]
        flat = [x.flatten(0, -2) if x.dim() > 1 else x for x in tensors]  # as a matrix product sees them
        args = json.loads(ops.arguments[i] or "[]")
        kind = op_kind(target, args, flat if target.split(".")[1] in PRODUCTS else tensors)
        work.append((ops.flops[i], ops.bytes_moved[i], compute_dtype(tensors, kind), kind))
    return {**{k: row[k] for k in KEYS}, "work": work}


def predicted_ms(found: dict[str, Any]) -> float:
    """The time of a step of such ops."""
    ops = [
        OpRow(name="", target="", phase="", flops=f, bytes_moved=b, dtype=t, kind=k)
        for f, b, t, k in found["work"]
    ]
    return sum(c.time_ns for c in costs_of(ops, [0] * len(ops), device(found["gpu"]))) / 1e6


def halves(found: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every second row of each GPU, and the others."""
    by_gpu = sorted(found, key=lambda r: r["gpu"])
    groups = [list(g) for _, g in itertools.groupby(by_gpu, key=lambda r: r["gpu"])]
    return [r for g in groups for r in g[::2]], [r for g in groups for r in g[1::2]]


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("times.json"))
def main(output: Path) -> None:
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
    measured = {" ".join(row[k] for k in KEYS): float(row["ms"]) for row in rows()}
    found = [{**there[key], "ms": ms} for key, ms in measured.items() if key in there]
    for r in found:
        r["off"] = 100 * (predicted_ms(r) / r["ms"] - 1)
    for gpu in ("", *sorted({r["gpu"] for r in found})):
        parts = [part for part in halves([r for r in found if gpu in ("", r["gpu"])]) if part]
        told = [f"{statistics.median(abs(r['off']) for r in part):5.1f} % of {len(part):3}" for part in parts]
        click.echo(f"{gpu or 'all':9} median error: {', others '.join(told)} rows")
    for r in found:
        click.echo(f"{r['off']:+5.0f} % beside {r['ms']:8.2f} ms: {' '.join(r[k] for k in KEYS if r[k])}")


if __name__ == "__main__":
    main()

"""Step times that others measured on GPUs, beside those that the roofline predicts.

python -m tests.bench.times [-o FILE.json]

The rows are tests/published/times.csv: models of timm in their benchmark (AMP, SGD), and the transformers of Stanford's
course CS336 (forward and backward, with or without the course's AdamW), by the mean step time that was published (see
SOURCES). Every row is added to FILE as soon as it is there. Needs no GPU, and no CUDA build of torch.

Counts: the sum of the times of all ops, each by itself. Ignores: what the host takes to ask for them, which decides
where a GPU is faster than Python; what is measured is then more than what is predicted.
"""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import click
import torch

from tests.published.models import SIZES, AdamW, Transformer, cross_entropy
from tracer import trace
from tracer.costs.roofline import op_time_ns
from traces.devices import device
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


def predicted_ms(row: dict[str, str]) -> float:
    """The sum of the times of the row's ops."""
    board, ops = device(row["gpu"]), step_of(row).ops
    tf32 = row["types"] == "tf32"
    types = {"": "float32", "tf32": "float32", "half": "float16"}.get(row["types"], row["types"])
    work = zip(ops.flops, ops.bytes_moved, ops.flags, strict=True)
    return (
        sum(op_time_ns(f, moved, types, board, tf32=tf32) for f, moved, flags in work if not flags & VIEW)
        / 1e6
    )


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("times.json"))
def main(output: Path) -> None:
    """Record what is not in FILE yet, and print the errors."""
    there = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    errors: dict[str, list[float]] = {}
    for row in rows():
        key = " ".join(row[k] for k in KEYS)
        if key not in there:
            try:
                there[key] = predicted_ms(row)
            except LowtideError as error:
                click.echo(f"{key}: {error}", err=True)
                continue
            output.write_text(json.dumps(there), encoding="utf-8")
        off = 100 * (there[key] / float(row["ms"]) - 1)
        click.echo(f"{key}: measured {row['ms']} ms, predicted {off:+.0f} %")
        for of in (row["gpu"], "all"):
            errors.setdefault(of, []).append(off)
    for of, found in sorted(errors.items()):
        click.echo(f"{of:9} {len(found):3} rows: median error {statistics.median(map(abs, found)):5.1f} %")


if __name__ == "__main__":
    main()

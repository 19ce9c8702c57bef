"""What `trace` and `simulate` predict for a GPU, beside what torch's own CUDA code allocates on the null driver.

python -m tests.bench.rehearsed [--models a,b] [--gpu h100,t4] [--amp none,bfloat16] [--plans] [-o FILE.json] [--json]

Needs a CUDA build of torch, and no GPU; trace and rehearsal use the same torch. A row is one model, GPU and type:
predicted and rehearsed peaks of a steady iteration, requested (sums of tensors) and allocated (in blocks), and of
reserved memory; with `--plans` also of plans at 70 and 50 % of the step's own peak. Every row is added to FILE as soon
as it is there, and rows that FILE has are not made again. Buffers that cuDNN asks for count as empty on both sides: the
null driver takes none, and no rule predicts them. Provenance of what is rehearsed: torch's own code, no GPU.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from executor.rehearsal import rehearse
from executor.rehearsal.record import Rehearsal
from simulator import api
from simulator.core.problem import Problem
from simulator.studies.prediction import untouched_fit
from tests.bench.architectures import CONFIGS, SEGMENTATION
from tracer import trace
from traces.errors import LowtideError
from traces.measurement import RunFigures
from traces.provenance import REHEARSED

ARCHITECTURES = Path("tests/bench/architectures.py")
VISION = {"batch_size": 32}
LANGUAGE = {"batch_size": 8, "seq_len": 256}
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("resnet18", "resnet50", "mobilenet_v2", "vit-small"), VISION),
    **dict.fromkeys(("bert-small", "gpt2-small", "t5-small", "llama-small"), LANGUAGE),
    **dict.fromkeys(
        ("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t",
         "mnasnet1_0", "mobilenet_v3_large", "regnet_y_400mf", "resnet152", "resnext50_32x4d", "shufflenet_v2_x1_0",
         "squeezenet1_1", "swin_t", "swin_v2_t", "vgg16_bn", "vit_b_16"),
        VISION,
    ),
    **{f"{ARCHITECTURES}:{name}": {} for name in (*CONFIGS, *SEGMENTATION)},
    **dict.fromkeys(("bert-base", "gpt2", "t5-base"), LANGUAGE),
}  # fmt: skip
BUDGETS = ("70%", "50%")
FIGURES = {
    "requested": "peak_allocated_bytes",
    "allocated": "peak_block_bytes",
    "reserved": "peak_reserved_bytes",
}


HEAD = f"""# Predicted beside rehearsed

Peaks in bytes of a steady iteration of the untouched loop, and of plans for a share of the captured graph's peak;
rehearsed: {REHEARSED}. Percent: by how much the prediction is higher. Buffers of cuDNN count as empty on both sides.
Made by `python -m tests.bench.rehearsed`.

"""


def row_of(model: str, gpu: str, options: dict[str, Any], *, plans: bool) -> Iterator[dict[str, Any]]:
    """The untouched step of one model, and its planned ones."""
    name = model.rpartition(":")[2]
    key = {
        "model": name,
        "gpu": gpu,
        "amp": options.get("amp", ""),
        "optimizer": options.get("optimizer", ""),
    }
    recorded = trace(model, target=gpu, profile=False, **options)
    problem = Problem(recorded)
    untouched = untouched_fit(api.simulate(problem)).figures()
    found = rehearse(model, gpu, options=options, script=False)
    yield {
        **key,
        "way": "untouched",
        "counted": bool(recorded.meta.untouched_peak_bytes),
        **beside(untouched, found),
    }
    for budget in BUDGETS if plans else ():
        plan = api.plan(problem, budget, seconds=1)
        with tempfile.TemporaryDirectory() as folder:
            path = plan.save(Path(folder) / "plan.json")
            found = rehearse(model, gpu, options=options, script=False, plan=path)
        yield {**key, "way": budget, **beside(api.simulate(problem, plan).planned_figures, found)}


def beside(predicted: RunFigures, found: Rehearsal) -> dict[str, Any]:
    """Predicted and rehearsed bytes, their difference in bytes and in percent of what was rehearsed."""
    out: dict[str, Any] = {"torch": found.environment["torch"]}
    for name, key in FIGURES.items():
        ours, theirs = getattr(predicted, key), getattr(found.figures, key)
        out[f"{name}_predicted_bytes"], out[f"{name}_rehearsed_bytes"] = ours, theirs
        out[f"{name}_off_percent"] = round(100 * (ours - theirs) / theirs, 4)
    return out


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the absolute differences in percent: their median and 95th percentile; and the lowest prediction."""
    out: dict[str, Any] = {"rows": len(rows)}
    for name in FIGURES:
        off = [r[f"{name}_off_percent"] for r in rows]
        sizes = sorted(map(abs, off))
        out[name] = {
            "median_percent": statistics.median(sizes),
            "p95_percent": sizes[max(0, math.ceil(0.95 * len(sizes)) - 1)],
            "lowest_percent": min(off),
        }
    return out


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of all rows, the untouched first."""
    head = (
        "model",
        "GPU",
        "autocast",
        "step",
        "allocated, rehearsed",
        "predicted",
        "reserved, rehearsed",
        "predicted",
    )
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|---|--:|--:|--:|--:|"]
    for r in sorted(rows, key=lambda r: (r["way"] != "untouched", r["way"], r["model"], r["gpu"], r["amp"])):
        cells = [r["model"], r["gpu"], r["amp"] or "-", r["way"]]
        for name in ("allocated", "reserved"):
            cells += [f"{r[f'{name}_rehearsed_bytes']:,}", f"{r[f'{name}_off_percent']:+.3f} %"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def summaries(rows: list[dict[str, Any]]) -> str:
    """The summary of each way as lines of Markdown."""
    lines = [""]
    for way, found in _answer(rows)["summary"].items():
        for name in FIGURES:
            f = found[name]
            lines.append(
                f"- {way}, {found['rows']} rows, {name}: off by {f['median_percent']} % in the median, by "
                f"{f['p95_percent']} % at the 95th percentile; lowest {f['lowest_percent']:+} %"
            )
    return "\n".join(lines) + "\n"


def _asked(models: str, gpus: str, amps: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    names = models.split(",") if models else list(MODELS)
    for gpu in gpus.split(","):
        for amp in amps.split(","):
            for name in names:
                model = name if name in MODELS else f"{ARCHITECTURES}:{name}"
                yield model, gpu, {**MODELS.get(model, {}), **({} if amp == "none" else {"amp": amp})}


@click.command()
@click.option("--models", default="", help="Names of MODELS; without it all of them.")
@click.option("--gpu", "gpus", default="h100", show_default=True)
@click.option("--amp", "amps", default="none", show_default=True, help="none, bfloat16, float16.")
@click.option("--plans", is_flag=True, help="Plans at two budgets too.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Rows that are there, and to which to add."
)
@click.option("--table", type=click.Path(path_type=Path), help="Write all rows as a Markdown table.")
@click.option("--json", "as_json", is_flag=True)
def main(
    models: str, gpus: str, amps: str, plans: bool, output: Path | None, table: Path | None, as_json: bool
) -> None:
    """Predict and rehearse, and set both side by side."""
    rows: list[dict[str, Any]] = []
    if output and output.exists():
        rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    there = {(r["model"], r["gpu"], r["amp"], r["way"]) for r in rows}
    for model, gpu, options in _asked(models, gpus, amps):
        key = (model.rpartition(":")[2], gpu, options.get("amp", ""))
        if (*key, BUDGETS[-1] if plans else "untouched") in there:
            continue
        try:
            for row in row_of(model, gpu, options, plans=plans):
                if (*key, row["way"]) not in there:
                    rows.append(row)
                    click.echo(json.dumps(row), err=True)
        except LowtideError as error:
            click.echo(f"{' '.join(key)}: {error}", err=True)
        if output:
            output.write_text(json.dumps(_answer(rows), indent=1) + "\n", encoding="utf-8")
    if table:
        table.write_text(HEAD + markdown(rows) + summaries(rows), encoding="utf-8")
    click.echo(json.dumps(_answer(rows)) if as_json else markdown(rows) + "\n" + json.dumps(summary(rows)))


def _answer(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ways = {
        "untouched": [r for r in rows if r["way"] == "untouched"],
        "planned": [r for r in rows if r["way"] != "untouched"],
    }
    return {
        "provenance": REHEARSED,
        "summary": {w: summary(found) for w, found in ways.items() if found},
        "rows": rows,
    }


if __name__ == "__main__":
    main()

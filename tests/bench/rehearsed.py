"""What `trace` and `simulate` predict for a GPU, beside what torch's own CUDA code allocates on the null driver.

python -m tests.bench.rehearsed [--models a,b] [-o FILE.json] [--table FILE.md]

Needs a CUDA build of torch, and no GPU; trace and rehearsal use the same torch. A row is one model, GPU, type and way:
the peaks of a steady iteration, predicted and rehearsed, requested (sums of tensors) and allocated (in blocks), and of
reserved memory; untouched, and with a plan for 70 or 50 % of the captured graph's peak. Where no plan is so small, the
budget is the lowest peak that the planner reaches, and the row says so. Each model is taken for two of three GPUs in
turn, in float32 and under autocast. Every row is added to FILE as soon as it
is there, and rows that FILE has are not made again, failures included. What is rehearsed is torch's own code, without
a GPU.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import click

from executor.cli.rehearse import APPLY
from simulator.core.problem import Problem
from simulator.planners.outcome import Infeasible
from simulator.prediction import ask as api
from simulator.prediction.step import untouched_fit, warnings
from tests.bench.architectures import CONFIGS, DIFFUSERS, SEGMENTATION, TIMM
from tracer import trace
from tracer.rehearsal.record import ASSUMED, Rehearsal
from tracer.rehearsal.run import rehearse
from traces.errors import LowtideError
from traces.provenance import REHEARSED
from traces.records.measurement import ITERATIONS, RunFigures
from traces.records.plan import Plan

ARCHITECTURES = Path("tests/bench/architectures.py")
VISION = {"batch_size": 32}
LANGUAGE = {"batch_size": 8, "seq_len": 256}
VISION_NAMES = (
    "alexnet", "squeezenet1_1", "resnet18", "vgg16_bn", "mnasnet1_0", "mobilenet_v2", "vit-small", "shufflenet_v2_x1_0",
    "resnet50", "mobilenet_v3_large", "convnext_tiny", "vit_b_16", "googlenet", "regnet_y_400mf", "efficientnet_b0",
    "inception_v3", "resnext50_32x4d", "densenet121", "swin_t", "swin_v2_t", "maxvit_t", "resnet152",
)  # fmt: skip
LANGUAGE_NAMES = ("bert-small", "gpt2-small", "t5-small", "llama-small", "bert-base", "gpt2", "t5-base")
FAMILIES: tuple[dict[str, dict[str, Any]], ...] = (
    dict.fromkeys(VISION_NAMES, VISION),
    {f"{ARCHITECTURES}:{name}": {} for name in CONFIGS},
    {f"{ARCHITECTURES}:{name}": {} for name in TIMM},
    dict.fromkeys(LANGUAGE_NAMES, LANGUAGE),
    {f"{ARCHITECTURES}:{name}": {} for name in (*SEGMENTATION, *DIFFUSERS)},
)
# One of each family after the other, so that a run that is cut short has seen all.
MODELS = {
    name: options
    for name, options in chain.from_iterable(zip_longest(*(f.items() for f in FAMILIES), fillvalue=("", {})))
    if name
}
HALF = {"t4": "float16", "a100-80": "bfloat16", "h100": "bfloat16"}  # each GPU's own half type
BUDGETS = ("70%", "50%")
SECONDS = 0.3  # for each plan: what is compared is memory
UNTOUCHED = "untouched"
FIGURES = {
    "requested": "peak_allocated_bytes",
    "allocated": "peak_block_bytes",
    "reserved": "peak_reserved_bytes",
}
KEYS = ("model", "gpu", "amp")
HEAD = f"""# Predicted beside rehearsed

Peaks of a steady iteration, of the untouched loop and of plans for a share of the captured graph's peak; rehearsed:
{REHEARSED}. Bytes are rehearsed ones; percent: by how much the prediction is higher. `*`: no plan is so small, so the
plan is the smallest that the planner finds. Made by `python -m tests.bench.rehearsed`.

"""


def rehearsed(
    model: str, gpu: str, options: dict[str, Any], plan: Path | None = None, iterations: int = ITERATIONS
) -> Rehearsal:
    """The rehearsal of one step; raises LowtideError if the GPU's memory does not suffice."""
    planned = (APPLY, str(plan)) if plan else ()
    found = rehearse(model, gpu, options=options, apply=planned, iterations=iterations)
    if found.out_of_memory:
        raise LowtideError(found.out_of_memory)
    return found


def rows_of(model: str, gpu: str, amp: str, budget: str) -> Iterator[dict[str, Any]]:
    """The untouched step of one model, and its planned one."""
    options = {**MODELS.get(model, {}), **({"amp": amp} if amp else {})}
    key = {"model": model.rpartition(":")[2], "gpu": gpu, "amp": amp}
    recorded = trace(model, target=gpu, **options)
    problem = Problem(recorded)
    predicted = api.simulate(problem)
    said = [w.code for w in warnings(predicted)]
    counted = {"counted": bool(recorded.meta.untouched_peak_bytes), "warnings": said}
    found = rehearsed(model, gpu, options)
    yield {**key, "way": UNTOUCHED, **counted, **beside(untouched_fit(predicted).figures(), found)}
    plan, moved = plan_near(problem, budget)
    with tempfile.TemporaryDirectory() as folder:
        path = plan.save(Path(folder) / "plan.json")
        found = rehearsed(model, gpu, options, path.absolute())
    figures = api.simulate(problem, plan).planned_figures
    share = round(100 * figures.peak_allocated_bytes / predicted.saved_figures.peak_allocated_bytes, 1)
    within = found.figures.peak_allocated_bytes <= (plan.budget_bytes or 0)
    asked = {"budget_bytes": plan.budget_bytes, "moved": moved, "percent": share, "within_budget": within}
    yield {**key, "way": budget, **asked, **beside(figures, found)}


def plan_near(problem: Problem, budget: str) -> tuple[Plan, bool]:
    """The plan for a budget, or for the lowest peak that the planner reaches, and whether it is that."""
    try:
        return api.plan(problem, budget, seconds=SECONDS), False
    except Infeasible as refusal:
        return api.plan(problem, refusal.figures["lowest_peak_bytes"], seconds=SECONDS), True


def beside(predicted: RunFigures, found: Rehearsal) -> dict[str, Any]:
    """Predicted and rehearsed bytes, their difference in bytes and in percent of what was rehearsed."""
    out: dict[str, Any] = {"torch": found.environment["torch"]}
    if told := sorted({f"{w.code} {w.subject}" for w in found.warnings if w.code != ASSUMED}):
        out["told"] = told
    for name, key in FIGURES.items():
        ours, theirs = getattr(predicted, key), getattr(found.figures, key)
        out[f"{name}_predicted_bytes"], out[f"{name}_rehearsed_bytes"] = ours, theirs
        out[f"{name}_off_percent"] = round(100 * (ours - theirs) / theirs, 4)
    return out


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the absolute differences in percent: their median and 95th percentile; and the lowest prediction."""
    out: dict[str, Any] = {"rows": len(rows), "models": len({r["model"] for r in rows})}
    for name in FIGURES:
        off = [r[f"{name}_off_percent"] for r in rows]
        sizes = sorted(map(abs, off))
        out[name] = {
            "median_percent": round(statistics.median(sizes), 4),
            "p95_percent": sizes[max(0, math.ceil(0.95 * len(sizes)) - 1)],
            "lowest_percent": min(off),
            "highest_percent": max(off),
        }
    return out


def ways(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows by what they are of: the untouched step or a plan, in float32 or under autocast."""
    out: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "failed" not in row:
            step = "untouched" if row["way"] == UNTOUCHED else "planned"
            out.setdefault(f"{step}, {'autocast' if row['amp'] else 'float32'}", []).append(row)
    return out


def markdown(rows: list[dict[str, Any]]) -> str:
    """A line for each model, GPU and type: what it takes, and how far off the untouched and the planned steps are."""
    head = ["model", "GPU", "autocast", "allocated", "off", "reserved", "off"]
    head += [f"{budget}: {name}" for budget in BUDGETS for name in ("allocated", "reserved")]
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|" + "--:|" * (len(head) - 3)]
    steps: dict[tuple[str, ...], dict[str, Any]] = {}
    for r in rows:
        if "failed" not in r:
            steps.setdefault(tuple(r[k] for k in KEYS), {})[r["way"]] = r
    for (model, gpu, amp), of in sorted(steps.items()):
        cells = [model, gpu, amp or "-"]
        for name in ("allocated", "reserved"):
            cells += [f"{of[UNTOUCHED][f'{name}_rehearsed_bytes']:,}", off(of.get(UNTOUCHED), name)]
        cells += [off(of.get(budget), name) for budget in BUDGETS for name in ("allocated", "reserved")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page_of(rows: list[dict[str, Any]]) -> str:
    """The summaries and the table in Markdown."""
    return HEAD + summaries(rows) + "\n" + markdown(rows)


def off(row: dict[str, Any] | None, name: str) -> str:
    """By how many percent a prediction is off; marked where the budget was moved."""
    if row is None:
        return "-"
    return f"{row[f'{name}_off_percent']:+.3f} %{'*' if row.get('moved') and name == 'allocated' else ''}"


def summaries(rows: list[dict[str, Any]]) -> str:
    """The summary of each way as a table, and what could not be compared."""
    head = "| rows of | rows, models | figure | median | 95 % within | lowest | highest |"
    lines = [head, "|---|---|---|--:|--:|--:|--:|"]
    for way, of in ways(rows).items():
        found = summary(of)
        for name in FIGURES:
            f = found[name]
            cells = [f"{f[f'{k}_percent']:.4f} %" for k in ("median", "p95")]
            cells += [f"{f[f'{k}_percent']:+.3f} %" for k in ("lowest", "highest")]
            lines.append(f"| {way} | {found['rows']}, {found['models']} | {name} | {' | '.join(cells)} |")
    failed = [r for r in rows if "failed" in r]
    if failed:
        lines += ["", "Not compared:", ""]
        causes = Counter((r["failed"], r["model"]) for r in failed)
        lines += [f"- {model}: {text}" for text, model in sorted(causes, key=lambda c: c[1])]
    return "\n".join(lines) + "\n"


def _asked(models: str) -> Iterator[tuple[str, str, str, str]]:
    """A model, a GPU, a type and a budget."""
    names = [n if n in MODELS else f"{ARCHITECTURES}:{n}" for n in models.split(",")] if models else [*MODELS]
    targets, order = [*HALF], [*MODELS]
    for turn in (0, 1):
        for place, name in enumerate(names):
            k = order.index(name) if name in MODELS else place
            gpu = targets[(k + turn) % len(targets)]
            yield name, gpu, HALF[gpu] if (k + turn) % 2 else "", BUDGETS[k // 2 % 2]


@click.command()
@click.option("--models", default="", help="Names of MODELS; without it all of them.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Rows that are there, and to which to add."
)
@click.option("--table", type=click.Path(path_type=Path), help="Write all rows as a Markdown table.")
def main(models: str, output: Path | None, table: Path | None) -> None:
    """Predict and rehearse, and set both side by side."""
    rows: list[dict[str, Any]] = []
    if output and output.exists():
        rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    done = {tuple(r[k] for k in KEYS) for r in rows if r["way"] != UNTOUCHED}
    for model, gpu, amp, budget in _asked(models):
        key = (model.rpartition(":")[2], gpu, amp)
        if key in done:
            continue
        rows = [r for r in rows if tuple(r[k] for k in KEYS) != key]
        try:
            for row in rows_of(model, gpu, amp, budget):
                rows.append(row)
                click.echo(json.dumps(row), err=True)
        except (LowtideError, ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            text = re.sub(r"/\S*?/site-packages/", "", text)[:300]
            rows.append({**dict(zip(KEYS, key, strict=True)), "way": "failed", "failed": text})
            click.echo(f"{' '.join(key)}: {text}", err=True)
        if output:
            head = {"provenance": REHEARSED, "summary": {w: summary(of) for w, of in ways(rows).items()}}
            lines = ",\n  ".join(map(json.dumps, rows))
            text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n'
            output.write_text(text, encoding="utf-8")
    if table:
        table.write_text(page_of(rows), encoding="utf-8")
    click.echo(summaries(rows) + "\n" + markdown(rows))


if __name__ == "__main__":
    main()

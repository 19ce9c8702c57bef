"""The page of the study of Inverted Activations, made of the blocks of every report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from simulator.report.charts import by_name, colour, dots, drawn, finish
from simulator.report.page import Chart, Page, Section, Text, needed, write_page
from simulator.show.tables import NUMBER, table
from traces.units import bytes_unit, show_bytes

COLOURS: Final = {
    "exact": "#111827", "torch": "#111827", "untouched": "#94a3b8", "Lowtide": "#d9614c", "invert": "#d9614c",
    "the paper": "#e9a23b", "the paper's": "#e9a23b", "recompute": "#56a6a0", "1e-6": "#94a3b8", "bits": "#a8a29e",
    "fewbit4": "#8a6fb5", "fewbit3": "#b39ddb", "fewbit2": "#d1c4e9", "int8": "#4c78a8", "int4": "#7ba3cf",
    "int2": "#aecbe8", "fp8_e4m3": "#63a375", "fp8_e5m2": "#a5cfb0",
}  # fmt: skip
FEW: Final = {f"few-bit, {n} bits": COLOURS[f"fewbit{n}"] for n in (4, 3, 2)}
MODELS: Final = {
    "bert": "BERT, 4 layers", "gpt2": "GPT-2, 4 layers", "llama": "Llama, 4 layers of 768",
    "bert_base": "BERT-base, 16 × 512, float32", "mistral": "Mistral-7B as for QLoRA, 1 × 4096, 8 of 32 layers",
}  # fmt: skip


def write(path: Path, study: Mapping[str, Any]) -> None:
    """Write the page of what `tests.bench.inverted_study` worked out; parts that are missing are left out.

    Raises:
        EnvironmentProblem: a package that pages need is not installed.
    """
    parts = {
        "derivative": _derivative, "gradients": _gradients, "memory": _memory, "times": _times, "training": _training,
    }  # fmt: skip
    sections = [made(study[name]) for name, made in parts.items() if name in study]
    subtitle = (
        "A study of arXiv:2407.15545 (Novikov and Oseledets): an activation's backward takes its output, which the "
        "next layer saves anyway, and one bit an element, in place of its input. Errors and losses were computed on a "
        "CPU, memory and time of the large models simulated from traces for an H200; nothing ran on a GPU."
    )
    made_with = study.get("environment", {})
    if commit := made_with.get("commit"):
        subtitle += f" One run, torch {made_with['torch']}, at commit {commit}."
    write_page(path, Page("Inverted Activations, beside what competes with them", subtitle, sections))


def lines(
    rows: Iterable[Sequence[object]], colours: Mapping[str, str], x: str, y: str, *, log: bool = False
) -> dict[str, Any]:
    """A line for each series: (series, x, y) rows."""
    alt, rows = needed("altair"), list(rows)
    there = {str(r[0]) for r in rows}
    scale = {"type": "log", "clamp": True} if log else {"zero": False}
    chart = (
        drawn("series:N x:Q y:Q", rows)
        .mark_line(strokeWidth=1.4)
        .encode(
            alt.X("x:Q").title(x).scale(nice=False),
            alt.Y("y:Q").title(y).scale(**scale),
            colour("series", {k: v for k, v in colours.items() if k in there}),
            tooltip=["series:N", "x:Q", alt.Tooltip("y:Q", format=".4g")],
        )
    )
    return finish(chart, height=300)


def _e(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _derivative(part: Mapping[str, Any]) -> Section:
    blocks: list[Any] = []
    for kind in ("gelu", "silu"):
        rows = [(way, x, max(off, 1e-9)) for k, way, x, off in part["curves"] if k == kind]
        blocks.append(
            Chart(
                lines(rows, COLOURS | FEW, "input", "error of the derivative", log=True),
                "float32, against float64. Near the minimum, where many inputs have nearly one output, what is lost is "
                "lost when the output is rounded.",
                f"The derivative of {kind}",
            )
        )
    rows = part["rows"]
    ways = list(dict.fromkeys((r["activation"], r["way"]) for r in rows))
    by = {(r["activation"], r["way"], r["dtype"]): r for r in rows}

    def of(dtype: str, what: str) -> Any:
        return lambda w: _e(by[(*w, dtype)][what])

    def shown(dtype: str) -> Any:
        return lambda w: "NaN" if by[(*w, dtype)]["nan"] else _e(by[(*w, dtype)]["relative"])

    columns = (
        ("activation", "", lambda w: w[0]),
        ("way", "", lambda w: w[1]),
        ("float32, largest", NUMBER, of("float32", "largest")),
        *((f"{d}, relative", NUMBER, shown(d)) for d in ("float32", "bfloat16", "float16")),
    )
    text = (
        "Inputs from N(0, 1), a million; relative L2 error of f'. torch is its own backward, from the input."
    )
    return Section("Error of the derivative", (*blocks, Text(text), table(ways, columns)))


def _gradients(rows: Sequence[Mapping[str, Any]]) -> Section:
    alt = needed("altair")
    order = list(COLOURS)
    points = [
        (f"{MODELS[r['model']]}{' bf16' if r['autocast'] else ''}", r["way"], r["relative"], order.index(r["way"]),
         f"{r['relative']:.2e}, {r['values']} values")
        for r in rows
    ]  # fmt: skip
    names = [p[0] for p in points]
    x = alt.X("x:Q").title("relative L2 error of the whole gradient").scale(type="log")
    y = alt.Y("name:N").sort(list(dict.fromkeys(names))).title(None).axis(labelLimit=320)
    caption = (
        "invert and fewbit change the inputs of activations alone, the other formats everything that is saved. Under "
        "bfloat16 the error is that beside torch under bfloat16, whose own rounding is of the same size."
    )
    columns = (
        ("model", "", lambda r: MODELS[r["model"]]),
        ("autocast", "", lambda r: r["autocast"]),
        ("way", "", lambda r: r["way"]),
        ("values", "count", lambda r: r["values"]),
        ("error", NUMBER, lambda r: _e(r["relative"])),
    )
    chart = Chart(dots(points, COLOURS, x, y, height=220), caption)
    return Section("Error of the gradient", (chart, table(rows, columns, caption="Figures")))


def _memory(rows: Sequence[Mapping[str, Any]]) -> Section:
    blocks: list[Any] = [
        Text(
            "What lies between forward and backward, and the step's time, from traces for an H200 (roofline): "
            "simulated. The paper's notebooks measured the same models; of Mistral this trace has 8 of its 32 layers, "
            "and attention in float32, not float16. Exact recomputation computes the output again, from the input.",
            "note",
        )
    ]
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model and "held_bytes" in r]
        unit, name = bytes_unit(max(r["held_bytes"] for r in mine))
        bars = [(r["way"], r["way"], r["held_bytes"] / unit, show_bytes(r["held_bytes"])) for r in mine]
        chart = by_name(bars, COLOURS, f"from forward to backward, {name}")
        blocks.append(Chart(chart, "", MODELS[model]))
    columns = (
        ("model", "", lambda r: MODELS[r["model"]]),
        ("way", "", lambda r: r["way"]),
        ("forward to backward", "bytes", lambda r: r.get("held_bytes")),
        ("", "+percent", lambda r: r["held_percent"]),
        ("peak", "bytes", lambda r: r.get("peak_bytes")),
        ("time", "+percent", lambda r: r.get("added_percent")),
    )
    return Section("Memory, beside the paper's", (*blocks, table(rows, columns)))


def _times(rows: Sequence[Mapping[str, Any]]) -> Section:
    base = rows[0]["seconds"]
    columns = (
        ("way", "", lambda r: r["way"]),
        ("processor time", NUMBER, lambda r: f"{r['seconds']:.3f} s"),
        ("added", "+percent", lambda r: 100 * (r["seconds"] / base - 1)),
        ("peak, predicted", "bytes", lambda r: r["peak_bytes"]),
    )
    text = (
        "BERT of 4 layers, 2 × 128 tokens: forward and backward on this CPU, one thread, the least of eight in turns. "
        "recompute is exact. The peak of this small step is the optimizer's, whichever way."
    )
    return Section("Time on a CPU", (Text(text), table(rows, columns)))


def _training(part: Mapping[str, Any]) -> Section:
    runs, width = part["runs"], part["per_point"]
    exact = runs["exact"]["curve"]

    def points(of: str) -> list[tuple[str, float, float]]:
        return [
            (way, (k + 0.5) * width, y if of == "loss" else y - exact[k])
            for way, run in runs.items()
            for k, y in enumerate(run["curve"])
            if of == "loss" or way != "exact"
        ]

    columns = (
        ("way", "", lambda w: w),
        ("loss, last tenth", NUMBER, lambda w: f"{runs[w]['last']:.5f}"),
        ("beside exact", "+percent", lambda w: runs[w]["off_percent"]),
        ("every step equal", "", lambda w: "yes" if runs[w]["equal"] else ""),
    )
    text = (
        f"A GPT-2 of bytes (2 layers of 128) learns {part['bytes']:,} bytes of Python's reference, {part['steps']:,} "
        "steps of 8 × 32 by AdamW, every way from the same weights, on the same batches, with the same dropout. "
        "1e-6 is exact from weights that are so far off: how far rounding alone leads."
    )
    blocks = (
        Text(text),
        Chart(lines(points("loss"), COLOURS, "step", "loss"), f"Means of {width} steps.", "Loss"),
        Chart(lines(points("off"), COLOURS, "step", "loss beside exact"), "", "Difference from exact"),
        table(list(runs), columns),
    )
    return Section("A thousand steps", blocks)

"""The study of the course as one page: ResNet-152 and BERT, from the gallery's traces; nothing is traced or run anew.

python -m tests.bench.study -o study.html [--svg study.svg]

The page has what Harvard's CS265 systems project asks for (activation checkpointing by μ-TWO): what a step computes
and holds, first and last uses, the parts of the peak, peak and latency against the batch size with and without
checkpointing. Beyond that it sets every planner beside the certified bound. `--svg` writes its main chart as a picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import click

from simulator.bounds import bounder_of
from simulator.core.problem import Problem, peak_by_category
from simulator.planners.outcome import where
from simulator.prediction.ask import Answer, ask, question
from simulator.prediction.loop_peaks import peaks_table
from simulator.prediction.step import provenance as figures_from
from simulator.report import charts
from simulator.report.page import Block, Chart, Page, Section, Text, needed, write_page
from simulator.report.step import PEAKS_CAPTION, activation_blocks, activations, memory, target_text
from simulator.show.tables import CODE, NUMBER, Cell, Table, beside, no, percent_cell, table
from traces.errors import LowtideError, SpecError
from traces.files import write_text
from traces.records.measurement import Measurement, RunFigures
from traces.records.plan import Plan
from traces.records.store import load
from traces.records.trace import ACTIVATION, BACKWARD, FORWARD, OPTIMIZER_STATE, PARAMETER, PHASES, Trace
from traces.units import show_percent

WAYS: Final = {
    "save-all, predicted": "#9cc4e4",
    "plan, predicted": "#f3b183",
    "eager, measured": charts.GREY,
    "save-all, measured": charts.BLUE,
    "plan, measured": charts.RED,
}
PLANNERS: Final = {
    "mu-two-paper": charts.ORANGE,
    "mu-two": charts.BLUE,
    "search": charts.RED,
    "checkpoint-sequential": charts.SKY,
    "per-block": charts.PINK,
    "sqrt-n": charts.GREEN,
}
IN_WORDS: Final = {"mu-two-paper": "μ-TWO as printed", "mu-two": "μ-TWO corrected"}
BOUND: Final = "certified bound"
SAVED: Final = "everything saved"
TITLES: Final = {"resnet152": "ResNet-152", "bert-base": "BERT-base"}
DETAILED: Final = {"resnet152": 32, "bert-base": 16}  # the batch sizes that are looked into
GALLERY: Final = Path("traces/gallery")
BUDGETS: Final = ("90%", "80%", "70%", "60%", "50%", "45%", "40%")  # shares of the peak
SECONDS: Final = 2.0  # of a search, for each budget
ONE: Final = "60%"  # the budget where one is enough
MOST_KINDS: Final = 10
CPU: Final = "CPU"
METHOD: Final = (
    "Question: how much of a training step's memory can be traded for computation, at what price, and how near the "
    "least possible price do μ-TWO as printed, μ-TWO corrected, the classic schemes and a search come?",
    "Method: each step is one recorded graph of forward, backward and optimizer, and every plan is replayed op by op "
    "with all that a recomputation itself holds; a plan whose peak is over its budget counts as none.",
    "Beside the plans stands a certified bound, which no plan that keeps the order of the ops can beat; a budget is a "
    "share of the peak with everything saved.",
)


@dataclass(frozen=True)
class Step:
    """One recorded step."""

    model: str
    path: Path
    trace: Trace

    @cached_property
    def problem(self) -> Problem:
        return Problem(self.trace)

    @property
    def batch(self) -> int:
        return self.trace.meta.batch_size

    @property
    def title(self) -> str:
        tokens = self.trace.meta.options.get("seq_len")
        return f"{TITLES.get(self.model, self.model)}, batch {self.batch}{f' × {tokens}' if tokens else ''}"

    @property
    def peak_bytes(self) -> int:
        return self.problem.saved.timeline.peak_allocated_bytes

    @property
    def source(self) -> str:
        """Where its figures come from, to end a caption with."""
        memory, _, _ = figures_from(self.trace.meta).partition(" (")
        return f" [memory {memory}; times by {self.trace.meta.times}]"


class Study:
    """What the page is made of."""

    @cached_property
    def steps(self) -> list[Step]:
        """Every step of the gallery's sweeps for a GPU, by model and batch. Raises SpecError: there is none."""
        paths = [path for path in GALLERY.glob("*-h200/trace-b*") if path.is_dir()]
        if not paths:
            raise SpecError(
                f"{GALLERY} holds no sweeps for a GPU (*-h200/trace-b*); run this where the gallery is."
            )
        found = [Step(path.parent.name.rpartition("-")[0], path, load(path)) for path in paths]
        return sorted(found, key=lambda s: (s.model != "resnet152", s.model, s.batch))

    @cached_property
    def looked_into(self) -> list[Step]:
        """One step of each model."""
        best = {s.model: s for s in self.steps}
        best |= {s.model: s for s in self.steps if s.batch == DETAILED.get(s.model)}
        return list(best.values())

    @cached_property
    def measured(self) -> dict[str, dict[int, Measurement]]:
        """What was measured on a CPU, by folder and batch size."""
        found: dict[str, dict[int, Measurement]] = {}
        for path in sorted(GALLERY.glob("*-cpu/measurement-b*.json"), reverse=True):
            measured = Measurement.load(path)
            found.setdefault(path.parent.name, {})[int(measured.options["batch_size"])] = measured
        return {folder: dict(sorted(of.items())) for folder, of in found.items()}

    @cached_property
    def answers(self) -> dict[tuple[str, int, str, str], Answer]:
        """By model, batch, budget and planner, by recomputation alone: for one budget of all steps, for all budgets of
        those looked into."""
        found = {}
        for step in self.steps:
            for budget in dict.fromkeys((ONE, *(BUDGETS if step in self.looked_into else ()))):
                click.echo(f"{step.title}, {budget}", err=True)
                for planner in PLANNERS:
                    asked = question(budget, planner=planner, seconds=SECONDS).of_planner()
                    found[step.model, step.batch, budget, planner] = ask(step.problem, asked)
        return found

    def found(self, step: Step, planner: str = "search", budget: str = ONE) -> Answer:
        return self.answers[step.model, step.batch, budget, planner]

    def page(self) -> Page:
        parts = {
            "Question and method": tuple(map(Text, METHOD)),
            "Computation and memory statistics": statistics(self),
            "First and last use of activations": lifetimes(self),
            "Peak breakdown": breakdown(self),
            "Peak memory and latency against batch size": against_batch(self),
            "Planners beside the bound": beside_the_bound(self),
            "What was measured where": (measured_where(self),),
        }
        names = " and ".join(TITLES.get(s.model, s.model) for s in self.looked_into)
        return Page(
            f"Activation checkpointing by μ-TWO: a study of {names}",
            "What recomputation saves, what it costs, and how near to the best it is",
            [Section(f"{k}. {title}", tuple(of)) for k, (title, of) in enumerate(parts.items(), 1)],
        )


# 2. Statistics


def statistics(study: Study) -> tuple[Block, ...]:
    def resident(s: Step, category: str) -> int:
        sts = s.trace.storages
        return sum(n for n, c in zip(sts.nbytes, sts.category, strict=True) if c == category)

    def time_of(s: Step, phase: str) -> int:
        return sum(t for t, p in zip(s.trace.ops.time_ns, s.trace.ops.phase, strict=True) if p == phase)

    def at_peak(s: Step) -> float:
        parts = peak_by_category(s.trace, s.problem.saved.schedule, s.problem.saved.timeline)
        return 100 * parts[ACTIVATION] / sum(parts.values())

    computation = table(
        study.steps,
        (
            ("step", "", lambda s: s.title),
            *(
                (f"{phase} ops", "count", lambda s, p=phase: s.trace.ops.phase.count(p))
                for phase in (FORWARD, BACKWARD)
            ),
            ("GFLOP", "count", lambda s: round(sum(s.trace.ops.flops) / 1e9)),
            ("bytes moved", "bytes", lambda s: sum(s.trace.ops.bytes_moved)),
            *((phase, "time", lambda s, p=phase: time_of(s, p)) for phase in PHASES),
            ("step", "time", lambda s: s.trace.time_ns),
        ),
        caption=f"Computation of one training step with everything saved, and its phases' times{study.steps[0].source}",
    )
    held = table(
        study.steps,
        (
            ("step", "", lambda s: s.title),
            ("storages", "count", lambda s: len(s.trace.storages)),
            ("parameters", "bytes", lambda s: resident(s, PARAMETER)),
            ("optimizer state", "bytes", lambda s: resident(s, OPTIMIZER_STATE)),
            ("activations saved", "bytes", lambda s: sum(a.nbytes for a in activations(s.problem))),
            ("peak", "bytes", lambda s: s.peak_bytes),
            ("activations, of the peak", "share", at_peak),
        ),
        caption=f"Memory of the same steps{study.steps[0].source}",
    )
    return computation, held, *map(by_kind, study.looked_into)


def by_kind(step: Step) -> Table:
    """The costliest kinds of ops."""
    trace, ops = step.trace, step.trace.ops
    made = [0] * len(ops)
    for producer, n in zip(trace.storages.producer, trace.storages.nbytes, strict=True):
        if producer >= 0:
            made[producer] += n
    kinds: dict[str, list[int]] = {}
    for i in range(len(ops)):
        row = (1, ops.time_ns[i], ops.flops[i], ops.bytes_moved[i], made[i])
        kind = kinds.setdefault(target_text(trace, i), [0] * len(row))
        kind[:] = map(sum, zip(kind, row, strict=True))
    whole = [sum(column) for column in zip(*kinds.values(), strict=True)]
    return table(
        sorted(kinds.items(), key=lambda row: -row[1][1])[:MOST_KINDS],
        (
            ("kind of op", CODE, lambda row: row[0]),
            ("runs", "count", lambda row: row[1][0]),
            ("time", "time", lambda row: row[1][1]),
            ("share of time", "share", lambda row: 100 * row[1][1] / whole[1]),
            ("GFLOP", "count", lambda row: round(row[1][2] / 1e9, 1)),
            ("bytes moved", "bytes", lambda row: row[1][3]),
            ("bytes made", "bytes", lambda row: row[1][4]),
        ),
        total=(f"all {len(kinds)} kinds", *whole[:2], 100.0, round(whole[2] / 1e9, 1), *whole[3:]),
        caption=f"{step.title}: the kinds of ops that take most time{step.source}",
    )


# 3. First and last use


def lifetimes(study: Study) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for step in study.looked_into:
        found = activations(step.problem)
        total = sum(a.nbytes for a in found)
        half = sum(a.nbytes for a in found if 2 * a.idle_ns >= step.trace.time_ns)
        text = (
            f"{step.title}: the first activations that are made are the last to be used: "
            f"{show_percent(100 * half / total, digits=0)} of the bytes lie idle for half of the step and longer"
            f"{step.source}"
        )
        shown = activation_blocks(step.problem, Plan(meta=step.trace.meta))
        told = f"{step.title}{step.source}"
        blocks += [Text(text), *(replace(b, caption=told) if isinstance(b, Chart) else b for b in shown)]
    return tuple(blocks)


# 4. The peak


def breakdown(study: Study) -> tuple[Block, ...]:
    parts: dict[str, dict[str, int]] = {}
    blocks: list[Block] = []
    for step in study.looked_into:
        answer = study.found(step)
        runs = {SAVED: answer.asked} | ({f"plan for {ONE}": answer.found} if answer.found else {})
        for name, c in runs.items():
            run = c.step.trace, c.planned.schedule, c.planned.timeline
            parts[f"{step.title}: {name}"] = peak_by_category(*run)
        chart, caption = memory(c), f"{step.title}. {PEAKS_CAPTION}{step.source}"
        title = f"{step.title}: memory over the step"
        blocks.append(replace(chart, title=title, caption=chart.caption + step.source))
        blocks.append(peaks_table(c, answer.asked, caption=caption))
    text = f"What is allocated at the peak; the parts sum to it. Plans are of search{study.steps[0].source}"
    return Chart(charts.peak_by_category(parts), text, "At the peak, by category"), *blocks


# 5. Against the batch size


def against_batch(study: Study) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for model in dict.fromkeys(s.model for s in study.steps):
        steps = [s for s in study.steps if s.model == model]
        for is_bytes, name in ((True, "peak memory"), (False, "iteration latency")):
            text = (
                f"Grey: everything saved. Coloured: checkpointing by each planner for a budget of {ONE}, the dashes; "
                f"without a bar, the planner has no plan within it. Predicted{steps[0].source}"
            )
            spec = by_planner(study, steps, is_bytes)
            blocks.append(Chart(spec, text, f"{TITLES.get(model, model)}: {name} against mini-batch size"))
    for folder, found in study.measured.items():
        first = next(iter(found.values()))
        title = TITLES.get(first.model, first.model)
        text = f"Predicted from ops measured on that CPU; plan by {first.planner}, the line is its budget [{folder}]"
        runs = [
            (f"{batch}, {way}", predicted, real)
            for batch, m in found.items()
            for way, predicted, real in (
                ("eager", RunFigures(), m.eager),
                ("save-all", m.keep_all_predicted, m.keep_all),
                ("plan", m.predicted, m.measured),
            )
        ]
        limits = {str(batch): m.budget_bytes or 0 for batch, m in found.items()}
        for key, name in (("peak_allocated_bytes", "peak memory"), ("step_time_ns", "iteration latency")):
            bars = [
                (batch, f"{way}, {kind}", value)
                for of, predicted, real in runs
                for batch, way in (of.split(", "),)
                for kind, run in (("predicted", predicted), ("measured", real))
                if (value := run.headline()[key]) is not None
            ]
            is_bytes = key.endswith("bytes")
            spec = charts.grouped(bars, WAYS, name, is_bytes=is_bytes, limits=limits if is_bytes else None)
            blocks.append(Chart(spec, text, f"{title}, on a CPU: {name}"))
        errors = beside(runs, CPU)
        blocks.append(
            replace(errors, caption=f"{title}, on a CPU, by batch size. {errors.caption} [{folder}]")
        )
    return tuple(blocks)


def by_planner(study: Study, steps: Sequence[Step], is_bytes: bool) -> dict[str, Any]:
    """Bars by batch size: everything saved, and a plan of each planner."""
    found = [(step, p, study.found(step, p)) for step in steps for p in PLANNERS]
    runs = [(step, SAVED, study.found(step).asked) for step in steps]
    runs += [(step, named(p), answer.found) for step, p, answer in found if answer.found]
    lines = [(str(step.batch), way, c.planned.timeline) for step, way, c in runs]
    bars = [(b, way, t.peak_allocated_bytes if is_bytes else t.step_time_ns) for b, way, t in lines]
    look = {SAVED: charts.GREY, **{named(p): colour for p, colour in PLANNERS.items()}}
    limits = {str(step.batch): answer.budget_bytes or 0 for step, _, answer in found} if is_bytes else None
    return charts.grouped(bars, look, "peak" if is_bytes else "step", is_bytes=is_bytes, limits=limits)


# 6. Planners and the bound


def beside_the_bound(study: Study) -> tuple[Block, ...]:
    blocks: list[Block] = []
    for step in study.looked_into:
        made = {p: sum(study.found(step, p, b).found is not None for b in BUDGETS) for p in PLANNERS}
        floor = bounder_of(step.problem).floor
        text = (
            f"{step.title}: of {len(BUDGETS)} budgets, "
            f"{', '.join(f'{named(p)} meets {n}' for p, n in made.items())}. "
            f"No plan at all can go below {show_percent(100 * floor.peak_bytes / step.peak_bytes, digits=1)} of "
            f"the peak with everything saved, which {where(step.trace, floor.op)} needs."
        )
        caption = (
            "Added time, of the step with everything saved, against the budget. Grey: no plan can be there, certified. "
            f"A line ends where its planner finds no plan; the axis grows with the root. Predicted{step.source}"
        )
        blocks += [
            Text(text),
            Chart(added_time(study, step), caption, f"{step.title}: added time against budget"),
            added_table(study, step),
        ]
    return tuple(blocks)


def named(planner: str) -> str:
    return IN_WORDS.get(planner, planner)


def added(answer: Answer) -> float | None:
    return None if answer.found is None else answer.found.overhead_percent


def least(answer: Answer) -> float | None:
    bound = answer.bound
    return bound.overhead_percent if bound and bound.feasible else None


def added_time(study: Study, step: Step) -> dict[str, Any]:
    """A line for each planner, over what the bound rules out."""
    alt = needed("altair")
    shares = {b: float(b.rstrip("%")) for b in BUDGETS}
    rows, ruled_out = [], []
    for budget, share in shares.items():
        if (value := least(study.found(step, budget=budget))) is not None:
            ruled_out.append((share, value))
        plans = {p: added(study.found(step, p, budget)) for p in PLANNERS}
        rows += [
            (f"budget {budget}", named(p), share, v, show_percent(v, signed=True))
            for p, v in plans.items()
            if v is not None
        ]
    look = {named(p): c for p, c in PLANNERS.items() if any(r[1] == named(p) for r in rows)}
    x = alt.X("x:Q").title("budget, % of the peak with everything saved").axis(values=list(shares.values()))
    x = x.scale(domain=[max(shares.values()) + 1, min(shares.values()) - 1], nice=False)
    y = alt.Y("y:Q").title("added time, %").scale(type="sqrt", domainMin=0)
    area = charts.drawn("x:Q y:Q", ruled_out).mark_area(color=charts.GREY, opacity=0.25).encode(x, y)
    # Dashed, so that what lies under it shows: the search often finds what the greedy finds.
    dashes = [[5, 5] if name == named("search") else [1, 0] for name in look]
    dash = alt.StrokeDash("series:N").scale(domain=list(look), range=dashes).title(None)
    lines = charts.drawn("name:N series:N x:Q y:Q note:N", rows).mark_line(strokeWidth=2)
    under = [area, lines.encode(x, y, charts.colour("series", look), dash, order="x:Q")]
    return charts.dots(rows, look, x, y, under=under, height=340)


def added_table(study: Study, step: Step) -> Table:
    def cell(planner: str, budget: str) -> Cell:
        answer = study.found(step, "search" if planner == BOUND else planner, budget)
        value = least(answer) if planner == BOUND else added(answer)
        return no("none") if value is None else percent_cell(value, signed=True)

    return table(
        [BOUND, *PLANNERS],
        (("planner", "", lambda p: named(p)), *((b, NUMBER, lambda p, b=b: cell(p, b)) for b in BUDGETS)),
        caption=f"{step.title}: added time by budget. Red: no plan within the budget. Each search had "
        f"{SECONDS:g} s of one processor{step.source}",
    )


# 7. Provenance


def measured_where(study: Study) -> Table:
    of: dict[str, list[Step]] = {}
    for s in study.steps:
        of.setdefault(s.path.parent.name, []).append(s)
    ran = dict.fromkeys(of, "nothing was run")
    for folder, found in study.measured.items():
        paths = {batch: GALLERY / folder / f"trace-b{batch}" for batch in found}
        of[folder] = [Step(found[batch].model, path, load(path)) for batch, path in paths.items()]
        ran[folder] = "eager, save-all and plan"
    return table(
        of.items(),
        (
            ("in the gallery", CODE, lambda row: row[0]),
            ("batch sizes", "", lambda row: ", ".join(str(s.batch) for s in row[1])),
            ("sections", "", lambda row: "5" if row[0] in study.measured else "2 to 6"),
            ("memory", "", lambda row: figures_from(row[1][0].trace.meta)),
            ("op times", "", lambda row: row[1][0].trace.meta.times),
            ("torch", "", lambda row: row[1][0].trace.meta.torch_version),
            ("measured as a whole", "", lambda row: ran[row[0]]),
        ),
        caption="Every figure of this page, by the traces that it is worked out of. Bounds and plans are computed; "
        "solve times are of the machine that made this page. No figure here was measured on a GPU.",
    )


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The page.")
@click.option("--svg", type=click.Path(path_type=Path), help="Its main chart, as a picture.")
def main(output: Path, svg: Path | None) -> None:
    """Make the page."""
    try:
        study = Study()
        write_page(output, study.page())
        if svg:
            write_text(svg, picture({s.title: added_time(study, s) for s in study.looked_into}))
    except LowtideError as error:
        raise click.ClickException(str(error)) from None


def picture(titled: Mapping[str, Mapping[str, Any]]) -> str:
    """Charts under each other as one SVG, each under its title."""
    datasets = {name: rows for spec in titled.values() for name, rows in spec["datasets"].items()}
    left_out = ("datasets", "autosize")
    panels = [
        {**{k: v for k, v in spec.items() if k not in left_out}, "title": title, "width": 700}
        for title, spec in titled.items()
    ]
    svg: str = needed("vl_convert").vegalite_to_svg(
        {"vconcat": panels, "datasets": datasets, "background": "white"}
    )
    return svg


if __name__ == "__main__":
    main()

"""Ask PyTorch's own partitioner what it would save of a traced step under its activation_memory_budget.

python -m tests.bench.baselines.torch_budget TRACE [--budgets 0.1,0.5] [--solvers dp,greedy] [-o FILE] [--json]

The model is built and captured again without running it, and has to be the trace's. `saved_sets.plans` makes plans of
what this writes, which say what torch's choice really needs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from tests.bench.baselines.saved_sets import SavedSets
from traces.commands import DefaultGroup, Output, OutputFile, answer_options, stdout_free
from traces.errors import EnvironmentProblem, PlanError, SpecError
from traces.records.store import load
from traces.records.trace import Trace, TraceMeta
from traces.units import show_bytes

EVERY_TENTH: Final = ",".join(f"{k / 10}" for k in range(11))
SOLVERS: Final = ("dp", "ilp", "greedy")


@click.group(cls=DefaultGroup, default="ask")
def main() -> None:
    """What torch would save of a traced step."""


@main.command("ask")
@click.argument("directory", metavar="TRACE")
@click.option(
    "--budgets", default=EVERY_TENTH, show_default=True, help="Values of torch's activation_memory_budget."
)
@click.option(
    "--solvers", default="dp", show_default=True, help="Some of dp, ilp (needs scipy), greedy; with commas."
)
@click.option("-o", "--output", type=OutputFile(), help="File for the saved sets.")
@answer_options
def ask(directory: str, budgets: str, solvers: str, output: Path | None, out: Output) -> None:
    """Run torch's activation_memory_budget on the graph of TRACE and write what it saves and what it recomputes."""
    settings = [(budget, s.strip()) for s in solvers.split(",") for budget in parse_budgets(budgets)]
    for _, solver in settings:
        check_solver(solver)
    record = load(directory)
    with stdout_free(out.as_json):
        sets = saved_sets(record, settings, out.say)
    if output is not None:
        sets.save(output)
    sizes = record.storages.nbytes
    lines = [f"{directory}: {sets.source}; graph captured in {sets.capture_seconds:.1f} s"]
    for s in sets.sets:
        wrong = "" if s.valid else f", WRONG GRADIENTS: {len(s.random_again)} random ops run again"
        lines.append(
            f"  {s.label:20} saves {show_bytes(sum(sizes[k] for k in s.saved)):>11} in {len(s.saved)} storages, runs "
            f"{s.recomputed_ops} ops again{wrong}; solved in {s.solve_seconds:.2f} s"
        )
    out.show(
        lambda: {"output": None if output is None else str(output), **sets.to_json()},
        lambda: "\n".join(lines),
    )


def parse_budgets(text: str) -> list[float]:
    """The shares in `0.1,0.5`; raises SpecError if one is no number between 0 and 1."""
    with contextlib.suppress(ValueError):
        shares = [float(word) for word in text.split(",")]
        if all(0.0 <= share <= 1.0 for share in shares):
            return shares
    raise SpecError(f"--budgets {text!r}: give shares between 0 and 1 with commas, such as 0.1,0.5.")


def check_solver(solver: str) -> None:
    """Raise SpecError if torch knows no such solver, EnvironmentProblem if it needs what is missing."""
    if solver not in SOLVERS:
        raise SpecError(f"torch has no solver {solver!r}; give some of {', '.join(SOLVERS)}.")
    if solver == "ilp" and find_spec("scipy") is None:
        raise EnvironmentProblem("torch's solver ilp needs scipy; install it with: pip install scipy")


def saved_sets(
    trace: Trace, settings: Sequence[tuple[float, str]], progress: Callable[[str], None] = lambda line: None
) -> SavedSets:
    """Build and capture the trace's model again, and ask torch for each budget and solver.

    Raises:
        PlanError: what was captured is not the trace's graph (another version of torch or of the user's file).
        SpecError, CaptureError, EnvironmentProblem: the model cannot be built or captured here.
    """
    import torch

    from tests.bench.baselines.saved_by_torch import Setting, saved_set

    begin = time.perf_counter()
    progress(f"Capturing {trace.meta.model} ...")
    again = same_graph_again(trace.meta)
    seconds = time.perf_counter() - begin
    sets = []
    for budget, solver in settings:
        progress(f"torch's budget {budget} with {solver} ...")
        sets.append(saved_set(again.program, Setting(budget=budget, solver=solver), again.graph_ops))
    source = f"torch {torch.__version__} activation_memory_budget"
    return SavedSets(trace=trace.meta, source=source, capture_seconds=seconds, sets=tuple(sets))


def same_graph_again(meta: TraceMeta) -> Any:
    """The draft of the step that a trace's header describes, for ids that are to be the trace's own; PlanError if it is
    not the same graph any more."""
    import torch

    from tracer.record.step import recorded_again

    again = recorded_again(meta, device=meta.device if meta.mode != "fake" else "cpu")
    if again.program.fingerprint() != meta.graph_fingerprint:
        raise PlanError(
            f"{meta.model}: the model that was built here has another graph than the trace (which was recorded with "
            f"torch {meta.torch_version}; this is {torch.__version__}); record the trace again."
        )
    return again


if __name__ == "__main__":
    main()

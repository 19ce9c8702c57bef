"""`simulate sweep`: one model traced and planned at several batch sizes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simulator.cli.options import (
    ALLOC_CONF,
    BUDGET_OF,
    TRACE_WORDS,
    Words,
    check_alloc_conf,
    lever_options,
    listed,
    output_options,
    planning_options,
    words_for_trace,
)
from simulator.core.budget import check_budget
from simulator.core.limits import Constraints, Limits
from traces.commands import Output
from traces.errors import BudgetError, SpecError
from traces.model_spec import short_name
from traces.records.plan import ALLOCATED

if TYPE_CHECKING:
    from simulator.studies.sweep import Sweep


@click.command("sweep", context_settings={"ignore_unknown_options": True})
@click.argument("model")
@TRACE_WORDS
@click.option("--batch-sizes", required=True, help="For example 8,16,32,64.")
@click.option(
    "--budget", required=True, help="As in `simulate TRACE --budget`; a share is of each batch's own peak."
)
@BUDGET_OF
@ALLOC_CONF
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory (default: MODEL-sweep).")
@planning_options
@lever_options
@output_options
def sweep_command(
    model: str,
    trace_words: tuple[str, ...],
    batch_sizes: str,
    budget: str,
    budget_of: str | None,
    alloc_conf: str | None,
    output: Path | None,
    planner: str | None,
    planning: Words,
    changes: Words,
    out: Output,
) -> None:
    """Trace and plan MODEL at several batch sizes.

    Any other option goes to `trace`, such as --seq-len 512 or --target h200. Traces, plans and sweep.json are written
    to one directory; a trace that the same options made before is used again. A batch size for which no plan fits is
    reported as such; the exit code is 1 only if none fits.
    """
    from simulator.api import levers_of
    from simulator.planners import DEFAULT
    from simulator.studies.sweep import SweepRequest, sweep

    check_budget(budget)
    check_alloc_conf(alloc_conf)
    request = SweepRequest(
        model=model,
        batch_sizes=parse_batch_sizes(batch_sizes),
        budget=budget,
        budget_of=budget_of or ALLOCATED,
        alloc_conf=alloc_conf,
        planner=planner or DEFAULT,
        limits=Limits(seconds=planning["seconds"], seed=planning["seed"]),
        constraints=Constraints(never=planning["never"], always_save=planning["always_save"]),
        levers=levers_of(**changes),
        directory=output or Path(f"{short_name(model)}-sweep"),
        tracer_options=words_for_trace(model, trace_words),
    )
    found = sweep(request, out.say)
    if out.report is not None:
        from simulator.report.sweep import write_sweep

        write_sweep(out.report, found, root=request.directory)
    out.show(found.to_json, lambda: sweep_table(found, request.directory))
    if not any(row.feasible for row in found.rows):
        raise BudgetError(f"no batch size fits: {found.rows[0].message}")


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """Batch sizes from `8,16,32`; raises SpecError if one is no positive number or stands twice."""
    words = listed("--batch-sizes", text)
    if not all(re.fullmatch("[1-9][0-9]*", word) for word in words):
        raise SpecError(f"--batch-sizes {text!r}: give positive whole numbers with commas, such as 8,16,32.")
    return tuple(map(int, words))


def sweep_table(sweep: Sweep, directory: Path) -> str:
    """The sweep to read: one line a batch size."""
    notes = [f"batch {row.batch_size}: {row.message}" for row in sweep.rows if not row.feasible]
    notes += [f"warning {text}" for text in sweep.warnings]
    written = f"Written to {directory}: sweep.json, traces, plans. Next: execute sweep {shlex.quote(str(directory))}"
    return "\n".join([*sweep.table().without("planner", "budget", "").lines(), *notes, written])

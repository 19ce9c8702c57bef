"""The command `simulate torch-budget`: what torch's activation_memory_budget really needs, beside our plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.options import planning_options
from traces.errors import SpecError

if TYPE_CHECKING:
    from simulator.core.limits import Limits
    from simulator.studies.torch_budget import Row


@click.command("torch-budget")
@click.argument("trace_name", metavar="TRACE")
@click.option("--saved", type=click.Path(path_type=Path), help="What `trace torch-budget` wrote.")
@click.option("--budgets", help="Without --saved: torch's budgets (default 0.0,0.1,...,1.0).")
@click.option("--solvers", default="dp", show_default=True, help="Without --saved: some of dp, ilp, greedy.")
@click.option("--runtime", default="flops", show_default=True, help="Without --saved: flops or times.")
@click.option("--planner", help="Ours (default: search; see `simulate planners`).")
@planning_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory: write torch's plans here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
def torch_budget_command(
    trace_name: str,
    saved: Path | None,
    budgets: str | None,
    solvers: str,
    runtime: str,
    planner: str | None,
    limits: Limits,
    output: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Replay the plans of torch's activation_memory_budget and plan for the same peaks.

    torch runs in a process of its own, on the graph of TRACE. Each of its plans is imported and replayed exactly.
    """
    from simulator.planners import default_for, find
    from simulator.planners.torch_budget import BUDGETS, ask_torch
    from simulator.studies.torch_budget import rows
    from traces.saved_sets import SavedSets
    from traces.store import load

    planner = planner or default_for(limits)
    find(planner)
    if output is not None and output.exists() and not output.is_dir():
        raise SpecError(f"{output} is a file; name a directory with -o.")

    def say(line: str) -> None:
        if not quiet:
            click.echo(line, err=True)

    trace = load(trace_name)
    if saved is not None:
        sets = SavedSets.load(saved)
    else:
        shares = BUDGETS if budgets is None else parse_shares(budgets)
        sets = ask_torch(trace, shares, tuple(solvers.split(",")), runtime, say)
    table = rows(trace, sets, planner, limits, say)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for row in table:
            row.plan.save(output / f"torch-{row.label}.json")
    if as_json:
        data: dict[str, Any] = {
            "trace": trace_name,
            "source": sets.source,
            "capture_seconds": sets.capture_seconds,
            "planner": planner,
            "resident_bytes": trace.resident_bytes,
            "plans": [row.to_json() for row in table],
        }
        click.echo(json.dumps(data))
    else:
        click.echo(text(table, planner, sets.source))


def text(table: tuple[Row, ...], planner: str, source: str) -> str:
    """The rows to read."""
    from traces.units import show_bytes, show_percent

    cells = [("torch", "peak", "overhead", "solved in", f"{planner}'s", "solved in", "")]
    for row in table:
        ours = row.ours_overhead_percent
        cells.append(
            (
                row.label,
                show_bytes(row.peak_bytes),
                show_percent(row.overhead_percent, signed=True),
                f"{row.solve_seconds:.2f} s",
                "–" if ours is None else show_percent(ours, signed=True),
                f"{row.ours_solve_seconds:.2f} s",
                ""
                if row.valid
                else f"as torch runs it: wrong gradients ({row.random_ops_again} random ops again)",
            )
        )
    widths = [max(len(line[k]) for line in cells) for k in range(len(cells[0]))]
    lines = [source]
    for line in cells:
        columns = [f"{c:>{w}}" for c, w in zip(line[:-1], widths, strict=False)]
        lines.append("  ".join((*columns, line[-1])))
    return "\n".join(line.rstrip() for line in lines)


def parse_shares(text: str) -> tuple[float, ...]:
    """Shares from `0.1,0.5`; raises SpecError if one is no number."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise SpecError(
            f"--budgets {text!r}: give shares between 0 and 1 with commas, such as 0.1,0.5."
        ) from None

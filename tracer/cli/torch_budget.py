"""The command `trace torch-budget`: ask PyTorch's own partitioner what it would save of a traced step."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

import click

from traces.commands import Output, answer_options, stdout_free
from traces.units import show_bytes

EVERY_TENTH = ",".join(f"{k / 10}" for k in range(11))


@click.command("torch-budget")
@click.argument("directory", metavar="TRACE")
@click.option(
    "--budgets", default=EVERY_TENTH, show_default=True, help="Values of torch's activation_memory_budget."
)
@click.option(
    "--solvers", default="dp", show_default=True, help="Some of dp, ilp (needs scipy), greedy; with commas."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File for the saved sets.")
@click.option("-f", "--force", is_flag=True, help="Replace the file that stands there.")
@answer_options
def torch_budget(
    directory: str, budgets: str, solvers: str, output: Path | None, force: bool, out: Output
) -> None:
    """Run torch's activation_memory_budget on the graph of TRACE and write what it saves and what it recomputes.

    The model is built and captured again without running it, and has to be the trace's. `simulate
    compare --saved` makes plans of the file and says what they really need.
    """
    from tracer.torch_api import require_torch
    from traces.errors import TraceError
    from traces.records import store

    shares = parse_budgets(budgets)
    record = store.load(directory)
    if output is not None and output.exists() and not force:
        raise TraceError(f"{output}: exists; give --force to replace it, or another name with -o.")
    require_torch()
    from tracer.record.torch_budget import Setting, saved_sets

    names = [name.strip() for name in solvers.split(",")]
    settings = [Setting(budget=b, solver=s) for s in names for b in shares]
    for setting in settings:
        setting.check()
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
    if output is not None and not out.as_json:
        where, saved = shlex.quote(str(directory)), shlex.quote(str(output))
        out.say(f"Next: simulate compare {where} --budget 60% --saved {saved}")


def parse_budgets(text: str) -> list[float]:
    """The shares in `0.1,0.5`; raises SpecError if one is no number between 0 and 1."""
    from traces.errors import SpecError

    with contextlib.suppress(ValueError):
        shares = [float(word) for word in text.split(",")]
        if all(0.0 <= share <= 1.0 for share in shares):
            return shares
    raise SpecError(f"--budgets {text!r}: give shares between 0 and 1 with commas, such as 0.1,0.5.")

"""What budgets of reserved memory cost, beside the plan for as many allocated bytes; and whether they are kept to.

python -m tests.bench.reserved_budgets TRACE ... [--share 60,50] [--allow bit] [--seconds 10] [--rehearse h200]

TRACE is what `trace MODEL --target GPU -o TRACE` wrote. A share is of what the step reserves with everything saved,
under torch's default allocator. For each share: the plan for so many allocated bytes; plans for so many reserved bytes
under the default allocator and with expandable segments; of each what it adds and what it reserves (simulated). With
--rehearse each plan of reserved memory is applied on the null driver, and what torch's own code reserves there stands
beside it (no GPU: needs a CUDA build of the torch that made the trace).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from executor.cli.rehearse import APPLY
from simulator import api
from simulator.core.problem import Problem
from simulator.planners.outcome import Infeasible
from tracer.rehearsal.run import rehearse
from traces.records.store import load

WAYS = {"default": "", "expandable": "expandable_segments:True"}


def rows_of(path: Path, shares: list[int], seconds: float, allow: str, gpu: str) -> Iterator[dict[str, Any]]:
    """A row for each share and way."""
    trace = load(path)
    problem = Problem(trace)
    whole = api.simulate(problem).saved_figures.peak_reserved_bytes or 0
    for share in shares:
        limit = whole * share // 100
        key = {"model": trace.meta.model, "share": share, "limit_bytes": limit}
        asked = [
            ("as many allocated", None, "allocated"),
            *((w, conf, "reserved") for w, conf in WAYS.items()),
        ]
        for way, conf, of in asked:
            try:
                plan = api.plan(problem, limit, budget_of=of, alloc_conf=conf, seconds=seconds, allow=allow)
            except Infeasible as refusal:
                lowest = refusal.figures["lowest_peak_bytes"]
                yield {**key, "way": way, "lowest_bytes": lowest}
                continue
            found = api.simulate(problem, plan, alloc_conf=conf)
            row = {
                **key,
                "way": way,
                "adds_percent": round(found.overhead_percent, 3),
                "reserved_bytes": found.planned_figures.peak_reserved_bytes,
                "ahead_bytes": plan.ahead_bytes,
            }
            if gpu and of == "reserved":
                with tempfile.TemporaryDirectory() as folder:
                    there = rehearse(
                        trace.meta.model, gpu, options=dict(trace.meta.options), script=False,
                        plan=plan.save(Path(folder) / "plan.json"), apply=APPLY, alloc_conf=conf or "",
                        seed=trace.meta.seed,
                    )  # fmt: skip
                row["rehearsed_reserved_bytes"] = there.figures.peak_reserved_bytes
                row["within"] = (there.figures.peak_reserved_bytes or 0) <= limit
            yield row


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--share", "shares", default="60,50", show_default=True)
@click.option("--seconds", default=10.0, show_default=True)
@click.option("--allow", default="bit", show_default=True)
@click.option("--rehearse", "gpu", default="", help="On this GPU of the device table.")
def main(traces: tuple[Path, ...], shares: str, seconds: float, allow: str, gpu: str) -> None:
    """A line of JSON for each share and way."""
    for path in traces:
        for row in rows_of(path, [int(s) for s in shares.split(",")], seconds, allow, gpu):
            click.echo(json.dumps(row))


if __name__ == "__main__":
    main()

"""The MLP for which torch's memory budget saves nothing: twelve layers, batch 4,096, width 1,024; peers and ours.

python -m tests.bench.mlp [--cache DIR] [--seconds S] [--json]

As in the published comparison: resident bytes are subtracted, 1 MB = 1e6 bytes, and time is the roofline of an A100
40 GB without fusion. Its model is not written down; the one here has its 251.7 MB with everything kept, and torch's
default solver saves nothing of them at any budget. Counts and ignores: as `tests.bench.torch_budget`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from simulator.core.limits import Limits
from simulator.planners import DEFAULT
from tests.bench.recorded import BENCH, CACHE
from tests.bench.torch_budget import Model, best_of, line

BUILD = f"{BENCH / 'build_functions.py'}:mlp"
BELOW_MB, AT_MOST_PERCENT = 134.0, 25.0


@click.command()
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@click.option("--planner", default=DEFAULT, show_default=True)
@click.option("--solvers", default="dp", show_default=True, help="Of torch; ilp needs scipy.")
@click.option("--seconds", type=float, default=5.0, show_default=True, help="For each plan of ours.")
@click.option("--json", "as_json", is_flag=True)
def main(cache: Path, planner: str, solvers: str, seconds: float, as_json: bool) -> None:
    """Compare torch's budget mode, checkpoints and our planner on the MLP."""
    model = Model(BUILD, cache, options={})
    peers = model.torchs(solvers.split(",")) + model.checkpoints()
    mine = model.ours(BELOW_MB, "time", planner, Limits(seconds=seconds))
    met = mine is not None and mine.time_percent < AT_MOST_PERCENT
    data: dict[str, Any] = {
        "keep_all_mb": (model.base.peak_allocated_bytes - model.trace.resident_bytes) / 1e6,
        "peers": [asdict(f) for f in peers],
        "front": [asdict(f) for f in best_of(peers)],
        "ours": mine and asdict(mine),
        "met": met,
    }
    if as_json:
        click.echo(json.dumps(data))
        return
    click.echo(f"keep-all {data['keep_all_mb']:.1f} MB")
    for f in data["peers"]:
        click.echo(line(f))
    click.echo(f"below {BELOW_MB} MB at less than +{AT_MOST_PERCENT} %: {'met' if met else 'NOT met'}")
    click.echo("  none" if mine is None else line(data["ours"]))


if __name__ == "__main__":
    main()

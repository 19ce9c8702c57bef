"""rotor's dynamic programme over the blocks of a model beside the default planner, at the same shares of activations.

python -m tests.bench.rotor [TRACE ...] [--shares 77,58,39,29,19] [--planners ...] [--cache DIR] [--json]

The shares are those of the published runs of rotor and Rockmate on a 12-layer GPT: of the peak less the resident bytes,
forward and backward alone (`--optimizer none`), fake traces with the times of an H200. rotor itself is run by
`tests.bench.baselines.rotor` on the same trace, and replayed as every other plan; the rotor and rockmate packages are
not used. Counts and ignores: as `tests.bench.solve`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from simulator.core.problem import Problem
from simulator.planners import DEFAULT
from tests.bench.recorded import BENCH, CACHE, trace_of
from tests.bench.solve import measure, text

TRACES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": (f"{BENCH / 'build_functions.py'}:mlp", {}),
    "gpt2": ("gpt2", {"batch_size": 4, "seq_len": 256, "dropout": 0.0, "optimizer": "none"}),
    "bert-base": ("bert-base", {"batch_size": 16, "seq_len": 512, "dropout": 0.0, "optimizer": "none"}),
    "resnet50": ("resnet50", {"batch_size": 64, "optimizer": "none"}),
}


@click.command()
@click.argument("traces", nargs=-1, type=click.Choice([*TRACES]))
@click.option(
    "--shares", default="77,58,39,29,19", show_default=True, help="Percent of the activations' peak."
)
@click.option("--planners", default=f"tests.bench.baselines.rotor:plan,{DEFAULT}", show_default=True)
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@click.option("--seconds", type=float, default=5.0, show_default=True, help="The planner's own limit.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="After which it is ended.")
@click.option("--json", "as_json", is_flag=True)
def main(
    traces: tuple[str, ...],
    shares: str,
    planners: str,
    cache: Path,
    seconds: float,
    timeout: float,
    as_json: bool,
) -> None:
    """Plan TRACES (default: all) with rotor and others at the same budgets."""
    out = []
    for name in traces or TRACES:
        model, options = TRACES[name]
        trace = trace_of(cache, model, **options, target="h200")
        resident = trace.resident_bytes
        activations = Problem(trace).saved.timeline.peak_allocated_bytes - resident
        budgets = [str(resident + int(float(s) / 100 * activations)) for s in shares.split(",")]
        found = measure(name, trace, budgets, planners.split(","), seconds, timeout)
        out += found
        if not as_json:
            for share, r in zip(
                (s for s in shares.split(",") for _ in planners.split(",")), found, strict=True
            ):
                click.echo(f"{share:>3} % of activations: {text(r)}")
    if as_json:
        click.echo(json.dumps([asdict(r) for r in out]))


if __name__ == "__main__":
    main()

"""What watching a model costs at every call, in processor time: reading its state, and finding it unchanged.

python -m tests.bench.guards_cost bert-base [--rounds 200] [--json]
"""

from __future__ import annotations

import json
import statistics
import time

import click


@click.command()
@click.argument("model", default="bert-base")
@click.option("--rounds", type=int, default=200, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(model: str, rounds: int, as_json: bool) -> None:
    """Time the guards of MODEL, by its name in `trace`; its weights are never made."""
    from executor.guards.state import Watch
    from tracer.step.step import load_spec
    from tracer.torch_api import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        built = load_spec(model, {})("cpu").model
    watch = Watch(built)
    begin = time.process_time()
    watch.state()
    read = time.process_time() - begin
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        watch.state()
        found.append(time.process_time() - begin)
    figures = {
        "model": model,
        "modules": sum(1 for _ in built.modules()),
        "read_ms": 1e3 * read,
        "unchanged_ms": 1e3 * statistics.median(found),
    }
    if as_json:
        click.echo(json.dumps(figures))
    else:
        click.echo(
            "{model}: {modules} modules, read in {read_ms:.1f} ms, unchanged in {unchanged_ms:.3f} ms".format(
                **figures
            )
        )


if __name__ == "__main__":
    main()

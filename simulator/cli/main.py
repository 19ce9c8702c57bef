"""The command `simulate`: its subcommands, and the help that shows a simulation's options as its own."""

from __future__ import annotations

import atexit
import gc
import json

import click

from simulator.cli.history import diff_command, why_command
from simulator.cli.plan import plan_command
from simulator.cli.studies import (
    capacity_command,
    compare_command,
    max_batch_command,
    pareto_command,
    sweep_command,
)
from traces.commands import DefaultGroup, echo

DEFAULT_COMMAND = ""  # a name that no trace can have


class SimulateGroup(DefaultGroup):
    """Shows the options of the default command, a simulation, as its own."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "TRACE [--budget BUDGET] [OPTIONS]")
        formatter.write_usage(ctx.command_path, "COMMAND [OPTIONS]", prefix=" " * len("Usage: "))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        plan = self.commands[DEFAULT_COMMAND]
        plan.format_options(click.Context(plan, info_name=ctx.info_name), formatter)
        shown = ((n, c.get_short_help_str(80)) for n, c in self.commands.items() if not c.hidden)
        with formatter.section("Commands"):
            formatter.write_dl(list(shown))


@click.group(
    "simulate",
    cls=SimulateGroup,
    default=DEFAULT_COMMAND,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)
@click.version_option(package_name="lowtide")
def main() -> None:
    """Find the cheapest way to make a training step fit into a memory budget.

    TRACE is a directory that `trace` wrote, or the name of a trace in the gallery. Without a budget the step is
    simulated as it is.

    \b
    simulate resnet152-b32                                    how much it needs
    simulate resnet152-b32 --budget 60% -o plan.json          make it fit
    simulate sweep resnet152 --batch-sizes 8,16,32 --budget 60%
    simulate compare resnet152-b32 --budget 60%               all planners side by side
    simulate pareto resnet152-b32                             what each GiB costs
    simulate max-batch bert-base --gpu a100-40                the largest batch that fits
    simulate capacity bert-base --gpus h100,a100-80           what fits which GPU
    simulate planners                                         list the planners
    simulate why snapshot.pickle                              what held the memory, what would make it fit
    simulate diff before.pickle after.pickle                  what grew

    Exit code: 0 done, 1 the budget cannot be met, 2 the input is wrong.
    """
    # A trace is many small objects that stay: to look through them at every turn takes 0.1 s.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)  # nor in the end, when all of it goes


@click.command("planners")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of a table.")
def planners_command(as_json: bool) -> None:
    """List the planners."""
    from simulator.planners import REGISTRY
    from simulator.show.tables import aligned

    about = {name: summary for name, (_, summary) in REGISTRY.items()}
    echo(json.dumps(about) if as_json else "\n".join(aligned([*about.items()], left=(0, 1))))


main.add_command(plan_command, DEFAULT_COMMAND)
for command in (
    sweep_command, planners_command, compare_command, pareto_command, max_batch_command,
    capacity_command, why_command, diff_command,
):  # fmt: skip
    main.add_command(command)

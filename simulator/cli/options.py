"""What the subcommands of `simulate` share: options and what they mean, and where answers go.

The options of planning and of the device reach a command as keyword arguments of the functions of `simulator.api`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

import click

from simulator.core.limits import DEFAULTS, Constraints
from simulator.core.selectors import check_selectors
from traces.commands import report_option
from traces.errors import SpecError
from traces.plan import ALLOCATED, RESERVED

Command = Callable[..., None]
Words = dict[str, Any]  # keyword arguments


class FiniteSeconds(click.FloatRange):
    """Seconds of a clock that runs out: the range alone lets `nan` and `inf` through, and theirs never does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds; give one such as 5.", param, ctx)
        return seconds


SECONDS_HELP: Final = "After so much processor time a planner that searches stops improving its plan."
CONSTRAINTS_HELP: Final = (
    "A file with a line for each constraint, such as `never layers.*.attn :: aten.mm.default`."
)
SEARCH: Final = (
    click.option(
        "--seconds", type=FiniteSeconds(min=0), default=DEFAULTS.seconds, show_default=True, help=SECONDS_HELP
    ),
    click.option(
        "--seed", type=int, default=DEFAULTS.seed, show_default=True, help="Of a planner's random choices."
    ),
    click.option(
        "--never", multiple=True, metavar="SELECTOR", help="Ops that must not run again; may be repeated."
    ),
    click.option(
        "--always-keep",
        multiple=True,
        metavar="SELECTOR",
        help="Ops whose values must be saved; may be repeated.",
    ),
    click.option("--constraints", type=click.Path(path_type=Path), metavar="FILE", help=CONSTRAINTS_HELP),
)
PLANNER: Final = click.option("--planner", help="Which planner (default: search; see `simulate planners`).")
ALLOC_CONF: Final = click.option(
    "--alloc-conf",
    metavar="TEXT",
    help="What if PYTORCH_ALLOC_CONF were this? For example expandable_segments:True (traces of a GPU).",
)
DEVICE: Final = (
    ALLOC_CONF,
    click.option(
        "--gpu", metavar="NAME", help="Does it fit this device of `trace targets`? Such as a100-40."
    ),
    click.option("--device-memory", metavar="SIZE", help="Does it fit a device of so much, such as 40GiB?"),
    click.option(
        "--context", metavar="SIZE", help="What CUDA's context takes of the device (assumed: 512MiB)."
    ),
)
BUDGET_OF: Final = click.option(
    "--budget-of",
    type=click.Choice([ALLOCATED, RESERVED]),
    default=ALLOCATED,
    show_default=True,
    help="What the budget limits: what the step asks for, or what CUDA's allocator takes for it.",
)
OUTPUT: Final = (
    report_option,
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of text."),
    click.option("-q", "--quiet", is_flag=True, help="No progress on stderr."),
)


def with_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    """The command with these options, in this order in its help."""
    for option in reversed(options):
        command = option(command)
    return command


def planning_options(command: Command) -> Command:
    """Give a command the options of planning; it receives them as `planner`, checked, and `planning`."""

    @wraps(command)
    def with_planning(planner: str | None, **others: Any) -> None:
        if planner is not None:
            from simulator.planners import find

            find(planner)
        command(planner=planner, **others)

    return with_options(search_options(with_planning), PLANNER)


def search_options(command: Command) -> Command:
    """Give a command the limits of a search and its constraints; it receives them, checked, as `planning`."""

    @wraps(command)
    def with_search(
        seconds: float,
        seed: int,
        never: tuple[str, ...],
        always_keep: tuple[str, ...],
        constraints: Path | None,
        **others: Any,
    ) -> None:
        given = Constraints(never=never, always_keep=always_keep)
        if constraints is not None:
            given = read_constraints(constraints, given)
        check_selectors(given)
        limits = {"seconds": seconds, "seed": seed}
        command(planning={**limits, "never": given.never, "always_keep": given.always_keep}, **others)

    return with_options(with_search, *SEARCH)


def read_constraints(path: Path, given: Constraints) -> Constraints:
    """The constraints of a file, behind those already given.

    One a line: `never SELECTOR` or `always-keep SELECTOR`. Empty lines and what follows a `#` do not count.

    Raises:
        SpecError: no such file, or a line that is no constraint; names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--constraints {path}: cannot be read ({error}).") from None
    never, keep = list(given.never), list(given.always_keep)
    for number, line in enumerate(text.splitlines(), 1):
        word, _, rest = line.partition("#")[0].strip().partition(" ")
        rest = rest.strip()
        if word in ("never", "always-keep") and rest:
            (never if word == "never" else keep).append(rest)
        elif word:
            raise SpecError(
                f"{path}:{number}: {line.strip()!r} is no constraint; write `never SELECTOR` or `always-keep SELECTOR`."
            )
    return Constraints(never=tuple(never), always_keep=tuple(keep))


def device_options(command: Command) -> Command:
    """Give a command the options about allocator and device; it receives them, checked, as `memory`."""

    @wraps(command)
    def with_memory(
        alloc_conf: str | None, gpu: str | None, device_memory: str | None, context: str | None, **others: Any
    ) -> None:
        from simulator.allocator.device import device_memory as memory_of
        from traces.devices import device

        check_alloc_conf(alloc_conf)
        if gpu is not None:
            device(gpu)
        of = partial(memory_of, gpu=gpu, memory=device_memory, context=context)
        command(memory={"alloc_conf": alloc_conf, "device": of}, **others)

    return with_options(with_memory, *DEVICE)


def check_alloc_conf(text: str | None) -> None:
    """Raise SpecError before any work for settings that torch does not have."""
    if text is not None:
        from simulator.allocator.settings import parse_alloc_conf

        parse_alloc_conf(text)


def check_budget_text(text: str) -> None:
    """Raise SpecError before any work if the text cannot be a budget."""
    from simulator.core.budget import check_budget

    check_budget(text)


# What is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where an answer goes, and in which form."""

    report: Path | None
    as_json: bool
    quiet: bool

    def say(self, line: str) -> None:
        """A line of progress, on stderr."""
        if not self.quiet:
            click.echo(line, err=True)

    def show(self, data: Callable[[], dict[str, Any]], text: Callable[[], str]) -> None:
        """The answer on stdout: one JSON object, or text to read."""
        click.echo(json.dumps(data()) if self.as_json else text())


def output_options(command: Command) -> Command:
    """Give a command --report, --json and -q; it receives them as `out`. What the modules inside log is told too."""

    @wraps(command)
    def with_out(report: Path | None, as_json: bool, quiet: bool, **others: Any) -> None:
        logger = logging.getLogger("lowtide")
        logger.setLevel(logging.INFO)
        logger.handlers = [] if quiet else [_Told()]
        logger.propagate = False
        command(out=Output(report=report, as_json=as_json, quiet=quiet), **others)

    return with_options(with_out, *OUTPUT)


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(record.getMessage(), err=True)

"""What the subcommands of `simulate` share: options and what they mean, tables, progress."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simulator.core.limits import Constraints, Limits
from simulator.core.selectors import check_selectors
from traces.commands import report_option
from traces.errors import SpecError
from traces.plan import ALLOCATED, RESERVED

if TYPE_CHECKING:
    from simulator.allocator.device import DeviceMemory
    from traces.trace import TraceMeta

Command = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """How a planner may look for a plan; the names are those of the functions of `simulator.api`."""

    seconds: float
    seed: int
    never: tuple[str, ...]
    always_keep: tuple[str, ...]

    @property
    def limits(self) -> Limits:
        """How long, and from which seed."""
        return Limits(seconds=self.seconds, seed=self.seed)

    @property
    def constraints(self) -> Constraints:
        """What no plan may do."""
        return Constraints(never=self.never, always_keep=self.always_keep)

    def words(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {"never": self.never, "always_keep": self.always_keep, **self.search()}

    def search(self) -> dict[str, Any]:
        """Those that a problem with its constraints leaves."""
        return {"seconds": self.seconds, "seed": self.seed}


class FiniteSeconds(click.FloatRange):
    """Seconds of a clock that runs out: the range alone lets `nan` and `inf` through, and theirs never does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds; give one such as 5.", param, ctx)
        return seconds


def planning_options(command: Command) -> Command:
    """Give a command the options of planning; it receives them as `planner`, checked, and `planning`."""

    @click.option("--planner", help="Which planner (default: search; see `simulate planners`).")
    @search_options
    @wraps(command)
    def with_planning(planner: str | None, **others: Any) -> None:
        check_planner(planner)
        command(planner=planner, **others)

    return with_planning


def search_options(command: Command) -> Command:
    """Give a command the limits of a search and its constraints; it receives them as `planning`."""

    @click.option(
        "--seconds",
        type=FiniteSeconds(min=0),
        default=Limits().seconds,
        show_default=True,
        help="After so much processor time a planner that searches stops improving its plan.",
    )
    @click.option(
        "--seed", type=int, default=Limits().seed, show_default=True, help="Of a planner's random choices."
    )
    @click.option(
        "--never", multiple=True, metavar="SELECTOR", help="Ops that must not run again; may be repeated."
    )
    @click.option(
        "--always-keep",
        multiple=True,
        metavar="SELECTOR",
        help="Ops whose values must be saved; may be repeated.",
    )
    @click.option(
        "--constraints",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A file with a line for each constraint, such as `never layers.*.attn :: aten.mm.default`.",
    )
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
        planning = Planning(seconds=seconds, seed=seed, never=given.never, always_keep=given.always_keep)
        command(planning=planning, **others)

    return with_search


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


def check_planner(name: str | None) -> None:
    """Raise SpecError before any work if there is no such planner; None is the default."""
    from simulator.planners import find

    if name is not None:
        find(name)


# Allocator and device


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user typed about allocator settings and a device."""

    alloc_conf: str | None = None
    gpu: str | None = None
    device_memory: str | None = None
    context: str | None = None

    def check(self) -> None:
        """Raise SpecError before any work for what no trace could make sense of."""
        from simulator.allocator.settings import parse_alloc_conf
        from traces.devices import device

        if self.alloc_conf is not None:
            parse_alloc_conf(self.alloc_conf)
        if self.gpu is not None:
            device(self.gpu)

    def device(self, meta: TraceMeta) -> DeviceMemory | None:
        """The memory of the device that was named; SpecError if it cannot run this trace's graph."""
        from simulator.allocator.device import device_memory
        from simulator.allocator.device_fit import kind_of

        return device_memory(kind_of(meta), gpu=self.gpu, memory=self.device_memory, context=self.context)

    def words(self, meta: TraceMeta) -> dict[str, Any]:
        """As keyword arguments of the functions of `simulator.api`."""
        return {"alloc_conf": self.alloc_conf, "device": self.device(meta)}


def alloc_conf_option(command: Command) -> Command:
    """Give a command --alloc-conf."""
    return click.option(
        "--alloc-conf",
        metavar="TEXT",
        help="What if PYTORCH_ALLOC_CONF were this? For example expandable_segments:True (traces of a GPU).",
    )(command)


def device_options(command: Command) -> Command:
    """Give a command the options about allocator and device; it receives them, checked, as `asked`."""

    @alloc_conf_option
    @click.option(
        "--gpu", metavar="NAME", help="Does it fit this device of `trace targets`? Such as a100-40."
    )
    @click.option("--device-memory", metavar="SIZE", help="Does it fit a device of so much, such as 40GiB?")
    @click.option(
        "--context", metavar="SIZE", help="What CUDA's context takes of the device (assumed: 512MiB)."
    )
    @wraps(command)
    def with_asked(
        alloc_conf: str | None, gpu: str | None, device_memory: str | None, context: str | None, **others: Any
    ) -> None:
        asked = Asked(alloc_conf=alloc_conf, gpu=gpu, device_memory=device_memory, context=context)
        asked.check()
        command(asked=asked, **others)

    return with_asked


def budget_of_option(command: Command) -> Command:
    """Give a command --budget-of."""
    return click.option(
        "--budget-of",
        type=click.Choice([ALLOCATED, RESERVED]),
        default=ALLOCATED,
        show_default=True,
        help="What the budget limits: what the step asks for, or what CUDA's allocator takes for it.",
    )(command)


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

    @report_option
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of text.")
    @click.option("-q", "--quiet", is_flag=True, help="No progress on stderr.")
    @wraps(command)
    def with_out(report: Path | None, as_json: bool, quiet: bool, **others: Any) -> None:
        logger = logging.getLogger("lowtide")
        logger.setLevel(logging.INFO)
        logger.handlers = [] if quiet else [_Told()]
        logger.propagate = False
        command(out=Output(report=report, as_json=as_json, quiet=quiet), **others)

    return with_out


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(record.getMessage(), err=True)


def columns(lines: Sequence[Sequence[object]], left: Sequence[int] = ()) -> list[str]:
    """Rows as lines of a table: the columns in `left` to the left, the others to the right."""
    widths = [max(len(str(line[k])) for line in lines) for k in range(len(lines[0]))]
    return [
        "  ".join(
            f"{cell!s:<{w}}" if k in left else f"{cell!s:>{w}}"
            for k, (cell, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def dash(value: float | None, text: str = "{:.2f}") -> str:
    """The value in a format, or a dash."""
    return "–" if value is None else text.format(value)

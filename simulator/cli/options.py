"""What the subcommands of `simulate` share: options and what they mean, and where answers go.

The options of planning and of the device reach a command as keyword arguments of the functions of `simulator.api`.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from simulator.allocator.settings import parse_alloc_conf
from simulator.core.limits import ALLOW, BIT_EXACT, DEFAULTS, Constraints
from simulator.core.selectors import check_selectors
from traces.commands import OUTPUT, Command, Output, echo, gathered
from traces.errors import SpecError
from traces.records.plan import ALLOCATED, RESERVED

Words = dict[str, Any]  # keyword arguments


class FiniteSeconds(click.FloatRange):
    """Seconds of a clock that runs out: the range alone lets `nan` and `inf` through, and theirs never does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds; give one such as 5.", param, ctx)
        return seconds


SECONDS_HELP: Final = "After so much processor time a planner that searches stops improving its plan."
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
        "--always-save",
        multiple=True,
        metavar="SELECTOR",
        help="Ops whose values must be saved; may be repeated.",
    ),
)
LEVERS: Final = (
    click.option(
        "--allow",
        type=click.Choice(list(ALLOW)),
        default=BIT_EXACT.allow,
        show_default=True,
        help="How the step may be changed beside recomputing: gradients equal in every bit, but for rounding, or "
        "within a measured error.",
    ),
    click.option(
        "--levers", metavar="NAMES", help="Which changes, such as tile (default: all; see `simulate levers`)."
    ),
    click.option(
        "--host-memory", metavar="SIZE", help="Of pinned host memory that --levers offload may take (32GiB)."
    ),
    click.option(
        "--host-bandwidth",
        metavar="SIZE",
        help="How much a second is copied to host memory or back, such as 25GB (default: by the device table).",
    ),
)
ERRORS: Final = (
    click.option(
        "--max-gradient-error",
        type=float,
        help="With --allow approximate: relative error of the gradient, such as 0.01.",
    ),
    click.option("--errors", type=click.Path(path_type=Path), help="What `execute errors TRACE` measured."),
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
    help="What the budget limits: what the step asks for (the default), or what CUDA's allocator takes for it (where a "
    "GPU is named).",
)
TRACE_WORDS: Final = click.argument(
    "trace_words", metavar="[OPTIONS OF trace]...", nargs=-1, type=click.UNPROCESSED
)
OWN_WORDS: Final = ("--batch-size", "-o", "--output", "-f", "--force", "--json")  # not for `trace`


def _planner(planner: str | None) -> str | None:
    if planner is not None:
        from simulator.planners import find

        find(planner)
    return planner


def _planning(**given: Any) -> Words:
    check_selectors(Constraints(never=given["never"], always_save=given["always_save"]))
    return given


def _levers(levers: str | None, **others: Any) -> Words:
    names = None if levers is None else tuple(x.strip() for x in levers.split(",") if x.strip())
    return {**others, "levers": names}


def _memory(alloc_conf: str | None, gpu: str | None, device_memory: str | None, context: str | None) -> Words:
    from simulator.allocator.device import device_memory as memory_of
    from traces.devices import device

    check_alloc_conf(alloc_conf)
    if gpu is not None:
        device(gpu)
    of = partial(memory_of, gpu=gpu, memory=device_memory, context=context)
    return {"alloc_conf": alloc_conf, "device": of}


search_options: Final = gathered("planning", _planning, *SEARCH)
lever_options: Final = gathered("changes", _levers, *LEVERS)
measured_lever_options: Final = gathered("changes", _levers, *LEVERS, *ERRORS)
device_options: Final = gathered("memory", _memory, *DEVICE)


def planning_options(command: Command) -> Command:
    """Give a command the options of planning: `planner` and `planning`, checked."""
    return gathered("planner", _planner, PLANNER)(search_options(command))


def listed(option: str, text: str) -> tuple[str, ...]:
    """The words of an option such as `a,b,c`; raises SpecError if one stands there twice."""
    words = tuple(word.strip() for word in text.split(","))
    if len(set(words)) != len(words):
        raise SpecError(f"{option} {text!r}: the same word stands there twice.")
    return words


def check_alloc_conf(text: str | None) -> None:
    """Raise SpecError before any work for settings that torch does not have."""
    if text is not None:
        parse_alloc_conf(text)


def words_for_trace(model: str, words: tuple[str, ...], *own: str) -> tuple[str, ...]:
    """The options that a command about a model does not know, which go to `trace`. Raises SpecError if one of them is
    for the command itself to decide, or the model does not come first.
    """
    if model.startswith("-"):
        raise SpecError(f"{model}: the first word is the model's name.")
    for word in words:
        if word.partition("=")[0] in (*OWN_WORDS, *own):
            raise SpecError(f"{word}: this command decides this itself.")
    return words


# What is shown


def _output(as_json: bool, quiet: bool, report: Path | None = None) -> Output:
    """What the modules inside log is told too."""
    logger = logging.getLogger("lowtide")
    logger.setLevel(logging.INFO)
    logger.handlers = [] if quiet else [_Told()]
    logger.propagate = False
    return Output(report=report, as_json=as_json, quiet=quiet, indent=None)


output_options: Final = gathered("out", _output, *OUTPUT)
answer_options: Final = gathered("out", _output, *OUTPUT[1:])  # of a command without a page


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        echo(record.getMessage(), err=True)

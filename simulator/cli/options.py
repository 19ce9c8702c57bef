"""What the subcommands of `simulate` share: the options of a question, and where answers go."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final, Protocol

import click

from simulator.core.limits import ALLOW, BIT_EXACT, DEFAULTS
from traces.commands import OUTPUT, Decorator, Output, echo, gathered
from traces.errors import SpecError
from traces.records.plan import ALLOCATED, RESERVED

Words = dict[
    str, Any
]  # of a question, by the names that `simulator.prediction.question.question` has for them

BUDGET: Final = click.option(
    "--budget", required=True, help="Bytes, a size such as 8GiB, or a share of the step's own peak."
)
BUDGET_OF: Final = click.option(
    "--budget-of",
    type=click.Choice([ALLOCATED, RESERVED]),
    help="What the budget limits: what the step asks for (the default), or what CUDA's allocator takes for it (where a "
    "GPU is named).",
)
PLANNER: Final = click.option("--planner", help="Which planner (default: search; see `simulate planners`).")
SEARCH: Final = (
    click.option("--seconds", type=float, default=DEFAULTS.seconds, show_default=True,
                 help="After so much processor time planners that search stop improving their plan."),
    click.option("--seed", type=int, default=DEFAULTS.seed, show_default=True,
                 help="Of a planner's random choices."),
    click.option("--never", multiple=True, metavar="SELECTOR",
                 help="Ops that must not run again; may be repeated."),
    click.option("--always-save", multiple=True, metavar="SELECTOR",
                 help="Ops whose values must be saved; may be repeated."),
)  # fmt: skip
LEVERS: Final = (
    click.option("--allow", type=click.Choice(list(ALLOW)), default=BIT_EXACT.allow, show_default=True,
                 help="How the step may be changed beside recomputing: gradients equal in every bit, but for rounding, "
                 "or within a measured error."),
    click.option("--levers", metavar="NAMES",
                 help="Which changes, such as tile (default: all that --allow allows; but offload and invert must be "
                 "named; see `simulate levers`)."),
    click.option("--host-memory", metavar="SIZE",
                 help="Of pinned host memory that --levers offload may take (32GiB)."),
    click.option("--host-bandwidth", metavar="SIZE",
                 help="How much a second is copied to host memory or back, such as 25GB (default: by the device "
                 "table)."),
)  # fmt: skip
ERRORS: Final = (
    click.option("--max-gradient-error", type=float,
                 help="With --allow approximate: relative error of the gradient, such as 0.01."),
    click.option("--errors", type=click.Path(path_type=Path), help="What `execute errors TRACE` measured."),
)  # fmt: skip
ALLOC_CONF: Final = click.option(
    "--alloc-conf",
    metavar="TEXT",
    help="What if PYTORCH_ALLOC_CONF were this? For example expandable_segments:True (traces of a GPU).",
)
DEVICE: Final = (
    ALLOC_CONF,
    click.option("--gpu", metavar="NAME", help="Does it fit this device of `trace targets`? Such as a100-40."),
    click.option("--device-memory", "memory", metavar="SIZE",
                 help="Does it fit a device of so much, such as 40GiB?"),
    click.option("--context", metavar="SIZE",
                 help="What CUDA's context takes of the device (assumed: 512MiB)."),
)  # fmt: skip
TRACE_WORDS: Final = click.argument(
    "trace_words", metavar="[OPTIONS OF trace]...", nargs=-1, type=click.UNPROCESSED
)
OWN_WORDS: Final = ("--batch-size", "-o", "--output", "-f", "--force", "--json")  # not for `trace`


def asking(*options: Decorator) -> Decorator:
    """Give a command these options of a question, and it their values as `words`."""
    return gathered("words", dict, *options)


def listed(option: str, text: str) -> tuple[str, ...]:
    """The words of an option such as `a,b,c`; raises SpecError if one stands there twice."""
    words = tuple(word.strip() for word in text.split(","))
    if len(set(words)) != len(words):
        raise SpecError(f"{option} {text!r}: the same word stands there twice.")
    return words


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


class Shown(Protocol):
    """An answer that a command shows."""

    def to_json(self) -> dict[str, Any]: ...

    def lines(self) -> list[str]: ...


def show(out: Output, found: Shown) -> None:
    """The answer on stdout, as one JSON object or to read."""
    out.show(found.to_json, lambda: "\n".join(found.lines()))


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

"""Share between the subcommands of `simulate`: options and what they mean."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from simulator.core.limits import ALLOW, BIT_EXACT, DEFAULTS
from traces.commands import Output, gathered
from traces.errors import SpecError
from traces.records.plan import ALLOCATED, RESERVED

if TYPE_CHECKING:
    from simulator.studies.rows import Study

Words = dict[str, Any]  # of a question, by the names that `simulator.prediction.ask.question` has for them

BUDGET: Final = click.option(
    "--budget",
    required=True,
    help="Memory limit: bytes, a size such as 8GiB, or a share such as 60% of each step's own peak.",
)
BUDGET_OF: Final = click.option(
    "--budget-of",
    type=click.Choice([ALLOCATED, RESERVED]),
    help="What the budget limits: the memory that the step asks for, or what CUDA's allocator reserves (the default "
    "where a GPU is named).",
)
PLANNER: Final = click.option("--planner", help="The planner (default: search), one of `simulate planners`.")
SEARCH: Final = (
    click.option("--seconds", type=float, default=DEFAULTS.seconds, show_default=True,
                 help="Processor time after which a search stops improving its plan."),
    click.option("--seed", type=int, default=DEFAULTS.seed, show_default=True,
                 help="Seed of a planner's random choices."),
)  # fmt: skip
LEVERS: Final = (
    click.option("--allow", type=click.Choice(list(ALLOW)), default=BIT_EXACT.allow, show_default=True,
                 help="How gradients may differ: in no bit (bit), by rounding (fp), or by a measured error "
                 "(approximate)."),
    click.option("--levers", metavar="NAMES",
                 help="Changes of the step that a plan may make, such as tile,offload (default: all that --allow "
                 "allows, except offload and invert)."),
    click.option("--host-memory", metavar="SIZE",
                 help="Pinned host memory that --levers offload may take (default: 32GiB)."),
    click.option("--host-bandwidth", metavar="SIZE",
                 help="Bytes copied to host memory or back in a second, such as 25GB (default: the device table's)."),
)  # fmt: skip
ERRORS: Final = (
    click.option("--max-gradient-error", type=float,
                 help="Largest relative error of the gradient with --allow approximate, such as 0.01."),
    click.option("--errors", type=click.Path(path_type=Path),
                 help="File of `execute errors TRACE`; approximate plans need it."),
)  # fmt: skip
ALLOC_CONF: Final = click.option("--alloc-conf", metavar="TEXT",
    help="Simulate this PYTORCH_ALLOC_CONF, such as expandable_segments:True. For traces of a GPU.")  # fmt: skip
DEVICE: Final = (
    click.option("--gpu", metavar="NAME", help="Device to fit, one of `trace targets`, such as a100-40."),
    click.option("--device-memory", "--memory", "memory", metavar="SIZE",
                 help="Memory of the device to fit, such as 40GiB."),
    click.option("--context", metavar="SIZE",
                 help="Memory of the device that the CUDA context takes (assumed: 512MiB)."),
    ALLOC_CONF,
)  # fmt: skip
DASK: Final = click.option("--dask", default="", metavar="ADDRESS",
                           help="Work on the workers of this Dask scheduler, which have the same files.")  # fmt: skip
TRACE_WORDS: Final = click.argument(
    "trace_words", metavar="[OPTIONS OF trace]...", nargs=-1, type=click.UNPROCESSED
)
OWN_WORDS: Final = ("--batch-size", "-o", "--output", "-f", "--force", "--json")  # not for `trace`


asking: Final = partial(gathered, "words", dict)  # gives a command options of a question, and it their values


def listed(_: click.Context, option: click.Parameter, text: str | None) -> tuple[str, ...] | None:
    """The words of an option such as `a,b,c`; raises SpecError if one stands there twice."""
    words = None if text is None else tuple(word.strip() for word in text.split(","))
    if words is not None and len(set(words)) != len(words):
        raise SpecError(f"{option.opts[0]} {text!r}: the same word stands there twice.")
    return words


def numbers(context: click.Context, option: click.Parameter, text: str | None, least: int = 1) -> list[int]:
    """The whole numbers of an option such as `8,16`; raises SpecError as `listed`, or if one is none."""
    words = listed(context, option, text) or ()
    if not all(re.fullmatch("0|[1-9][0-9]*", word) and int(word) >= least for word in words):
        raise SpecError(f"{option.opts[0]} {text!r}: give whole numbers with commas, such as 8,16,32.")
    return [*map(int, words)]


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


def show(out: Output, found: Study[Any]) -> None:
    """A study on stdout, as one JSON object or to read; its page before that, if one is asked for."""
    if out.report is not None:
        from simulator.report.step import write_study

        write_study(out.report, found)
    out.show(lambda: found.data, lambda: "\n".join(found.lines()))

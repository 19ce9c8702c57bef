"""Turn the options that all planning subcommands share, and a file of constraints, into Limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from simulator.core.limits import Constraints, Limits
from simulator.core.selectors import check_selectors
from traces.errors import SpecError


class FiniteSeconds(click.FloatRange):
    """Seconds of a clock that runs out: the range alone lets `nan` and `inf` through, and theirs never does."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds; give one such as 5.", param, ctx)
        return seconds


def planning_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of planning; it receives them as one argument, `limits`."""

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
        help="Ops whose values must be kept; may be repeated.",
    )
    @click.option(
        "--constraints",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="A file with a line for each constraint, such as `never layers.*.attn :: aten.mm.default`.",
    )
    @wraps(command)
    def with_limits(
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
        command(limits=Limits(seconds=seconds, seed=seed, constraints=given), **others)

    return with_limits


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

"""Turn the options that all planning subcommands share into the Limits that planners take."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from simulator.planners.limits import Limits


def planning_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of planning; it receives them as one argument, `limits`."""

    @click.option(
        "--seconds",
        type=click.FloatRange(min=0),
        default=Limits().seconds,
        show_default=True,
        help="After so long a planner that searches stops improving its plan.",
    )
    @click.option(
        "--seed", type=int, default=Limits().seed, show_default=True, help="Of a planner's random choices."
    )
    @wraps(command)
    def with_limits(seconds: float, seed: int, **others: Any) -> None:
        command(limits=Limits(seconds=seconds, seed=seed), **others)

    return with_limits

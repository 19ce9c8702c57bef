"""Turn the options about allocator settings and a device into the question that a simulation answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from traces.plan import ALLOCATED, RESERVED

if TYPE_CHECKING:
    from simulator.allocator.device import DeviceMemory
    from simulator.allocator.question import Question
    from traces.trace import TraceMeta

DEVICE = "device"  # the budget that is the device's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user typed."""

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
        from simulator.allocator.question import kind_of

        return device_memory(kind_of(meta), gpu=self.gpu, memory=self.device_memory, context=self.context)

    def question(self, meta: TraceMeta) -> Question | None:
        """What to ask the allocator; None for a CPU's trace."""
        from simulator.allocator.question import ask

        return ask(meta, self.alloc_conf, self.device(meta))


def alloc_conf_option(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --alloc-conf."""
    return click.option(
        "--alloc-conf",
        metavar="TEXT",
        help="What if PYTORCH_ALLOC_CONF were this? For example expandable_segments:True (traces of a GPU).",
    )(command)


def device_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options about allocator and device; it receives them as one argument, `asked`."""

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
        command(asked=asked, **others)

    return with_asked


def budget_of_option(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --budget-of."""
    return click.option(
        "--budget-of",
        type=click.Choice([ALLOCATED, RESERVED]),
        default=ALLOCATED,
        show_default=True,
        help="What the budget limits: what the step asks for, or what CUDA's allocator takes for it.",
    )(command)

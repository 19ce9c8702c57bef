"""What the three command lines share: a default command, errors as messages and exit codes, one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from traces.errors import LowtideError


class DefaultGroup(click.Group):
    """A group whose first word may be left out: what is no subcommand goes to the default one.

    So `trace resnet18 -o x` means `trace run resnet18 -o x`, while `trace show x` is itself.
    """

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = {name for p in self.get_params(ctx) for name in p.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [self.default, *args]
        return super().parse_args(ctx, args)


def run(command: click.Command) -> None:
    """Run a command line: LowtideError becomes its message on stderr and its exit code, never a traceback."""
    try:
        command.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        click.echo("Stopped.", err=True)
        sys.exit(130)
    except LowtideError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)


def say(text: str, *, quiet: bool = False) -> None:
    """A line of progress, on stderr."""
    if not quiet:
        click.echo(text, err=True)


def print_json(data: dict[str, Any]) -> None:
    """The one object that `--json` prints on stdout."""
    click.echo(json.dumps(data, indent=1))


def gib(nbytes: int | float) -> str:
    """Bytes for people, in the largest binary unit that they reach."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes / 2**10:.1f} KiB"


def milliseconds(time_ns: int | float) -> str:
    """Nanoseconds for people."""
    return f"{time_ns / 1e9:.2f} s" if time_ns >= 1e10 else f"{time_ns / 1e6:.2f} ms"

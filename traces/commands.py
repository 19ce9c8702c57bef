"""Share between the three command lines: a default command, errors as messages and exit codes, one JSON object."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from traces import progress
from traces.errors import EnvironmentProblem, LowtideError, SpecError
from traces.files import check_writable

# Module -> package.
PAGE_NEEDS: Final = {"altair": "altair", "vl_convert": "vl-convert-python", "jinja2": "jinja2"}

# In a long help, under which heading an option stands; those that stand here nowhere come first.
HEADINGS: Final = {
    "The step": "seq_len image_size dtype amp optimizer dropout task attention seed",
    "The loop": "zero_grad clip_grad_norm accumulate release_gradients",
    "The device": "memory context alloc_conf budget_of",
    "What a plan may change": "allow levers host_memory host_bandwidth max_gradient_error errors",
    "The search": "planner seconds",
    "The measurement": "rounds warmup steps memory_steps runs verify iterations",
}
SETTINGS: Final = Path("pyproject.toml")  # in whose table [tool.lowtide] the user's defaults stand

Command = Callable[..., None]
Decorator = Callable[[Command], Command]

# What a terminal obeys instead of showing it. Names in a foreign file may hold such characters.
CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def echo(text: str, *, err: bool = False) -> None:
    """A text on stdout or stderr; characters that the terminal would obey, or cannot show, stand there as escapes."""
    progress.clear()
    click.echo(_plain(text, sys.stderr if err else sys.stdout), err=err)
    progress.show()


def _plain(text: str, stream: Any) -> str:
    shown = CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    code = getattr(stream, "encoding", None) or "utf-8"
    return shown.encode(code, "backslashreplace").decode(code)


class Bar:
    """How far work is, in the last line of the terminal that is stderr, by click's bar."""

    PARTS: Final = 1000  # that are told apart
    made: Any = None

    def __call__(self, share: float | None, text: str) -> bool:
        line = ""
        if share is not None:
            if self.made is None or self.made.pos > self.PARTS * share:  # it is other work
                how: Any = {"width": 24, "bar_template": "[%(bar)s] %(info)s  %(label)s"}
                self.made = click.progressbar(length=self.PARTS, file=sys.stderr, **how)
            self.made.label = text
            self.made.make_step(int(self.PARTS * share) - self.made.pos)
            shown = _plain(self.made.format_progress_line(), sys.stderr)
            line = shown[: shutil.get_terminal_size().columns - 1]
        if self.made is not None:
            click.echo(f"\r\x1b[K{line}", err=True, nl=False)
        return share is not None


BAR: Final = Bar()


class Refused(click.ClickException):
    """A LowtideError on its way to stderr, with its own exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it on the class

    def show(self, file: Any = None) -> None:
        echo(f"Error: {self.format_message()}", err=True)


@contextlib.contextmanager
def _as_messages() -> Iterator[None]:
    try:
        yield
    except LowtideError as error:
        raise Refused(str(error), error.exit_code) from None
    except KeyboardInterrupt:
        raise Refused("stopped.", 130) from None
    except BrokenPipeError:
        raise  # click ends quietly when the reader of stdout has gone
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise Refused(f"{where}{error.strerror or error}; name another path.", 2) from None
    finally:
        progress.shown_by(None)


class DefaultGroup(click.Group):
    """A group whose first word may be left out: what is no subcommand goes to the default one.

    So `trace resnet18 -o x` means `trace run resnet18 -o x`, while `trace show x` is itself. What went wrong for a
    reason outside the program is shown as one line on stderr, never as a traceback.
    """

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for word in args:
            try:
                word.encode()
            except UnicodeEncodeError:
                raise click.UsageError(f"{word!a} is no text in UTF-8, and no file could hold it.") from None
        own = {name for p in self.get_params(ctx) for name in p.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def make_context(self, info_name: str | None, *args: Any, **kwargs: Any) -> click.Context:
        with _as_messages():  # it may print the help
            given = {"default_map": self._settings(str(self.name))} if kwargs.get("parent") is None else {}
            return super().make_context(info_name, *args, **{**given, **kwargs})

    def _settings(self, name: str) -> dict[str, dict[str, Any]]:
        """The user's defaults by subcommand: [tool.lowtide.NAME] of the folder's pyproject.toml holds options of the
        command, for each of its subcommands that has them."""
        if not SETTINGS.is_file():
            return {}
        import tomllib

        try:
            text = SETTINGS.read_text(encoding="utf-8")
            given = dict(tomllib.loads(text).get("tool", {}).get("lowtide", {}).get(name, {}))
        except (ValueError, TypeError, AttributeError) as error:
            raise SpecError(f"{SETTINGS}: [tool.lowtide.{name}] cannot be read: {error}.") from None
        options = {
            word: {o.removeprefix("--"): str(p.name) for p in command.params for o in p.opts}
            for word, command in self.commands.items()
        }
        if unknown := sorted(given.keys() - {option for of in options.values() for option in of}):
            raise SpecError(
                f"{SETTINGS}: [tool.lowtide.{name}] has {unknown[0]}, which is no option of `{name}`."
            )
        return {word: {of[k]: v for k, v in given.items() if k in of} for word, of in options.items()}

    def invoke(self, ctx: click.Context) -> Any:
        with _as_messages():
            return super().invoke(ctx)


class Grouped(click.Command):
    """A command whose help has the options that most people use first, and the rest under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = {p.name: text for p in self.get_params(ctx) if (text := p.get_help_record(ctx)) is not None}
        under = {
            heading: [shown.pop(name) for name in names.split() if name in shown]
            for heading, names in HEADINGS.items()
        }
        for heading, rows in {"Options": [*shown.values()], **under}.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class OutputFile(click.Path):
    """A file that is written in the end. Whether it can be is found out before the work."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        check_writable(path)
        return path


class ReportFile(OutputFile):
    """A page that is written in the end. Whether the packages are here that it needs is found out before the work."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        missing = [package for module, package in PAGE_NEEDS.items() if find_spec(module) is None]
        if missing:
            raise EnvironmentProblem(
                f"--report {value}: a report needs {' and '.join(missing)}, not installed here; nothing was run. "
                f"Install with `pip install {' '.join(missing)}`, or leave --report out."
            )
        return super().convert(value, param, ctx)


def gathered(name: str, make: Callable[..., Any], *options: Decorator) -> Decorator:
    """A decorator that gives a command these options; it receives as `name` what `make` makes of their values."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def gathering(**words: Any) -> None:
            command(**{name: make(**{word: words.pop(word) for word in mine})}, **words)

        known = len(getattr(command, "__click_params__", ()))
        made: Command = gathering
        for option in reversed(options):
            made = option(made)
        mine = [option.name for option in getattr(made, "__click_params__", ())[known:]]
        return made

    return decorate


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        echo(record.getMessage(), err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where an answer goes, and in which form."""

    report: Path | None = None
    as_json: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        """What is logged inside is told too, and how far the work is."""
        logger = logging.getLogger("lowtide")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [] if self.quiet else [_Told()]
        progress.shown_by(BAR if not self.quiet and sys.stderr.isatty() else None)

    def say(self, line: str) -> None:
        """A line of progress, on stderr."""
        if not self.quiet:
            echo(line, err=True)

    def show(self, data: Callable[[], dict[str, Any]], text: Callable[[], str]) -> None:
        """The answer on stdout: one JSON object, or text to read."""
        if self.as_json:
            echo(json.dumps(_finite(data()), allow_nan=False))
        else:
            echo(text())


shard_option: Final = click.option(
    "--shard", type=click.Choice(["fsdp2", "ddp"]), help="Shard MODEL so; its batch is that of each rank."
)
OUTPUT: Final = (
    click.option("--report", type=ReportFile(), help="Write an HTML page to this file."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object in place of text."),
    click.option("-q", "--quiet", is_flag=True, help="Print no progress on stderr."),
)
output_options: Final = gathered("out", Output, *OUTPUT)
answer_options: Final = gathered("out", Output, *OUTPUT[1:])  # of a command without a page
json_option: Final = gathered("out", Output, OUTPUT[1])
quiet_option: Final = gathered("out", Output, OUTPUT[2])


def step_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that describe a training step; it receives each by its name, None where not given."""
    for option in reversed(
        (
            click.option("--batch-size", type=click.IntRange(min=1), help="Examples in the batch."),
            click.option("--seq-len", type=click.IntRange(min=1), help="Tokens in an example (transformers)."),
            click.option("--image-size", type=click.IntRange(min=1), help="Height and width of an image (vision)."),
            click.option("--optimizer", help="Optimizer: sgd, adam, adamw or none."),
            click.option("--dtype", help="Type of the weights: float32, bfloat16 or float16."),
            click.option("--amp", help="Autocast of forward and loss: bfloat16 or float16. The weights stay float32."),
            click.option("--zero-grad", help="When gradients are freed: before forward (default), after the optimizer, "
                         "never but set to zero (keep), or never (none)."),
            click.option("--clip-grad-norm", type=float, help="Clip the norm of all gradients to this."),
            click.option("--accumulate", type=click.IntRange(min=1),
                         help="Run forward and backward so many times, a batch each, before the optimizer."),
            click.option("--release-gradients", is_flag=True, default=None,
                         help="Step each parameter in backward when its gradient is there, and free the gradient."),
            click.option("--dropout", type=float, help="Dropout probability, instead of the model's own."),
            click.option("--task", help="Task of a model of hf:CONFIG.json: causal-lm, image-classification, ..."),
            click.option("--attention", help="Attention: sdpa or eager (transformers)."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@contextlib.contextmanager
def stdout_free(as_json: bool) -> Iterator[None]:
    """Send what the user's code prints in the body to stderr with `as_json`, that of its child processes included, and
    what it prints when the process ends.

    So stdout holds the one JSON object and nothing else.
    """
    if not as_json:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            # Before what the user's code has registered, since the last goes first.
            atexit.register(_stdout_ends)


def _stdout_ends() -> None:
    with contextlib.suppress(BrokenPipeError, ValueError):  # nobody reads it, or it is closed
        sys.stdout.flush()
    os.dup2(2, 1)


def _finite(data: Any) -> Any:
    """Replace infinities and NaN, which Python writes and other readers of JSON refuse, by None."""
    if isinstance(data, Mapping):
        return {k: _finite(v) for k, v in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data

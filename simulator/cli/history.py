"""`simulate why` and `simulate diff`: what held the memory of a run, and how two runs differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from simulator.cli.options import BUDGET_OF, DEVICE, LEVERS, SEARCH, Words, asking
from traces.commands import Output, output_options
from traces.errors import TraceError

MOST_ROWS = 8
TRACE = click.option("--trace", metavar="TRACE", help="The trace that a plan is of.")


@click.command("why")
@click.argument("what")
@asking(
    click.option("--budget", help="What it is to fit: bytes, a size, a share such as 60%, or `device`."),
    *DEVICE, BUDGET_OF, *LEVERS, *SEARCH,
)  # fmt: skip
@TRACE
@output_options
def why_command(what: str, words: Words, trace: str | None, out: Output) -> None:
    """Say why memory ran out: what held it, what of it is fragmentation, and what would make it fit.

    WHAT is torch's memory snapshot, the JSON of a rehearsal, a trace, a plan (with --trace), or a text with torch's
    message that memory ran out (- reads it from stdin). Nothing in a snapshot is executed.

    \b
    simulate why snapshot.pickle
    simulate why rehearsal.json               of `execute rehearse ... --json`
    simulate why snapshot.pickle --alloc-conf expandable_segments:True --device-memory 16GiB
    simulate why bert-base --gpu a100-40
    python train.py 2>&1 | simulate why -

    Exit code: 0 done, 2 the input is wrong.
    """
    from simulator.history.read import read
    from simulator.history.why import why
    from simulator.prediction.ask import question

    if (message := _message(what)) is not None:
        if out.report is not None:
            from simulator.report.page import Page, Section, Text, write_page

            answer = Section("Answer", tuple(map(Text, message["sentences"])))
            write_page(out.report, Page(f"{what}: why memory ran out", "torch's message", (answer,)))
        out.show(lambda: message, lambda: "\n".join(message["sentences"]))
        return
    asked = question(**words)
    source = read(what, asked, trace)
    out.say(f"explaining {what}")
    found = why(source, asked)
    if out.report is not None:
        from simulator.report.history import write_history

        write_history(out.report, f"{what}: why it needs this memory", found, found.history)
    tables = (line for t in found.tables(MOST_ROWS) for line in ["", *t.lines()])
    lines = [*found.sentences(), *found.history.notes, *tables]
    out.show(found.to_json, lambda: "\n".join(lines))


def _message(what: str) -> dict[str, Any] | None:
    """The message of torch that a text has; None: this is no text."""
    from simulator.history.message import message_in
    from simulator.history.read import PICKLES

    if what == "-":
        return message_in(sys.stdin.read(), "stdin")
    path = Path(what)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        if path.suffix in PICKLES or b"\0" in (head := file.read(1000)) or head[:1] in (b"\x80", b"{"):
            return None
    try:
        return message_in(path.read_text(encoding="utf-8", errors="replace"), what)
    except OSError as error:
        raise TraceError(f"{what}: cannot be read ({error.strerror or error}).") from None


@click.command("diff")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@asking(*DEVICE)
@TRACE
@output_options
def diff_command(before: str, after: str, words: Words, trace: str | None, out: Output) -> None:
    """Say how the memory of two runs differs, by category, module and line.

    A and B are traces, plans, snapshots, rehearsals or measurements. A plan beside a trace is taken to be of that one.

    \b
    simulate diff bert-base plan.json
    simulate diff before.pickle after.pickle

    Exit code: 0 done, 2 the input is wrong.
    """
    from simulator.history.diff import Diff
    from simulator.history.read import read
    from simulator.prediction.ask import question

    asked = question(**words)
    beside = {before: after, after: before}
    runs = [
        read(name, asked, trace or (None if Path(beside[name]).is_file() else beside[name]))
        for name in (before, after)
    ]
    found = Diff(before=runs[0].history, after=runs[1].history)
    if out.report is not None:
        from simulator.report.history import write_history

        write_history(out.report, f"{before} and {after}", found, found.before, found.after)
    notes = dict.fromkeys((*found.before.notes, *found.after.notes))
    out.show(
        found.to_json,
        lambda: "\n\n".join([*("\n".join(t.lines()) for t in found.tables(MOST_ROWS)), *notes]),
    )

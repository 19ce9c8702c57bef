"""Call a function in a fresh Python process: JSON in on stdin, JSON out on stdout, and deaths explained.

`run_fresh` is the side that waits, `serve` the side that works (`python -m traces.isolated MODULE:FUNCTION`). The
model's own code may print what it likes: the answer stands in a line that begins with `TOLD`. A process that has
answered may be kept for the next call, which then need not import all anew.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import IO, Any, Final

from traces import errors
from traces.errors import EnvironmentProblem, LowtideError, OutOfMemoryProblem, is_out_of_memory
from traces.processes import ending_with_this
from traces.progress import clear, counting, shown_by

TOLD: Final = "lowtide told: "  # begins a line of ours: what is told (one of the words below), and that
ANSWER, SHARE = "answer", "share"  # the result, how much is done
KILLED: Final = (-9, 137)  # what Linux does to a process when memory runs out
KEPT: Final = "LOWTIDE_KEPT"  # the variable that names the calls for which this process is kept
IDLE_S: Final = 300  # a kept process ends when it has not been called for so long
# A process, what it says on stderr, and until when it surely waits.
Kept = tuple[subprocess.Popen[str], IO[bytes], float]
_kept: dict[str, dict[str, list[Kept]]] = {}  # by the name of the calls, and what was started
_starter: Final = ThreadPoolExecutor(1)  # its thread, with which what it starts ends, lives as long as we do


def run_fresh(
    function: str,
    arguments: Mapping[str, Any],
    *,
    what: str,
    environment: Mapping[str, str] | None = None,
    overriding: Mapping[str, str] | None = None,
    shown: bool = False,
    kept: str = "",
) -> dict[str, Any]:
    """Call a function by its name in a fresh process, and return the JSON object that it answers.

    Args:
        function: "module:name"; arguments: by name, all of them JSON.
        what: what the process does, for messages ("measured the plan").
        environment: variables that are set unless they are set already; overriding: those that are in any case.
        shown: write what the process says to stderr, once it has ended.
        kept: names calls that may have the same process one after another, and the same of those that it starts.

    Raises:
        LowtideError: the process reported an error, with its message and exit code.
        OutOfMemoryProblem: it reported that memory ran out, or was killed as Linux does then.
        EnvironmentProblem: it died otherwise, with the end of what it said; of a stack that Python's
            faulthandler wrote, the innermost lines.
    """
    # Child processes find the packages where this one found them.
    root = str(Path(__file__).resolve().parent.parent)
    kept, given = kept or os.environ.get(KEPT, ""), {**os.environ, **(overriding or {})}
    env = {
        # torch's C++ parts and its profiler write to stderr by themselves.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "KINETO_LOG_LEVEL": "99",
        **(environment or {}),
        **given,
        KEPT: kept,
        "PYTHONPATH": os.pathsep.join([root, given.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    lines, told = list[str](), dict[str, Any]({ANSWER: None, SHARE: 0.0})
    waiting = _kept.setdefault(kept, {}).setdefault(json.dumps([function, env]), []) if kept else []
    with ExitStack() as ending, counting(1) as done:
        process, said, _ = _process(function, env, waiting)
        ending.enter_context(said)
        ending.enter_context(process)
        ending.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has died, as is told below
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            if not line.startswith(TOLD):
                lines.append(line)
                continue
            word, value = json.loads(line.removeprefix(TOLD))
            if word == SHARE:
                done(value - told[SHARE])
            told[word] = value
            if word == ANSWER:
                break
        data: dict[str, Any] | None = told[ANSWER]
        keep = bool(kept and data is not None and "error" not in data)
        if not keep:
            if data is not None:  # torch takes seconds to end by itself
                process.kill()
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
        said.seek(0)
        stderr = said.read().decode(errors="replace")
        if keep:
            ending.pop_all()
            waiting.append((process, said, monotonic() + IDLE_S / 2))
    if shown:
        clear()
        sys.stderr.write(stderr)
    if data is None:
        _, stack, end = (stderr or "".join(lines)).strip().rpartition("(most recent call first):\n")
        tail = " / ".join(end.splitlines()[:3] if stack else end.splitlines()[-3:])[:600]
        killed = process.returncode in KILLED
        kind = OutOfMemoryProblem if killed else EnvironmentProblem
        raise kind(
            f"the process that {what} ended with code {process.returncode} and no result"
            + (" (killed: out of memory?)" if killed else "")
            + (f": {tail}" if tail else ".")
        )
    if "error" in data:
        named = getattr(errors, str(data.get("kind", "")), LowtideError)
        error = named(data["error"])
        error.exit_code = int(data["exit_code"])
        raise error
    return data


@contextmanager
def keeping(kept: str) -> Iterator[None]:
    """The processes that are kept by that name end with the body."""
    try:
        yield
    finally:
        for process, said, _ in chain(*_kept.pop(kept, {}).values()):
            with said, process:
                process.kill()


def _process(function: str, env: Mapping[str, str], waiting: list[Kept]) -> Kept:
    """A process that serves the function, one that waits or a fresh one, and what it says from now on."""
    with suppress(IndexError):  # there is none, also where another thread was faster
        while True:
            process, said, until = waiting.pop()
            if process.poll() is None and monotonic() < until:
                said.seek(0)
                said.truncate()
                return process, said, until
            with said, process:
                process.kill()
    said = TemporaryFile()  # noqa: SIM115  # who asks closes it
    command, pipe = [sys.executable, "-m", "traces.isolated", function], subprocess.PIPE
    text: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "env": env, **ending_with_this()}
    start = partial(subprocess.Popen[str], command, stdin=pipe, stdout=pipe, stderr=said, **text)
    return _starter.submit(start).result() if env[KEPT] else start(), said, 0.0


def serve(function: str) -> None:
    """Call the function with the arguments in each line of stdin; print its answers, or the error if a user can cause
    it."""
    warnings.simplefilter("ignore")

    def draw(share: float | None, text: str) -> bool:
        if share is not None:
            tell(share, SHARE)
        return False

    shown_by(draw)
    with open(os.dup(0), encoding="utf-8") as calls, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # which the model's own code may read
        for line in calls:
            try:
                module, _, name = function.partition(":")
                answer = getattr(import_module(module), name)(**json.loads(line))
            except Exception as error:
                if (answer := error_json(error)) is None:
                    raise
            tell(answer)
            if os.environ.get(KEPT) and not select.select([calls], [], [], IDLE_S)[0]:
                break


def tell(value: Any, word: str = ANSWER) -> None:
    """Give the answer of this process, which may end at once then, or what else it tells."""
    out = sys.__stdout__ or sys.stdout
    out.write(f"\n{TOLD}{json.dumps([word, value])}\n")
    out.flush()  # before whatever the interpreter's end may break


def error_json(error: Exception) -> dict[str, Any] | None:
    """Return what the process prints for a user's error; None: a defect, whose traceback should be seen."""
    if is_out_of_memory(error):
        text = " ".join(str(error).split())[:400] or type(error).__name__
        told = text if isinstance(error, OutOfMemoryProblem) else f"out of memory: {text}"
        error = OutOfMemoryProblem(told)
    if isinstance(error, LowtideError):
        return {"error": str(error), "exit_code": error.exit_code, "kind": type(error).__name__}
    return None


if __name__ == "__main__":
    serve(sys.argv[1])

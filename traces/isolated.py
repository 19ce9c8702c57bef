"""Call a function in a fresh Python process: JSON in on stdin, JSON out on stdout, and deaths explained.

`run_fresh` is the side that waits, `serve` the side that works (`python -m traces.isolated MODULE:FUNCTION`). The
model's own code may print what it likes: the answer stands in a line that begins with `TOLD`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from traces import errors
from traces.errors import EnvironmentProblem, LowtideError, OutOfMemoryProblem, is_out_of_memory
from traces.processes import ending_with_this
from traces.progress import clear, counting, shown_by

TOLD: Final = "lowtide told: "  # begins a line of ours: what is told (one of the words below), and that
ANSWER, SHARE = "answer", "share"  # the result, how much is done
KILLED: Final = (-9, 137)  # what Linux does to a process when memory runs out


def run_fresh(
    function: str,
    arguments: Mapping[str, Any],
    *,
    what: str,
    environment: Mapping[str, str] | None = None,
    overriding: Mapping[str, str] | None = None,
    shown: bool = False,
) -> dict[str, Any]:
    """Call a function by its name in a fresh process, and return the JSON object that it answers.

    Args:
        function: "module:name"; arguments: by name, all of them JSON.
        what: what the process does, for messages ("measured the plan").
        environment: variables that are set unless they are set already; overriding: those that are in any case.
        shown: write what the process says to stderr, once it has ended.

    Raises:
        LowtideError: the process reported an error, with its message and exit code.
        OutOfMemoryProblem: it reported that memory ran out, or was killed as Linux does then.
        EnvironmentProblem: it died otherwise, with the end of what it said; of a stack that Python's
            faulthandler wrote, the innermost lines.
    """
    # Child processes find the packages where this one found them.
    root = str(Path(__file__).resolve().parent.parent)
    env = {
        # torch's C++ parts and its profiler write to stderr by themselves.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "KINETO_LOG_LEVEL": "99",
        **(environment or {}),
        **os.environ,
        **(overriding or {}),
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    lines, told = list[str](), dict[str, Any]({ANSWER: None, SHARE: 0.0})
    with (
        TemporaryFile() as said,
        counting(1) as done,
        subprocess.Popen(
            [sys.executable, "-m", "traces.isolated", function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            encoding="utf-8",
            errors="replace",
            env=env,
            **ending_with_this(),
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has died, as is told below
                process.stdin.write(json.dumps(arguments))
                process.stdin.close()
            for line in process.stdout:
                if not line.startswith(TOLD):
                    lines.append(line)
                    continue
                word, value = json.loads(line.removeprefix(TOLD))
                if word == SHARE:
                    done(value - told[SHARE])
                told[word] = value
                if word == ANSWER:  # torch takes seconds to end by itself
                    process.kill()
            code = process.wait()
        finally:
            process.kill()
        said.seek(0)
        stderr = said.read().decode(errors="replace")
    if shown:
        clear()
        sys.stderr.write(stderr)
    data: dict[str, Any] | None = told[ANSWER]
    if data is None:
        _, stack, end = (stderr or "".join(lines)).strip().rpartition("(most recent call first):\n")
        tail = " / ".join(end.splitlines()[:3] if stack else end.splitlines()[-3:])[:600]
        killed = code in KILLED
        kind = OutOfMemoryProblem if killed else EnvironmentProblem
        raise kind(
            f"the process that {what} ended with code {code} and no result"
            + (" (killed: out of memory?)" if killed else "")
            + (f": {tail}" if tail else ".")
        )
    if "error" in data:
        named = getattr(errors, str(data.get("kind", "")), LowtideError)
        error = named(data["error"])
        error.exit_code = int(data["exit_code"])
        raise error
    return data


def serve(function: str) -> None:
    """Call the function with the arguments on stdin; print its answer, or the error if a user can cause it."""
    warnings.simplefilter("ignore")
    arguments = json.loads(sys.stdin.read())

    def draw(share: float | None, text: str) -> bool:
        if share is not None:
            tell(share, SHARE)
        return False

    shown_by(draw)
    try:
        module, _, name = function.partition(":")
        answer = getattr(import_module(module), name)(**arguments)
    except Exception as error:
        if (answer := error_json(error)) is None:
            raise
    tell(answer)


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

"""Call a function in a fresh Python process: JSON in on stdin, JSON out on stdout, and deaths explained.

`run_fresh` is the side that waits, `serve` the side that works (`python -m traces.isolated MODULE:FUNCTION`). The
model's own code may print what it likes: the answer is the line that begins with `ANSWER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from traces import errors
from traces.errors import EnvironmentProblem, LowtideError, OutOfMemoryProblem, is_out_of_memory
from traces.processes import ending_with_this

ANSWER: Final = "lowtide answer: "  # begins the line with the result
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
        function: "module:name".
        arguments: by name, all of them JSON.
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
    done = subprocess.run(
        [sys.executable, "-m", "traces.isolated", function],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        env=env,
        check=False,
        **ending_with_this(),
    )
    if shown:
        sys.stderr.write(done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if not lines:
        _, stack, end = (done.stderr or done.stdout).strip().rpartition("(most recent call first):\n")
        tail = " / ".join(end.splitlines()[:3] if stack else end.splitlines()[-3:])[:600]
        killed = done.returncode in KILLED
        kind = OutOfMemoryProblem if killed else EnvironmentProblem
        raise kind(
            f"the process that {what} ended with code {done.returncode} and no result"
            + (" (killed: out of memory?)" if killed else "")
            + (f": {tail}" if tail else ".")
        )
    data: dict[str, Any] = json.loads(lines[-1].removeprefix(ANSWER))
    if "error" in data:
        if data.get("out_of_memory"):
            raise OutOfMemoryProblem(str(data["error"]))
        named = getattr(errors, str(data.get("kind", "")), LowtideError)
        error = named(data["error"])
        error.exit_code = int(data["exit_code"])
        raise error
    return data


def serve(function: str) -> None:
    """Call the function with the arguments on stdin; print its answer, or the error if a user can cause it."""
    warnings.simplefilter("ignore")
    arguments = json.loads(sys.stdin.read())
    try:
        module, _, name = function.partition(":")
        answer = getattr(import_module(module), name)(**arguments)
    except Exception as error:
        told = error_json(error)
        if told is None:
            raise
        answer = told
    tell(answer)


def tell(answer: Mapping[str, Any]) -> None:
    """Give the answer of this process, which may end at once then."""
    out = sys.__stdout__ or sys.stdout
    out.write(f"\n{ANSWER}{json.dumps(answer)}\n")
    out.flush()  # before whatever the interpreter's end may break


def error_json(error: Exception) -> dict[str, Any] | None:
    """Return what the process prints for a user's error; None: a defect, whose traceback should be seen."""
    if is_out_of_memory(error):
        text = " ".join(str(error).split())[:400] or type(error).__name__
        told = text if isinstance(error, OutOfMemoryProblem) else f"out of memory: {text}"
        return {"error": told, "exit_code": 2, "out_of_memory": True}
    if isinstance(error, LowtideError):
        return {"error": str(error), "exit_code": error.exit_code, "kind": type(error).__name__}
    return None


if __name__ == "__main__":
    serve(sys.argv[1])

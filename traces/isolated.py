"""Call a function in a fresh Python process: JSON in on stdin, JSON out on stdout, and deaths explained.

`run_fresh` is the side that waits, `serve` the side that works (`python -m traces.isolated MODULE:FUNCTION`). The
model's own code may print what it likes: the answer is the line that begins with `ANSWER`. Within `forking` imports are
made once for several such processes.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final, NamedTuple

from traces import errors
from traces.errors import EnvironmentProblem, LowtideError, OutOfMemoryProblem, is_out_of_memory
from traces.processes import ending_with_this

ANSWER: Final = "lowtide answer: "  # begins the line with the result
KILLED: Final = (-9, 137)  # what Linux does to a process when memory runs out
COMMAND: Final = ("-m", "traces.isolated")


def run_fresh(
    function: str,
    arguments: Mapping[str, Any],
    *,
    what: str,
    environment: Mapping[str, str] | None = None,
    overriding: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Call a function by its name in a fresh process, and return the JSON object that it answers.

    Args:
        function: "module:name".
        arguments: by name, all of them JSON.
        what: what the process does, for messages ("measured the plan").
        environment: variables that are set unless they are set already; overriding: those that are in any case.
        timeout_s: after this many seconds the process is ended; None: never.

    Raises:
        LowtideError: the process reported an error, with its message and exit code.
        OutOfMemoryProblem: it reported that memory ran out, or was killed as Linux does then.
        EnvironmentProblem: it died otherwise or took too long, with the end of what it said; of a stack that Python's
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
    forks, given = _FORKS.get(), json.dumps(arguments)
    try:
        done = (
            forks.run(function, given, env, timeout_s)
            if forks
            else subprocess.run(
                [sys.executable, *COMMAND, function],
                input=given,
                capture_output=True,
                text=True,
                env=env,
                timeout=timeout_s,
                check=False,
                **ending_with_this(),
            )
        )
    except (subprocess.TimeoutExpired, TimeoutError):
        raise EnvironmentProblem(
            f"the process that {what} took longer than {timeout_s:.0f} s and was ended; give it more time (a campaign: "
            "timeout-minutes) or less to do."
        ) from None
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


@contextmanager
def forking(*modules: str) -> Iterator[None]:
    """Within it the processes of `run_fresh` are forks of one that has imported these modules and run nothing.

    One for each environment, since libraries read variables as they are imported, and for each working directory. They
    end with the block. Counts: Linux. Ignores: other systems, where each process is fresh.
    """
    if sys.platform != "linux" or _FORKS.get():
        yield
        return
    forks = _Forks(modules)
    before = _FORKS.set(forks)
    try:
        yield
    finally:
        _FORKS.reset(before)
        for server in forks.servers.values():
            server.end()


class _Server(NamedTuple):
    """A process that forks for each job, and the socket by which it is asked to."""

    process: subprocess.Popen[Any]
    link: socket.socket

    def end(self) -> None:
        """End it, and with it its fork."""
        self.process.kill()
        self.process.wait()
        self.link.close()


class _Forks:
    """The processes that have imported the modules, by working directory and environment."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self.servers: dict[tuple[object, ...], _Server] = {}

    def run(
        self, function: str, given: str, env: dict[str, str], timeout_s: float | None
    ) -> subprocess.CompletedProcess[str]:
        """What `subprocess.run` would return of a fresh process. TimeoutError: it took longer."""
        key = os.getcwd(), *sorted(env.items())
        with _file() as stdin, _file() as stdout, _file() as stderr:
            stdin.write(given)
            stdin.seek(0)
            # What is said during imports is told with the first job.
            server = self.servers.pop(key) if key in self.servers else self._start(env, stdout, stderr)
            code = b""
            try:
                server.link.settimeout(timeout_s)
                with suppress(ConnectionError):  # it has died
                    files = [f.fileno() for f in (stdin, stdout, stderr)]
                    socket.send_fds(server.link, [function.encode()], files)
                    code = server.link.recv(16)
            except BaseException:
                server.end()
                raise
            if code:
                self.servers[key] = server
            else:
                code = str(server.process.wait()).encode()
                server.link.close()
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(COMMAND, int(code), stdout.read(), stderr.read())

    def _start(self, env: dict[str, str], stdout: IO[str], stderr: IO[str]) -> _Server:
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files: dict[str, Any] = {"stdin": theirs, "stdout": stdout, "stderr": stderr}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *COMMAND, *self.modules], env=env, **files, **ending_with_this()
            )
        return _Server(process, link)


_FORKS: Final[ContextVar[_Forks | None]] = ContextVar("forks", default=None)


def _file() -> IO[str]:
    return TemporaryFile("w+", errors="replace")


def fork_for_each(modules: list[str]) -> str:
    """Import modules; then fork for each job that comes through the socket on stdin, a function's name with the fork's
    stdin, stdout and stderr, and send the code by which the fork ended. Returns the name, in the fork; "": no more."""
    warnings.simplefilter("ignore")
    for module in modules:
        import_module(module)
    gc.freeze()  # the forks' garbage collectors need not touch what is shared
    link = socket.socket(fileno=0)
    while (job := socket.recv_fds(link, 1024, 3))[0]:
        child = os.fork()
        if not child:
            ending_with_this()["preexec_fn"]()
            link.detach()
            for k, file in enumerate(job[1]):
                os.dup2(file, k)
                os.close(file)
            return job[0].decode()
        for file in job[1]:
            os.close(file)
        link.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    return ""


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
    sys.stdout.write(f"\n{ANSWER}{json.dumps(answer)}\n")
    sys.stdout.flush()  # before whatever the interpreter's end may break


def error_json(error: Exception) -> dict[str, Any] | None:
    """What the process prints for an error that a user can cause; None: a defect, whose traceback should be seen."""
    if is_out_of_memory(error):
        text = " ".join(str(error).split())[:400] or type(error).__name__
        told = text if isinstance(error, OutOfMemoryProblem) else f"out of memory: {text}"
        return {"error": told, "exit_code": 2, "out_of_memory": True}
    if isinstance(error, LowtideError):
        return {"error": str(error), "exit_code": error.exit_code, "kind": type(error).__name__}
    return None


if __name__ == "__main__":
    asked = sys.argv[1] if ":" in sys.argv[1] else fork_for_each(sys.argv[1:])
    if asked:
        serve(asked)

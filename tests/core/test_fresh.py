"""Fresh processes: what they answer, whatever else they print, and how their deaths are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from traces.errors import (
    BudgetError,
    EnvironmentProblem,
    LowtideError,
    OutOfMemoryProblem,
    is_out_of_memory,
)
from traces.isolated import error_json, forking, run_fresh

Run = Callable[..., dict[str, object]]

SERVED = """
import os
from traces.errors import PlanError

def do(value, limit_bytes=0):
    {body}
    return {{"got": value}}
"""


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Make a module whose `do` has a body of the test's own, and run it on a value."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(body: str, **more: object) -> dict[str, object]:
        (tmp_path / "lowtide_served.py").write_text(SERVED.format(body=body))
        return run_fresh("lowtide_served:do", {"value": 7, **more}, what="did it", timeout_s=60)

    return run


@pytest.fixture(params=["fresh", pytest.param("forked", marks=LINUX)])
def module(served: Run, request: pytest.FixtureRequest) -> Iterator[Run]:
    """The same, of a fresh process and of a fork: both are told of in the same words."""
    if request.param == "fresh":
        yield served
    else:
        with forking("traces.errors"):
            yield served


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        """print('{"loss": 1}')""",
        """print("{'step': 3}", end='')""",
        """import atexit; atexit.register(print, '{"bye": 1}')""",
        """import warnings; warnings.warn('old')""",
    ],
)
def test_the_answer_comes_back_whatever_the_model_prints(module: Run, body: str) -> None:
    assert module(body) == {"got": 7}


@pytest.mark.parametrize("printed", ["", """print('{"loss": 1}', flush=True); """])
def test_a_death_is_told_with_the_end_of_what_was_said(module: Run, printed: str) -> None:
    """A model that prints JSON itself is no answer."""
    said = printed + "os.write(2, b'cannot go on'); os._exit(3)"
    with pytest.raises(EnvironmentProblem, match="that did it ended with code 3 and no result: cannot go on"):
        module(said)


def test_a_killed_process_may_have_run_out_of_memory(module: Run) -> None:
    with pytest.raises(OutOfMemoryProblem, match="killed"):
        module("os.kill(os.getpid(), 9)")


def test_errors_of_users_come_back_as_they_were(module: Run) -> None:
    with pytest.raises(LowtideError, match=r"^no such plan\.$") as caught:
        module("raise PlanError('no such plan.')")
    assert caught.value.exit_code == 2
    with pytest.raises(OutOfMemoryProblem):
        module("raise MemoryError")
    with pytest.raises(EnvironmentProblem, match="ZeroDivisionError"):
        module("1 / 0")


def test_a_process_that_takes_too_long_is_ended(module: Run, tmp_path: Path) -> None:
    (tmp_path / "lowtide_slow.py").write_text("import time; do = lambda: time.sleep(60)")
    with pytest.raises(EnvironmentProblem, match="took longer than 1 s"):
        run_fresh("lowtide_slow:do", {}, what="slept", timeout_s=1)


# What a fork finds of the process that made it, and of the forks before it.
FOUND = """import lowtide_before as it; it.runs += 1; \
    return {"got": [it.pid, it.variable, it.runs, os.getpid(), os.getcwd(), os.environ["LOWTIDE_TEST"]]}"""
BEFORE = "import os; pid = os.getpid(); variable = os.environ['LOWTIDE_TEST']; runs = 0"


@LINUX
def test_forks_share_imports_and_nothing_else(
    served: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment or directory of its own has a process of its own, which ends with the block."""
    (tmp_path / "lowtide_before.py").write_text(BEFORE)

    def found() -> tuple[int, ...]:
        pid, variable, runs, own, cwd, now = served(FOUND)["got"]  # type: ignore[misc]
        assert (variable, runs, cwd, now) == (os.environ["LOWTIDE_TEST"], 1, os.getcwd(), variable)
        assert pid != own
        return pid, own

    monkeypatch.setenv("LOWTIDE_TEST", "1")
    with forking("lowtide_before"):
        first, second = found(), found()
        assert first[0] == second[0]
        assert first[1] != second[1]
        with pytest.raises(OutOfMemoryProblem):
            served("os.kill(os.getpid(), 9)")
        assert found()[0] == first[0]
        with pytest.raises(
            OutOfMemoryProblem, match="killed"
        ):  # Linux may choose it, which dies with its fork
            served(f"os.kill({first[0]}, 9); import time; time.sleep(60)")
        again = found()
        monkeypatch.setenv("LOWTIDE_TEST", "2")
        other = found()
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        last = found()
        assert len({first[0], again[0], other[0], last[0]}) == 4
        assert all(alive(x[0]) for x in (again, other, last))
        assert not alive(first[0])
    assert not any(alive(x[0]) for x in (again, other, last))


@LINUX
def test_imports_that_fail_are_told(served: Run, tmp_path: Path) -> None:
    (tmp_path / "lowtide_broken.py").write_text("raise OSError('no such library')")
    with (
        forking("lowtide_broken"),
        pytest.raises(EnvironmentProblem, match=r"ended with code 1 and no result: .*no such library"),
    ):
        served("pass")


@LINUX
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_ends_leaves_no_fork_behind(served: Run, tmp_path: Path, how: signal.Signals) -> None:
    note = tmp_path / "pids"
    sleeping = (
        f"open({str(note)!r}, 'w').write(f'{{os.getppid()}} {{os.getpid()}} '); import time; time.sleep(60)"
    )
    (tmp_path / "lowtide_sleeps.py").write_text(f"import os\ndef do():\n    {sleeping}")
    # A shell's job in the background ignores SIGINT, and so would all that it starts.
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from traces.isolated import forking, run_fresh
with forking("traces.errors"):
    run_fresh("lowtide_sleeps:do", {}, what="slept")
"""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, str(tmp_path)])
    command = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL
    )
    while not note.exists() or note.read_text().count(" ") < 2:
        time.sleep(0.02)
    command.send_signal(how)
    command.wait()
    left = [int(pid) for pid in note.read_text().split()]
    for _ in range(500):
        if not any(map(alive, left)):
            return
        time.sleep(0.02)
    for pid in filter(alive, left):
        os.kill(pid, signal.SIGKILL)
    pytest.fail("a fork outlived the command")


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and " Z " not in stat.read_text()


@pytest.mark.parametrize(
    ("error", "out"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("the sizes do not match"), False),
        (BudgetError("no plan"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_that_memory_ran_out(error: Exception, out: bool) -> None:
    assert is_out_of_memory(error) is out
    wrapped = LowtideError("the step failed")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped) is out
    told = error_json(wrapped)
    assert told is not None
    assert told.get("out_of_memory", False) is out
    if not out and not isinstance(error, LowtideError):
        assert error_json(error) is None  # a defect, whose traceback should be seen

"""Fresh processes: what they answer, whatever else they print, and how their deaths are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from traces.errors import BudgetError, EnvironmentProblem, LowtideError, OutOfMemoryProblem, is_out_of_memory
from traces.isolated import error_json, keeping, run_fresh

Run = Callable[..., dict[str, object]]

SERVED = """
import os
from traces.errors import PlanError

def do(value, limit_bytes=0):
    {body}
    return {{"got": value}}
"""


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a killed command leaves its process")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Make a module whose `do` has a body of the test's own, and run it on a value."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(body: str, **more: object) -> dict[str, object]:
        (tmp_path / "lowtide_served.py").write_text(SERVED.format(body=body))
        return run_fresh("lowtide_served:do", {"value": 7, **more}, what="did it")

    return run


@pytest.mark.parametrize(
    "body",
    [
        "pass",
        """print('{"loss": 1}')""",
        """print("{'step': 3}", end='')""",
        """import atexit; atexit.register(print, '{"bye": 1}')""",
        """import warnings; warnings.warn('old')""",
        """import atexit, time; atexit.register(time.sleep, 1000)""",
    ],
)
def test_the_answer_comes_back_whatever_the_model_prints(served: Run, body: str) -> None:
    assert served(body) == {"got": 7}


@pytest.mark.parametrize("printed", ["", """print('{"loss": 1}', flush=True); """])
def test_a_death_is_told_with_the_end_of_what_was_said(served: Run, printed: str) -> None:
    """A model that prints JSON itself is no answer."""
    said = printed + "os.write(2, b'cannot go on'); os._exit(3)"
    with pytest.raises(EnvironmentProblem, match="that did it ended with code 3 and no result: cannot go on"):
        served(said)


def test_a_killed_process_may_have_run_out_of_memory(served: Run) -> None:
    with pytest.raises(OutOfMemoryProblem, match="killed"):
        served("os.kill(os.getpid(), 9)")


def test_errors_of_users_come_back_as_they_were(served: Run) -> None:
    with pytest.raises(LowtideError, match=r"^no such plan\.$") as caught:
        served("raise PlanError('no such plan.')")
    assert caught.value.exit_code == 2
    with pytest.raises(OutOfMemoryProblem):
        served("raise MemoryError")
    with pytest.raises(EnvironmentProblem, match="ZeroDivisionError"):
        served("1 / 0")


@LINUX
def test_a_process_is_kept_for_calls_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it failed or died; and what the model's own code reads from stdin is none of the calls."""
    body = "return {'pid': os.getpid(), 'read': sys.stdin.read(), 'of': 1 // (not fails)}"
    (tmp_path / "lowtide_kept.py").write_text(f"import os, sys\ndef do(fails=False):\n    {body}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def pid(kept: str, **given: bool) -> int:
        told = run_fresh("lowtide_kept:do", given, what="did it", kept=kept)
        assert told["read"] == ""
        return int(told["pid"])

    with keeping("a"), keeping("b"):
        first = pid("a")
        assert [pid("a") == first, pid("b") == first, pid("") == first] == [True, False, False]
        with pytest.raises(EnvironmentProblem, match="ZeroDivision"):
            pid("a", fails=True)
        second = pid("a")
        os.kill(second, signal.SIGKILL)
        while alive(second):
            time.sleep(0.02)
        third = pid("a")
        assert len({first, second, third}) == 3
    assert not alive(third)


@LINUX
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_ends_leaves_no_process_behind(
    served: Run, tmp_path: Path, how: signal.Signals
) -> None:
    note = tmp_path / "pids"
    sleeping = f"open({str(note)!r}, 'w').write(f'{{os.getpid()}} '); import time; time.sleep(60)"
    (tmp_path / "lowtide_sleeps.py").write_text(f"import os\ndef do():\n    {sleeping}")
    # A shell's job in the background ignores SIGINT, and so would all that it starts.
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from traces.isolated import run_fresh
run_fresh("lowtide_sleeps:do", {}, what="slept")
"""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, str(tmp_path)])
    command = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL
    )
    while not note.exists() or not note.read_text():
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
    pytest.fail("a process outlived the command")


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
    assert (told["kind"] == "OutOfMemoryProblem") is out
    if not out and not isinstance(error, LowtideError):
        assert error_json(error) is None  # a defect, whose traceback should be seen

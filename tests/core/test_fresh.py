"""Fresh processes: what they answer, whatever else they print, and how their deaths are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from executor.isolated import run_fresh
from traces.errors import EnvironmentProblem, LowtideError, OutOfMemoryProblem

Run = Callable[..., dict[str, object]]

SERVED = """
import os
from traces.errors import PlanError

def do(value, limit_bytes=0):
    {body}
    return {{"got": value}}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Make a module whose `do` has a body of the test's own, and run it on a value."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(body: str, **more: object) -> dict[str, object]:
        (tmp_path / "lowtide_served.py").write_text(SERVED.format(body=body))
        return run_fresh("lowtide_served:do", {"value": 7, **more}, what="did it", timeout_s=60)

    return run


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

"""Tests of the tiers that start processes fail where they hang, and say where that is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Each says by itself that its time is over, once it is where it hangs.
HANGING = """
import os, signal, subprocess, sys, time
import pytest
from traces.isolated import run_fresh

pytestmark = pytest.mark.rehearsal

def test_that_waits_for_a_process():
    run_fresh("lowtide_hangs:wait", {}, what="waits")

def test_that_takes_no_notice_of_its_process():
    subprocess.run([sys.executable, "-c", "import lowtide_hangs; lowtide_hangs.wait()"])

def test_that_hangs_itself():
    assert 1000 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1200
    os.kill(os.getpid(), signal.SIGALRM)
    time.sleep(60)

def test_after_them():
    pass

"""
PROCESS = """
import os, signal, time
def wait():
    os.kill(os.getppid(), signal.SIGALRM)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a process's children")
def test_a_hang_is_a_failure_with_its_stack(tmp_path: Path) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    (tmp_path / "lowtide_hangs.py").write_text(PROCESS)
    words = ("-p", "tests.limits", "-p", "no:cacheprovider", "-c", os.devnull, "-q", "test_hanging.py")
    env = {k: v for k, v in os.environ.items() if k != "LOWTIDE_TEST_LIMIT_S"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "--rootdir", str(tmp_path)],
        cwd=tmp_path, env={**env, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert "3 failed, 1 passed" in done.stdout
    assert re.search(r'lowtide_hangs\.py", line \d in wait', done.stdout)
    assert "took longer than 1200 s; aborted: [" in done.stdout
    assert "TimeoutError" in done.stdout

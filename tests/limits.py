"""A test that starts processes and hangs fails with their stacks: each of its processes that waits for no other is
aborted once the test's time is over."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Final

import pytest

# Tiers whose tests run commands that may wait for each other, or for a device, for ever.
TIERS: Final = ("rehearsal", "gpu")
LIMIT_S: Final = float(
    os.environ.get("LOWTIDE_TEST_LIMIT_S", "1200")
)  # twenty times the longest on a free machine
AGAIN_S: Final = 30.0  # later the next are aborted, that waited for the first


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    limited = any(item.get_closest_marker(tier) for tier in TIERS)
    if not limited or sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return (yield)
    aborted: list[str] = []

    def abort(_signal: int, _frame: FrameType | None) -> None:
        leaves = [pid for pid in descendants(os.getpid()) if not children(pid)]
        if not leaves:  # the test itself hangs: here
            raise TimeoutError(f"the test took longer than {LIMIT_S:.0f} s")
        for pid in leaves:
            aborted.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            os.kill(pid, signal.SIGABRT)  # on which Python says where it is

    before = signal.signal(signal.SIGALRM, abort)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONFAULTHANDLER", "1")
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S, AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    if aborted:
        pytest.fail(f"took longer than {LIMIT_S:.0f} s; aborted: {aborted}")
    return None


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are not ended."""
    return [int(n) for task in Path(f"/proc/{pid}/task").glob("*/children") for n in task.read_text().split()]


def descendants(pid: int) -> list[int]:
    return [n for child in children(pid) for n in (child, *descendants(child))]

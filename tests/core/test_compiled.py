"""Inner loops are compiled once, said so, and kept on disk."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import numba
import numpy as np
import pytest

from simulator import kernels as clock
from simulator.core.limits import Limits
from simulator.kernels import compiled
from tests.commands import ROOT, python
from tests.tiny import chain
from traces.records.store import save


def simulate(trace: Path, cache: Path, *options: str) -> str:
    """What a planner with few kernels says on stderr, with that place for compiled code."""
    words = ("simulator", trace, "--budget", "90%", "--planner", "mu-two", *options)
    return python("-m", *words, NUMBA_CACHE_DIR=str(cache)).stderr


def test_compiling_is_said_and_done_once(tmp_path: Path) -> None:
    trace, cache = save(chain(8), tmp_path / "trace"), tmp_path / "cache"
    assert simulate(trace, cache).count("compiling") == 1
    assert "compiling" not in simulate(trace, cache)
    # One kernel is compiled again, and nothing is said of it where nothing is to be said.
    (kept,) = cache.rglob("walk.walk-*.nbi")
    kept.unlink()
    assert simulate(trace, cache, "--quiet") == ""
    assert kept.exists()


def test_without_a_place_to_keep_code_it_is_compiled_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = compiled.numba.njit

    def nowhere(*functions: object, **options: bool) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*functions, **options)

    monkeypatch.setattr(compiled.numba, "njit", nowhere)

    def double(x: int) -> int:
        return 2 * x

    twice = compiled.compiled(double)
    assert twice(21) == 42
    assert isinstance(twice(np.int32(3)), int)


def test_a_full_disk_under_the_cache_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, *given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(numba.core.caching.Cache, "save_overload", full)

    def thrice(x: int) -> int:
        return 3 * x

    assert compiled.compiled(thrice)(14) == 42


def test_a_changed_inlined_function_is_compiled_into_the_kept_kernels_anew(tmp_path: Path) -> None:
    """A kernel's own module is as old as before; what it has inlined is not."""
    package = tmp_path / "loops"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(compiled.__file__, package / "compiled.py")
    inner, outer = package / "inner.py", package / "outer.py"
    inner.write_text("from loops.compiled import inlined\n@inlined\ndef more(x):\n    return x + 1\n")
    outer.write_text(
        "from loops.compiled import compiled\nfrom loops.inner import more\n"
        "@compiled\ndef twice(x):\n    return 2 * more(x)\n"
    )

    def says() -> str:
        code = "from loops.outer import twice; print(twice(3), sum(twice.stats.cache_hits.values()))"
        env = {
            "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        return python("-c", code, **env).stdout.strip()

    assert says() == "8 0"
    assert says() == "8 1"  # kept
    inner.write_text(inner.read_text().replace("x + 1", "x + 2"))
    later = time.time() + 2
    os.utime(inner, (later, later))
    assert says() == "10 0"


def test_compiling_is_not_on_the_planners_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "excuse", lambda seconds: excused.append(seconds))
    excused: list[float] = []

    @compiled.numba.njit
    def inner(x: int) -> int:
        return x + 1

    @compiled.numba.njit
    def outer(x: int) -> int:
        return inner(x) + 1

    assert outer(1) == 3
    assert len(excused) == 1  # the inner one is compiled within the outer one's time
    assert excused[0] > 0


def test_excused_seconds_lengthen_a_running_clock() -> None:
    running = Limits(seconds=0.0).started()
    assert running.over
    clock.excuse(60.0)
    assert not running.over
    assert 50 < running.until - clock.now() <= 60
    assert Limits(seconds=0.0).started().over  # what was excused before it began is not its own

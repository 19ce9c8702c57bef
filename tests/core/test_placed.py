"""The pool with planned addresses: its table, and the C that hands memory out by it, without torch."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from executor.rehearsal.driver import SOURCES
from executor.rehearsal.placed import SLACK_BYTES, STAYS, Placed, Places, Pool, Rows, places_of
from simulator import api
from simulator.allocator.placement import ALIGN_BYTES
from simulator.allocator.requests import Requests, requests_of
from tests.strategies import traces_with_actions
from tests.tiny import bwd, fwd, trace
from traces.errors import SpecError
from traces.records.plan import Action, Plan
from traces.records.trace import Trace

LINUX = pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs cc on Linux")
B = ALIGN_BYTES
CUDA = """#include <stdlib.h>
int cudaMalloc(void **p, size_t n) { return !(*p = malloc(n)); }
int cudaFree(void *p) { free(p); return 0; }
"""


class Asked:
    """A pool as torch asks it: addresses, and what lies there."""

    def __init__(self, library: Path, places: Places) -> None:
        self.driver = ctypes.CDLL(str(library))
        self.driver.placed_malloc.restype = ctypes.c_void_p
        self.pool = Pool(self.driver, places)
        self.there: dict[int, int] = {}

    def ask(self, nbytes: int) -> int:
        at = self.driver.placed_malloc(ctypes.c_size_t(nbytes), 0, None)
        assert at
        for other, size in self.there.items():  # nothing ever overlaps, whatever the table says
            assert at + nbytes <= other or other + size <= at
        self.there[at] = nbytes
        return int(at)

    def give(self, at: int) -> None:
        self.driver.placed_free(ctypes.c_void_p(at), ctypes.c_size_t(self.there.pop(at)), 0, None)

    def play(self, of: Requests) -> None:
        """An iteration's requests; what is asked for once is asked for and stays."""
        blocks: dict[int, int] = {}
        once = list(of.once)
        for k in range(len(of.blocks) + 1):
            while once and once[0][0] <= k:
                self.ask(once.pop(0)[1])
            if k == len(of.blocks):
                break
            if of.blocks[k] >= 0:
                blocks[of.blocks[k]] = self.ask(of.sizes[k])
            elif ~of.blocks[k] in blocks:
                self.give(blocks.pop(~of.blocks[k]))
        for at in blocks.values():
            self.give(at)

    @property
    def figures(self) -> Placed:
        return self.pool.figures()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Places], Asked]:
    """Makes pools, each of a library of its own, since they know one arena."""
    folder, number = tmp_path_factory.mktemp("placed"), itertools.count()
    (folder / "cuda.c").write_text(CUDA)
    command = ["cc", "-shared", "-fPIC", "-w", "-o", "placed.so", str(SOURCES / "placed.c"), "cuda.c"]
    subprocess.run(command, cwd=folder, check=True)

    def made(places: Places) -> Asked:
        return Asked(shutil.copy(folder / "placed.so", folder / f"{next(number)}.so"), places)

    return made


def table(rows: Rows, *, pool_blocks: int = 10, resident_blocks: int = 2) -> Places:
    return Places(pool_bytes=pool_blocks * B, resident_bytes=resident_blocks * B, first=rows, later=rows)


@LINUX
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=traces_with_actions())
def test_every_request_of_a_schedule_lies_where_it_was_planned(
    pool: Callable[[Places], Asked], drawn: tuple[Trace, tuple[Action, ...]]
) -> None:
    of = gpus(drawn[0])
    found = api.simulate(of, Plan(meta=of.meta, planner="drawn", actions=drawn[1]))
    asked = requests_of(found.step, found.planned.schedule)
    places = places_of(found)
    made = pool(places)
    for n in filter(None, asked.residents):
        made.ask(n)
    made.pool.begin()
    for part in (asked, replace(asked, once=())):
        made.play(part)
        made.pool.begin()
    requests = sum(n > 0 for n in asked.sizes)
    found_out = made.figures
    assert found_out == Placed(
        pool_bytes=found.placed.pool_bytes + SLACK_BYTES,
        peak_bytes=found.placed.blocks.peak_bytes,
        peak_aside_bytes=0,
        placed=2 * requests,
        staying=len(asked.once),
        unlisted=sum(n > 0 for n in asked.residents),
        taken=0,
        unasked=0,
    )
    assert found_out.reserved_bytes == found_out.pool_bytes
    if found_out.peak_bytes:
        assert found_out.fragmentation == pytest.approx(found_out.pool_bytes / found_out.peak_bytes - 1)


def gpus(of: Trace) -> Trace:
    return replace(of, meta=replace(of.meta, device="cuda", target="h100"))


@LINUX
def test_a_wrong_table_is_found_out_and_nothing_overlaps(pool: Callable[[Places], Asked]) -> None:
    """Two blocks that live at once have one place: the second is counted, lies below, and the third beside the pool."""
    made = pool(table(((2 * B, 4 * B), (2 * B, 4 * B), (B, 5 * B))))
    made.pool.begin()
    first = made.ask(2 * B)
    assert made.ask(2 * B) == first - 4 * B  # below
    made.ask(B)
    assert (made.figures.placed, made.figures.taken, made.figures.peak_aside_bytes) == (1, 2, B)
    assert made.figures.reserved_bytes == 11 * B
    made.pool.begin()


@LINUX
def test_a_place_beyond_the_pool_is_none(pool: Callable[[Places], Asked]) -> None:
    made = pool(table(((2 * B, 9 * B),)))
    made.pool.begin()
    made.ask(2 * B)
    assert (made.figures.placed, made.figures.taken) == (0, 1)


@LINUX
def test_what_is_in_no_row_goes_below_and_then_beside_the_pool(pool: Callable[[Places], Asked]) -> None:
    made = pool(table(((3 * B, 2 * B), (B, STAYS))))
    base = made.ask(1)  # before the first iteration, a byte in a block of 512
    made.pool.begin()
    assert made.ask(3 * B) == base + 2 * B
    assert made.ask(2 * B) not in range(base, base + 10 * B)
    stays = made.ask(B)
    assert stays == base + B
    made.give(base)
    assert made.ask(B) == base
    out = made.figures
    assert (out.placed, out.staying, out.unlisted, out.taken) == (1, 1, 3, 0)
    assert (out.peak_bytes, out.peak_aside_bytes) == (7 * B, 2 * B)


@LINUX
def test_requests_may_come_early_late_or_never(pool: Callable[[Places], Asked]) -> None:
    made = pool(table(((B, 2 * B), (2 * B, 3 * B), (3 * B, 5 * B))))
    made.pool.begin()
    three, two = made.ask(3 * B), made.ask(2 * B)
    assert three - two == 2 * B
    made.give(three)
    made.give(two)
    made.pool.begin()
    assert (made.figures.placed, made.figures.unasked) == (2, 1)


@LINUX
@pytest.mark.parametrize(("other", "near"), [(B, 64), (4 * 2**20, 64), (2**20, 4)])
def test_a_request_is_looked_for_among_the_next_rows_alone(
    pool: Callable[[Places], Asked], other: int, near: int
) -> None:
    """A small one among fewer, for small ones are all alike."""
    small = other == 2**20
    asked = 2 * B if small else 2**20 + B
    rows = [(other, 0)] * near + [(asked, 8 * 2**20)]
    made = pool(Places(pool_bytes=16 * 2**20, resident_bytes=0, first=tuple(rows), later=tuple(rows)))
    made.pool.begin()
    made.give(made.ask(asked))
    assert (made.figures.placed, made.figures.unlisted) == (0, 1)
    made.give(made.ask(other))
    made.give(made.ask(asked))
    assert (made.figures.placed, made.figures.unlisted) == (2, 1)


@LINUX
def test_a_row_that_long_since_did_not_come_is_passed_over(pool: Callable[[Places], Asked]) -> None:
    made = pool(table(tuple([(2 * B, 4 * B)] + [(B, 2 * B)] * 6)))
    made.pool.begin()
    for _ in range(4):
        made.give(made.ask(B))
    made.give(made.ask(2 * B))
    made.pool.begin()
    assert (made.figures.placed, made.figures.unlisted, made.figures.unasked) == (4, 1, 3)


@LINUX
def test_nothing_is_nowhere(pool: Callable[[Places], Asked]) -> None:
    made = pool(table(()))
    assert made.driver.placed_malloc(ctypes.c_size_t(0), 0, None) is None


def test_a_first_iteration_whose_gradients_stay_has_them_below() -> None:
    """x 2 goes again, g 1 stays: later g is there, and lies below with w 1."""
    first = Requests(residents=(B,), blocks=(0, 1, ~0), sizes=(2 * B, B, 0), once=((3, 4 * B),), count=2)
    later = Requests(residents=(B,), blocks=(2, ~2), sizes=(2 * B, 0), once=(), count=1, first=first)
    of = gpus(trace([fwd({"x": 2 * B}, "w"), bwd({"g": B}, "x")], {"w": B}))
    found = api.simulate(of)
    found.step.once(("requests", found.planned.schedule), lambda p: later)
    places = places_of(found)
    assert places.first == ((2 * B, places.resident_bytes), (B, STAYS), (4 * B, STAYS))
    assert places.later == ((2 * B, places.resident_bytes),)


def test_a_plan_for_a_cpu_has_no_places() -> None:
    with pytest.raises(SpecError, match="--target"):
        places_of(api.simulate(trace([fwd({"x": B}, "w"), bwd({"g": B}, "x")], {"w": B})))

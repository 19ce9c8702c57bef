"""Skip what this machine cannot run, share a whole run among processes, and keep caches apart."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from hypothesis import settings

from tracer.rehearsal.driver import find_cuda_torch
from traces.errors import EnvironmentProblem

pytest_plugins = ["tests.limits"]
# Where there is no torch, `core` and `bench` are all.
collect_ignore = [] if find_spec("torch") else ["frameworks", "gpu", "published", "rehearsal", "torch"]

# Imports make much and drop little: the garbage collector need not look while tests are collected.
gc.disable()

# The first example of a test may have to compile the inner loops.
settings.register_profile("lowtide", deadline=None)
settings.load_profile("lowtide")

# What tests keep stays out of the user's own cache, and that out of the tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lowtide-tests-")
# Threads of several processes that wait for work by spinning would take the cores from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A run that names no path takes two processes where pytest-xdist is installed and `-n` says nothing else.

    Two, since a process may hold the step of a large model. Neighbours stay together, so that the fixtures of a module
    are made once. What `-m gpu` measures has the machine to itself.
    """
    options = config.option
    if hasattr(config, "workerinput"):
        return  # this is one of the processes already: it would start two more, and each of them two
    alone = options.usepdb or options.markexpr == "gpu"
    if not options.file_or_dir and not alone and getattr(options, "numprocesses", 0) is None:
        options.numprocesses = 2
        options.dist = "worksteal"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, tests marked gpu without a CUDA device, and rehearsal without a torch built for one."""
    for name, has, reason in (
        ("gpu", _has_gpu, "no CUDA device"),
        ("rehearsal", _has_cuda_torch, "no CUDA torch"),
    ):
        marked = [item for item in items if item.get_closest_marker(name)]
        if marked and not has():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """What the imports made stays to the end: the garbage collector need not walk it again and again.

    Nor need torch tell what it does in detail to pytest's log: a twelfth of the time of a capture for many sizes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20)  # in place of 700 and 10: captures make much and drop little, too
    gc.enable()
    # pytest listens to every logger that does not propagate; for a listener there, torch writes down each graph.
    logging.getLogger("torch.__trace").propagate = True


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _has_cuda_torch() -> bool:
    try:
        find_cuda_torch()
    except EnvironmentProblem:
        return False
    return True


@pytest.fixture(autouse=True, scope="module")
def walked_once() -> Iterator[None]:
    """What a module's tests imported and cached stays, too: each search for garbage walked a million objects of it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A test in which what several threads allocate for themselves would count: it is not, or otherwise, told."""
    yield from _threads(1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """A test of what torch's kernels do otherwise where there is a single thread."""
    yield from _threads(2)


def _threads(number: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)

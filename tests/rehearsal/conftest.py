"""Rehearsals are forked from a process that has imported torch on the null driver, which is half of their time."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.forked import forking
from tracer.rehearsal.driver import driver_environment, find_cuda_torch
from traces.devices import device


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    preload = driver_environment(find_cuda_torch(), device("h100"))["LD_PRELOAD"]
    torch = ("torch._dynamo", "torch.distributed.fsdp")
    modules = (*torch, "tracer.rehearsal.perform", "tracer.api", "executor.measuring")
    with forking(tmp_path_factory.mktemp("forks"), preload, *modules) as client:
        yield client


@pytest.fixture(autouse=True, scope="module")
def forked(forks: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forks)
        yield

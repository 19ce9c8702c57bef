"""The rooms of the house: modules import one another without circles, at any level, lazily or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest

grimp = pytest.importorskip("grimp")

PACKAGES = ("traces", "simulator", "tracer", "executor")


@cache
def graph() -> Any:
    return grimp.build_graph(*PACKAGES)


def circles(nodes: Iterable[str], successors: Callable[[str], Iterable[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(n: str) -> None:
        index[n] = low[n] = len(index)
        stack.append(n)
        for m in sorted(successors(n)):
            if m not in index:
                visit(m)
            if m in stack:
                low[n] = min(low[n], low[m])
        if low[n] == index[n]:
            component = stack[stack.index(n) :]
            del stack[stack.index(n) :]
            if len(component) > 1:
                found.append(sorted(component))

    for n in sorted(nodes):
        if n not in index:
            visit(n)
    return found


def test_circles_are_found() -> None:
    edges = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": [], "f": ["f", "a"]}
    assert circles(edges, edges.__getitem__) == [["a", "b", "c"]]


ROOMS_IN_ROOMS = (
    "traces",
    "tracer",
    "executor",
    "simulator.core",
    "simulator.planners",
    "simulator.allocator",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_imports_itself_by_a_detour(package: str) -> None:
    nothing_imports_itself(package, 2)


@pytest.mark.parametrize("place", ROOMS_IN_ROOMS)
def test_no_room_in_a_room_imports_itself_by_a_detour(place: str) -> None:
    nothing_imports_itself(place, 3)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_itself_by_a_detour(package: str) -> None:
    nothing_imports_itself(package, 9)


def nothing_imports_itself(package: str, depth: int) -> None:
    def room(module: str) -> str:
        return ".".join(module.split(".")[:depth])

    modules = [m for m in graph().modules if f"{m}.".startswith(f"{package}.")]
    edges: dict[str, set[str]] = {room(m): set() for m in modules}
    for m in modules:
        imported = {room(n) for n in graph().find_modules_directly_imported_by(m) if room(n) in edges}
        edges[room(m)] |= imported - {room(m)}
    assert circles(edges, edges.__getitem__) == []

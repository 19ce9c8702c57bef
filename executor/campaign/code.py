"""Turn the entries of the processes that predict and measure into a digest of all code that they can run.

What counts is found by following imports, those inside functions too, from these entries: a module that none of them
leads to (commands, pages, benchmarks) can be edited without a kept result becoming another code's.

Counts: Lowtide's modules as Python reads them, without comments, layout and docstrings; modules that are named in a
string, alone or as `module:function`, as planners and workers are; tables of rules. Ignores: modules whose names are
put together at run time; there are none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from executor.campaign.cases import digest

ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("traces", "tracer", "simulator", "executor")
# What runs in the processes that predict and measure, and what makes a record of their answers.
ENTRIES: Final = (
    "executor.campaign.worker",
    "executor.measure_worker",
    "executor.campaign.one",
    "executor.campaign.boundary",
)


@cache  # a process runs one code, however often the files are edited meanwhile
def code_digest(root: Path = ROOT) -> str:
    """The digest of what `modules_behind` the entries, and of the tables beside them."""
    trees = read_modules(root)
    parts = [(name, ast.dump(_undocumented(trees[name]))) for name in modules_behind(ENTRIES, trees)]
    tables = [(p.name, p.read_text(encoding="utf-8")) for p in sorted((root / "tracer").rglob("*.toml"))]
    return digest([parts, tables])


def read_modules(root: Path) -> dict[str, ast.Module]:
    """All of Lowtide's modules by name, parsed; a package under its own name."""
    found = {}
    for path in sorted(p for room in ROOMS for p in (root / room).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def modules_behind(entries: Iterable[str], trees: Mapping[str, ast.Module]) -> tuple[str, ...]:
    """The entries and every module that one of these imports, whenever it does; sorted."""
    seen: set[str] = set()
    stack = list(entries)
    while stack:
        name = stack.pop()
        if name not in seen:
            seen.add(name)
            package = name.rpartition(".")[0]
            stack += [*([package] if package else []), *(m for m in _named(trees[name]) if m in trees)]
    return tuple(sorted(seen))


def _named(tree: ast.Module) -> Iterator[str]:
    """What may be the name of a module that this one imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def _undocumented(tree: ast.Module) -> ast.Module:
    """The module without docstrings; edits it in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return tree

"""What models call of CUDA and its libraries runs on the null driver, call by call, in one process."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tracer.rehearsal import run_on_null_driver
from traces.devices import device

pytestmark = pytest.mark.rehearsal
TREE = ast.parse(Path(__file__).with_name("calls.py").read_text(encoding="utf-8"))
NAMES = [n.name for n in TREE.body if isinstance(n, ast.FunctionDef) and n.decorator_list]


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    return run_on_null_driver("tests.rehearsal.calls:run", {}, device("h100"), what="called torch")


@pytest.mark.parametrize("name", NAMES)
def test_the_call_runs(name: str, errors: dict[str, str]) -> None:
    assert errors[name] == ""

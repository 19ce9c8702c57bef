"""Formulas calculate, and do nothing else."""

from __future__ import annotations

import pytest

from tracer.costs.formulas import Formula
from tracer.costs.signature import TensorSpec
from traces.errors import SpecError

X = TensorSpec(shape=(2, 3, 5), stride=(15, 5, 1), dtype="bfloat16")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 * x.shape[0] + x.shape[-1] // 2", 6),
        ("x.nbytes % 7 - -1", 60 % 7 + 1),
        ("x.elements if x.item_bytes == 2 else 0", 30),
        ("1 if x.item_bytes > 2 else 3", 3),
        ("1 < x.shape[1] <= 3", True),
        ("1 < x.shape[1] <= 2", False),
        ("90 in (80, 90)", True),
        ("flag and x.shape[0]", 2),
        ("not flag or 7", 7),
        ("0 or 5", 5),
        ("0 and 5", 0),
        ("most(4, x.shape[2])", 5),
    ],
)
def test_values(text: str, value: object) -> None:
    assert Formula(text)({"x": X, "flag": True, "most": max}) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "x.__class__",
        "x.key",
        "[n for n in (1, 2)]",
        "lambda: 1",
        "'text'",
        "(1).real",
        "x.shape[0:2]",
        "max(1, key=2)",
        "(f or g)(1)",
        "2 ** 100",
        "x := 1",
        "1 +",
        "f'{x}'",
    ],
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="formula"):
        Formula(text)


def test_an_unknown_name() -> None:
    with pytest.raises(NameError, match="y"):
        Formula("y + 1")({"x": X})

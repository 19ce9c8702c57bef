"""What a budget may look like, and what not."""

from __future__ import annotations

import pytest

from simulator.allocator.device import size_of
from simulator.core.limits import parse_budget
from traces.errors import SpecError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8589934592", 8589934592),
        ("8GiB", 8 * 2**30),
        ("8 GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("500M", 500 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("1000B", 1000),
        ("60%", 600),
        ("60 %", 600),
        ("33.3%", 333),
        ("150%", 1500),
        ("0.1%", 1),
        ("99999999999999TiB", 2**62),
    ],
)
def test_budgets(text: str, nbytes: int) -> None:
    assert parse_budget(text, 1000) == nbytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "not more than zero"),
        ("-1", "not more than zero"),
        ("-5%", "not more than zero"),
        ("0%", "not more than zero"),
        ("0GiB", "not more than zero"),
        ("abc", "not a number"),
        ("nan", "not a number"),
        ("1" * 5_000, "not a number"),  # more digits than Python reads
        ("inf", "not a number"),
        ("1e9", "not a number|unknown unit"),
        ("", "not a number"),
        ("%", "not a number"),
        ("8XB", "unknown unit"),
        ("8%GiB", "unknown unit"),
        ("0.6", r"did you mean 60%"),
        ("0.01%", "less than one byte"),
        ("٦٠%", "not a number"),
    ],
)
def test_what_is_no_budget(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        parse_budget(text, 1000)
    assert caught.value.exit_code == 2


def test_what_is_no_size_names_its_option_and_offers_no_share() -> None:
    with pytest.raises(SpecError, match=r"--host-memory '0' is not more than zero; .*512MiB\)\.$"):
        size_of("--host-memory", "0")

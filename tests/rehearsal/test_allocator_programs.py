"""torch's allocator does on the null driver what it did when the recordings in tests/data/allocator were made."""

from __future__ import annotations

import gzip
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
RELEASE = "2.15.0"  # the recordings of older ones are of programs that were drawn otherwise
THEN, NOW = 0x7F0000000000, 0x2F0000000000  # where segments lay in the recordings, and lie now


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pickle.loads(gzip.decompress(path.read_bytes()))
    return rows


def places(row: dict[str, Any], base: int) -> list[int]:
    """Where each block came to lie; those in expandable ranges have the same addresses in both."""
    found = [op[4] for op in row["ops"] if op[0] == "alloc"]
    return [a - base if base <= a < base + (1 << 40) else a for a in found]


def test_random_programs_get_the_recorded_blocks(tmp_path: Path) -> None:
    import torch

    if torch.__version__.partition("+")[0] != RELEASE:
        pytest.skip(f"the recording is of torch {RELEASE}")
    recorded = ROOT / "tests" / "data" / "allocator" / f"torch-{RELEASE}.pickle.gz"
    out = tmp_path / "programs.pickle.gz"
    subprocess.run([sys.executable, "-m", "tests.standin.run", str(out)], cwd=ROOT, check=True)
    before, now = read(recorded), read(out)
    assert len(before) == len(now) == 24
    for old, new in zip(before, now, strict=True):
        assert [op[0] for op in new["ops"]] == [op[0] for op in old["ops"]]
        assert new["figures"] == old["figures"]
        assert new["peaks"] == old["peaks"]
        assert places(new, NOW) == places(old, THEN)

"""JSON files that hold no record are refused in words by the reader of every record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator.studies.sweep import Sweep
from traces.errors import LowtideError
from traces.records.measurement import Measurement
from traces.records.plan import Plan


@pytest.mark.parametrize("record", [Plan, Measurement, Sweep])
@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\xff", "NaN", "3", "[]", "null"])
def test_what_is_no_record_is_refused_in_words(record: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LowtideError, match=r"record\.json: "):
        record.load(path)

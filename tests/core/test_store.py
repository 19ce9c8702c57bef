"""Traces on disk: what is written is read back, and what is damaged or foreign is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings

from simulator.cli.main import main as simulate
from tests.strategies import traces
from tests.tiny import chain
from tracer.cli.main import trace
from traces.errors import TraceError
from traces.files import from_json
from traces.records.store import (
    META_KEY,
    OPS_FILE,
    STORAGES_FILE,
    UNTOUCHED_FILE,
    check_fingerprints,
    find,
    load,
    save,
    validate,
)
from traces.records.trace import FORWARD, VIEW, TraceMeta, Untouched

STORED = chain(3)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return save(STORED, tmp_path / "t")


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    with pq.ParquetFile(path) as file:
        table = file.read()
    pq.write_table(change(table), path)


def with_header(table: pa.Table, **values: object) -> pa.Table:
    header = json.loads(table.schema.metadata[META_KEY])
    header.update(values)
    return table.replace_schema_metadata({META_KEY: json.dumps(header).encode()})


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(of=traces())
def test_a_trace_comes_back_as_it_was(of: object, tmp_path: Path) -> None:
    assert load(save(of, tmp_path / "t", force=True)) == of  # type: ignore[arg-type]


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", broken)
    with pytest.raises(OSError, match="disk full"):
        save(STORED, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_a_replacement_that_fails_leaves_the_old_trace(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one cannot be moved to its place (nor by a Ctrl-C there): the old one comes back."""
    real = os.replace

    def replace_file(source: object, target: object) -> None:
        if str(target) == str(stored) and not str(source).endswith(".old") and not stored.exists():
            raise KeyboardInterrupt
        real(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", replace_file)
    with pytest.raises(KeyboardInterrupt):
        save(chain(2), stored, force=True)
    assert load(stored) == STORED
    assert [p.name for p in stored.parent.iterdir()] == ["t"]


def test_a_link_to_a_trace_stays(stored: Path) -> None:
    link = stored.parent / "link"
    link.symlink_to(stored)
    save(chain(2), link, force=True)
    assert link.is_symlink()
    assert load(stored) == chain(2)


def test_a_trace_has_the_permissions_that_the_user_gives_to_new_files(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = save(STORED, tmp_path / "t")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o700


def changed_cell(column: str, row: int, value: object) -> Callable[[pa.Table], pa.Table]:
    """A table's change: one cell."""

    def change(table: pa.Table) -> pa.Table:
        k, kind = table.schema.get_field_index(column), table.schema.field(column).type
        values = table.column(column).to_pylist()
        values[row] = value
        return table.set_column(k, column, pa.array(values, kind))

    return change


def without_model(table: pa.Table) -> pa.Table:
    header = json.loads(table.schema.metadata[META_KEY])
    del header["model"]
    return table.replace_schema_metadata({META_KEY: json.dumps(header).encode()})


def times_as_text(table: pa.Table) -> pa.Table:
    k = table.schema.get_field_index("time_ns")
    return table.set_column(k, "time_ns", table.column("time_ns").cast(pa.string()))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        *(
            (file, share, "cannot be read as Parquet")
            for file in (OPS_FILE, STORAGES_FILE)
            for share in (0.0, 0.3, 0.9)
        ),
        (OPS_FILE, lambda t: t.append_column("name", t.column("name")), "column 'name' is string, string"),
        (OPS_FILE, lambda t: pa.table({"a": [1, 2]}), "not one of Lowtide's"),
        (OPS_FILE, lambda t: with_header(t, record="recipe"), "does not describe a trace"),
        (OPS_FILE, lambda t: with_header(t, schema_version=99), "schema version 99"),
        (OPS_FILE, without_model, "header is malformed"),
        (OPS_FILE, lambda t: t.drop_columns(["time_ns"]), "column 'time_ns' is missing"),
        (OPS_FILE, times_as_text, "column 'time_ns' is string, not int64"),
        (OPS_FILE, lambda t: t.replace_schema_metadata({META_KEY: b"[" * 100_000}), "cannot be read"),
        (STORAGES_FILE, changed_cell("nbytes", 0, None), "column 'nbytes' has empty cells"),
        (STORAGES_FILE, changed_cell("producer", 1, 2), r"storage 1 says that op 2 produced it"),
    ],
)
def test_a_damaged_file_is_refused(stored: Path, file: str, change: Any, message: str) -> None:
    """A share: that much of the file is left; else what becomes of its table."""
    if isinstance(change, float):
        data = (stored / file).read_bytes()
        (stored / file).write_bytes(data[: int(len(data) * change)])
    else:
        rewrite(stored / file, change)
    with pytest.raises(TraceError, match=message):
        load(stored)


def test_a_missing_file(stored: Path) -> None:
    (stored / STORAGES_FILE).unlink()
    with pytest.raises(TraceError, match=f"{STORAGES_FILE}: missing"):
        load(stored)
    (stored / STORAGES_FILE).mkdir()
    with pytest.raises(TraceError, match=f"{STORAGES_FILE}: a directory"):
        load(stored)


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such trace directory"):
        find(tmp_path / "nothing")
    with pytest.raises(TraceError, match="holds no trace"):
        find(tmp_path)


def test_the_header_survives_fields_that_this_version_does_not_know(stored: Path) -> None:
    for file in (OPS_FILE, STORAGES_FILE):
        rewrite(stored / file, lambda t: with_header(t, from_the_future=1))
    assert load(stored) == STORED
    assert from_json(TraceMeta, {**STORED.meta.to_json(), "from_the_future": 1}) == STORED.meta


@pytest.mark.parametrize(
    ("table", "column", "row", "value", "message"),
    [
        ("storages", "nbytes", 1, -4, "negative size"),
        ("storages", "category", 1, "treasure", "unknown category"),
        ("storages", "producer", 1, 99, "does not exist"),
        ("storages", "hold", 1, 99, "held by op 99"),
        ("storages", "nbytes", 1, 1 << 62, "sizes sum to"),
        ("storages", "first_forward_use", 1, 2, "first forward use 2"),
        ("storages", "last_forward_use", 1, -1, "last forward use -1"),
        ("storages", "first_backward_use", 1, 3, "first backward use 3"),
        ("storages", "last_backward_use", 1, -1, "last backward use -1"),
        ("ops", "phase", 0, "sideways", "unknown phase"),
        ("ops", "phase", 0, "backward", "after an op of a later phase"),
        ("ops", "time_ns", 0, -1, "negative time"),
        ("ops", "time_ns", 0, 1 << 62, "times sum to"),
        ("ops", "flags", 0, VIEW, "is a view"),
        ("ops", "reads", 1, (1, 1), "reads a storage twice"),
        ("ops", "writes", 1, (2, 2), "writes a storage twice"),
        ("ops", "writes", 0, (1, 2), "makes only later"),
        ("ops", "inputs", 0, (3,), "does not run before it"),
        ("ops", "reads", 0, (99,), "reads storage 99"),
        ("ops", "reads", 0, (3,), "produces only later"),
        ("ops", "writes", 7, (99,), "writes storage 99"),
        ("ops", "events", 0, (1,), "by its events"),
        ("ops", "overwrites", 0, 99, "overwrites storage 99"),
        ("ops", "flops", 0, -1, "-1 FLOPs"),
        ("ops", "bytes_moved", 0, -1, "moves -1 bytes"),
        ("ops", "flags", 0, -1, "unknown flags -1"),
        ("ops", "flags", 0, 64, "unknown flags 64"),
        ("storages", "shape", 1, (2, -1), "shape"),
        ("storages", "first_forward_use", 0, 99, "used by op 99"),
    ],
)
def test_validate_names_the_row(table: str, column: str, row: int, value: object, message: str) -> None:
    part = getattr(STORED, table)
    values = list(getattr(part, column))
    values[row] = value
    wrong = replace(STORED, **{table: replace(part, **{column: tuple(values)})})
    if (table, column) == ("ops", "writes"):  # what op 7 made must not be missed first
        producers = tuple(-1 if p == 7 else p for p in STORED.storages.producer)
        wrong = replace(wrong, storages=replace(STORED.storages, producer=producers))
    with pytest.raises(TraceError, match=message):
        validate(wrong)


@pytest.mark.parametrize(("forward", "backward"), [(-1, 3), (4, 3), (3, 99)])
def test_a_header_whose_rows_do_not_exist(forward: int, backward: int) -> None:
    meta = replace(STORED.meta, forward_ops=forward, first_backward_graph_op=backward)
    with pytest.raises(
        TraceError, match=f"forward ends at op {forward} and backward begins at op {backward}"
    ):
        validate(replace(STORED, meta=meta))


def test_tables_that_were_changed_consistently_are_told_from_the_recorded_ones(stored: Path) -> None:
    """A storage of another size: every check of `load` passes, and only the digests know."""
    check_fingerprints(load(stored), stored, graph=True)
    nbytes = (*STORED.storages.nbytes[:-1], STORED.storages.nbytes[-1] + 4)
    other = replace(STORED, storages=replace(STORED.storages, nbytes=nbytes))
    save(other, stored, force=True)
    assert load(stored) == other
    with pytest.raises(TraceError, match=rf"the fingerprint in its header is {STORED.meta.fingerprint}"):
        check_fingerprints(load(stored), stored)
    # The graph's own digests leave out what is outside of it, so they are looked at one by one.
    meta = replace(STORED.meta, structure_fingerprint="0")
    save(replace(STORED, meta=meta), stored, force=True)
    check_fingerprints(load(stored), stored)
    with pytest.raises(TraceError, match="the structure_fingerprint in its header is 0"):
        check_fingerprints(load(stored), stored, graph=True)


def test_a_changed_trace_is_neither_simulated_nor_shown(stored: Path) -> None:
    meta = replace(STORED.meta, fingerprint="0")
    save(replace(STORED, meta=meta), stored, force=True)
    for command in ((simulate, [str(stored)]), (trace, ["show", str(stored)])):
        done = CliRunner().invoke(*command)
        assert done.exit_code == 2
        assert "were changed after it was recorded" in done.output


def test_requests_of_the_untouched_loop_come_back(tmp_path: Path) -> None:
    of = replace(
        STORED, untouched=Untouched(block=(0, -1, ~0), nbytes=(7, 9, 0), once=(0, 1, 0), phase=(FORWARD,) * 3)
    )
    place = save(of, tmp_path / "t")
    assert load(place) == of
    save(of, place, force=True)  # a third file is a trace's own
    rewrite(place / UNTOUCHED_FILE, lambda t: t.set_column(1, "nbytes", [[7, 9, 1]]))
    with pytest.raises(TraceError, match="cannot ask for 1 bytes"):
        load(place)
    save(of, place, force=True)
    rewrite(place / UNTOUCHED_FILE, lambda t: with_header(t, model="another"))
    with pytest.raises(TraceError, match="belong to different traces"):
        load(place)

"""Save a Trace as a few Parquet files in a directory, and load it back, checking everything on the way."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from traces.errors import TraceError
from traces.files import parquet as tables
from traces.files.parquet import ID, IDS, INT, INTS, TEXT
from traces.files.whole import check_writable, directory_beside, umask
from traces.records.trace import SCHEMA_VERSION, Ops, Storages, Trace, TraceMeta, Untouched, fingerprint
from traces.records.validate import validate

OPS_FILE: Final = "ops.parquet"
STORAGES_FILE: Final = "storages.parquet"
UNTOUCHED_FILE: Final = "untouched.parquet"  # only of a trace that has it
GALLERY: Final = Path(__file__).parents[1] / "gallery"

COLUMN_KINDS: Final = {"Texts": TEXT, "Numbers": INT, "Ids": ID, "NumberLists": INTS, "IdLists": IDS}
OPS_COLUMNS, STORAGES_COLUMNS, UNTOUCHED_COLUMNS = (
    {f.name: COLUMN_KINDS[str(f.type)] for f in fields(table)} for table in (Ops, Storages, Untouched)
)


def save(trace: Trace, directory: str | Path, *, force: bool = False) -> Path:
    """Write a trace to a new directory, whole or not at all.

    Args:
        trace: what to save.
        directory: where; its parents are made.
        force: replace a trace that already stands there. Anything but a trace is never replaced.

    Raises:
        TraceError: the directory exists and `force` is off, or it holds something else than a trace.
    """
    directory = Path(directory)
    check_place(directory, force=force)
    place = Path(os.path.realpath(directory))  # a link stays, and leads to the new trace
    with directory_beside(place) as temporary:
        header = trace.meta.to_json()
        for file, table, columns in (
            (OPS_FILE, trace.ops, OPS_COLUMNS),
            (STORAGES_FILE, trace.storages, STORAGES_COLUMNS),
            (UNTOUCHED_FILE, trace.untouched, UNTOUCHED_COLUMNS),
        ):
            if table != Untouched():
                values = {c: getattr(table, c) for c in columns}
                tables.write(temporary / file, columns, header, values)
        temporary.chmod(0o777 & ~umask())
        _put(temporary, place)
    return directory


def check_place(directory: str | Path, *, force: bool = False) -> None:
    """Find out whether a trace may be saved there, before the work of recording it. Nothing is made.

    Raises:
        TraceError: the directory exists and `force` is off, or it holds something else than a trace.
        OSError: it cannot be made.
    """
    directory = Path(directory)
    check_writable(directory)
    there: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        there = {p.name for p in directory.iterdir()} if not directory.is_file() else {""}
    if not there <= {OPS_FILE, STORAGES_FILE, UNTOUCHED_FILE}:
        raise TraceError(f"{directory}: exists and is not a trace; name another output with -o.")
    if there and not force:
        raise TraceError(f"{directory}: exists; give --force to replace it, or name another output with -o.")


def _put(made: Path, place: Path) -> None:
    """Move a finished directory to its place; what stands there is gone in the end, or back if that fails."""
    aside = made.with_name(made.name + ".old")
    there = place.exists()
    if there:
        os.replace(place, aside)
    try:
        os.replace(made, place)
    except BaseException:
        if there:
            os.replace(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def find(name: str | Path) -> Path:
    """The directory that a user means: a path, or the name of a trace in the gallery. Raises TraceError if neither
    exists.
    """
    path = Path(name)
    if (path / OPS_FILE).is_file():
        return path
    inside = GALLERY / str(name)
    if (inside / OPS_FILE).is_file():
        return inside
    if path.is_dir():
        raise TraceError(
            f"{name}: this directory holds no trace (no {OPS_FILE}); make one with `trace MODEL -o {name}`."
        )
    known = (
        ", ".join(sorted(p.parent.relative_to(GALLERY).as_posix() for p in GALLERY.rglob(OPS_FILE))) or "none"
    )
    raise TraceError(
        f"{name}: no such trace directory, and no trace of that name in the gallery (there: {known}). "
        f"Make one with `trace MODEL -o {name}`."
    )


def load(directory: str | Path) -> Trace:
    """Read and validate a trace. Raises TraceError if a file is missing, truncated, of another schema, or contradicts
    itself.
    """
    directory = find(directory)
    meta, ops = _load_table(directory / OPS_FILE, OPS_COLUMNS)
    other, storages = _load_table(directory / STORAGES_FILE, STORAGES_COLUMNS)
    third: dict[str, Any] = {}
    if (directory / UNTOUCHED_FILE).is_file():
        third_meta, third = _load_table(directory / UNTOUCHED_FILE, UNTOUCHED_COLUMNS)
        other = other if third_meta == meta else third_meta
    if meta != other:
        raise TraceError(f"{directory}: its files belong to different traces.")
    try:
        untouched = Untouched(**third)
    except ValueError as error:
        raise TraceError(f"{directory}: {UNTOUCHED_FILE}: {error}.") from None
    trace = Trace(meta=meta, ops=Ops(**ops), storages=Storages(**storages), untouched=untouched)
    try:
        validate(trace)
    except TraceError as error:
        raise TraceError(f"{directory}: {error}") from None
    return trace


def check_fingerprints(trace: Trace, name: str | Path, *, graph: bool = False) -> None:
    """Compare the header's digests with the tables: tables that were changed without them are no longer that step.

    `load` leaves this out, because it takes more than half as long as loading does.

    Args:
        trace: as loaded.
        name: what to call it.
        graph: also the two digests of the captured model alone.

    Raises:
        TraceError: a digest is not that of the tables.
    """
    told: dict[str, tuple[str, dict[str, bool]]] = {"fingerprint": (trace.meta.fingerprint, {})}
    if graph:
        told |= {
            "graph_fingerprint": (trace.meta.graph_fingerprint, {"eager": False}),
            "structure_fingerprint": (trace.meta.structure_fingerprint, {"eager": False, "sizes": False}),
        }
    for field, (digest, which) in told.items():
        real = fingerprint(trace.ops, trace.storages, **which)
        if digest != real:
            raise TraceError(
                f"{name}: the {field} in its header is {digest}, and that of its ops and storages is {real}: they were "
                "changed after it was recorded. Record it again with `trace`."
            )


def _load_table(path: Path, columns: dict[str, str]) -> tuple[TraceMeta, dict[str, Any]]:
    header, values = tables.read(path, columns)
    if (version := header.get("schema_version")) != SCHEMA_VERSION:
        raise TraceError(
            f"{path}: schema version {version}, and this Lowtide reads {SCHEMA_VERSION}; {tables.AGAIN}"
        )
    try:
        meta = TraceMeta.from_json(header)
    except ValueError as error:
        raise TraceError(f"{path}: its header is malformed ({error}); {tables.AGAIN}") from None
    return meta, values

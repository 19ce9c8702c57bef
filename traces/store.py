"""Save a Trace as two Parquet files in a directory, and load it back, checking everything on the way.

pyarrow imports pandas by itself in most of its convenience functions; the reader here uses only
`ParquetFile(...).read()`, which does not, so that `simulate` starts quickly.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from traces.errors import TraceError
from traces.trace import SCHEMA_VERSION, Ops, Storages, Trace, TraceMeta

if TYPE_CHECKING:
    import pyarrow as pa

OPS_FILE: Final = "ops.parquet"
STORAGES_FILE: Final = "storages.parquet"
META_KEY: Final = b"lowtide"
GALLERY: Final = Path(__file__).parent / "gallery"

_TEXT, _INT, _ID, _IDS, _INTS = "text", "int64", "int32", "list<int32>", "list<int64>"
OPS_COLUMNS: Final = {
    "name": _TEXT,
    "target": _TEXT,
    "phase": _TEXT,
    "module": _TEXT,
    "time_ns": _INT,
    "flops": _INT,
    "bytes_moved": _INT,
    "inputs": _IDS,
    "reads": _IDS,
    "writes": _IDS,
    "events": _INTS,
    "overwrites": _ID,
    "flags": _ID,
}
STORAGES_COLUMNS: Final = {
    "name": _TEXT,
    "nbytes": _INT,
    "category": _TEXT,
    "producer": _ID,
    "first_forward_use": _ID,
    "last_forward_use": _ID,
    "first_backward_use": _ID,
    "last_backward_use": _ID,
    "hold": _ID,
    "dtype": _TEXT,
    "shape": _INTS,
    "aliases": _IDS,
}


def _arrow_type(kind: str) -> pa.DataType:
    import pyarrow as pa

    return {
        _TEXT: pa.string(),
        _INT: pa.int64(),
        _ID: pa.int32(),
        _IDS: pa.list_(pa.int32()),
        _INTS: pa.list_(pa.int64()),
    }[kind]


def save(trace: Trace, directory: str | Path, *, force: bool = False) -> Path:
    """Write a trace to a new directory, whole or not at all.

    Args:
        trace: what to save.
        directory: where; its parents are made.
        force: replace a trace that already stands there. Anything but a trace is never replaced.

    Raises:
        TraceError: the directory exists and `force` is off, or it holds something else than a trace.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory = Path(directory)
    if directory.exists():
        is_trace = directory.is_dir() and {p.name for p in directory.iterdir()} <= {
            OPS_FILE,
            STORAGES_FILE,
        }
        if not is_trace:
            raise TraceError(f"{directory}: exists and is not a trace; name another output with -o.")
        if not force and any(directory.iterdir()):
            raise TraceError(f"{directory}: exists; give --force to replace it, or another -o.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        header = json.dumps({"record": "trace", **trace.meta.to_json()}, sort_keys=True).encode()
        for file, table, columns in (
            (OPS_FILE, trace.ops, OPS_COLUMNS),
            (STORAGES_FILE, trace.storages, STORAGES_COLUMNS),
        ):
            arrays = [
                pa.array([list(x) for x in getattr(table, c)] if "list" in k else getattr(table, c),
                         type=_arrow_type(k))
                for c, k in columns.items()
            ]  # fmt: skip
            schema = pa.schema([(c, _arrow_type(k)) for c, k in columns.items()], metadata={META_KEY: header})
            pq.write_table(pa.Table.from_arrays(arrays, schema=schema), temporary / file, compression="zstd")
        temporary.chmod(0o755)
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return directory


def find(name: str | Path) -> Path:
    """The directory that a user means: a path, or the name of a trace in the gallery.

    Raises:
        TraceError: neither exists.
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
    """Read and validate a trace.

    Raises:
        TraceError: a file is missing, truncated, of another schema, or contradicts itself.
    """
    directory = find(directory)
    meta, ops = _load_table(directory / OPS_FILE, OPS_COLUMNS)
    other, storages = _load_table(directory / STORAGES_FILE, STORAGES_COLUMNS)
    if meta != other:
        raise TraceError(f"{directory}: {OPS_FILE} and {STORAGES_FILE} belong to different traces.")
    trace = Trace(meta=meta, ops=Ops(**ops), storages=Storages(**storages))
    try:
        trace.validate()
    except TraceError as error:
        raise TraceError(f"{directory}: {error}") from None
    return trace


def _load_table(path: Path, columns: dict[str, str]) -> tuple[TraceMeta, dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    again = "record the trace again with `trace`."
    if not path.is_file():
        raise TraceError(f"{path}: missing; {again}")
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            raw = (schema.metadata or {}).get(META_KEY)
            if raw is None:
                raise TraceError(f"{path}: a Parquet file, but not one of Lowtide's; {again}")
            header = json.loads(raw)
            if not isinstance(header, dict) or header.get("record") != "trace":
                raise TraceError(f"{path}: its header does not describe a trace; {again}")
            if header.get("schema_version") != SCHEMA_VERSION:
                raise TraceError(
                    f"{path}: schema version {header.get('schema_version')}, and this Lowtide reads "
                    f"{SCHEMA_VERSION}; {again}"
                )
            for column, kind in columns.items():
                if column not in schema.names:
                    raise TraceError(f"{path}: the column {column!r} is missing; {again}")
                if schema.field(column).type != _arrow_type(kind):
                    raise TraceError(
                        f"{path}: the column {column!r} is {schema.field(column).type}, not {kind}; {again}"
                    )
            table = file.read(columns=list(columns))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read as Parquet ({_first_line(error)}); {again}") from None
    values = {c: _column(table.column(c), kind) for c, kind in columns.items()}
    for column, items in values.items():
        if any(x is None for x in items):
            raise TraceError(f"{path}: the column {column!r} has empty cells; {again}")
    try:
        meta = TraceMeta.from_json(header)
    except TypeError as error:
        raise TraceError(f"{path}: its header is malformed ({error}); {again}") from None
    return meta, values


def _column(column: pa.ChunkedArray, kind: str) -> tuple[Any, ...]:
    if "list" not in kind:
        return tuple(column.to_pylist())
    # Slicing one flat list is several times faster than Arrow's own nested conversion.
    rows: list[tuple[int, ...] | None] = []
    for chunk in column.chunks:
        if chunk.null_count:
            return (*rows, None)
        offsets = chunk.offsets.to_pylist()
        flat = chunk.values.to_pylist()
        rows.extend(tuple(flat[a:b]) for a, b in itertools.pairwise(offsets))
    return tuple(rows)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def header_fields() -> tuple[str, ...]:
    """Names of the header's fields, in order (for `traces/README.md`'s test)."""
    return tuple(f.name for f in fields(TraceMeta))

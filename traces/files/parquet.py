"""Write and read one Parquet table with a JSON header, checking names, types and empty cells on the way.

pyarrow imports pandas by itself in most of its convenience functions; the reader here uses only
`ParquetFile(...).read()`, which does not, and the writer makes columns from buffers, so that commands start quickly.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from traces.errors import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

META_KEY: Final = b"lowtide"
TEXT, INT, ID, IDS, INTS = "text", "int64", "int32", "list<int32>", "list<int64>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One kind of table: what its header calls itself, its version, its columns, and what to do about a bad file."""

    record: str
    noun: str  # "a trace"
    version_key: str
    version: int
    columns: dict[str, str]  # name -> TEXT, INT, ID, IDS or INTS
    again: str  # the last words of every refusal
    later: tuple[str, ...] = ()  # TEXT columns that files of this version may lack: then every cell is ""


def arrow_type(kind: str) -> pa.DataType:
    """The Arrow type of a column."""
    import pyarrow as pa

    return {
        TEXT: pa.string(),
        INT: pa.int64(),
        ID: pa.int32(),
        IDS: pa.list_(pa.int32()),
        INTS: pa.list_(pa.int64()),
    }[kind]


def write(path: Path, form: Format, header: dict[str, Any], values: dict[str, Any]) -> None:
    """Write a table; `values` has one sequence a column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = json.dumps({"record": form.record, **header}, sort_keys=True).encode()
    arrays = [_array(values[c], k) for c, k in form.columns.items()]
    schema = pa.schema([(c, arrow_type(k)) for c, k in form.columns.items()], metadata={META_KEY: text})
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path, compression="zstd")


def _array(values: Sequence[Any], kind: str) -> pa.Array:
    """A column as Arrow has it, from its buffers: `pa.array` imports pandas, if that is installed, for 0.4 s."""
    import pyarrow as pa

    def buffer(code: str, numbers: Iterable[int]) -> pa.Buffer:
        return pa.py_buffer(array(code, numbers))

    if kind in (INT, ID):
        return pa.Array.from_buffers(
            arrow_type(kind), len(values), [None, buffer("q" if kind == INT else "i", values)]
        )
    parts = [v.encode() for v in values] if kind == TEXT else values
    offsets = buffer("i", itertools.accumulate(map(len, parts), initial=0))
    if kind == TEXT:
        return pa.StringArray.from_buffers(len(values), offsets, pa.py_buffer(b"".join(parts)))
    inside = _array(list(itertools.chain.from_iterable(values)), ID if kind == IDS else INT)
    return pa.Array.from_buffers(arrow_type(kind), len(values), [None, offsets], children=[inside])


def read(path: Path, form: Format) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The header, and the columns. Raises TraceError if the file is missing, no Parquet, or another record or version,
    or a column is missing, is there twice, has another type, or has empty cells.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise TraceError(f"{path}: {'a directory' if path.is_dir() else 'missing'}; {form.again}")
    try:
        with pq.ParquetFile(path) as file:
            header, schema = _header(path, form, file.schema_arrow), file.schema_arrow
            for column, kind in form.columns.items():
                if (times := schema.names.count(column)) != 1 and (times or column not in form.later):
                    raise TraceError(
                        f"{path}: the column {column!r} is {'there twice' if times else 'missing'}; {form.again}"
                    )
                if times and schema.field(column).type != arrow_type(kind):
                    raise TraceError(
                        f"{path}: the column {column!r} is {schema.field(column).type}, not {kind}; {form.again}"
                    )
            there = [c for c in form.columns if c in schema.names]
            table = file.read(columns=there)
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise TraceError(f"{path}: cannot be read as Parquet ({line}); {form.again}") from None
    values = {c: _column(table.column(c), form.columns[c]) for c in there}
    values |= {c: ("",) * table.num_rows for c in form.columns if c not in values}
    for column, items in values.items():
        if any(x is None for x in items):
            raise TraceError(f"{path}: the column {column!r} has empty cells; {form.again}")
    return header, values


def _header(path: Path, form: Format, schema: pa.Schema) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(META_KEY)
    if raw is None:
        raise TraceError(f"{path}: a Parquet file, but not one of Lowtide's; {form.again}")
    header = json.loads(raw)
    if not isinstance(header, dict) or header.get("record") != form.record:
        raise TraceError(f"{path}: its header does not describe {form.noun}; {form.again}")
    if header.get(form.version_key) != form.version:
        raise TraceError(
            f"{path}: {form.version_key.replace('_', ' ')} {header.get(form.version_key)}, and this Lowtide reads "
            f"{form.version}; {form.again}"
        )
    return header


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

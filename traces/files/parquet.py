"""Write and read one Parquet table of a trace with its JSON header, checking names, types and empty cells on the way.

pyarrow imports pandas by itself in most of its convenience functions; the reader here uses only
`ParquetFile(...).read()`, which does not, and the writer makes columns from buffers, so that commands start quickly.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from traces.errors import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

META_KEY: Final = b"lowtide"
RECORD: Final = "trace"  # what the header calls itself
AGAIN: Final = "record the trace again with `trace`."
LATER: Final = ("arguments",)  # text that older files lack: then every cell is ""
TEXT, INT, ID, IDS, INTS = "text", "int64", "int32", "list<int32>", "list<int64>"


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


def write(path: Path, columns: dict[str, str], header: dict[str, Any], values: dict[str, Any]) -> None:
    """Write a table; `values` has one sequence a column, `columns` its kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = json.dumps({"record": RECORD, **header}, sort_keys=True).encode()
    arrays = [_array(values[c], k) for c, k in columns.items()]
    schema = pa.schema([(c, arrow_type(k)) for c, k in columns.items()], metadata={META_KEY: text})
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


def read(path: Path, columns: dict[str, str]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The header, and the columns. Raises TraceError if the file is missing, no Parquet, or no trace's, or a column is
    missing, is there twice, has another type, or has empty cells.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise TraceError(f"{path}: {'a directory' if path.is_dir() else 'missing'}; {AGAIN}")
    try:
        with pq.ParquetFile(path) as file:
            header, schema = _header(path, file.schema_arrow), file.schema_arrow
            for column, kind in columns.items():
                if (times := schema.names.count(column)) != 1 and (times or column not in LATER):
                    raise TraceError(
                        f"{path}: the column {column!r} is {'there twice' if times else 'missing'}; {AGAIN}"
                    )
                if times and schema.field(column).type != arrow_type(kind):
                    raise TraceError(
                        f"{path}: the column {column!r} is {schema.field(column).type}, not {kind}; {AGAIN}"
                    )
            there = [c for c in columns if c in schema.names]
            table = file.read(columns=there)
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise TraceError(f"{path}: cannot be read as Parquet ({line}); {AGAIN}") from None
    values = {c: _column(table.column(c), columns[c]) for c in there}
    values |= {c: ("",) * table.num_rows for c in columns if c not in values}
    for column, items in values.items():
        if any(x is None for x in items):
            raise TraceError(f"{path}: the column {column!r} has empty cells; {AGAIN}")
    return header, values


def _header(path: Path, schema: pa.Schema) -> dict[str, Any]:
    raw = (schema.metadata or {}).get(META_KEY)
    if raw is None:
        raise TraceError(f"{path}: a Parquet file, but not one of Lowtide's; {AGAIN}")
    header = json.loads(raw)
    if not isinstance(header, dict) or header.get("record") != RECORD:
        raise TraceError(f"{path}: its header does not describe a trace; {AGAIN}")
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

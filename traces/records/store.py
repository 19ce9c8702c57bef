"""Save a Trace as a few Parquet files in a directory, and load it back, checking everything on the way.

pyarrow imports pandas by itself, if that is installed, in most of its convenience functions; the reader here uses only
`ParquetFile(...).read()`, which does not, so that commands start quickly.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from traces.errors import TraceError
from traces.files import check_writable, from_json, umask
from traces.records.trace import (
    CATEGORIES,
    DIGESTS,
    FLAG_NAMES,
    MOST,
    PHASES,
    SCHEMA_VERSION,
    VIEW,
    Ops,
    Storages,
    Trace,
    TraceMeta,
    Untouched,
    fingerprint,
    uses_of,
)

if TYPE_CHECKING:
    import pyarrow as pa

META_KEY: Final = b"lowtide"
RECORD: Final = "trace"  # what the header calls itself
AGAIN: Final = "record the trace again with `trace`."
LATER: Final = ("arguments",)  # text that older files lack: then every cell is ""
TEXT, INT, ID, IDS, INTS = "string", "int64", "int32", "list<int32>", "list<int64>"


def arrow_type(kind: str) -> pa.DataType:
    """The Arrow type of a column."""
    import pyarrow as pa

    inside = kind.removeprefix("list<").removesuffix(">")
    return pa.type_for_alias(kind) if inside == kind else pa.list_(pa.type_for_alias(inside))


def write_table(path: Path, columns: dict[str, str], header: dict[str, Any], values: dict[str, Any]) -> None:
    """Write a table; `values` has one sequence a column, `columns` its kind."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = json.dumps({"record": RECORD, **header}, sort_keys=True).encode()
    arrays = [pa.array(values[c], arrow_type(k)) for c, k in columns.items()]
    schema = pa.schema([(c, arrow_type(k)) for c, k in columns.items()], metadata={META_KEY: text})
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path, compression="zstd")


def read_table(path: Path, columns: dict[str, str]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """The header, and the columns. Raises TraceError if the file is missing, no Parquet, or no trace's, or a column is
    missing, is there twice, has another type, or has empty cells.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise TraceError(f"{path}: {'a directory' if path.is_dir() else 'missing'}; {AGAIN}")
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            raw = (schema.metadata or {}).get(META_KEY)
            if raw is None:
                raise TraceError(f"{path}: a Parquet file, but not one of Lowtide's; {AGAIN}")
            header = json.loads(raw)
            if not isinstance(header, dict) or header.get("record") != RECORD:
                raise TraceError(f"{path}: its header does not describe a trace; {AGAIN}")
            for column, kind in columns.items():
                found = [field.type for field in schema if field.name == column]
                if found != [arrow_type(kind)] and (found or column not in LATER):
                    told = ", ".join(map(str, found)) or "missing"
                    raise TraceError(f"{path}: the column {column!r} is {told}, not {kind}; {AGAIN}")
            there = [c for c in columns if c in schema.names]
            table = file.read(columns=there)
    except (pa.ArrowException, OSError, ValueError, RecursionError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise TraceError(f"{path}: cannot be read as Parquet ({line}); {AGAIN}") from None
    empty = ("",) * table.num_rows
    values = {c: _column(table.column(c), kind) if c in there else empty for c, kind in columns.items()}
    for column, items in values.items():
        if any(x is None for x in items):
            raise TraceError(f"{path}: the column {column!r} has empty cells; {AGAIN}")
    return header, values


def _column(column: pa.ChunkedArray, kind: str) -> tuple[Any, ...]:
    if "list" not in kind:
        return tuple(column.to_pylist())
    # Slicing one flat list is several times faster than Arrow's own nested conversion.
    lists = column.combine_chunks()
    if lists.null_count:
        return (None,)
    flat = lists.values.to_pylist()
    return tuple(tuple(flat[a:b]) for a, b in itertools.pairwise(lists.offsets.to_pylist()))


def validate(trace: Trace) -> Trace:
    """Return the same trace; raises TraceError, which names the row, if its tables contradict each other.

    Checked: every id is in range; no op reads or writes a storage or takes a value that does not exist yet, nor
    names a storage twice; every produced storage is written by its producer, which is no view; sizes and times are
    not negative, and their sums fit 64 bits with room to spare; the phases stand in order, but for what the header
    has within backward; the measured events of an op sum to what it leaves behind; first and last uses of what the step
    makes are its readers; flags are known ones; the header's rows exist.
    """
    for what, total in (("sizes", sum(trace.storages.nbytes)), ("times", sum(trace.ops.time_ns))):
        if total > MOST:
            raise TraceError(f"the {what} sum to {total}, more than can be reckoned with.")
    for check in (_storages, _ops, _values, _uses, _header):
        for problem in check(trace):
            raise TraceError(problem)
    return trace


def _storages(trace: Trace) -> Iterator[str]:
    ops, sts = trace.ops, trace.storages
    for s, producer in enumerate(sts.producer):
        if sts.nbytes[s] < 0:
            yield f"storages: storage {s} has the negative size {sts.nbytes[s]}."
        if sts.category[s] not in CATEGORIES:
            yield f"storages: storage {s} has the unknown category {sts.category[s]!r}."
        if not -1 <= producer < len(ops):
            yield f"storages: storage {s} names op {producer}, which does not exist."
        if producer >= 0 and s not in ops.writes[producer]:
            yield f"storages: storage {s} says that op {producer} produced it, but that op does not write it."
        if not -1 <= sts.hold[s] < len(ops):
            yield f"storages: storage {s} is held by op {sts.hold[s]}, which does not exist."
        if any(n < 0 for n in sts.shape[s]):
            yield f"storages: storage {s} has the shape {sts.shape[s]}."


def _ops(trace: Trace) -> Iterator[str]:
    """Check what stands in one row by itself, and the order of the phases."""
    ops, n_storages = trace.ops, len(trace.storages)
    rank = {p: i for i, p in enumerate(PHASES)}
    last = 0
    for i, phase in enumerate(ops.phase):
        if phase not in rank:
            yield f"ops: op {i} has the unknown phase {phase!r}."
        if rank[phase] < last and not (rank[phase] and trace.meta.within_backward):
            yield f"ops: op {i} ({phase}) stands after an op of a later phase."
        last = rank[phase]
        if ops.time_ns[i] < 0:
            yield f"ops: op {i} takes the negative time {ops.time_ns[i]} ns."
        if ops.flops[i] < 0 or ops.bytes_moved[i] < 0:
            yield f"ops: op {i} has {ops.flops[i]} FLOPs and moves {ops.bytes_moved[i]} bytes."
        if not 0 <= ops.flags[i] <= sum(FLAG_NAMES):
            yield f"ops: op {i} has the unknown flags {ops.flags[i]}."
        for j in ops.inputs[i]:
            if not 0 <= j < i:
                yield f"ops: op {i} takes the value of op {j}, which does not run before it."
        for verb, named in (("reads", ops.reads[i]), ("writes", ops.writes[i])):
            if len(set(named)) != len(named):
                yield f"ops: op {i} ({ops.name[i]}) {verb} a storage twice."
            for s in named:
                if not 0 <= s < n_storages:
                    yield f"ops: op {i} {verb} storage {s}, which does not exist."
        if not -1 <= ops.overwrites[i] < n_storages:
            yield f"ops: op {i} overwrites storage {ops.overwrites[i]}, which does not exist."


def _values(trace: Trace) -> Iterator[str]:
    """Check that what an op reads and writes is there when it runs, and that it makes what its events leave behind."""
    ops, sts = trace.ops, trace.storages
    for i, name in enumerate(ops.name):
        for s in ops.writes[i]:
            if sts.producer[s] > i:
                yield f"ops: op {i} ({name}) writes storage {s}, which op {sts.producer[s]} makes only later."
            if sts.producer[s] == i and ops.flags[i] & VIEW:
                yield f"ops: op {i} ({name}) is a view, and makes storage {s}."
        for s in ops.reads[i]:
            if sts.producer[s] >= i:
                yield (
                    f"ops: op {i} ({name}) reads storage {s}, which op {sts.producer[s]} produces only later; record "
                    "the trace again."
                )
        created_bytes = sum(sts.nbytes[s] for s in ops.writes[i] if sts.producer[s] == i)
        if ops.events[i] and sum(ops.events[i]) != created_bytes:
            yield (
                f"ops: op {i} ({name}) leaves {sum(ops.events[i])} bytes by its events and {created_bytes} by its "
                "storages."
            )


def _uses(trace: Trace) -> Iterator[str]:
    ops, sts = trace.ops, trace.storages
    for column, uses in uses_of(ops, len(sts)).items():
        for s, (told, use) in enumerate(zip(getattr(sts, column), uses, strict=True)):
            if told != use and sts.producer[s] >= 0:  # a library uses its workspace without reading it
                yield (
                    f"storages: storage {s} ({sts.name[s]}) has the {column.replace('_', ' ')} {told}, and by the ops "
                    f"that read it is {use}."
                )
            if not -1 <= told < len(ops):
                yield f"storages: storage {s} is used by op {told}, which does not exist."


def _header(trace: Trace) -> Iterator[str]:
    forward, backward = trace.meta.forward_ops, trace.meta.first_backward_graph_op
    end = backward
    for first, count in trace.meta.within_backward:
        if first < end or count < 1 or first + count > len(trace.ops):
            yield f"header: {count} ops from {first} on are none that stand among backward's."
        end = first + count
    if not 0 <= forward <= backward <= len(trace.ops):
        yield f"header: forward ends at op {forward} and backward begins at op {backward} of {len(trace.ops)}."


OPS_FILE: Final = "ops.parquet"
STORAGES_FILE: Final = "storages.parquet"
UNTOUCHED_FILE: Final = "untouched.parquet"  # only of a trace that has it
GALLERY: Final = Path(__file__).parents[1] / "gallery"

COLUMN_KINDS: Final = {"Texts": TEXT, "Numbers": INT, "Ids": ID, "NumberLists": INTS, "IdLists": IDS}
OPS_COLUMNS, STORAGES_COLUMNS, UNTOUCHED_COLUMNS = (
    {f.name: COLUMN_KINDS[str(f.type)] for f in fields(table)} for table in (Ops, Storages, Untouched)
)
FILES: Final = {OPS_FILE: OPS_COLUMNS, STORAGES_FILE: STORAGES_COLUMNS, UNTOUCHED_FILE: UNTOUCHED_COLUMNS}


def save(trace: Trace, directory: str | Path, *, force: bool = False) -> Path:
    """Write a trace to a new directory, whole or not at all; its parents are made. `force`: replace a trace that
    already stands there. Raises TraceError: the directory exists without `force`, or holds something else than a trace.
    """
    directory = Path(directory)
    check_place(directory, force=force)
    place = Path(os.path.realpath(directory))  # a link stays, and leads to the new trace
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{place.name}.", dir=place.parent, ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        tables = (trace.ops, trace.storages, trace.untouched)
        for (file, columns), table in zip(FILES.items(), tables, strict=True):
            if table != Untouched():
                values = {c: getattr(table, c) for c in columns}
                write_table(temporary / file, columns, trace.meta.to_json(), values)
        temporary.chmod(0o777 & ~umask())
        _put(temporary, place)
    return directory


def check_place(directory: str | Path, *, force: bool = False) -> None:
    """Find out whether a trace may be saved there, before the work of recording it; nothing is made. Raises TraceError
    as `save` does, and OSError: it cannot be made."""
    directory = Path(directory)
    check_writable(directory)
    there: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        there = {p.name for p in directory.iterdir()} if not directory.is_file() else {""}
    if not there <= FILES.keys():
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
    for place in (path, GALLERY / str(name)):
        if (place / OPS_FILE).is_file():
            return place
    if path.is_dir():
        raise TraceError(
            f"{name}: this directory holds no trace (no {OPS_FILE}); make one with `trace MODEL -o {name}`."
        )
    there = (p.parent.relative_to(GALLERY).as_posix() for p in GALLERY.rglob(OPS_FILE))
    known = ", ".join(sorted(there)) or "none"
    raise TraceError(
        f"{name}: no such trace directory, and no trace of that name in the gallery (there: {known}). "
        f"Make one with `trace MODEL -o {name}`."
    )


def load(directory: str | Path) -> Trace:
    """Read and validate a trace. Raises TraceError if a file is missing, truncated, of another schema, or contradicts
    itself.
    """
    directory = find(directory)
    there = {f: c for f, c in FILES.items() if f != UNTOUCHED_FILE or (directory / f).is_file()}
    (meta, ops), (_, storages), *rest = read = [_load_table(directory / f, c) for f, c in there.items()]
    if any(other != meta for other, _ in read):
        raise TraceError(f"{directory}: its files belong to different traces.")
    third = rest[0][1] if rest else {}
    try:
        untouched = Untouched(**third)
        return validate(Trace(meta=meta, ops=Ops(**ops), storages=Storages(**storages), untouched=untouched))
    except (TraceError, ValueError) as error:
        raise TraceError(f"{directory}: {error}") from None


def check_fingerprints(trace: Trace, name: str | Path, *, graph: bool = False) -> None:
    """Compare the header's digests with the tables (with `graph` also the two of the captured model alone): tables that
    were changed without them are no longer that step. Raises TraceError: a digest is not theirs.

    `load` leaves this out, because it takes more than half as long as loading does.
    """
    for field, which in [*DIGESTS.items()][: None if graph else 1]:
        digest, real = getattr(trace.meta, field), fingerprint(trace.ops, trace.storages, **which)
        if digest != real:
            raise TraceError(
                f"{name}: the {field} in its header is {digest}, and that of its ops and storages is {real}: they were "
                "changed after it was recorded. Record it again with `trace`."
            )


def _load_table(path: Path, columns: dict[str, str]) -> tuple[TraceMeta, dict[str, Any]]:
    header, values = read_table(path, columns)
    if (version := header.get("schema_version")) != SCHEMA_VERSION:
        raise TraceError(f"{path}: schema version {version}; this Lowtide reads {SCHEMA_VERSION}; {AGAIN}")
    try:
        meta = from_json(TraceMeta, header)
    except ValueError as error:
        raise TraceError(f"{path}: its header is malformed ({error}); {AGAIN}") from None
    return meta, values

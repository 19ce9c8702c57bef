"""Hold what the kernels take: tables whose rows have named fields, and named tuples of tables.

A table is one argument and its row lies in one place in memory, so a kernel that reads several facts of one op fetches
them at once. Lists of ids of every op (what it needs, reads, creates) lie one behind the other: those of op k from
`ops[k].needs_at` to `ops[k + 1].needs_at`, so `ops` has one row more than there are ops.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

# For kernels to call each other with numbers of one width, and no literals: they are compiled for each mix of types.
long: Any = np.int64


def table(fields: list[tuple[str, type]]) -> np.dtype[Any]:
    """The type of a table's rows; aligned, as kernels want them."""
    return np.dtype(fields, align=True)


OPS_ROW: Final = table(
    [
        ("time_ns", np.int64),
        ("rerun_bytes", np.int64),  # what a library allocates for good if it runs a second time
        ("needs_at", np.int32),  # of `ids`: storages of forward that it takes, in a chain's order
        ("reads_at", np.uint32),  # of `ids`: storages of forward that it reads
        ("creates_at", np.uint32),  # of `ids`: storages of forward that it makes
        ("overwrites", np.int32),  # a storage whose memory it takes over if that ends here; -1
        ("id", np.int32),  # in the trace
        ("may_rerun", np.int32),
    ]
)
STORAGES_ROW: Final = table(
    [
        ("nbytes", np.int64),
        ("producer", np.uint32),
        ("last_forward", np.int32),  # the op after which forward needs it no more
        ("last_backward", np.int32),  # op by id in the trace; -1
        ("hold", np.int32),  # the op of backward until which the first instance is held whatever the plan; -1
        ("hold_after", np.int32),  # whether beyond that op's end: then it cannot take it over
        ("forward_take", np.int32),  # the op of forward that takes it over if it ends there; -1
    ]
)


class Packed(NamedTuple):
    """One trace, by position: ops are numbered as those that are left when views are dissolved."""

    forward: int  # how many ops forward has
    resident_bytes: int
    made_at: int  # of `ids`: the storages that forward makes, in that order
    ops: Any  # [op + 1] of OPS_ROW
    storages: Any  # [storage] of STORAGES_ROW
    ids: Any  # the lists of storages of all ops
    transient_bytes: Any  # [op]: what its own run adds at most
    # [op]: what its first run leaves behind, less what it frees whatever the plan: in forward all that it makes
    adds_bytes: Any


class Choice(NamedTuple):
    """The decisions of a plan."""

    saved: Any  # [storage]: whether it is there from forward on
    retained: Any  # [storage]: whether it stays when it has come back
    evict_at: Any  # [eviction]: op after which a storage is absent, ascending
    evicted: Any  # [eviction]: that storage


class Work(NamedTuple):
    """Work space of `walk`; nothing in it lasts from one call to the next, but for the steps, which are a result.

    Steps are those of the schedule, views left out.
    """

    present: Any  # [storage]: whether it may be read
    last: Any  # [storage]: the step that last read the instance that is there
    # [storage]: the step that last read what forward made, once it has come back; NEVER: it has not.
    first_end: Any
    demanded: Any  # [storage]: the op whose chain needs it
    visited: Any  # [op]: the op in whose chain it is
    step_of: Any  # [op]
    stack: Any  # of a chain; then what came back for the op at hand
    op: Any  # [step + op], out: the op (of forward they stand), ~op if it runs again. A chain stands there first
    freed_bytes: Any  # [step]
    taken_bytes: Any  # [step]: of what is freed, what the step's op takes over
    peak_bytes: Any  # [step], out; of a step that runs again first what it makes


def steps(room: int, n_ops: int) -> dict[str, Any]:
    """The columns of `Work` that have so many steps, and room for a chain beyond."""
    columns = ("freed_bytes", "taken_bytes", "peak_bytes")
    return {
        "op": np.arange(room + n_ops + 1, dtype=np.int32),
        **{name: np.zeros(room, np.int64) for name in columns},
    }


def pack_lists(*lists: Any) -> tuple[list[Any], Any]:
    """Rows of ids of several kinds one behind the other: where each row starts, with the end, by kind; and the ids."""
    starts, ids = [], np.zeros(0, np.int32)
    for rows in lists:
        start, more = pack_rows(rows)
        starts.append(start + np.int32(len(ids)))
        ids = np.concatenate((ids, more))
    return starts, ids.astype(np.uint32)


def pack_rows(rows: Any, kind: Any = np.int32) -> tuple[Any, Any]:
    """Lists of ids (or sizes) one behind the other, and where each starts, with the end behind the last."""
    at = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=at[1:])
    return at, np.array([s for row in rows for s in row], kind)

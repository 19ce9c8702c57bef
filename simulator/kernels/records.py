"""What the kernels take: tables whose rows have named fields, and named tuples of tables.

A table is one argument and its row lies in one place in memory, so a kernel that reads several facts of one op fetches
them at once. Lists of ids of every op (what it needs, reads, creates) lie one behind the other: those of op k from
`ops[k].needs_at` to `ops[k + 1].needs_at`, so `ops` has one row more than there are ops.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

# For kernels to call each other with numbers of one width, and no literals: they are compiled for each mix of types.
long: Any = np.int64

OP: Final = np.dtype(
    [
        ("time_ns", np.int64),
        ("transient_bytes", np.int64),  # what its own run adds at most
        ("settled_bytes", np.int64),  # what it leaves behind, less what it frees, whatever the plan
        ("born_bytes", np.int64),  # what it makes, in forward
        ("rerun_bytes", np.int64),  # what a library allocates for good if it runs a second time
        (
            "needs_at",
            np.int32,
        ),  # of `needs`: storages of forward that it takes, in the order in which a chain goes
        ("reads_at", np.int32),  # of `reads`: storages of forward that it reads
        ("creates_at", np.int32),  # of `creates`: storages of forward that it makes
        ("overwrites", np.int32),  # a storage whose memory it takes over if that ends here; -1
        ("id", np.int32),  # in the trace
        ("may_rerun", np.int32),
    ]
)
STORAGE: Final = np.dtype(
    [
        ("nbytes", np.int64),
        ("producer", np.int32),
        ("last_forward", np.int32),  # the op after which forward needs it no more
        ("last_backward", np.int32),  # op by id in the trace; -1
        ("hold", np.int32),  # the op of backward until which the first instance is held whatever the plan; -1
        (
            "hold_after",
            np.int32,
        ),  # whether it is held beyond the end of that op, which then cannot take it over
        ("forward_take", np.int32),  # the op of forward that takes it over if it ends there; -1
    ]
)
# A result of `walk`: one row a step of the schedule, views left out.
STEP: Final = np.dtype(
    [
        ("gained_bytes", np.int64),
        ("freed_bytes", np.int64),
        ("taken_bytes", np.int64),  # of what is freed, what the step's op takes over
        ("peak_bytes", np.int64),
        ("op", np.int32),  # ~op if it runs again
        ("unused", np.int32),
    ]
)
# Its work space.
OF_STORAGE: Final = np.dtype(
    [
        ("last", np.int32),  # the step that last read the instance that is there
        (
            "first_end",
            np.int32,
        ),  # the step that last read what forward made, once it has come back; NEVER: it has not
        ("demanded", np.int32),  # the op whose chain needs it
        ("unused", np.int32),
    ]
)
OF_OP: Final = np.dtype([("visited", np.int32), ("step", np.int32)])  # the op in whose chain it is; its step


class Facts(NamedTuple):
    """One trace, by position: ops are numbered as those that are left when views are dissolved."""

    forward: int  # how many ops forward has
    resident_bytes: int
    ops: Any  # [op + 1] of OP
    storages: Any  # [storage] of STORAGE
    needs: Any
    reads: Any
    creates: Any
    made: Any  # storages that forward makes


class Choice(NamedTuple):
    """What a plan says."""

    saved: Any  # [storage]: whether it is there from forward on
    retained: Any  # [storage]: whether it stays when it has come back
    evict_at: Any  # [eviction]: op after which a storage is absent, ascending
    evicted: Any  # [eviction]: that storage


class Work(NamedTuple):
    """Work space of `walk`; nothing in it lasts from one call to the next, but for the steps, which are a result."""

    there: Any  # [storage]
    storages: Any  # [storage] of OF_STORAGE
    ops: Any  # [op] of OF_OP
    rebuilt: Any  # [storage]: what came back for the op at hand
    order: Any  # [op]: a chain
    stack: Any
    steps: Any  # [step] of STEP, out


def pack_rows(rows: Any) -> tuple[Any, Any]:
    """Lists of ids one behind the other, and where each starts, with the end behind the last."""
    at = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=at[1:])
    return at, np.array([s for row in rows for s in row], np.int32)

"""The buffers that libraries keep for good, cuBLAS's above all, as storages of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

from tracer.costs.rows import LibraryWorkspace, OpRow, StorageRow
from traces.devices import Device
from traces.records.trace import BACKWARD, FORWARD, WORKSPACE

CUBLAS: Final = frozenset(
    {"mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
)


def workspace_rows(ops: Sequence[OpRow], seen: Iterable[LibraryWorkspace]) -> tuple[StorageRow, ...]:
    """Workspaces that were seen, as storages that exist throughout the step, each first used by the op that asked.

    A library asks for one in the first op of its kind. Each thread has its own, so one of a size that has been there
    before is backward's.
    """
    rows: list[StorageRow] = []
    for w in seen:
        backward = any(w.nbytes == row.nbytes for row in rows)
        asking = (i for i, r in enumerate(ops) if r.target == w.op and (not backward or r.phase == BACKWARD))
        rows.append(_kept(f"workspace of a library, made by {w.op}", w.nbytes, next(asking, -1)))
    return tuple(rows)


def rerun_workspaces(ops: Iterable[OpRow], device: Device) -> dict[str, int]:
    """The ops of forward for which a library asks for its buffer in backward's thread too, once they run again there:
    target -> bytes beyond the buffer that backward has anyway."""
    if device.kind != "cuda":
        return {}
    return dict.fromkeys(
        sorted({r.target for r in ops if r.phase == FORWARD and short_name(r.target) in CUBLAS}), 0
    )


def _kept(name: str, nbytes: int, first: int) -> StorageRow:
    return StorageRow(
        name=name, nbytes=nbytes, category=WORKSPACE, used_from=first, dtype="uint8", shape=(nbytes,)
    )


@cache
def short_name(target: str) -> str:
    """An op's name without its overload, one of aten's without "aten": "mm", "lowtide.dropout_mask"."""
    return target.removeprefix("aten.").rpartition(".")[0]

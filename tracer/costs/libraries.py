"""The buffers that libraries keep for good, cuBLAS's above all, as storages of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tracer.costs.rows import LibraryWorkspace, OpRow, StorageRow
from traces.devices import Device
from traces.records.trace import BACKWARD, FORWARD, WORKSPACE

CUBLAS: Final = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot")
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
        rows.append(
            StorageRow(
                name=f"workspace of a library, made by {w.op}",
                nbytes=w.nbytes,
                category=WORKSPACE,
                used_from=next(asking, -1),
                dtype="uint8",
                shape=(w.nbytes,),
            )
        )
    return tuple(rows)


def rerun_workspaces(ops: Iterable[OpRow], device: Device) -> dict[str, int]:
    """The ops of forward for which a library asks for its buffer in backward's thread too, once they run again there:
    target -> bytes beyond the buffer that backward has anyway."""
    if device.kind != "cuda":
        return {}
    return dict.fromkeys(sorted({r.target for r in ops if r.phase == FORWARD and r.target in CUBLAS}), 0)

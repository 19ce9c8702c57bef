"""Rows of a trace, for calls of ops on fake tensors and for storages, and the tables that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final

import torch

from tracer.costs.cost import NO_COST, Cost
from tracer.costs.roofline import STREAM, compute_dtype, op_bytes, op_flops, op_kind
from tracer.costs.rows import LibraryWorkspace, OpRow, StorageRow
from tracer.torch_api import pytree
from traces.records.trace import BACKWARD, VIEW, WORKSPACE, Ops, Storages, uses_of

OF_OPS: Final = tuple(c for c in Ops.__dataclass_fields__ if c not in ("time_ns", "events"))
OF_STORAGES: Final = ("name", "nbytes", "category", "producer", "hold", "dtype", "shape")


def op_row(
    func: Any, args: Any, kwargs: Any, out: Any, given: Sequence[torch.Tensor], *, flags: int, **known: Any
) -> OpRow:
    """The row of a call, without its costs. `flags`: of the op; a view computes nothing and moves nothing."""
    view = bool(flags & VIEW)
    made = list(tensors_in(out)) or list(tensors_in(overwritten(func, args, kwargs)))
    kind = STREAM if view else op_kind(str(func), args, (*given, *made))
    return OpRow(
        target=str(func),
        flops=0 if view else op_flops(func, args, kwargs, out),
        bytes_moved=0 if view else op_bytes(given, made, func),
        flags=flags,
        dtype=compute_dtype(given, kind),
        kind=kind,
        **known,
    )


def storage_row(x: torch.Tensor, name: str, category: str, producer: int = -1) -> StorageRow:
    """The row of a tensor's storage."""
    return StorageRow(
        name=name,
        nbytes=x.untyped_storage().nbytes(),
        category=category,
        producer=producer,
        dtype=str(x.dtype).removeprefix("torch."),
        shape=tuple(int(d) for d in x.shape),
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


def overwritten(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments of a call (tensors, or nodes that stand for them) that the op overwrites, by its schema."""
    if not (written := _written(func)):
        return []
    return pytree.tree_leaves([args[k] if k < len(args) else kwargs.get(name) for k, name in written])


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an op overwrites."""
    schema = getattr(func, "_schema", None)
    arguments = enumerate(schema.arguments if schema is not None else ())
    return tuple((k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def storage_key(x: torch.Tensor) -> int:
    """Return what two tensors have in common exactly if they share a storage."""
    return int(x.untyped_storage()._cdata)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what an op takes or returns, in order: alone, or in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for x in value:
            yield from tensors_in(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from tensors_in(x)


def created_bytes(rows: Sequence[OpRow], storages: Sequence[StorageRow]) -> tuple[int, ...]:
    """By op: bytes of the storages that it makes."""
    return tuple(
        sum(storages[s].nbytes for s in row.writes if storages[s].producer == i) for i, row in enumerate(rows)
    )


def tables_of(
    rows: Sequence[OpRow], storages: Sequence[StorageRow], costs: Sequence[Cost] = ()
) -> tuple[Ops, Storages]:
    """The tables of a trace; without costs, ops take no time and their allocations are not known."""
    costs = costs or [NO_COST] * len(rows)
    columns: dict[str, Any] = {c: tuple(getattr(r, c) for r in rows) for c in OF_OPS}
    ops = Ops(**columns, time_ns=tuple(c.time_ns for c in costs), events=tuple(c.events for c in costs))
    columns = {c: tuple(getattr(r, c) for r in storages) for c in OF_STORAGES}
    uses = {column: list(values) for column, values in uses_of(ops, len(storages)).items()}
    for s, row in enumerate(storages):
        if row.used_from >= 0:
            phase = "backward" if rows[row.used_from].phase == BACKWARD else "forward"
            uses[f"first_{phase}_use"][s] = row.used_from
    columns |= {column: tuple(values) for column, values in uses.items()}
    return ops, Storages(**columns)

"""Collect ops and storages row by row and freeze them into a Trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tracer.costs.signature import Signature
from traces.trace import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    Ops,
    Storages,
    Trace,
    TraceMeta,
    aliases_of,
    fingerprint,
    uses_of,
)
from traces.validate import validate


@dataclass(slots=True, kw_only=True)
class OpRow:
    """One op, while the trace is being collected."""

    name: str
    target: str
    phase: str
    module: str = ""
    time_ns: int = 0
    flops: int = 0
    bytes_moved: int = 0
    inputs: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    events: tuple[int, ...] = ()
    overwrites: int = -1
    flags: int = 0
    arguments: str = ""
    dtype: str = "float32"  # what the roofline looks up; not stored
    signature: Signature | None = None  # the call, by which measurements and rules are found; not stored


@dataclass(slots=True, kw_only=True)
class StorageRow:
    """One storage, while the trace is being collected."""

    name: str
    nbytes: int
    category: str = ACTIVATION
    producer: int = -1
    hold: int = -1
    used_from: int = -1  # op that first uses it without reading it, as a library does its workspace
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class TraceBuilder:
    """A growing trace. Ids are positions in the two lists."""

    ops: list[OpRow] = field(default_factory=list)
    storages: list[StorageRow] = field(default_factory=list)

    def add_storage(self, row: StorageRow) -> int:
        self.storages.append(row)
        return len(self.storages) - 1

    def add_op(self, row: OpRow) -> int:
        self.ops.append(row)
        return len(self.ops) - 1

    def freeze(self, meta: TraceMeta) -> Trace:
        """Derive first and last uses and the fingerprint, and validate.

        Raises:
            TraceError: what was collected contradicts itself (a defect of the tracer).
        """
        n = len(self.storages)
        ops = Ops(**{c: tuple(getattr(r, c) for r in self.ops) for c in Ops.__dataclass_fields__})
        plain = ("name", "nbytes", "category", "producer", "hold", "dtype", "shape")
        columns: dict[str, Iterable[object]] = {c: tuple(getattr(r, c) for r in self.storages) for c in plain}
        uses = {column: list(values) for column, values in uses_of(ops, n).items()}
        for s, row in enumerate(self.storages):
            if row.used_from >= 0:
                phase = BACKWARD if self.ops[row.used_from].phase == BACKWARD else FORWARD
                uses[f"first_{phase}_use"][s] = row.used_from
        columns |= {column: tuple(values) for column, values in uses.items()}
        storages = Storages(
            **columns,  # type: ignore[arg-type]
            aliases=aliases_of(ops, n),
        )
        meta = replace(meta, fingerprint=fingerprint(ops, storages))
        trace = Trace(meta=meta, ops=ops, storages=storages)
        validate(trace)
        return trace

"""A recorded step before its costs are known, and the one place where rows and costs become a Trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tracer.costs.approximate import workspace_rows
from tracer.costs.cost import Cost, Costs
from tracer.costs.rows import LibraryWorkspace, OpRow, StorageRow
from tracer.record.program import Program
from tracer.record.rows import created_bytes, tables_of
from tracer.step.loop import TrainingStep
from tracer.torch_api import FakeTensorMode
from traces.devices import Device
from traces.records.store import validate
from traces.records.trace import Trace, TraceMeta, Untouched, fingerprint


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A step's rows in their order, and what they stand for. `finish` makes the trace, with these costs or others."""

    rows: tuple[OpRow, ...]  # by op id
    storages: tuple[StorageRow, ...]
    libraries: tuple[StorageRow, ...]  # further ones, that libraries keep by rule
    meta: TraceMeta  # without what the costs decide
    program: Program
    graph_ops: tuple[int, ...]  # program op -> op id
    step: TrainingStep  # on fake tensors, its optimizer with its state
    mode: FakeTensorMode  # of those
    target: Device
    costs: Costs

    @cached_property
    def created_bytes(self) -> tuple[int, ...]:
        """By op id: bytes of the storages that the op makes."""
        return created_bytes(self.rows, self.storages)

    @cached_property
    def trace(self) -> Trace:
        """The trace with the costs that the step was recorded with."""
        return self.finish()

    @cached_property
    def priced(self) -> list[Cost]:
        """By op id: what it costs, as the step was recorded."""
        rows = zip(self.rows, self.created_bytes, strict=True)
        return [self.costs.of(row, created, self.target) for row, created in rows]

    def finish(
        self,
        costs: Sequence[Cost] | None = None,
        workspaces: Iterable[LibraryWorkspace] | None = None,
        untouched: Untouched = Untouched(),  # noqa: B008
        **header: Any,
    ) -> Trace:
        """The trace.

        Args:
            costs: by op id; None: those that the step was recorded with.
            workspaces: what libraries were seen to keep; None: what they keep by rule.
            untouched: what the untouched loop asks of the allocator.

        Raises:
            TraceError: what was collected contradicts itself (a defect of the tracer).
        """
        costs = self.priced if costs is None else costs
        kept = self.libraries if workspaces is None else workspace_rows(self.rows, workspaces)
        ops, storages = tables_of(self.rows, (*self.storages, *kept), costs)
        sources = dict(Counter(c.source for c in costs if c.source))
        meta = replace(self.meta, workspace=sources, fingerprint=fingerprint(ops, storages), **header)
        return validate(Trace(meta=meta, ops=ops, storages=storages, untouched=untouched))

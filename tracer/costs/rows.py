"""The rows of a trace while it is being collected: ops and storages, without what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from tracer.costs.roofline import STREAM
from traces.records.trace import ACTIVATION


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryWorkspace:
    """Memory that a library allocated inside an op at its first call and kept for ever (cuBLAS)."""

    nbytes: int
    op: str  # the operator that was running


@dataclass(slots=True, kw_only=True)
class OpRow:
    """One op."""

    name: str
    target: str
    phase: str
    module: str = ""
    flops: int = 0
    bytes_moved: int = 0
    inputs: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    overwrites: int = -1
    flags: int = 0
    arguments: str = ""
    dtype: str = "float32"  # what the roofline looks up, as the kind; not stored
    kind: str = STREAM


@dataclass(slots=True, kw_only=True)
class StorageRow:
    """One storage."""

    name: str
    nbytes: int
    category: str = ACTIVATION
    producer: int = -1
    hold: int = -1
    # Op with which it comes, in the first iteration: a library's workspace, an optimizer's state.
    used_from: int = -1
    dtype: str = ""
    shape: tuple[int, ...] = ()

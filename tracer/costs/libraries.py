"""The memory that cuBLAS and cuBLASLt get because of the ops of a step: for good, or for one call.

Up to torch 2.14 cuBLAS gets a buffer from torch's caching allocator at its first call in each thread, and keeps it. A
training step has two such threads: the one that runs forward and the optimizer, and autograd's. From 2.15 on it gets a
buffer for each call instead. The sizes are those of torch's `aten/src/ATen/cuda/CublasHandlePool.cpp`
(`parseChosenWorkspaceSize`), and what the wheels of 2.11, 2.12 and 2.15 ask their allocator for; no GPU has confirmed
them here.

Counts: cuBLAS, and cuBLASLt where it has a buffer of its own (2.11 and 2.15; between them it shares cuBLAS's). Ignores:
cuDNN, which gets its buffers per call; cuSOLVER, cuSPARSE and NCCL; the CUDA context, which is no memory of torch's;
further streams and devices; the releases that let threads share a buffer (pytorch#180283, undone by #188623).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Final

from tracer.costs.rows import OpRow, StorageRow
from tracer.costs.table import short_name
from traces.devices import Device
from traces.records.device_profile import LibraryWorkspace
from traces.records.trace import BACKWARD, FORWARD, WORKSPACE

KIB: Final = 2**10
LARGE_BYTES: Final = 4096 * 8 * KIB  # compute capability 9, and 10 and 12 from torch 2.12 on (pytorch#175344)
SHARED_FROM: Final = (2, 12)  # from here on cuBLASLt shares cuBLAS's buffer by default (pytorch#168175)
A_CALL_FROM: Final = (2, 15)  # from here on buffers are for one call by default (pytorch#194311)
SMALL_BYTES: Final = (4096 * 2 + 16 * 8) * KIB  # ":4096:2:16:8", all others
LT_BYTES: Final = 1024 * KIB  # cuBLASLt by itself

# Ops that torch runs by cuBLAS on CUDA. "addmm" with a vector to add may go to cuBLASLt, which then shares the buffer.
CUBLAS: Final = frozenset({
    "mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "addr",
    "_scaled_mm", "linear", "matmul", "_int_mm", "linalg_vecdot",
})  # fmt: skip
CUBLASLT: Final = frozenset({"addmm", "_addmm_activation", "_scaled_mm"})


def cublas_workspace_bytes(device: Device, release: tuple[int, int]) -> int:
    """The buffer of one cuBLAS handle in a release of torch, such as (2, 13). `CUBLAS_WORKSPACE_CONFIG` (":KiB:count",
    several) decides where it is set."""
    sizes = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(size) * int(count) * KIB for size, count in sizes)
    return LARGE_BYTES if device.sm[0] in ((9, 10, 12) if release >= SHARED_FROM else (9,)) else SMALL_BYTES


def cublaslt_workspace_bytes(device: Device, release: tuple[int, int]) -> int:
    """The buffer that cuBLASLt has of its own; 0 where it shares cuBLAS's, by default from 2.12 to 2.14."""
    given = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    size = int(given) * KIB if given.isdecimal() else LT_BYTES
    if not stays(release):
        return size
    told = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if (told != "0") if release >= SHARED_FROM else (told == "1"):
        return 0
    return min(size, cublas_workspace_bytes(device, release))


def stays(release: tuple[int, int]) -> bool:
    """Whether buffers are for good, and not for one call; TORCH_CUBLAS_WORKSPACE_CACHE decides where it is set."""
    return release < A_CALL_FROM or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def bytes_a_call(device: Device, release: tuple[int, int]) -> dict[str, int]:
    """What one call gets and gives back: "cublas" and "cublaslt" -> bytes, 0 where buffers stay."""
    sizes = {"cublas": cublas_workspace_bytes, "cublaslt": cublaslt_workspace_bytes}
    return {name: 0 if stays(release) else size(device, release) for name, size in sizes.items()}


def library_storages(
    ops: Iterable[OpRow], device: Device, release: tuple[int, int]
) -> tuple[StorageRow, ...]:
    """The buffers that stay, as storages that exist throughout the step."""
    if device.kind != "cuda" or not stays(release):
        return ()
    own = cublaslt_workspace_bytes(device, release)
    # Up to 2.11 cuBLASLt runs on cuBLAS's handle, with which cuBLAS's buffer comes.
    cublas = CUBLAS - CUBLASLT if own and release >= SHARED_FROM else CUBLAS
    sizes = (("cuBLAS", cublas, cublas_workspace_bytes(device, release)), ("cuBLASLt", CUBLASLT, own))
    rows = [(short_name(r.target), r.phase == BACKWARD) for r in ops]
    found = []
    for thread, backward in (("forward", False), ("backward", True)):
        for library, names, size in sizes:
            first = next((i for i, (n, b) in enumerate(rows) if n in names and b is backward), -1)
            if first >= 0 and size:
                found.append(_kept(f"{library} workspace ({thread})", size, first))
    return tuple(found)


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


def _kept(name: str, nbytes: int, first: int) -> StorageRow:
    return StorageRow(
        name=name, nbytes=nbytes, category=WORKSPACE, used_from=first, dtype="uint8", shape=(nbytes,)
    )


def rerun_workspaces(ops: Iterable[OpRow], device: Device, release: tuple[int, int]) -> dict[str, int]:
    """What a library keeps in backward's thread once that runs an op of forward again: target -> bytes.

    cuBLASLt's buffer, where it has one of its own and backward has no op for it; 0 for the other ops of cuBLAS, whose
    buffer backward has anyway. The arguments are those of `library_storages`.
    """
    if device.kind != "cuda":
        return {}
    rows = [(r.target, r.phase, short_name(r.target)) for r in ops]
    there = any(phase == BACKWARD and name in CUBLASLT for _, phase, name in rows)
    own = 0 if there or not stays(release) else cublaslt_workspace_bytes(device, release)
    again = sorted({(t, n) for t, phase, n in rows if phase == FORWARD and n in CUBLAS})
    return {target: own if name in CUBLASLT else 0 for target, name in again}

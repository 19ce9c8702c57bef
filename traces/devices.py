"""The device table (`devices.toml`): what the cost model needs to know of a device, memory, bandwidth, peak rates.

How much of the rates a real kernel reaches is the business of `tracer.costs.roofline`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from traces.errors import SpecError
from traces.units import MIB

TERA: Final = 10**12
GIGA: Final = 10**9
LAUNCH_NS: Final = 4_000  # an eager op's launch; small kernels of a stream start about this far apart
# What the driver and the loaded libraries keep of a GPU beside torch's allocator, 0.3 to 1 GiB and more. Measured on an
# H200 (CUDA 13): 619 MiB with the first tensor, 703 MiB with cuBLAS, cuDNN and attention. Assumed for all others.
CONTEXT_BYTES: Final = 704 * MIB
# NCCL's rings: until one begins, and for each step, by NVIDIA/nccl's src/graph/tuning.cc (ring, Simple).
BEGIN_NS: Final = 8_400
STEP_NS: Final = {"NVLink": 3_400, "PCI Express": 5_700, "network": 9_600}
NETWORK_GBIT_PER_S: Final = 400  # a network card for each GPU, as in NVIDIA's DGX H100
# Words in a GPU's name that make it another board than the one of the plain name.
OTHER_BOARDS: Final = frozenset({"ti", "super", "laptop", "max", "d", "mig", "nvl", "pcie"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device."""

    name: str
    kind: str  # "cuda" or "cpu"
    memory_bytes: int  # all of it; a process gets less
    bandwidth_bytes_per_s: int
    # By dtype, as torch names it, or "tf32": the dense peak; others are as fast as float32.
    flops_per_s: dict[str, int]
    source: str
    launch_ns: int = LAUNCH_NS  # least time between the starts of two dependent kernels
    sm: tuple[int, int] = (0, 0)  # CUDA compute capability, which decides the kernels; (0, 0): no NVIDIA GPU
    multiprocessors: int = 0  # of the board, by which some kernels choose how to split their work
    memory_mhz: int = 0  # the clock of its memory, by which cuDNN weighs moving against computing
    l2_bytes: int = 0  # its cache, by which some kernels choose their tiles
    host_bytes_per_s: int = 12 * GIGA  # pinned; 80 % of PCI Express 3, 4, 5; measured on an H200 alone
    nvlink_bytes_per_s: int = 0  # that a collective of one machine's GPUs reaches; 0: they have none


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How fast GPUs of a job reach each other: assumed, nothing of it is measured here."""

    gpu: Device
    network_gbit_per_s: float = NETWORK_GBIT_PER_S  # that each GPU has to other machines

    def gather_ns(self, nbytes: int, ranks: int, nodes: int) -> int:
        """The time of an all-gather to, or a reduce-scatter of, so many bytes.

        Counts: a ring through all ranks, by its slowest link, and a latency for each step. Ignores: what else is on the
        links, how machines are wired, NCCL's other algorithms.
        """
        slowest = self.gpu.nvlink_bytes_per_s or self.gpu.host_bytes_per_s
        if nodes > 1:  # a ring enters each machine once, by all of its network cards
            slowest = min(slowest, int(self.network_gbit_per_s * GIGA / 8) * ranks // nodes)
        step_ns = STEP_NS["NVLink" if self.gpu.nvlink_bytes_per_s else "PCI Express"]
        latency_ns = BEGIN_NS + (ranks - nodes) * step_ns + (nodes - 1) * STEP_NS["network"]
        return latency_ns + nbytes * (ranks - 1) * 10**9 // (ranks * slowest)

    def __str__(self) -> str:
        nvlink, pci = self.gpu.nvlink_bytes_per_s // GIGA, self.gpu.host_bytes_per_s // GIGA
        within = f"NVLink {nvlink} GB/s" if nvlink else f"PCI Express {pci} GB/s"
        return f"{within} within a machine, {self.network_gbit_per_s:g} Gbit/s of each GPU between machines"


@cache
def _table() -> dict[str, list[dict[str, Any]]]:
    """Return what `devices.toml` holds."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@cache
def devices() -> tuple[Device, ...]:
    """The device table."""
    return tuple(
        Device(
            name=row["name"],
            kind=row["kind"],
            memory_bytes=row["memory_mib"] * MIB,
            bandwidth_bytes_per_s=row["gb_per_s"] * GIGA,
            flops_per_s={dtype: int(rate * TERA) for dtype, rate in row["tflops"].items()},
            source=row["source"],
            sm=tuple(row.get("sm", (0, 0))),
            multiprocessors=row.get("multiprocessors", 0),
            memory_mhz=row.get("memory_mhz", 0),
            l2_bytes=row.get("l2_mib", 0) * MIB,
            host_bytes_per_s=row.get("host_gb_per_s", 12) * GIGA,
            nvlink_bytes_per_s=row.get("nvlink_gb_per_s", 0) * GIGA,
        )
        for row in _table()["device"]
    )


def device(name: str) -> Device:
    """The device of that name, whatever its case and punctuation: "h200", "RTX 4090", "a100_40gb". Raises SpecError if
    there is none, or the name fits several (a100).
    """
    known = {_key(d.name): d for d in devices()}
    key = _key(name)
    for prefix in ("nvidia", "geforce"):
        key = key.removeprefix(prefix)
    for candidate in (key, key.removesuffix("gb"), "rtx" + key):
        if candidate in known:
            return known[candidate]
    names = ", ".join(d.name for d in devices())
    starting = [d.name for k, d in known.items() if len(key) > 1 and k.startswith(key)]
    if len(starting) > 1:
        raise SpecError(f"device {name!r} may be {' or '.join(starting)}; say which.")
    raise SpecError(f"device {name!r} is unknown; known are {names}.")


def board_of(name: str) -> str:
    """The device table's entry for a GPU as the driver names it ("NVIDIA A100-SXM4-80GB" -> "A100-80"); "" if none."""
    words = {w.removesuffix("gb") for w in re.findall(r"[a-z0-9]+", name.lower())}
    known = () if words & OTHER_BOARDS else (d.name for d in devices() if d.kind == "cuda")
    return next((board for board in known if set(board.lower().split("-")) <= words), "")


def architecture(gpu: Device) -> dict[str, Any]:
    """What a multiprocessor of the device holds at most: `threads`, `blocks`, `shared_bytes`, `block_shared_bytes`.
    Raises SpecError if it is no GPU whose compute capability is known."""
    for row in _table()["architecture"]:
        if tuple(row["sm"]) == gpu.sm:
            return row
    raise SpecError(f"{gpu.name} is no NVIDIA GPU of the device table; name one, such as h100.")


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())

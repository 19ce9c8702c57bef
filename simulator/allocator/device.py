"""The memory that one training process can have of a device, from its name or size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from simulator.core.budget import parse_budget
from traces.devices import CONTEXT_BYTES, device
from traces.errors import SpecError
from traces.units import show_bytes

CPU: Final = "cpu"
CUDA: Final = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A device's memory, and what of it the training step cannot have."""

    name: str
    kind: str  # cuda or cpu
    memory_bytes: int
    context_bytes: int = 0
    reserve_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """The bytes left for the allocator; at least 0."""
        return max(0, self.memory_bytes - self.context_bytes - self.reserve_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.name,
            "memory_bytes": self.memory_bytes,
            "context_bytes": self.context_bytes,
            "reserve_bytes": self.reserve_bytes,
            "usable_bytes": self.usable_bytes,
        }

    def describe(self) -> str:
        """`A100-40: 40.00 GiB, less 512.00 MiB for the CUDA context (assumed)`."""
        size = show_bytes(self.memory_bytes)
        parts = [self.name if self.name.endswith(size) else f"{self.name}: {size}"]
        if self.context_bytes:
            assumed = " (assumed)" if self.context_bytes == CONTEXT_BYTES else ""
            parts.append(f"less {show_bytes(self.context_bytes)} for the CUDA context{assumed}")
        if self.reserve_bytes:
            parts.append(f"less {show_bytes(self.reserve_bytes)} in reserve")
        return ", ".join(parts)

    def room(self) -> str:
        """`describe`, and what that leaves to use."""
        left = f": {show_bytes(self.usable_bytes)} to use" if self.usable_bytes != self.memory_bytes else ""
        return self.describe() + left


def device_memory(
    kind: str | None = None,
    *,
    gpu: str | None = None,
    memory: str | None = None,
    context: str | None = None,
    reserve: str | None = None,
) -> DeviceMemory | None:
    """Return the memory that the user named; None if that is nothing.

    Args:
        kind: of the trace that is to fit, cuda or cpu; None: as the device is, and a size alone is of a CPU.
        gpu: an entry of the device table; memory: a size such as 40GiB, instead of the entry's or without one.
        context: what the CUDA context takes; None: the assumed value on a GPU, nothing on the CPU.
        reserve: what shall stay free, a size or a share of the memory such as 2%.

    Raises:
        SpecError: no such device, no size, or a device of another kind than the trace's.
    """
    if gpu is None and memory is None:
        if context is not None or reserve is not None:
            raise SpecError(
                "--context and --reserve are parts of a device's memory; name one with --gpu or --device-memory."
            )
        return None
    entry = None if gpu is None else device(gpu)
    if kind is None:
        kind = CPU if entry is None else entry.kind
    if entry is not None and entry.kind != kind:
        other = "trace it with --target NAME" if entry.kind == CUDA else "give the GPU that it was traced for"
        raise SpecError(
            f"--gpu {gpu}: the trace holds the graph of a {kind.upper()} and this device is a "
            f"{entry.kind.upper()}; {other}."
        )
    if memory is not None:
        total = size_of("--device-memory", memory)
    else:
        assert entry is not None
        total = entry.memory_bytes
    kept = 0 if kind == CPU else CONTEXT_BYTES
    if context is not None:
        kept = 0 if context.strip() == "0" else size_of("--context", context)
    return DeviceMemory(
        name=entry.name if entry is not None else f"a device of {show_bytes(total)}",
        kind=kind,
        memory_bytes=total,
        context_bytes=kept,
        reserve_bytes=0 if reserve in (None, "0", "0%") else parse_budget(str(reserve), total),
    )


def size_of(option: str, text: str) -> int:
    """The bytes of an option that takes a size; raises SpecError if it is none."""
    if "%" in text:
        raise SpecError(f"{option} {text}: give a size, such as 40GiB; there is nothing to take a share of.")
    return parse_budget(text, 1, option)

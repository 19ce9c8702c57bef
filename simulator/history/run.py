"""`History`: the memory of one run over time, and what held it at the peak, whatever the run was."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from traces.files import to_json
from traces.units import show_bytes

PARTS: Final = ("category", "module", "line")  # what the bytes at the peak are told by
UNNAMED: Final = "(nobody knows)"
OURS: Final = "lowtide"  # the file of all frames in a snapshot that `simulator.history.export` writes
NO_MODULE: Final = "outside of the model"  # of an op of the loss or the optimizer, of a batch, of a workspace
Parts = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """What torch had reserved at the peak and nobody held, in bytes; together it is reserved less requested."""

    rounding_bytes: int  # of requests to multiples of 512
    rests_bytes: int  # behind blocks of large segments, of up to 1 MiB: the allocator does not split them off
    pieces_bytes: int  # in segments that hold something else, so that they cannot go back to the driver
    pieces: int
    largest_bytes: int  # of these
    cached_bytes: int  # whole segments, which torch gives back before it gives up


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that torch could not serve."""

    asked_bytes: int
    free_bytes: int  # that the device had left


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """One run. Figures that this kind of run does not tell are None, or empty."""

    name: str
    kind: str  # trace, plan, rehearsal, snapshot, measurement
    peak_bytes: int  # requested
    where: str = ""  # the peak, in words
    parts: Parts  # bytes at the peak by each of PARTS, the largest first; "": nobody knows
    reserved_bytes: int | None = None  # at the peak
    most_reserved_bytes: int | None = None
    free: Free | None = None
    refused: Refused | None = None
    outside_bytes: int | None = None  # of the device's memory, what lies outside of torch; assumed
    device_bytes: int | None = None  # all memory of the device
    notes: tuple[str, ...] = ()
    curve: Sequence[tuple[int, int]] = ()  # over its length, bytes requested and reserved (0: nobody knows)

    @property
    def peaks(self) -> dict[str, int]:
        reserved = {} if self.reserved_bytes is None else {"reserved there": self.reserved_bytes}
        return {"peak requested": self.peak_bytes, **reserved}

    def to_json(self) -> dict[str, Any]:
        """Return it without its curve."""
        return {k: v for k, v in to_json(self).items() if k != "curve"}


def parts_of(rows: Iterable[tuple[str, str, str, int]]) -> Parts:
    """Rows of category, module, line and bytes, added up by each."""
    found: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
    for category, module, line, nbytes in rows:
        for of, name in zip(found, (category, around(module), line), strict=True):
            of[name] += nbytes
    return {part: dict(of.most_common()) for part, of in zip(PARTS, found, strict=True)}


def around(module: str) -> str:
    """The repeated layer that a module is in: `bert.encoder.layer.3` of `bert.encoder.layer.3.output`."""
    parts = module.split(".")
    before = sum(1 for _ in takewhile(lambda part: not part.isdigit(), parts))
    return ".".join(parts[: before + 1])


def listed(of: Mapping[str, int], most: int) -> str:
    """`1.00 GiB activation, 512.00 MiB parameter`: the first of those with names, in words."""
    return ", ".join([f"{show_bytes(n)} {name}" for name, n in of.items() if n and name][:most])


def of_layers(op: str, module: str) -> str:
    """What the same op of all repeated layers is called."""
    layers = re.sub(r"\b\d+\b", "*", module)
    return re.sub(r"_\d+$", "", op) + f" of {layers}" * (module not in ("", NO_MODULE))

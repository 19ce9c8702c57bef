"""Keep what ops were measured to cost on one device, so that traces of other models and batch sizes can use it.

A profile belongs to one device, one release of torch and one set of flags. Its entries are found by the text of an op's
signature: the operator, and shape, strides and dtype of every tensor that it takes and gives.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from traces.errors import TraceError
from traces.files import Form, JsonRecord, from_json
from traces.provenance import ABSENT, MEASURED_CPU, MEASURED_CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which measurements belong together: those of one device, one torch and one set of flags."""

    device: str  # the device's own name: a GPU's as the driver gives it, a processor's
    kind: str  # "cpu" or "cuda"
    target: str  # its entry in the device table; "" if it has none
    torch_version: str  # without the build's suffix
    flags: dict[str, str]  # what else decides which kernel runs: tf32, benchmark, deterministic, threads

    @property
    def file_name(self) -> str:
        """The name of its file in a cache directory."""
        flags = hashlib.sha256(repr(sorted(self.flags.items())).encode()).hexdigest()[:8]
        device = "-".join("".join(c if c.isalnum() else " " for c in self.device.lower()).split())
        return f"{device}-torch{self.torch_version}-{flags}.profile.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The measured cost of one op."""

    # Allocations (+) and frees (-) in order; they sum to the bytes that the op leaves.
    events: tuple[int, ...]
    time_ns: int  # median
    samples: int  # timed runs behind it
    provenance: str  # measured-cpu or measured-cuda


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryWorkspace:
    """Memory that a library allocated inside an op at its first call and kept for ever (cuBLAS)."""

    nbytes: int
    op: str  # the operator that was running


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile(JsonRecord):
    """All that was measured on one device."""

    form: ClassVar = Form(
        name="profile",
        version=2,
        advice="fill another with `trace --device`, or give --no-profile",
        error=TraceError,
    )
    identity: Identity
    entries: dict[str, Entry] = field(default_factory=dict)  # by the signature's key
    workspaces: tuple[LibraryWorkspace, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DeviceProfile:
        """The profile that parsed JSON holds; ValueError if it is none, or says what cannot be: measurements of a GPU
        that is not there; an entry with negative memory or time, without a sample, of no such provenance."""
        made = from_json(cls, data)
        if made.identity.device.endswith(ABSENT):
            raise ValueError(f"{made.identity.device} is not there: nothing on it is a measurement")
        for key, entry in made.entries.items():
            if min(accumulate(entry.events), default=0) < 0:
                raise ValueError(f"op {key[:80]!r} frees more than it has allocated")
            if entry.time_ns < 0 or entry.samples < 1:
                raise ValueError(f"op {key[:80]!r} has {entry.samples} samples of {entry.time_ns} ns")
            if entry.provenance not in (MEASURED_CPU, MEASURED_CUDA):
                raise ValueError(f"op {key[:80]!r} has the unknown provenance {entry.provenance!r}")
        if any(workspace.nbytes <= 0 for workspace in made.workspaces):
            raise ValueError("a library workspace has no bytes")
        return made

    def merged(self, newer: DeviceProfile) -> DeviceProfile:
        """Both together; where both know an op, the newer one counts, with the lower of both times: what else ran on
        the device made the other. Raises TraceError if they belong to different devices, versions of torch or flags.
        """
        if difference := differences(self.identity, newer.identity):
            raise TraceError(
                f"two device profiles cannot be merged, since they differ: {difference}. Keep them in files of "
                "their own (--profile)."
            )
        both = self.entries.keys() & newer.entries.keys()
        times = {k: min(self.entries[k].time_ns, newer.entries[k].time_ns) for k in both}
        entries = {**self.entries, **newer.entries}
        return replace(
            newer,
            entries=entries | {k: replace(entries[k], time_ns=t) for k, t in times.items()},
            workspaces=newer.workspaces or self.workspaces,
        )


def differences(ours: Identity, theirs: Identity) -> str:
    """In what two identities differ, in words; empty: they belong together."""
    out = [
        f"{label} {a!r} and {b!r}"
        for label, a, b in (
            ("device", ours.device, theirs.device),
            ("torch", ours.torch_version, theirs.torch_version),
        )
        if a != b
    ]
    out += [
        f"{name} {ours.flags.get(name, 'unset')} and {theirs.flags.get(name, 'unset')}"
        for name in sorted({*ours.flags, *theirs.flags})
        if ours.flags.get(name) != theirs.flags.get(name)
    ]
    return ", ".join(out)


def add_to(path: Path, new: DeviceProfile) -> DeviceProfile:
    """Merge a profile into the file at `path`, which is made if it does not exist; returns the whole.

    Of two processes that do so at the same time, the file holds what the later one knew. Raises TraceError if the file
    is no profile, or one of another device.
    """
    if path.exists():
        try:
            new = DeviceProfile.load(path).merged(new)
        except TraceError as error:
            raise TraceError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None
    new.save(path)
    return new


def cache_directory() -> Path:
    """Where profiles are kept by default: $XDG_CACHE_HOME/lowtide, or ~/.cache/lowtide."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "lowtide"


def candidates(identity: Identity) -> Iterable[Path]:
    """Files that may hold a profile that fits, the likeliest first."""
    yield cache_directory() / identity.file_name
    yield from sorted(cache_directory().glob("*.profile.json"))

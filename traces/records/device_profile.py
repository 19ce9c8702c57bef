"""Keep what ops were measured to cost on one device, so that traces of other models and batch sizes can use it.

A profile belongs to one device, one release of torch and one set of flags. Its entries are found by the text of an op's
signature: the operator, and shape, strides and dtype of every tensor that it takes and gives.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from traces.errors import TraceError
from traces.files import parquet as tables
from traces.files.json_records import Record, from_json, to_json
from traces.files.parquet import INT, INTS, TEXT
from traces.files.whole import replacing
from traces.provenance import ABSENT, MEASURED_CPU, MEASURED_CUDA

PROFILE_VERSION: Final = 1
FORM: Final = tables.Format(
    record="profile",
    noun="a device profile",
    version_key="profile_version",
    version=PROFILE_VERSION,
    columns={"key": TEXT, "events": INTS, "time_ns": INT, "samples": INT, "provenance": TEXT},
    again="fill another with `trace --device`, or give --no-profile.",
)


COLUMNS: Final = tuple(FORM.columns)[1:]  # those of an entry


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
        return f"{device}-torch{self.torch_version}-{flags}.parquet"


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
class DeviceProfile:
    """All that was measured on one device."""

    identity: Identity
    entries: dict[str, Entry] = field(default_factory=dict)  # by the signature's key
    workspaces: tuple[LibraryWorkspace, ...] = ()

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

    def validate(self) -> None:
        """Raise TraceError if it says what cannot be: measurements of a GPU that is not there; an entry with negative
        memory or time, without a sample, of no such provenance."""
        if self.identity.device.endswith(ABSENT):
            raise TraceError(f"{self.identity.device} is not there: nothing on it is a measurement.")
        for key, entry in self.entries.items():
            live = 0
            for event in entry.events:
                live += event
                if live < 0:
                    raise TraceError(f"op {key[:80]!r} frees more than it has allocated.")
            if entry.time_ns < 0 or entry.samples < 1:
                raise TraceError(f"op {key[:80]!r} has {entry.samples} samples of {entry.time_ns} ns.")
            if entry.provenance not in (MEASURED_CPU, MEASURED_CUDA):
                raise TraceError(f"op {key[:80]!r} has the unknown provenance {entry.provenance!r}.")
        for workspace in self.workspaces:
            if workspace.nbytes <= 0:
                raise TraceError(f"a library workspace has {workspace.nbytes} bytes.")


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


def save(profile: DeviceProfile, path: str | Path) -> Path:
    """Write a profile, whole or not at all; entries stand in order of their keys."""
    path = Path(path)
    keys = sorted(profile.entries)
    values: dict[str, Any] = {"key": keys}
    for column in COLUMNS:
        values[column] = [getattr(profile.entries[k], column) for k in keys]
    header = {
        "profile_version": PROFILE_VERSION,
        **to_json(profile.identity),
        "workspaces": to_json(profile.workspaces),
    }
    with replacing(path) as temporary:
        tables.write(temporary, FORM, header, values)
    return path


def load(path: str | Path) -> DeviceProfile:
    """Read and check a profile. Raises TraceError if the file is missing, truncated, another record, or contradicts
    itself.
    """
    path = Path(path)
    header, columns = tables.read(path, FORM)
    rows = zip(*(columns[c] for c in COLUMNS), strict=True)
    entries = [Entry(**dict(zip(COLUMNS, row, strict=True))) for row in rows]
    profile = DeviceProfile(
        identity=_identity(path, header),
        entries=dict(zip(columns["key"], entries, strict=True)),
        workspaces=_of_header(
            path, tuple[LibraryWorkspace, ...], header.get("workspaces", []), "has malformed workspaces"
        ),
    )
    try:
        profile.validate()
    except TraceError as error:
        raise TraceError(f"{path}: {error} {FORM.again.capitalize()}") from None
    return profile


def load_identity(path: str | Path) -> Identity:
    """Whose measurements a file holds, read from its header alone. Raises TraceError: as `load`, as far as the header
    goes.
    """
    path = Path(path)
    return _identity(path, tables.read_header(path, FORM))


def _identity(path: Path, header: dict[str, Any]) -> Identity:
    return _of_header(path, Identity, header, "does not say whose measurements these are")


def _of_header(path: Path, kind: type[Record], data: Any, problem: str) -> Record:
    try:
        return from_json(kind, data)
    except ValueError as error:
        raise TraceError(f"{path}: its header {problem} ({error}); {FORM.again}") from None


def add_to(path: str | Path, new: DeviceProfile) -> DeviceProfile:
    """Merge a profile into the file at `path`, which is made if it does not exist; returns the whole.

    Of two processes that do so at the same time, the file holds what the later one knew. Raises TraceError if the file
    is no profile, or one of another device.
    """
    path = Path(path)
    if path.exists():
        try:
            new = load(path).merged(new)
        except TraceError as error:
            raise TraceError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from None
    save(new, path)
    return new


def cache_directory() -> Path:
    """Where profiles are kept by default: $XDG_CACHE_HOME/lowtide, or ~/.cache/lowtide."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path.home() / ".cache") / "lowtide"


def candidates(identity: Identity) -> Iterable[Path]:
    """Files that may hold a profile that fits, the likeliest first."""
    yield cache_directory() / identity.file_name
    yield from sorted(cache_directory().glob("*.parquet"))

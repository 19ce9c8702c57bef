"""Find the device profile that belongs to a device, and make one of what a real-mode trace measured."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high
from typing import Any, Final

from tracer.costs.cost import Cost
from tracer.costs.rows import OpRow
from traces.devices import Device, devices
from traces.errors import TraceError
from traces.provenance import provenance_of
from traces.records import device_profile as store
from traces.records.device_profile import DeviceProfile, Entry, Identity, LibraryWorkspace
from traces.records.trace import VIEW

# Words in a GPU's name that make it another board than the one of the plain name.
OTHER_BOARDS: Final = frozenset({"ti", "super", "laptop", "max", "d", "mig", "nvl", "pcie"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A profile, where it came from, and what one should know before using it ("": nothing)."""

    profile: DeviceProfile
    path: Path
    warning: str = ""


def identity_here(device: str) -> Identity:
    """Whose measurements those made now on `device` ("cpu", "cuda", "cuda:1") are."""
    import torch

    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
        return _gpu(name, board_of(name))
    flags = {
        "threads": torch.get_num_threads(),
        "mkldnn": torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return _identity(f"{processor()}, {torch.backends.cpu.get_cpu_capability()}", "cpu", "cpu", flags)


def identity_wanted(target: Device, tf32: bool | None = None) -> Identity:
    """Whose measurements a fake trace for `target` would like: this processor's, or such a GPU's, with the flags that
    torch has here; `tf32` sets those of TF32."""
    return identity_here("cpu") if target.kind == "cpu" else _gpu("", target.name, tf32)


def _gpu(name: str, board: str, tf32: bool | None = None) -> Identity:
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    flags = {
        "tf32_matmul": matmul.allow_tf32 if tf32 is None else tf32,
        "tf32_cudnn": cudnn.allow_tf32 if tf32 is None else tf32,
        "benchmark": cudnn.benchmark,
        "deterministic": cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
    }
    return _identity(name, "cuda", board, flags)


def _identity(device: str, kind: str, target: str, flags: dict[str, Any]) -> Identity:
    import torch

    version, words = str(torch.__version__).partition("+")[0], {k: str(v) for k, v in flags.items()}
    return Identity(device=device, kind=kind, target=target, torch_version=version, flags=words)


def processor() -> str:
    """The name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


def board_of(name: str) -> str:
    """The device table's entry for a GPU as the driver names it ("NVIDIA A100-SXM4-80GB" -> "A100-80"); "" if none."""
    words = {w.removesuffix("gb") for w in re.findall(r"[a-z0-9]+", name.lower())}
    known = () if words & OTHER_BOARDS else (d.name for d in devices() if d.kind == "cuda")
    return next((board for board in known if set(board.lower().split("-")) <= words), "")


def mismatch(have: Identity, want: Identity) -> str:
    """Why measurements do not fit a trace, in words; empty: they do."""
    if have.kind != want.kind or (want.device and have.device != want.device):
        return f"it is of {have.device}, not of {want.device or want.target}"
    if not want.device and have.target != want.target:
        return f"it is of {have.device}, not of {want.target}"
    ours, theirs = have.torch_version.split(".")[:2], want.torch_version.split(".")[:2]
    if ours != theirs:
        return f"it was made with torch {have.torch_version}, and this is {want.torch_version}"
    wrong = [k for k in sorted({*have.flags, *want.flags}) if have.flags.get(k) != want.flags.get(k)]
    return ", ".join(
        f"{k} was {have.flags.get(k, 'unset')} and is {want.flags.get(k, 'unset')}" for k in wrong
    )


def find(want: Identity, given: Path | None = None) -> Found | None:
    """The profile for a trace: the one that was named, else the first that fits of the user's and the gallery's.

    A file there that cannot be read is passed over with a warning; an empty profile stands for it if no other fits.
    Raises TraceError if the named file is no profile, or one of another device. (Another torch or other flags are a
    warning there.)
    """
    if given is not None:
        profile = DeviceProfile.load(given)
        have = profile.identity
        reason = mismatch(have, want)
        if reason.startswith("it is of"):
            raise TraceError(f"{given}: this profile does not fit: {reason}. Give another with --profile.")
        return Found(profile=profile, path=given, warning=f"{given}: {reason}" if reason else "")
    damaged: Found | None = None
    for path in store.candidates(want):
        try:
            if path.is_file() and not mismatch((profile := DeviceProfile.load(path)).identity, want):
                found = Found(profile=profile, path=path)
                return found if damaged is None else replace(found, warning=damaged.warning)
        except TraceError as error:
            warning = f"{error} It is left out here."
            damaged = damaged or Found(profile=DeviceProfile(identity=want), path=path, warning=warning)
    return damaged


def profile_of(
    rows: Sequence[OpRow],
    costs: Sequence[Cost],
    identity: Identity,
    samples: int,
    workspaces: tuple[LibraryWorkspace, ...] = (),
) -> DeviceProfile:
    """Return what was measured, by signature; where calls share one, their median time counts.

    Args:
        rows, costs: by op id.
        samples: timed rounds.
        workspaces: what libraries were seen to keep.
    """
    calls: dict[str, list[Cost]] = {}
    for row, cost in zip(rows, costs, strict=True):
        if row.signature is not None and not row.flags & VIEW:
            calls.setdefault(row.signature.key, []).append(cost)
    entries = {
        key: entry_of(
            same[0].events, median_high(cost.time_ns for cost in same), samples * len(same), identity
        )
        for key, same in calls.items()
    }
    return DeviceProfile(identity=identity, entries=entries, workspaces=workspaces)


def entry_of(events: tuple[int, ...], time_ns: int, samples: int, identity: Identity) -> Entry:
    """Return what a call was measured to cost on that device."""
    return Entry(
        events=events,
        time_ns=time_ns,
        samples=samples,
        provenance=provenance_of(identity.kind, identity.device),
    )

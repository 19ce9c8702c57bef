"""Record a training step as the command `trace` does: with the device profile that fits, or measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tracer.costs.cost import APPROXIMATE, MEASURED, NONE, Costs
from tracer.costs.cost import REHEARSED as BY_REHEARSAL
from tracer.costs.profiles import Found, find, identity_here, identity_wanted
from tracer.measure.host_copies import host_bytes_per_s
from tracer.measure.step import measure
from tracer.measure.untouched import untouched_loop
from tracer.precision.policy import set_tf32
from tracer.record.one_graph import OneGraph
from tracer.record.program import Program
from tracer.record.step import trace_step
from tracer.step.loop import TrainingStep
from tracer.step.step import BuildStep
from traces.devices import Device
from traces.devices import device as device_entry
from traces.errors import TraceError
from traces.files import check_writable
from traces.provenance import REHEARSED, provenance_of
from traces.records import device_profile as store
from traces.records.device_profile import DeviceProfile, Identity
from traces.records.trace import Trace

Say = Callable[[str], None]  # told what happens, a line each time


def silent(text: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileUse:
    """The use of device profiles."""

    path: Path | None = None  # instead of the user's own file
    off: bool = False  # neither read nor written

    @classmethod
    def of(cls, profile: str | Path | Literal[False] | None) -> ProfileUse:
        """Return it as the argument of `trace` says it."""
        return cls(path=Path(profile) if profile else None, off=profile is False)


def record_fake(
    build: BuildStep,
    target: Device,
    use: ProfileUse,
    say: Say = silent,
    *,
    device: str = "cpu",
    program: Callable[[TrainingStep], Program | None] = lambda step: None,
) -> Trace:
    """A trace from fake tensors, its ops' costs from the profile of the target if there is one.

    Args:
        target: whose costs.
        device: of the fake tensors; anything but "cpu" needs a build of torch for it.
        program: what is known of a step's model already; None: it is captured.

    Raises:
        TraceError: the profile that was named is none, or is of another device.
    """
    found = _known(target, build, use, say)
    profile = found.profile if found is not None else None
    draft = trace_step(build, target, device=device, costs=Costs(profile=profile), program=program)
    kept = profile.workspaces if profile is not None else ()
    trace = draft.finish(
        draft.costs,
        kept if {w.op for w in kept} & {row.target for row in draft.rows} else None,
    )
    say(sources_text(trace, str(found.path) if found is not None else ""))
    return trace


def record_shapes(
    builds: Sequence[BuildStep], target: Device, use: ProfileUse, each: Callable[[int, Trace], None]
) -> None:
    """The traces of steps that differ in sizes alone: of one captured graph, where that is what capturing each comes
    to.

    Args:
        builds: in order of size.
        each: told of each trace as it is made, by its place among `builds`.
    """

    gpu = target if target.kind == "cuda" else None
    graph, last = OneGraph(gpu), len(builds) - 1
    for k in dict.fromkeys((last // 2, last, 0, *range(last))):
        each(k, record_fake(builds[k], target, use, program=graph.program))


def record_real(
    build: BuildStep,
    target: Device,
    device: str,
    use: ProfileUse,
    say: Say = silent,
    *,
    rounds: int = 5,
    warmup: int = 2,
) -> Trace:
    """A trace measured on this machine; what was measured is added to the device's profile.

    On a GPU that is not there (a rehearsal) the allocations are torch's own, the times those of the device's profile or
    else the roofline's, and no profile learns of them. Of a loop that frees gradients in backward, the ops are measured
    in one that ends in a step. For the arguments see `measure`.

    Raises:
        TraceError: the real step ran other ops than the captured one; the profile that was named is none, or is of
            another device.
    """
    if device.startswith("cuda"):
        set_tf32(build.policy)  # before anything asks whose measurements these are
    identity = identity_here(device)
    rehearsed = provenance_of(device, identity.device) == REHEARSED
    path = None if use.off or rehearsed else _own_file(use, identity, say)
    target = device_entry(identity.target) if identity.target else target
    known = _known(target, build, use, say) if rehearsed else None
    profile = known.profile if known is not None else None
    releases = bool(build.policy.get("release_gradients"))
    ending = replace(build, policy={**build.policy, "release_gradients": False}) if releases else build
    draft = trace_step(ending, target, device=device, costs=Costs(profile=profile))
    say(f"{'Rehearsing' if rehearsed else 'Measuring'} {len(draft.rows)} ops on {identity.device} ...")
    measured = measure(draft, ending, device, rounds=rounds, warmup=warmup, say=say)
    own = measured.profile(identity, rounds)
    peak_bytes, requests = untouched_loop(build, device)
    if releases:
        draft = trace_step(build, target, device=device, costs=Costs(profile=own))
    trace = measured.finish(draft, untouched=requests, untouched_peak_bytes=peak_bytes)
    if device.startswith("cuda") and not rehearsed:
        rates = {**trace.meta.rates, "host_bytes_per_s": host_bytes_per_s()}
        trace = replace(trace, meta=replace(trace.meta, rates=rates))
    if path is not None and (merged := _added(path, own, use, say)) is not None:
        say(f"Profile {path}: {len(merged.entries)} calls of ops measured so far.")
    return trace


def _known(target: Device, build: BuildStep, use: ProfileUse, say: Say) -> Found | None:
    """Return what was measured on that device before."""
    found = None if use.off else find(identity_wanted(target, build.policy.get("tf32")), use.path)
    if found is not None and found.warning:
        say(f"warning: {found.warning}")
    return found


def _own_file(use: ProfileUse, identity: Identity, say: Say) -> Path | None:
    """Where new measurements go, asked before the work; None (and a warning) if the user's own directory takes none.

    Raises:
        TraceError: the file there cannot take them.
        OSError: the file that was named cannot be written.
    """
    path = use.path or store.cache_directory() / identity.file_name
    try:
        check_writable(path)
    except OSError as error:
        _not_kept(path, error, use, say)
        return None
    if path.exists():
        different = store.differences(DeviceProfile.load(path).identity, identity)
        if different:
            raise TraceError(
                f"{path}: what is measured now cannot be added to this profile, since they differ: {different}. Name "
                "another file with --profile."
            )
    return path


def _added(path: Path, new: DeviceProfile, use: ProfileUse, say: Say) -> DeviceProfile | None:
    """Add measurements to the file; None (and a warning) if the user's own directory takes none."""
    try:
        return store.add_to(path, new)
    except OSError as error:
        _not_kept(path, error, use, say)
        return None


def _not_kept(path: Path, error: OSError, use: ProfileUse, say: Say) -> None:
    """Warn; a trace is worth more than a file that nobody named."""
    if use.path is not None:
        raise error
    say(
        f"warning: the device profile {path} cannot be written ({error.strerror or error}), so the measurements are "
        "kept for this trace alone; name another file with --profile, or give --no-profile."
    )


def sources_text(trace: Trace, where: str) -> str:
    """How many ops of a trace have their costs from where, in words."""
    counts = trace.meta.workspace
    parts = [
        f"{counts.get(MEASURED, 0)} measured",
        *([f"{n} rehearsed"] if (n := counts.get(BY_REHEARSAL, 0)) else []),
        f"{counts.get(APPROXIMATE, 0)} approximate, by a few rules",
        f"{counts.get(NONE, 0)} by what they return alone",
    ]
    text = f"Allocations inside the {sum(counts.values())} computing ops: {', '.join(parts)}"
    return text + (f" (profile {where})." if where else ".")

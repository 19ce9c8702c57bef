"""The traces of a campaign's step: as a laptop makes it, by another batch size's profile, and measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.model_spec import source_file

if TYPE_CHECKING:
    from tracer.build.step import BuildStep
    from tracer.record.draft import Draft
    from traces.devices import Device
    from traces.trace import Trace

UNCALIBRATED_DIR, TRANSFERRED_DIR, CALIBRATED_DIR = "uncalibrated", "transferred", "calibrated"


def describe_device(*, device: str) -> dict[str, Any]:
    """The device of a campaign: its name, its memory, its entry in the device table ("": none), its environment."""
    from executor.measure import check_device, environment
    from tracer.costs.profiles import board_of, nearest_board, processor

    check_device(device)
    found = {"environment": environment(device)}
    if device.startswith("cuda"):
        import torch

        memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        name = torch.cuda.get_device_name(device)
        target = board_of(name) or nearest_board(name, memory_bytes)
        return {**found, "name": name, "memory_bytes": memory_bytes, "target": target}
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {**found, "name": processor(), "memory_bytes": memory_bytes, "target": "cpu"}


def record_step(
    *,
    model: str,
    options: Mapping[str, Any],
    seed: int,
    device: str,
    target: str,
    directory: str,
    rounds: int,
    warmup: int,
    transfer: bool,
) -> dict[str, Any]:
    """Record the step without the device, with what half its batch size showed there, and measured.

    Saves the traces below `directory`, the cheapest first: those that are there stand also where a later one fails,
    as it does where the device's memory does not suffice. User's device profiles are neither read nor written.

    Raises:
        LowtideError: as `trace` would; OutOfMemoryError of torch, from what runs.
    """
    from tracer.build.step import load_spec
    from tracer.costs.calibration import Costs
    from tracer.costs.machine import probed_cpu
    from tracer.measure.step import measure
    from tracer.record.step import trace_step
    from traces import store
    from traces.devices import device as device_entry

    build = load_spec(model, dict(options), seed=seed)
    # The rates of a CPU stand in no datasheet: the machine itself tells them, in a second and without the model.
    entry = probed_cpu() if target == device == "cpu" else device_entry(target)
    # Rules alone: what a machine that never saw this device can know.
    recorded = trace_step(build, entry, device="cpu", costs=Costs())
    root = Path(directory)
    store.save(recorded.trace, root / UNCALIBRATED_DIR, force=True)
    if device != "cpu":
        recorded = trace_step(build, entry, device=device, costs=Costs())
    batch_size = recorded.trace.meta.batch_size
    if transfer and batch_size > 1 and takes_batch_size(model):
        half = load_spec(model, {**options, "batch_size": batch_size // 2}, seed=seed)
        store.save(
            _transferred(recorded, half, entry, device, rounds, warmup), root / TRANSFERRED_DIR, force=True
        )
    real = measure(recorded, build, device, rounds=rounds, warmup=warmup)
    store.save(real.finish(), root / CALIBRATED_DIR, force=True)
    return {"fingerprint": recorded.trace.meta.fingerprint}


def takes_batch_size(model: str) -> bool:
    """Whether `batch_size` is an option of the model; of a user's function, as its text says."""
    path = source_file(model)
    return path is None or "batch_size" in path.read_text(encoding="utf-8", errors="replace")


def _transferred(
    recorded: Draft, other: BuildStep, entry: Device, device: str, rounds: int, warmup: int
) -> Trace:
    """The trace with the costs that a profile of the step at another batch size gives it."""
    from tracer.costs.calibration import Costs
    from tracer.costs.profiles import identity_here
    from tracer.measure.step import measure
    from tracer.record.step import trace_step

    smaller = trace_step(other, entry, device=device, costs=Costs())
    measured = measure(smaller, other, device, rounds=rounds, warmup=warmup)
    profile = measured.profile(identity_here(device), rounds)
    return recorded.finish(Costs(profile=profile), profile.workspaces or None)

"""The traces of a campaign's step: as a laptop makes it, and measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from executor.campaign.record import CALIBRATED, RULES


def describe_device(*, device: str) -> dict[str, Any]:
    """The device of a campaign: its name, its memory, its entry in the device table ("": none), its environment."""
    from executor.measuring import environment
    from tracer.build.step import check_device
    from tracer.costs.profiles import board_of, processor

    check_device(device)
    found = {"environment": environment(device)}
    if device.startswith("cuda"):
        import torch

        memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        name = torch.cuda.get_device_name(device)
        return {**found, "name": name, "memory_bytes": memory_bytes, "target": board_of(name)}
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {**found, "name": processor(), "memory_bytes": memory_bytes, "target": "cpu"}


def record_step(
    *, step: dict[str, Any], method: dict[str, Any], target: str, directory: str
) -> dict[str, Any]:
    """Record the step without the device, and measured on it.

    Saves the traces below `directory`, the cheapest first: those that are there stand also where a later one fails,
    as it does where the device's memory does not suffice. User's device profiles are neither read nor written.

    Raises:
        LowtideError: as `trace` would; OutOfMemoryError of torch, from what runs.
    """
    from tracer.build.step import load_spec
    from tracer.recording import ProfileUse, record_drafted, record_real
    from traces.devices import device as device_entry
    from traces.records import store

    build = load_spec(step["model"], step["options"], seed=method["seed"])
    entry = device_entry(target)
    # Rules alone: what a machine that never saw this device can know.
    off, root = ProfileUse(off=True), Path(directory)
    fake, trace = record_drafted(build, entry, off)
    store.save(trace, root / RULES, force=True)
    how = {"rounds": method["rounds"], "warmup": method["trace_warmup"]}
    trace = record_real(build, entry, method["device"], off, **how, fake=fake)
    store.save(trace, root / CALIBRATED, force=True)
    return {"fingerprint": trace.meta.fingerprint}

"""Turn a step of a campaign into its two traces: one as a laptop would make it, one measured on the device."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from traces.errors import SpecError

UNCALIBRATED_DIR, CALIBRATED_DIR = "uncalibrated", "calibrated"
_CPUINFO: Final = Path("/proc/cpuinfo")


def describe_device(*, device: str) -> dict[str, Any]:
    """The device that a campaign runs on: its name, its memory, what the figures depend on."""
    from executor.measure import check_device, environment

    check_device(device)
    found = {"environment": environment(device)}
    if device.startswith("cuda"):
        import torch

        memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
        name = torch.cuda.get_device_name()
        return {**found, "name": name, "memory_bytes": memory_bytes, "target": target_of(name, memory_bytes)}
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {**found, "name": _processor(), "memory_bytes": memory_bytes, "target": "cpu"}


def _processor() -> str:
    if _CPUINFO.is_file():
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def target_of(name: str, memory_bytes: int) -> str:
    """The entry of the device table that a GPU's name stands for; of several, the one with the nearest memory.

    Raises:
        SpecError: none does.
    """
    from traces.devices import DEVICES

    words = name.lower().replace("-", " ").split()
    fitting = [d for d in DEVICES if d.kind == "cuda" and d.name.lower().split("-")[0] in words]
    if not fitting:
        known = ", ".join(d.name for d in DEVICES if d.kind == "cuda")
        raise SpecError(
            f"{name} is not in the device table; name the entry nearest to it as target in [campaign]: {known}."
        )
    return min(fitting, key=lambda d: abs(d.memory_bytes - memory_bytes)).name


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
    measured: bool = True,
) -> dict[str, Any]:
    """Record the step without a device, and then measured on it; saves both traces below `directory`.

    The first stands also where the second fails, as it does where the device's memory does not suffice.

    Raises:
        LowtideError: as `trace` would; OutOfMemoryError of torch, from the measured trace only.
    """
    from tracer.calibration import Costs
    from tracer.profile import measure
    from tracer.spec import load_spec
    from tracer.step import trace_step
    from traces import store
    from traces.devices import device as device_entry

    build = load_spec(model, dict(options), seed=seed)
    entry = device_entry(target)
    # Rules alone: what a machine that never saw this device can know.
    recorded = trace_step(build, entry, device="cpu", costs=Costs())
    root = Path(directory)
    store.save(recorded.trace, root / UNCALIBRATED_DIR, force=True)
    if measured:
        if device != "cpu":
            recorded = trace_step(build, entry, device=device)
        real = measure(recorded, build, device, rounds=rounds, warmup=warmup)
        store.save(real, root / CALIBRATED_DIR, force=True)
    return {"fingerprint": recorded.trace.meta.fingerprint}

"""Where figures were taken: on a CPU, a GPU, or a GPU that is not there (a rehearsal), and under which settings."""

from __future__ import annotations

import os
from typing import Final

from traces.errors import SpecError

MEASURED_CPU: Final = "measured-cpu"
MEASURED_CUDA: Final = "measured-cuda"
REHEARSED: Final = "rehearsed (torch's own code, no GPU)"
ABSENT: Final = " (rehearsed)"  # ends the name of a GPU that is not there
NAME: Final = "LOWTIDE_NULL_NAME"  # the variable from which the null driver has that name
# The allocator reads the name of CUDA itself first (`CUDAAllocatorConfig::instance`), and some versions know no other.
ALLOC_CONF: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PACKAGES: Final = ("traces", "simulator", "tracer", "executor")  # Lowtide's own


def rehearsing() -> bool:
    """Return whether this process and those that it starts run on the null driver, where nothing can be measured."""
    return NAME in os.environ


def refuse_page() -> None:
    """Raise SpecError in a rehearsal, since pages show what was measured."""
    if rehearsing():
        raise SpecError(
            "--report shows what was measured, and on a GPU that is not there nothing is; leave it out."
        )


def provenance_of(device: str) -> str:
    """The provenance of figures taken on a device ("cpu", "cuda", "cuda:1")."""
    if not device.startswith("cuda"):
        return MEASURED_CPU
    return REHEARSED if rehearsing() else MEASURED_CUDA


def alloc_conf() -> str:
    """The settings of torch's CUDA allocator that the environment gives; empty where it says nothing."""
    return next((os.environ[name] for name in ALLOC_CONF if os.environ.get(name)), "")

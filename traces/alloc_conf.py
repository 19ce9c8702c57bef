"""The settings that torch's CUDA allocator takes from the environment."""

from __future__ import annotations

import os
from typing import Final

# The allocator reads the name of CUDA itself first (`CUDAAllocatorConfig::instance`), and some versions know no other.
NAMES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def alloc_conf() -> str:
    """The settings as text; empty where the environment says nothing."""
    return next((os.environ[name] for name in NAMES if os.environ.get(name)), "")

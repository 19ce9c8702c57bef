"""Tell what figures depend on beside the step: versions of libraries, threads, the GPU and its settings."""

from __future__ import annotations

import contextlib
import functools
import platform
from importlib import metadata

import torch

from traces.provenance import alloc_conf


def versions() -> dict[str, str]:
    """Versions of what decides the graph; torch's with its build, which the installed package does not always name."""
    out = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return out | {
        name: found for name in ("torchvision", "transformers", "lowtide") if (found := _version(name))
    }


@functools.cache
def _version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


def environment(device: str) -> dict[str, str]:
    """Return what the figures of a run on that device ("cpu", "cuda", "cuda:1") depend on, beside the plan."""
    out = {
        **versions(),
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
        "alloc_conf": alloc_conf(),
    }
    if device.startswith("cuda"):
        out |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
            "tf32_matmul": str(torch.backends.cuda.matmul.fp32_precision == "tf32"),
        }
    return out

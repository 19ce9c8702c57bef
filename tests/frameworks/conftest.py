"""Before any framework is imported: torchvision beside a CPU-only torch, which transformers and timm want."""

from __future__ import annotations

import importlib.util

if all(importlib.util.find_spec(name) is not None for name in ("torch", "torchvision")):
    from tracer.step.named.vision import import_torchvision

    import_torchvision()

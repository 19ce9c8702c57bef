"""Trace + Plan + the real model -> rewritten FX graphs that train -> Measurement."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.fitting.fit import fit
    from executor.plans import verify
    from executor.training.module import apply_plan, remove_plan, unplanned

__all__ = ["apply_plan", "fit", "remove_plan", "unplanned", "verify"]
_ROOMS = {"fit": "executor.fitting.fit", "verify": "executor.plans"}


def __getattr__(name: str) -> Any:
    # torch takes more than a second to import; `execute --help` should not.
    if name in __all__:
        return getattr(import_module(_ROOMS.get(name, "executor.training.module")), name)
    raise AttributeError(f"module 'executor' has no attribute {name!r}")

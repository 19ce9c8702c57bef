"""Trace + Plan + the real model -> rewritten FX graphs that train -> Measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executor.training.module import PlannedModule, apply_plan, remove_plan, unplanned

__all__ = ["PlannedModule", "apply_plan", "remove_plan", "unplanned"]


def __getattr__(name: str) -> Any:
    # torch takes more than a second to import; `execute --help` should not.
    if name in __all__:
        from executor.training import module

        return getattr(module, name)
    raise AttributeError(f"module 'executor' has no attribute {name!r}")

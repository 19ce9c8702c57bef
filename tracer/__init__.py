"""One training step of a torch model as a trace: `from tracer import trace`. torch is imported at its first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracer.api import trace

__all__ = ["trace"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tracer import api

        return getattr(api, name)
    raise AttributeError(f"module 'tracer' has no attribute {name!r}")

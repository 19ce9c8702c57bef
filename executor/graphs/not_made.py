"""Stand in the place of an output that a plan does not make."""

from __future__ import annotations

from typing import Any, Final

import torch

from tracer.torch_api import make_wrapper_subclass
from traces.errors import PlanError

PASSED_ON: Final = ("detach", "alias", "_to_copy", "view_as")  # by code that only hands outputs on


class NotMade(torch.Tensor):
    """The place of an output that the plan does not make: its shape and type are known, and any use of it raises."""

    why: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, why: str) -> NotMade:
        made: NotMade = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.why = why
        return made

    def __init__(self, like: torch.Tensor, why: str) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:
        return f"NotMade({tuple(self.shape)}: {self.why})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        if func.overloadpacket.__name__ in PASSED_ON:
            return cls(mine, mine.why)
        raise PlanError(f"{mine.why}, and {func} asked for it; use the loss alone, or plan without --allow.")

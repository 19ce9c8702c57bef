"""How one iteration of the training loop goes around model, loss and optimizer: the options that are no model's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

from tracer.precision.policy import parse_policy
from traces.errors import SpecError

BEFORE: Final = "before"
AFTER: Final = "after"
KEEP: Final = "keep"
NONE: Final = "none"
ZERO_GRAD: Final = (BEFORE, AFTER, KEEP, NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The options of the loop; as they are by default, the ordinary one."""

    # Gradients are set to None before forward or after the optimizer's step, or set to zero after it
    # (set_to_none=False) and so stay, or are left to add up.
    zero_grad: str = BEFORE
    clip_grad_norm: float | None = None  # the most that the norm of all gradients may be
    accumulate: int = 1  # how often forward and backward run, on a batch each, before the optimizer's step
    # Each parameter is stepped in backward, and its gradient freed (`released`).
    release_gradients: bool = False

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return ", ".join(f"{name} {value}" for name, value in given)


ORDINARY: Final = Loop()
LOOP_OPTIONS: Final = tuple(f.name for f in fields(Loop))
AROUND_OPTIONS: Final = ("amp", *LOOP_OPTIONS)  # what is applied around whatever builds a step


def parse_around(given: dict[str, Any]) -> dict[str, Any]:
    """Check and return those of all options that are applied around a step. Raises SpecError: an unknown value."""
    loop = {k: given[k] for k in LOOP_OPTIONS if given.get(k) is not None}
    if (way := loop.get("zero_grad", BEFORE)) not in ZERO_GRAD:
        raise SpecError(f"--zero-grad {way!r} is unknown; known are {', '.join(ZERO_GRAD)}.")
    norm, count = loop.get("clip_grad_norm", 1.0), loop.get("accumulate", 1)
    if type(norm) not in (int, float) or not norm > 0:
        raise SpecError(f"--clip-grad-norm {norm!r} must be a number above 0.")
    if type(count) is not int or count < 1:
        raise SpecError(f"--accumulate {count!r} must be a whole number of at least 1.")
    if loop.get("release_gradients") and ("clip_grad_norm" in loop or count > 1 or way != BEFORE):
        raise SpecError(
            "--release-gradients steps each parameter in backward and frees its gradient, which excludes "
            "--clip-grad-norm, --accumulate and --zero-grad, for which all gradients are there after backward."
        )
    return parse_policy(given) | loop

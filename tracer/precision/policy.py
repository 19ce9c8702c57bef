"""How a step computes with several types (autocast, gradient scaling): the options, the contexts, the scaler."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, Final

from traces.errors import SpecError

AMP_DTYPES: Final = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}
FLOAT16: Final = "float16"  # the one that needs its gradients scaled: its smallest normal number is 6e-5

LOW_SCALE: Final = 2.0**-16


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """A state of `torch.autocast` for one kind of device.

    torch keeps the cast of a parameter for as long as the outermost region lasts, so that it is made once however often
    the parameter is used, and the gradients of its uses are summed in the lower precision. `cache`: whether it does.
    """

    dtype: str = ""  # as torch names it; "": autocast is off
    kind: str = "cpu"  # the device type of the tensors that are cast
    cache: bool = True

    def region(self) -> contextlib.AbstractContextManager[Any]:
        """The state."""
        if not self.dtype:
            return contextlib.nullcontext()
        import torch

        return torch.autocast(self.kind, dtype=getattr(torch, self.dtype), cache_enabled=self.cache)


OFF: Final = Autocast()


def ambient(kind: str) -> Autocast:
    """The state of autocast at this moment for a kind of device."""
    import torch

    if not torch.is_autocast_enabled(kind):
        return replace(OFF, kind=kind)
    dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return Autocast(dtype=dtype, kind=kind, cache=torch.is_autocast_cache_enabled())


def parse_policy(given: dict[str, Any]) -> dict[str, Any]:
    """The type of autocast out of all options, by its full name. Raises SpecError: an unknown one, or autocast of
    weights that are not float32.
    """
    if given.get("amp") is None:
        return {}
    amp, dtype = parse_amp(given["amp"]), str(given.get("dtype") or "float32").removeprefix("torch.")
    if dtype not in ("float32", "fp32"):
        raise SpecError(
            f"--amp {amp} keeps the weights in float32, and --dtype {dtype} does not; give one of the two."
        )
    return {"amp": amp}


def parse_amp(value: Any) -> str:
    """The full name of a type for autocast; SpecError if it is none."""
    name = str(value).lower().removeprefix("torch.")
    if name not in AMP_DTYPES:
        raise SpecError(f"--amp {value!r} is unknown; known are {', '.join(AMP_DTYPES)}.")
    return AMP_DTYPES[name]


def scale_of(scaler: Any) -> float:
    """By what a scaler multiplies the loss; 1 without one. It falls in a step whose gradients overflow."""
    return 1.0 if scaler is None else float(scaler.get_scale())


def start_low(scaler: Any) -> None:
    """Give a scaler, if there is one, a scale at which no gradient overflows: it skips steps that do, and torch's first
    scale may be too large."""
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": LOW_SCALE})


def scaler_tensors(scaler: Any) -> list[Any]:
    """Return what a gradient scaler keeps from step to step: its scale and the count of steps since it changed."""
    found = [] if scaler is None else [scaler._scale, scaler._growth_tracker]
    return [x for x in found if x is not None]

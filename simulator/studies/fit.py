"""Turn a comparison and a device's memory into whether the step fits, with and without the plan, and what is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simulator.allocator.device import DeviceMemory
from simulator.allocator.question import Reserved
from simulator.studies.prediction import Comparison
from traces.units import show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether a step fits a device, and by how much. On a GPU reserved memory decides, on the CPU allocated memory."""

    device: DeviceMemory
    kept_bytes: int  # the peak with everything kept, with as much memory as it asks for
    plan_bytes: int
    kept_fits: bool
    plan_fits: bool
    kept_retries: int = 0  # how often a step gives all cached memory back to make room
    plan_retries: int = 0
    message: str = ""  # why the plan does not fit

    @property
    def left_bytes(self) -> int | None:
        """What the device has left at the plan's peak; None if it does not fit."""
        return max(0, self.device.usable_bytes - self.plan_bytes) if self.plan_fits else None

    def to_json(self) -> dict[str, Any]:
        return {
            **self.device.to_json(),
            "baseline_fits": self.kept_fits,
            "plan_fits": self.plan_fits,
            "left_bytes": self.left_bytes,
            "baseline_retries_a_step": self.kept_retries,
            "plan_retries_a_step": self.plan_retries,
        }

    def lines(self) -> list[str]:
        """To read."""
        head = f"device  {self.device.room()}"
        if self.left_bytes is None:
            return [head, f"        does not fit: {self.message}"]
        retries = f", with {self.plan_retries} retries a step" if self.plan_retries else ""
        return [head, f"        fits{retries}, {show_bytes(self.left_bytes)} left"]


def fit(c: Comparison, device: DeviceMemory | None) -> Fit | None:
    """Whether the two runs of a comparison fit; None without a device."""
    if device is None:
        return None
    usable = device.usable_bytes
    kept, planned = c.kept_reserved, c.planned_reserved
    if kept is None or planned is None:
        kept_peak = c.kept_timeline.peak_allocated_bytes
        plan_peak = c.planned_timeline.peak_allocated_bytes
        return Fit(
            device=device,
            kept_bytes=kept_peak,
            plan_bytes=plan_peak,
            kept_fits=kept_peak <= usable,
            plan_fits=plan_peak <= usable,
            message="" if plan_peak <= usable else _short(plan_peak, usable, "allocates"),
        )
    return Fit(
        device=device,
        kept_bytes=kept.figures.highest_reserved_bytes,
        plan_bytes=planned.figures.highest_reserved_bytes,
        kept_fits=kept.fits,
        plan_fits=planned.fits,
        kept_retries=kept.figures.retries_a_step if kept.fits else 0,
        plan_retries=planned.figures.retries_a_step if planned.fits else 0,
        message=_reserved_message(planned, usable),
    )


def _reserved_message(reserved: Reserved, usable: int) -> str:
    if reserved.fits:
        return ""
    wanted = reserved.wanted_bytes
    return _short(wanted, usable, "reserves") if wanted > usable else reserved.out_of_memory


def _short(peak: int, usable: int, does: str) -> str:
    return f"the step {does} {show_bytes(peak)}, {show_bytes(peak - usable)} more than there is to use"

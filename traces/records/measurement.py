"""Measurement: what real runs showed, beside the prediction and the environment that they ran in."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, TypeVar

from traces.errors import TraceError
from traces.files import Form, JsonRecord
from traces.provenance import ABSENT, MEASURED_CPU, MEASURED_CUDA, REHEARSED
from traces.records.plan import ALLOCATED

ITERATIONS: Final = 5  # as many are measured, rehearsed and predicted; the last is the one that counts
T = TypeVar("T")


def steady(iterations: Sequence[T]) -> Sequence[T]:
    """Return those in the steady state: all after the first, which makes the optimizer's state, or it alone."""
    return iterations[1:] or iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of one way to run the step, predicted or measured; None: not known for this device.

    `peak_allocated_bytes` are the bytes that the step asked for: the sum of its tensors and of what ops use inside.
    The CPU's allocator hands out as much; CUDA's rounds up, so there `peak_block_bytes` is beside it, the bytes of the
    blocks handed out. In torch's memory_stats() the three are requested_bytes.all.peak, allocated_bytes.all.peak
    (which is also torch.cuda.max_memory_allocated()) and reserved_bytes.all.peak.
    """

    peak_allocated_bytes: int | None = None
    peak_block_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_time_ns: int | None = None
    # The spread behind the figures: the peak of each iteration, and every timed step.
    peaks_bytes: tuple[int, ...] = ()
    times_ns: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()  # at the end of each iteration
    # Of a plan: steps with everything kept that ran in turns with `times_ns`, the k-th beside the k-th.
    keep_all_times_ns: tuple[int, ...] = ()

    def peak_bytes(self, of: str) -> int | None:
        """The peak that a budget of `of` (allocated, reserved) limits."""
        return self.headline()[f"peak_{of}_bytes"]

    def headline(self) -> dict[str, int | None]:
        """The four figures that every `--json` shows, the first fields."""
        return {f.name: getattr(self, f.name) for f in fields(self)[:4]}

    def __post_init__(self) -> None:
        pairs = self.keep_all_times_ns
        if pairs and (len(pairs) != len(self.times_ns) or min(pairs) <= 0):
            raise ValueError("keep_all_times_ns are not the times of as many steps as times_ns")


def slowdown_percent(plan: RunFigures, keep_all: RunFigures) -> float | None:
    """Percent by which the plan's time is above keep-all's, of steps in turns the median over pairs; None: unknown."""
    if plan.keep_all_times_ns:
        pairs = zip(plan.times_ns, plan.keep_all_times_ns, strict=True)
        return 100.0 * (statistics.median(p / k for p, k in pairs) - 1.0)
    if not keep_all.step_time_ns or plan.step_time_ns is None:
        return None
    return 100.0 * (plan.step_time_ns / keep_all.step_time_ns - 1.0)


def signed_error_percent(predicted: RunFigures, measured: RunFigures) -> dict[str, float | None]:
    """100 * (predicted - measured) / measured for each figure; negative: the prediction was too low.

    None where either figure is unknown.
    """
    after = measured.headline()
    return {
        key: None if value is None or not (real := after[key]) else 100.0 * (value - real) / real
        for key, value in predicted.headline().items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(JsonRecord):
    """One `execute`: the plan's prediction, and what was measured of eager, keep-all and the plan."""

    form: ClassVar = Form(name="measurement", version=1, advice="run `execute` again", error=TraceError)
    model: str
    options: Mapping[str, Any]
    planner: str
    budget_bytes: int | None
    fingerprint: str
    device: str
    provenance: str  # measured-cpu, measured-cuda or REHEARSED
    environment: Mapping[str, str]
    predicted: RunFigures
    measured: RunFigures
    keep_all_predicted: RunFigures
    keep_all: RunFigures
    eager: RunFigures
    verified: bool | None = None
    max_abs_difference: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0
    bit_equal: bool | None = None
    first_difference: str = ""
    verification_note: str = ""
    budget_of: str = ALLOCATED  # what the budget limits
    warnings: tuple[str, ...] = ()  # what the plan said beside its prediction

    def __post_init__(self) -> None:
        """What is not there has no times, and computes nothing that could be verified."""
        gpu = self.environment.get("gpu", "")
        rehearsed = gpu.endswith(ABSENT)
        if rehearsed != (self.provenance == REHEARSED):
            raise ValueError(f"the provenance is {self.provenance}, and the GPU {gpu or 'none'}")
        runs = (self.eager, self.keep_all, self.measured)
        timed = any(f.step_time_ns is not None or f.times_ns for f in runs)
        if rehearsed and (timed or self.verified is not None):
            raise ValueError(f"{gpu} is not there, and has times or a verification")

    @property
    def place(self) -> str:
        """The device of the figures: "CPU", or "GPU (NVIDIA H200)"."""
        kind = {MEASURED_CPU: "CPU", MEASURED_CUDA: "GPU"}.get(self.provenance, self.device)
        gpu = self.environment.get("gpu")
        return f"{kind} ({gpu})" if gpu else kind

    @property
    def within_budget(self) -> bool | None:
        """True if the measured peak is within the budget; None where either is unknown."""
        peak = self.measured.peak_bytes(self.budget_of)
        return None if self.budget_bytes is None or peak is None else peak <= self.budget_bytes

    @property
    def slowdown_percent(self) -> float | None:
        """The time that the plan adds to the step, measured, in percent."""
        return slowdown_percent(self.measured, self.keep_all)

    @property
    def predicted_slowdown_percent(self) -> float | None:
        """The time that the plan adds to the step, predicted, in percent."""
        return slowdown_percent(self.predicted, self.keep_all_predicted)

    def to_json(self) -> dict[str, Any]:
        return {
            **JsonRecord.to_json(self),
            "error_percent": signed_error_percent(self.predicted, self.measured),
            "keep_all_error_percent": signed_error_percent(self.keep_all_predicted, self.keep_all),
            "slowdown_percent": {
                "predicted": self.predicted_slowdown_percent,
                "measured": self.slowdown_percent,
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome: `bit_equal` means every bit of every tensor after every step.

    `equal` is the verdict: equal in every value (0 and -0 are, and one NaN and another), or within the noise of an
    untouched model that differs from itself.
    """

    equal: bool
    bit_equal: bool
    steps: int
    max_abs_difference: dict[str, float] = field(default_factory=dict)  # by kind; NaN against NaN is equal
    first_difference: str = ""  # where the first bit differed
    losses: tuple[float, ...] = ()
    first_step_relative: float = 0.0  # of the first step: largest difference / largest value, by kind
    gradient_error: float = 0.0  # of the first step: relative L2 of the whole gradient
    note: str = ""  # how the verdict was reached, where it was not at the first comparison

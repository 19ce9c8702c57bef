"""The common language: the records that cross a process boundary, and the gallery of recorded traces."""

from traces.errors import (
    BudgetError,
    CaptureError,
    EnvironmentProblem,
    LowtideError,
    PlanError,
    SpecError,
    TraceError,
    VerificationError,
)
from traces.records.measurement import Measurement, RunFigures
from traces.records.plan import Action, Plan
from traces.records.trace import Ops, Storages, Trace, TraceMeta

__all__ = [
    "Action",
    "BudgetError",
    "CaptureError",
    "EnvironmentProblem",
    "LowtideError",
    "Measurement",
    "Ops",
    "Plan",
    "PlanError",
    "RunFigures",
    "SpecError",
    "Storages",
    "Trace",
    "TraceError",
    "TraceMeta",
    "VerificationError",
]

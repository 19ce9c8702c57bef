"""Predict what a training step needs from its trace, and plan it into a memory budget. Never imports torch.

    simulate("resnet152")                     # peak, step time, reserved memory; in a notebook with its timeline
    found = plan("resnet152", "60%")          # the cheapest plan found; found.save("plan.json") for `execute`
    simulate("resnet152", found)              # the step with it
    bound("resnet152", "60%")                 # what no plan can beat
    pareto("resnet152")                       # what each GiB costs

A trace is a `Trace`, the directory that `trace` wrote, or a name in the gallery. A budget is bytes (int), a size such
as "8GiB", or a share of the step's own peak such as "60%".
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulator.planners.outcome import Infeasible
    from simulator.prediction.ask import bound, plan, simulate
    from simulator.studies.comparison import compare
    from simulator.studies.max_batch import max_batch
    from simulator.studies.pareto import pareto

__all__ = ["Infeasible", "bound", "compare", "max_batch", "pareto", "plan", "simulate"]
PLACES = {"Infeasible": "planners.outcome", "compare": "studies.comparison"}
PLACES |= {name: f"studies.{name}" for name in ("max_batch", "pareto")}


def __getattr__(name: str) -> Any:
    """Return what the package offers, imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"simulator.{PLACES.get(name, 'prediction.ask')}"), name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]

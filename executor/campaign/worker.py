"""The fresh process behind a campaign's cases: does one task and answers with its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from executor.campaign.predict import predict_fit, predict_plan, predict_step
from executor.campaign.record_step import describe_device, record_step
from executor.isolated import serve

TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "device": describe_device,
    "trace": record_step,
    "baseline": predict_step,
    "plan": predict_plan,
    "fit": predict_fit,
}


def do(payload: dict[str, Any]) -> dict[str, Any]:
    """A task's name and arguments -> what it returns."""
    arguments = dict(payload)
    return TASKS[arguments.pop("task")](**arguments)


if __name__ == "__main__":
    serve(do)

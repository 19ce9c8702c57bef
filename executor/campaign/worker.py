"""The fresh process behind a campaign's cases: reads one task as JSON on stdin, does it, prints the result as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from executor.campaign.predict import predict_fit, predict_plan, predict_step
from executor.campaign.record_step import describe_device, record_step
from executor.fresh import error_json

TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "device": describe_device,
    "trace": record_step,
    "baseline": predict_step,
    "plan": predict_plan,
    "fit": predict_fit,
}


def main() -> None:
    warnings.simplefilter("ignore")
    task = json.loads(sys.stdin.read())
    answer: dict[str, Any]
    try:
        answer = TASKS[task.pop("task")](**task)
    except Exception as error:
        told = error_json(error)
        if told is None:
            raise
        answer = told
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

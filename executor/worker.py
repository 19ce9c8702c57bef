"""The fresh process behind `executor.measure`: reads a job as JSON on stdin, does it, prints the result as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict
from typing import Any

from executor.fresh import error_json
from executor.measure import Job, perform


def main() -> None:
    warnings.simplefilter("ignore")
    job = Job(**json.loads(sys.stdin.read()))
    answer: dict[str, Any]
    try:
        answer = asdict(perform(job))
    except Exception as error:
        told = error_json(error, limited=job.limit_bytes > 0)
        if told is None:
            raise
        answer = told
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

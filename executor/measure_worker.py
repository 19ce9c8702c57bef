"""The fresh process behind `executor.measure`: does one job and answers with what it found."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from executor.isolated import serve
from executor.measure import Job, perform


def do(payload: dict[str, Any]) -> dict[str, Any]:
    """A job's fields -> its result's."""
    return asdict(perform(Job(**payload)))


if __name__ == "__main__":
    serve(do, limited=lambda payload: payload["limit_bytes"] > 0)

"""Run the outstanding cases of a campaign, each in processes of its own, and keep a record of each as it ends."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from executor.campaign.boundary import run_boundary
from executor.campaign.cases import BOUNDARY, Campaign, Case
from executor.campaign.one import Bench, SharedStep, run_case, shared_step
from executor.campaign.record import FAILED, RETRIED, Book, Keys, Record, Store, code_digest
from executor.isolated import run_fresh
from traces.errors import LowtideError, SpecError

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which of the cases to run now."""

    only: str = ""  # a part of the label, with * and ? as in file names
    retry_failed: bool = False

    def wants(self, case: Case) -> bool:
        return not self.only or fnmatch.fnmatch(case.label.lower(), f"*{self.only.lower()}*")


def run_campaign(campaign: Campaign, store: Store, choice: Choice, progress: Progress) -> Book:
    """Run what is not there yet; returns all records, which also stand in `campaign.json`.

    Cases of the same step run one after the other and share its traces, eager and keep-all. Ctrl-C loses the running
    case alone.

    Raises:
        EnvironmentProblem: no such device.
        SpecError: `choice.only` fits no case.
        TraceError: the directory holds a foreign file in a record's place.
    """
    chosen = [c for c in campaign.cases if choice.wants(c)]
    if not chosen:
        raise SpecError(
            f"--only {choice.only!r} fits none of the {len(campaign.cases)} cases, such as "
            f"{campaign.cases[0].label!r}."
        )
    device = campaign.method.device
    progress(f"Looking at the device {device} ...")
    found = run_fresh(
        "executor.campaign.record_step:describe_device", {"device": device}, what="looked at the device"
    )
    bench = Bench.of(campaign.method, found, store)
    keys = Keys(method=campaign.method, code=code_digest(), environment=bench.environment)
    records: dict[str, Record] = {}
    for case in campaign.cases:
        kept = store.record(keys.of_case(case))
        if kept is not None and not (choice.retry_failed and choice.wants(case) and kept.status in RETRIED):
            records[kept.key] = kept

    def book() -> Book:
        in_order = [records[k] for k in map(keys.of_case, campaign.cases) if k in records]
        return Book(
            name=campaign.name, method=campaign.method, asked=len(campaign.cases), records=tuple(in_order)
        )

    earlier = store.put_aside({keys.of_case(c) for c in campaign.cases})
    if earlier is not None:
        progress(
            "What this directory holds was made in part by other code, versions or another device, or for other cases. "
            f"It is kept in {earlier}, which `execute campaign` reports like any other."
        )
    store.save_book(book())
    queue = [c for c in chosen if keys.of_case(c) not in records]
    if kept_number := len(chosen) - len(queue):
        progress(f"{kept_number} of {len(chosen)} cases are finished and kept.")
    queue = _by_step(queue, keys)
    steps: dict[str, SharedStep | LowtideError] = {}
    for number, case in enumerate(queue):
        progress(f"[{number + 1}/{len(queue)}] {case.label}")
        record = _run(case, keys, bench, steps, progress)
        store.save(record)
        records[record.key] = record
        store.save_book(book())
        progress(f"    {record.status}{': ' + record.message if record.message else ''}")
    return book()


def _by_step(cases: list[Case], keys: Keys) -> list[Case]:
    """In the order of the file, but with the cases of one step side by side."""
    order: dict[str, int] = {}
    for case in cases:
        order.setdefault(keys.of_step(case), len(order))
    return sorted(cases, key=lambda c: order[keys.of_step(c)])


def _shared(case: Case, key: str, bench: Bench, progress: Progress) -> SharedStep | LowtideError:
    """What the step's cases share, or why they have nothing to share, which none of them must find out again."""
    try:
        return shared_step(case, key, bench, progress)
    except LowtideError as error:
        return error


def _run(
    case: Case,
    keys: Keys,
    bench: Bench,
    steps: dict[str, SharedStep | LowtideError],
    progress: Progress,
) -> Record:
    """One case, from the beginning to its record, whatever happens but Ctrl-C."""
    begin = time.perf_counter()
    key = keys.of_case(case)
    record = bench.empty(case, key)
    try:
        if case.kind == BOUNDARY:
            record = run_boundary(record, keys, bench, progress)
        else:
            step_key = keys.of_step(case)
            if step_key not in steps:
                steps[step_key] = _shared(case, step_key, bench, progress)
                begin = time.perf_counter()
            step = steps[step_key]
            if isinstance(step, LowtideError):
                raise step
            record = run_case(record, step, bench, progress)
    except LowtideError as error:
        record = replace(record, status=FAILED, message=str(error))
    seconds = time.perf_counter() - begin
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(record, seconds=round(seconds, 2), finished=finished)

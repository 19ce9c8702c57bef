"""Run the outstanding cases of a campaign, and save the record of each as it ends."""

from __future__ import annotations

import fnmatch
import time
from dataclasses import replace
from datetime import UTC, datetime

from executor.campaign.bench import Bench, Progress
from executor.campaign.cases import NONE, Campaign, Case
from executor.campaign.record import RETRIED, Book, Record, Store
from traces.errors import SpecError


def run_campaign(
    campaign: Campaign, store: Store, progress: Progress, *, only: str = "", retry_failed: bool = False
) -> Book:
    """Run what is not there yet; returns all records, which also stand in `campaign.json`.

    Cases of the same step run one after the other and share what they can. Ctrl-C loses the running case alone.

    Args:
        only: a part of the label of the cases that run, with * and ? as in file names.
        retry_failed: run failed cases and failed verifications again.

    Raises:
        EnvironmentProblem: no such device.
        SpecError: `only` fits no case.
        TraceError: the directory holds a foreign file in a record's place.
    """
    cases = campaign.cases
    chosen = [c for c in cases if fnmatch.fnmatch(c.label.lower(), f"*{only.lower()}*")]
    if not chosen:
        raise SpecError(f"--only {only!r} fits none of the {len(cases)} cases, such as {cases[0].label!r}.")
    bench = Bench.open(campaign.method, store, progress)
    keys = bench.keys
    records: dict[str, Record] = {}
    for case in cases:
        known = store.record(keys.of_case(case))
        if known is not None and not (retry_failed and case in chosen and known.status in RETRIED):
            records[known.key] = known

    def book() -> Book:
        made = tuple(records[k] for k in map(keys.of_case, cases) if k in records)
        return Book(name=campaign.name, method=campaign.method, asked=len(cases), records=made)

    earlier = store.put_aside({keys.of_case(c) for c in cases})
    if earlier is not None:
        progress(
            "What this directory holds was made in part by other code, versions or another device, or for other cases. "
            f"It is kept in {earlier}, which `execute campaign` reports like any other."
        )
    store.save_book(book())
    queue = [c for c in chosen if keys.of_case(c) not in records]
    if finished := len(chosen) - len(queue):
        progress(f"{finished} of {len(chosen)} cases are finished and kept.")
    order = list(dict.fromkeys(keys.of_step(c.step) for c in queue))
    queue.sort(key=lambda c: order.index(keys.of_step(c.step)))  # as in the file, but a step's cases together
    for number, case in enumerate(queue):
        progress(f"[{number + 1}/{len(queue)}] {case.label}")
        record = _run(case, bench)
        store.save(record)
        records[record.key] = record
        store.save_book(book())
        progress(f"    {record.status}{': ' + record.message if record.message else ''}")
    return book()


def _run(case: Case, bench: Bench) -> Record:
    """One case, from the beginning to its record, whatever happens but Ctrl-C."""
    step = bench.step(case.step)
    begin = time.perf_counter()
    try:
        record = step if case.budget == NONE else bench.case(case, step)
    except Exception as error:
        record = bench.empty(case).failed(error)
    seconds = round(time.perf_counter() - begin, 2)
    return replace(record, seconds=seconds, finished=datetime.now(UTC).isoformat(timespec="seconds"))

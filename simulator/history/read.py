"""Tell what a file is, and read it as a `History`: a trace, a plan of one, a rehearsal, a snapshot, a measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from simulator.allocator.device import kind_of
from simulator.allocator.replay import load_plain
from simulator.core.problem import holdings
from simulator.history.run import NO_MODULE, History, of_layers, parts_of
from simulator.history.snapshot import history_of
from simulator.planners.outcome import where
from simulator.prediction.ask import Question, problem_of, simulate
from simulator.prediction.step import Prediction
from traces.errors import SpecError, TraceError
from traces.records.measurement import Measurement
from traces.records.trace import BUFFER, HELD, PARAMETER, WORKSPACE

PICKLES: Final = (".pickle", ".pkl")
KNOWN: Final = "a trace, plan or memory snapshot, or the JSON of `execute rehearse --json`, `execute PLAN -o`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A history, and what it was read from, as far as more can be asked of that."""

    history: History
    prediction: Prediction | None = None
    snapshot: Any = None


def read(name: str, question: Question, trace: str | None = None) -> Source:
    """Read what the name stands for: a file, a directory, or a trace in the gallery, under the question's settings and
    on its device; `trace`: of a plan. Raises LowtideError: it is not there, damaged, or of no kind that is read here.
    """
    path = Path(name)
    if not path.is_file():
        return of_trace(name, None, question)
    with path.open("rb") as file:
        head = file.read(1)
    if head == b"\x80" or path.suffix in PICKLES:
        data = load_plain(path)
        found, device = history_of(data, name), question.device("cuda")
        if device is not None:
            outside = None if found.refused else device.context_bytes  # which a refusal tells
            found = replace(found, device_bytes=device.memory_bytes, outside_bytes=outside)
        return Source(history=found, snapshot=data)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise SpecError(f"{name}: this is none of what is read here: {KNOWN}.") from None
    record = data.get("record") if isinstance(data, dict) else None
    if record == "measurement":
        return Source(history=_measured(name, Measurement.load(path)))
    if record == "plan":
        if trace is None:
            raise SpecError(f"{name}: a plan is of a trace; name that with --trace.")
        return of_trace(trace, path, question)
    try:
        ranks = data.get("rehearsals", [data])
        return Source(history=_rehearsed(name, max(ranks, key=lambda rank: rank["gpu_bytes"])))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        raise TraceError(f"{name}: this JSON is none of what is read here: {KNOWN}.") from None


def of_trace(name: str, plan: Path | None, question: Question) -> Source:
    """A trace with everything saved, or by its plan; the steady iteration."""
    problem = problem_of(name)
    device = question.device(kind_of(problem.trace.meta))
    c = simulate(problem, plan, alloc_conf=question.alloc_conf, device=device)
    return Source(history=of_prediction(c, name if plan is None else str(plan)), prediction=c)


def of_prediction(c: Prediction, name: str) -> History:
    """The steady iteration of the planned step. Memory outside of torch, and the device, are those of the question."""
    trace, run, device, reserved = c.step.trace, c.planned, c.setting.device, c.planned_fit.reserved
    ops, sts, at, peak = trace.ops, trace.storages, run.timeline.peak_step, run.timeline.peak_allocated_bytes
    op = run.schedule.op[at] if at >= 0 else -1
    told = []
    for s in holdings(trace, run.schedule, at) if at >= 0 else range(len(sts)):
        made, name_of, category = sts.producer[s], sts.name[s], sts.category[s]
        own = name_of.rpartition(".")[0] or "the model itself"
        named = own if category in (PARAMETER, BUFFER) else NO_MODULE
        of = (ops.module[made] or NO_MODULE, ops.name[made]) if made >= 0 else (named, name_of)
        told.append((category, *of, sts.nbytes[s]))
    if rest := peak - sum(row[-1] for row in told):
        told.append((WORKSPACE, ops.module[op] or NO_MODULE, ops.name[op], rest))
    return History(
        name=name,
        kind="plan" if c.plan.changes else "trace",
        peak_bytes=peak,
        where=where(trace, op) if at >= 0 else "",
        parts=parts_of((category, module, of_layers(line, module), n) for category, module, line, n in told),
        reserved_bytes=None if reserved is None else reserved.peak_reserved_bytes,
        most_reserved_bytes=None if reserved is None else reserved.highest_reserved_bytes,
        outside_bytes=None if device is None else device.context_bytes + device.reserve_bytes,
        device_bytes=None if device is None else device.memory_bytes,
        curve=tuple((n, 0) for n in run.timeline.peak_bytes),
    )


def _rehearsed(name: str, r: Mapping[str, Any]) -> History:
    phases: Mapping[str, Mapping[str, int]] = r["iterations"][-1]["phases"]
    peaks = {phase: p["requested_bytes"] for phase, p in phases.items()}
    highest = max(peaks, key=peaks.__getitem__)
    categories = {HELD[k]: n for k, n in r["at_the_peak"].items()}
    told = [("", row["line"].partition(":")[0], row["line"], row["requested_bytes"]) for row in r["alive"]]
    in_smaller_lines = max(0, sum(categories.values()) - sum(row[-1] for row in told))
    told.append(("", "", "", in_smaller_lines))
    by_size = sorted(categories.items(), key=lambda kn: -kn[1])
    return History(
        name=name,
        kind="rehearsal",
        peak_bytes=peaks[highest],
        where=highest,
        parts={**parts_of(told), "category": dict(by_size)},
        reserved_bytes=phases[highest]["reserved_bytes"],
        most_reserved_bytes=max(p["reserved_bytes"] for p in phases.values()),
        outside_bytes=r["outside_bytes"],
        device_bytes=r["memory_bytes"],
        notes=tuple(f"torch said: {text}" for text in [r["out_of_memory"]] if text),
        curve=tuple((p["requested_bytes"], p["reserved_bytes"]) for p in phases.values()),
    )


def _measured(name: str, m: Measurement) -> History:
    run = m.measured
    peaks = run.peaks_bytes or (run.peak_allocated_bytes or 0,)
    return History(
        name=name,
        kind="measurement",
        peak_bytes=run.peak_allocated_bytes or max(peaks),
        parts={},
        reserved_bytes=run.peak_reserved_bytes,
        notes=(f"{name} is a measurement, which knows the peak of each iteration and not what held it.",),
        curve=tuple(zip_longest(peaks, run.reserved_bytes[: len(peaks)], fillvalue=0)),
    )

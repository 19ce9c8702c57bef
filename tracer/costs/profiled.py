"""Give a trace the op times that torch.profiler measured: a Kineto trace of the same loop, in Chrome's JSON."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median, mode
from typing import Any, Final, NamedTuple

from traces.errors import TraceError
from traces.records.trace import VIEW, Trace

ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what runs on a GPU
NS_PER_US: Final = 1000
# What a captured graph calls otherwise than the loop does; and it has no ops in place where the loop has.
IN_GRAPHS: Final = {"aten::native_batch_norm": "aten::_native_batch_norm_legit_functional"}


class Timed(NamedTuple):
    """A trace with measured times, and how much of the profile they are."""

    trace: Trace
    steps: int  # that the profile holds
    ops: int  # of the trace that were measured
    # Ops that the profile has in another number, the longest first: their times stay estimates.
    missed: tuple[str, ...]

    def in_words(self) -> str:
        computing = sum(not f & VIEW for f in self.trace.ops.flags)
        told = f"{self.ops} of {computing} ops have the median of {self.steps} measured steps"
        return told + (f"; still estimated: {', '.join(self.missed)}" if self.missed else "")


def with_times(trace: Trace, path: Path) -> Timed:
    """The trace with the times of a profile in the place of its own.

    An op of the trace is matched by its name and its turn among the ops of that name. Where a profile holds some steps,
    an op gets the median over them; a GPU's op has the time of the kernels that it launched.

    Counts: kernels, or on a CPU the ops themselves. Ignores: pauses between them; that ops of one name may run in
    another order than in the trace.

    Raises:
        TraceError: the file is no such profile, or is of another step.
    """
    ops = trace.ops
    names = [_name("::".join(target.split(".")[:2])) for target in ops.target]
    wanted = Counter(names)
    measured = defaultdict[str, list[int]](list)
    for name, time_ns in _measured(_events(path), wanted, path):
        measured[name].append(time_ns)
    ratios = [len(found) // wanted[name] for name, found in measured.items() if not len(found) % wanted[name]]
    steps = mode(ratios) if ratios else 0
    whole = {name for name, found in measured.items() if len(found) == steps * wanted[name]}
    if not steps or 2 * sum(wanted[name] for name in whole) < len(ops):
        raise TraceError(
            f"{path}: a profile of another step: fewer than half of the {len(ops)} ops of {trace.meta.model} are in it "
            "as often. Profile whole steps of the loop that was traced, with the same model and batch."
        )
    turn, estimated, times, count = Counter[str](), Counter[str](), list(ops.time_ns), 0
    for i, name in enumerate(names):
        if name in whole and not ops.flags[i] & VIEW:
            times[i] = round(median(measured[name][turn[name] :: wanted[name]]))
            count += 1
        elif not ops.flags[i] & VIEW:
            estimated[name] += times[i]
        turn[name] += 1
    meta = replace(trace.meta, profile=f"{path.name}, {steps} step{'s' * (steps > 1)}")
    missed = tuple(name for name, time_ns in estimated.most_common() if time_ns)
    return Timed(replace(trace, meta=meta, ops=replace(ops, time_ns=tuple(times))), steps, count, missed)


def _name(op: str) -> str:
    """An op's name by which graph and loop call the same op: "aten::add_" -> "aten::add"."""
    return IN_GRAPHS.get(op, op).removesuffix("_")


def _events(path: Path) -> list[dict[str, Any]]:
    """The events of a profile that have a duration, in the order in which they began."""
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = [e for e in data["traceEvents"] if e.get("ph") == "X" and e["dur"] >= 0]
        return sorted(events, key=lambda e: (e["ts"], -e["dur"]))
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}: this is no profile as torch.profiler's export_chrome_trace writes it ({error})."
        ) from None


def _measured(
    events: list[dict[str, Any]], wanted: Mapping[str, int], path: Path
) -> Iterator[tuple[str, int]]:
    """By wanted op that is in no other such: its name and its time, in order."""
    kernels = defaultdict[Any, float](float)  # by what launched them, in us
    for e in events:
        if e.get("cat") in ON_GPU:
            kernels[e.get("args", {}).get("External id")] += e["dur"]
    # By thread: where its last wanted op ends, and what that launched.
    until = dict[Any, tuple[float, list[float]]]()
    found = list[tuple[str, list[float]]]()
    for e in events:
        if e.get("cat") != "cpu_op":
            continue
        launched = kernels.get(e.get("args", {}).get("External id"), 0.0) if kernels else 0.0
        end, inside = until.get(e.get("tid"), (0.0, []))
        if e["ts"] < end:
            inside.append(launched)
        elif (name := _name(str(e.get("name")))) in wanted:
            parts = [launched if kernels else e["dur"]]
            until[e.get("tid")] = e["ts"] + e["dur"], parts
            found.append((name, parts))
    if not found:
        raise TraceError(
            f"{path}: no op of the trace is in this profile; profile with ProfilerActivity.CPU on, too."
        )
    yield from ((name, round(NS_PER_US * sum(parts))) for name, parts in found)

"""Give a trace the op times that torch.profiler measured: a Kineto trace of the same loop, in Chrome's JSON."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median, mode
from typing import Any, Final

from traces.errors import TraceError
from traces.records.trace import VIEW, Trace

ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of what runs on a GPU
NS_PER_US: Final = 1000
# What a captured graph calls otherwise than the loop does; and it has no ops in place where the loop has.
IN_GRAPHS: Final = {
    "aten::native_batch_norm": "aten::_native_batch_norm_legit_functional",
    "aten::native_dropout": "lowtide::dropout_mask",  # the kernel multiplies, too
}


def with_times(trace: Trace, path: Path) -> tuple[Trace, dict[str, Any]]:
    """The trace with the times of a profile in the place of its own; and how many steps that holds, how many ops of
    which compute it measured, and which ops, the longest first, keep their estimates as it has them not, or elsewhere.

    An op of the trace that computes is matched by its name and its turn among the ops of that name; where a step of the
    profile has more or fewer of the name, by its turn since the last op of which it has as many. Where a profile holds
    some steps, an op gets the median over them; a GPU's op has the time of the kernels that it launched.

    Counts: kernels, or on a CPU the ops themselves. Ignores: pauses between them; that ops of one name may run in
    another order than in the trace. Raises TraceError: the file is no such profile, or is of another step.
    """
    ops = trace.ops
    names = [_name("::".join(target.split(".")[:2])) for target in ops.target]
    computing = [i for i, flags in enumerate(ops.flags) if not flags & VIEW]
    wanted = Counter(names[i] for i in computing)
    found = [m for m in _measured(path, frozenset(names)) if m[0] in wanted]
    seen = Counter(name for name, _ in found)
    ratios = [n // wanted[name] for name, n in seen.items() if not n % wanted[name]]
    steps = mode(ratios) if ratios else 0
    whole = {name: n for name, n in wanted.items() if seen[name] == steps * n > 0}
    by_turn = defaultdict[tuple[str, int, int], list[int]](list)
    for turn, (_, time_ns) in zip(_turns([name for name, _ in found], whole), found, strict=True):
        by_turn[turn].append(time_ns)
    turns = dict(zip(computing, _turns([names[i] for i in computing], whole), strict=True))
    measured = {i: by_turn[turn] for i, turn in turns.items() if turn in by_turn}
    if 2 * sum(map(any, measured.values())) < max(len(computing), len(found) // max(1, steps)):
        raise TraceError(
            f"{path}: a profile of another step, or without its kernels: fewer than half of the {len(computing)} ops "
            f"that compute in {trace.meta.model} are in it in that order with a time, or they are fewer than half of "
            "what it holds. Profile whole steps of the loop that was traced, with the same model and batch."
        )
    times, estimated = list(ops.time_ns), Counter[str]()
    for i in computing:
        if i in measured:
            times[i] = round(median(measured[i]))
        else:
            estimated[names[i]] += times[i]
    meta = replace(trace.meta, profile=f"{path.name}, {steps} step{'s' * (steps > 1)}")
    missed = [name for name, time_ns in estimated.most_common() if time_ns]
    told = {"steps": steps, "measured_ops": len(measured), "ops": len(computing), "estimated": missed}
    return replace(trace, meta=meta, ops=replace(ops, time_ns=tuple(times))), told


def _turns(names: Sequence[str], whole: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """By op of some steps: its name, and its turn in its step among the ops of that name. `whole` says how many each
    step has; of others, the turns are counted anew from each op of which there are as many."""
    before, in_step, turn = 0, sum(whole.values()) or 1, Counter[tuple[str, int]]()
    for name in names:
        place = name, -1 if name in whole else before
        yield name, place[1] % in_step, turn[place] % whole.get(name, len(names))
        before += name in whole
        turn[place] += 1


def _name(op: str) -> str:
    """An op's name by which graph and loop call the same op: "aten::add_" -> "aten::add"."""
    return IN_GRAPHS.get(op, op).removesuffix("_")


def _measured(path: Path, wanted: Container[str]) -> Iterator[tuple[str, int]]:
    """By wanted op of a profile that is in no other such: its name and its time, in the order in which they began."""
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        events = [e for e in data["traceEvents"] if e.get("ph") == "X" and e["dur"] >= 0]
        events.sort(key=lambda e: (e["ts"], -e["dur"]))
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}: this is no profile as torch.profiler's export_chrome_trace writes it ({error})."
        ) from None
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

"""Write a predicted step for the tools that people have: torch's memory snapshot, and Perfetto's JSON.

The snapshot has what memory_viz and Mosaic read. It holds the iterations from the first, which makes the optimizer's
state, to the first that asks for no new memory. Its frames name the op, its module, the category, and "recomputed here"
where an op runs again. Blocks lie where the simulated allocator puts them; for a CPU's trace, where CUDA's would by
default.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulator.allocator.caching import Allocator, Block
from simulator.allocator.requests import Recorder, Requests, recorded
from simulator.allocator.settings import AllocatorSettings
from simulator.core.facts import OFFLOAD, RELOAD, transfer_ns
from simulator.core.problem import Problem, Replay, by_category, categories_of
from simulator.core.schedule import Schedule
from simulator.history.run import NO_MODULE, OURS
from simulator.prediction.step import Prediction
from traces.errors import SpecError
from traces.files import replacing, write_text
from traces.records.measurement import ITERATIONS
from traces.records.trace import (
    BACKWARD,
    OPTIMIZER,
    OPTIMIZER_STATE,
    PARAMETER,
    PHASES,
    VIEW,
    WORKSPACE,
    Trace,
)

SNAPSHOT, PERFETTO = ".pickle", ".json"
AGAIN = "recomputed here"  # in frames, under an op that runs again
TIMELESS = "no time of its own"  # what a rank does beside its blocks
COPIES = {OFFLOAD: "copies to host memory", RELOAD: "copies from host memory"}
Frames = list[dict[str, Any]]


def write_export(path: Path, c: Prediction) -> None:
    """Write the planned step (the one with everything saved, if there is no plan), by the ending of the name. Raises
    SpecError: an ending that means nothing."""
    check_export(path)
    if path.suffix == PERFETTO:
        write_text(path, json.dumps(perfetto_of(c.step.trace, c.planned), separators=(",", ":")))
        return
    with replacing(path) as place:
        place.write_bytes(pickle.dumps(snapshot_of(c), protocol=4))


def check_export(path: Path) -> None:
    """Raise SpecError if the ending is not that of a file that `write_export` can write."""
    if path.suffix not in (SNAPSHOT, PERFETTO):
        raise SpecError(f"--export {path}: end it in {SNAPSHOT} for memory_viz, or {PERFETTO} for Perfetto.")


def snapshot_of(c: Prediction) -> dict[str, Any]:
    """The snapshot of the planned step."""
    problem, replay = c.step, c.planned
    tellings: list[_Telling] = []

    def make(*args: Any, **words: Any) -> Recorder:
        tellings.append(_Telling(*args, **words))
        return tellings[-1]

    steady = recorded(problem, replay.schedule, make)
    first = steady.first or steady
    film = _Film(c.setting.settings, problem.trace, replay, first.residents)
    film.play(first, tellings[-1], with_once=True)
    asked = -1
    for _ in range(ITERATIONS - 1):
        if asked == (asked := len(film.allocator.segment_events)):
            break  # the last iteration asked for nothing new, so that all later ones are equal to it
        film.play(steady, tellings[0], with_once=False)
    return film.snapshot(c.setting.alloc_conf or "")


class _Telling(Recorder):
    """Tells for whom each request is made."""

    def __init__(self, problem: Problem, **words: Any) -> None:
        super().__init__(problem, **words)
        self.steps: list[int] = []  # request -> the step that makes it
        self.storages: dict[int, int] = {}  # block -> its storage
        self.for_once: list[int] = []  # of what is asked for once: the step

    def step(self, schedule: Schedule, step: int) -> None:
        first = self.count
        super().step(schedule, step)
        self.steps += [step] * (len(self.blocks) - len(self.steps))
        self.for_once += [step] * (len(self.once) - len(self.for_once))
        for s in self.trace.ops.writes[schedule.op[step]]:
            for block in (*self.there.get(s, ()), *self.sums.get(s, ())):
                if block >= first:
                    self.storages[block] = s


class _Film:
    """Plays requests to an allocator, and writes down what happens as torch does."""

    def __init__(
        self, settings: AllocatorSettings | None, trace: Trace, replay: Replay, sizes: tuple[int, ...]
    ) -> None:
        """`sizes` are of what is there before the first iteration."""
        self.allocator = Allocator(settings)
        self.trace, self.replay = trace, replay
        self.events: list[dict[str, Any]] = []
        self.live: dict[int, tuple[Block, Frames]] = {}  # by address
        self.held: dict[int, list[Block]] = {}  # by number, the older first
        self.begin_ns, self.phase = 0, ""
        self.annotations: list[dict[str, Any]] = []  # where phases begin and end
        self.told: dict[tuple[int, str], Frames] = {}
        self.lines: dict[str, int] = {}  # of names: tools take frames of one line for the same
        sts = trace.storages
        names: dict[int, list[int]] = {}
        for s, producer in enumerate(sts.producer):
            if producer < 0:
                names.setdefault(sts.nbytes[s], []).append(s)
        for size in sizes:
            of = names.get(size)
            s = of.pop(0) if of else -1
            category = sts.category[s] if s >= 0 else PARAMETER
            name = sts.name[s] if s >= 0 else "weights"
            self.malloc(size, 0, self.stack(name, name.rpartition(".")[0], category))

    def play(self, asked: Requests, telling: _Telling, *, with_once: bool) -> None:
        """One iteration; with what is asked for once, or without."""
        start_ns, schedule = self.replay.timeline.start_ns, self.replay.schedule
        once = list(zip(asked.once, telling.for_once or [0] * len(asked.once), strict=False)) * with_once
        once.reverse()
        count = len(asked.blocks)
        steps = telling.steps + [len(schedule) - 1] * (count - len(telling.steps))
        for k in range(count + 1):
            while once and once[-1][0][0] <= k:
                (_, size), step = once.pop()
                late = self.trace.ops.phase[schedule.op[step]] == OPTIMIZER
                state = self.stack("the first step", "optimizer", OPTIMIZER_STATE)
                self.malloc(size, start_ns[step], state if late else self.frames(step, WORKSPACE))
            if k == count:
                break
            block, at = asked.blocks[k], start_ns[steps[k]]
            again = schedule.recompute[steps[k]]
            self.enter(BACKWARD if again else self.trace.ops.phase[schedule.op[steps[k]]], at)
            if block >= 0:
                s = telling.storages.get(block, -1)
                category = self.trace.storages.category[s] if s >= 0 else WORKSPACE
                made = self.malloc(asked.sizes[k], at, self.frames(steps[k], category))
                self.held.setdefault(block, []).append(made)
            else:
                self.free(self.held[~block].pop(0), at)
        self.begin_ns += self.replay.timeline.step_time_ns
        self.enter("", 0)

    def enter(self, phase: str, at_ns: int) -> None:
        """A phase begins, or none; the one before ends."""
        for name, stage in ((self.phase, "END"), (phase, "START")) if phase != self.phase else ():
            told = {"stage": stage, "name": name, "device": 0, "time_us": (self.begin_ns + at_ns) // 1000}
            self.annotations += [told] * bool(name)
        self.phase = phase

    def frames(self, step: int, category: str) -> Frames:
        """The stack of a step's request; one object for those that are alike, which the pickle holds once."""
        if (step, category) not in self.told:
            op, again = self.replay.schedule.op[step], self.replay.schedule.recompute[step]
            ops = self.trace.ops
            self.told[step, category] = self.stack(ops.name[op], ops.module[op], category, again)
        return self.told[step, category]

    def stack(self, op: str, module: str, category: str, again: bool = False) -> Frames:
        names = (op, module or NO_MODULE, category, *([AGAIN] if again else []))
        lines = (self.lines.setdefault(name, len(self.lines) + 1) for name in names)
        return [{"name": n, "filename": OURS, "line": line} for n, line in zip(names, lines, strict=True)]

    def malloc(self, size: int, at_ns: int, frames: Frames) -> Block:
        seen = len(self.allocator.segment_events)
        block = self.allocator.malloc(size)
        for e in self.allocator.segment_events[seen:]:
            self.note(e.action, e.address, e.size_bytes, at_ns, frames)
        self.note("alloc", block.address, size, at_ns, frames)
        self.live[block.address] = block, frames
        return block

    def free(self, block: Block, at_ns: int) -> None:
        _, frames = self.live.pop(block.address)
        for action in ("free_requested", "free_completed"):
            self.note(action, block.address, block.requested, at_ns, frames)
        self.allocator.free(block)

    def note(self, action: str, address: int, size: int, at_ns: int, frames: Frames) -> None:
        self.events.append(
            {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames,
             "time_us": (self.begin_ns + at_ns) // 1000, "pool_id": (0, 0)}
        )  # fmt: skip

    def snapshot(self, alloc_conf: str) -> dict[str, Any]:
        """All of it, with the segments as they are in the end."""
        allocator, heads = self.allocator, dict[int, Block]()
        there = [block for block, _ in self.live.values()]
        for head in (*there, *allocator.small.blocks(), *allocator.large.blocks()):
            while head.prev is not None:
                head = head.prev
            heads[head.address] = head
        return {
            "segments": [s for _, head in sorted(heads.items()) for s in self.segments(head)],
            "device_traces": [self.events],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": alloc_conf, "max_cached_size": -1},
            "external_annotations": self.annotations,
        }

    def segments(self, head: Block) -> Iterator[dict[str, Any]]:
        """A segment; of a range that grows each run of mapped pages."""
        blocks: list[dict[str, Any]] = []
        here: Block | None = head
        while here is not None:
            if here.mapped:
                block, frames = self.live.get(here.address, (None, []))
                blocks.append(
                    {"address": here.address, "size": here.size, "requested_size": here.requested if block else 0,
                     "state": "active_allocated" if block else "inactive", "frames": frames}
                )  # fmt: skip
            here = here.next
            if blocks and (here is None or not here.mapped):
                used = sum(b["size"] for b in blocks if b["state"] != "inactive")
                yield {
                    "device": 0, "address": blocks[0]["address"], "total_size": sum(b["size"] for b in blocks),
                    "allocated_size": used, "active_size": used, "stream": 0, "is_expandable": head.expandable,
                    "requested_size": sum(b["requested_size"] for b in blocks), "segment_pool_id": (0, 0),
                    "segment_type": "small" if head.pool.small else "large", "frames": [], "blocks": blocks,
                }  # fmt: skip
                blocks = []


def perfetto_of(trace: Trace, replay: Replay) -> dict[str, Any]:
    """The step in the trace-event format, which Perfetto and chrome://tracing open: counters of all bytes and by
    category, ops by phase, copies to and from host memory as they follow each other."""
    schedule, timeline, ops = replay.schedule, replay.timeline, trace.ops
    rows: list[dict[str, Any]] = []

    def tell(ph: str, name: str, args: Any, **more: Any) -> None:
        rows.append({"ph": ph, "name": name, "pid": 1, "args": args, **more})

    tell("M", "process_name", {"name": trace.meta.model})
    # From 2: Perfetto takes threads 0 and 1 of process 1 for one.
    tracks = {name: k for k, name in enumerate((*PHASES, AGAIN, *COPIES.values(), TIMELESS), 2)}
    for name, k in tracks.items():
        tell("M", "thread_name", {"name": name}, tid=k)
        tell("M", "thread_sort_index", {"sort_index": k}, tid=k)
    free_ns = dict.fromkeys(COPIES, 0)
    counted = list(by_category(trace, schedule, timeline))
    known = [c for c in categories_of(trace) if any(now[c] for now in counted)]
    for k, (op, now) in enumerate(zip(schedule.op, counted, strict=True)):
        begin, again, target = timeline.start_ns[k], schedule.recompute[k], ops.target[op]
        args = {"op": op, "target": target, "module": ops.module[op], "bytes at most": timeline.peak_bytes[k]}
        tell("C", "allocated", {"bytes": timeline.peak_bytes[k]}, ts=begin / 1000)  # shown by both names
        tell("C", "allocated bytes", {c: now[c] for c in known}, ts=begin / 1000)
        took = timeline.duration_ns[k]
        drawn = took or (ops.writes[op] and target not in COPIES and not ops.flags[op] & VIEW)
        slices = [((AGAIN if again else ops.phase[op]) if took else TIMELESS, begin, took)] if drawn else []
        if target == OFFLOAD or (target == RELOAD and again):
            begin, took = max(begin, free_ns[target]), transfer_ns(trace, op)
            free_ns[target] = begin + took
            slices.append((COPIES[target], begin, took))
        for track, begin, took in slices:
            tell("X", ops.name[op], args, cat="op", tid=tracks[track], ts=begin / 1000, dur=took / 1000)
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"model": trace.meta.model}}

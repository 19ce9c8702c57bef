"""Compose one rank's step of what was recorded of its blocks, and cut a plan of it into plans for the blocks.

Counts: of each block the values that its own graph makes; in each stretch of the step (a block's forward, the loss, a
block's backward, the rest) what the rehearsal showed beside them, a value of each category: shards, their optimizer
states, what is gathered and reduced, gradients, what blocks are given, logits, workspaces. Ignores: how these would
change with a plan, as where that alone reads what a block is given; the time of all but the blocks.

The gathered parameters of a block that `fully_shard` shards are a value by itself from behind its forward until they
are taken: as torch prefetches one block, when backward of the block behind it begins. To gather them again is to
recompute it. Counts: the time that nothing hides: what the links take for it and for what is reduced meanwhile, beyond
the backward of the block behind. Ignores: that recomputation there hides more, and what else is on the links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from executor.rehearsed.record import BACKWARD, FORWARD, STEP
from simulator.core.problem import Problem, by_category
from simulator.planners.outcome import finish
from traces.devices import Links
from traces.errors import SpecError
from traces.files import read_json
from traces.records import store
from traces.records.plan import Action, BlockPlan
from traces.records.trace import (
    ACTIVATION,
    COMMUNICATION,
    EAGER,
    EFFECT,
    GRADIENT,
    HELD,
    MOST,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETER,
    RANK,
    REHEARSED_MODE,
    Ops,
    Storages,
    Trace,
    TraceMeta,
    uses_of,
)
from traces.records.trace import BACKWARD as BACKWARD_PHASE
from traces.records.trace import FORWARD as FORWARD_PHASE

STORAGE: Final = "storage"
BESIDE: Final = "beside"  # the target of ops that stand for what is no block's
KINDS: Final = (PARAMETER, OPTIMIZER_STATE, COMMUNICATION, GRADIENT, ACTIVATION, OTHER)  # of what lies beside


@dataclass(frozen=True, slots=True)
class Stretch:
    """Of the step: until the next begins."""

    what: str  # begins: FORWARD, LOSS, BACKWARD or REST
    block: str
    reduced_bytes: int  # over the ranks, by what is called meanwhile
    held: Mapping[str, int]  # at the peak, by category in a rehearsal's words

    def beside(self, inside: Mapping[str, int]) -> list[int]:
        """Bytes by KINDS of what was there beside the blocks' own values, which took `inside` at their peak."""
        left, found = max(0, sum(self.held.values()) - sum(inside.values())), []
        seen = {HELD[words]: n for words, n in self.held.items()}
        for kind in KINDS[:-1]:
            found.append(min(left, max(0, seen[kind] - inside[kind])))
            left -= found[-1]
        return [*found, left]


@dataclass(frozen=True, slots=True)
class Gather:
    """The whole parameters of a block that `fully_shard` shards."""

    block: str
    nbytes: int
    reshards: bool | None  # whether they go after forward, as the script has it; None: to fewer ranks
    exposed_ns: int  # what it adds to gather them again
    storage: int  # of the composed step, if a plan decides that; else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """One rank's step, of the graphs of its blocks."""

    trace: Trace
    graphs: Mapping[str, Trace]  # of its blocks; those that are alike have the same one
    starts: Mapping[str, Mapping[str, int]]  # and their first rows: FORWARD, BACKWARD and STORAGE
    gathers: tuple[Gather, ...]
    links: Links

    @property
    def script(self) -> tuple[Action, ...]:
        """What the script gathers again, as a plan would."""
        return tuple(Action(storage=g.storage) for g in self.gathers if g.storage >= 0 and g.reshards)

    def again(self, actions: Iterable[Action]) -> dict[str, Gather]:
        """What is gathered again by a plan's actions, or as the script has it, by block."""
        chosen = {a.storage for a in actions} | {-1}
        return {
            g.block: g
            for g in self.gathers
            if g.storage in chosen and (g.storage >= 0 or g.reshards is not False)
        }

    def plans(self, actions: Sequence[Action], planner: str) -> tuple[BlockPlan, ...]:
        """Cut a plan's actions into plans for the blocks; alike blocks with alike actions share one."""
        shared: dict[tuple[int, tuple[Action, ...]], list[str]] = {}
        for block, graph in self.graphs.items():
            shared.setdefault((id(graph), self._own(block, actions)), []).append(block)
        return tuple(
            BlockPlan(
                blocks=tuple(blocks),
                plan=replace(finish(problem, planner, MOST, own), budget_bytes=None).sealed(),
            )
            for (_, own), blocks in shared.items()
            for problem in [Problem(self.graphs[blocks[0]])]
        )

    def _own(self, block: str, actions: Iterable[Action]) -> tuple[Action, ...]:
        """Its actions, with the ids of its own graph. What goes in forward behind it, goes with its last op."""
        graph, at = self.graphs[block], self.starts[block]
        first, whole = graph.meta.forward_ops, len(graph.ops)

        def own(op: int) -> int:
            return first + op - at[BACKWARD] if op >= at[BACKWARD] else min(op - at[FORWARD], first - 1)

        return tuple(
            Action(
                storage=a.storage - at[STORAGE],
                recipe=a.recipe,
                retain=a.retain,
                evict_after=tuple(sorted({n for op in a.evict_after if (n := own(op)) < whole})),
            )
            for a in actions
            if at[STORAGE] <= a.storage < at[STORAGE] + len(graph.storages)
        )


def compose(folder: Path, links: Links) -> Composed:
    """The step that was recorded in a folder (`record.recording`), where communication takes the time of such links.
    Raises SpecError: blocks run forward after others ran backward, or backward reaches none."""
    told = read_json(folder / STEP)
    used, stretches = dict(told["graphs"]), [Stretch(*mark) for mark in told["marks"]]
    count = Counter((s.what, s.block) for s in stretches)
    blocks = [b for b, g in used.items() if g >= 0 and count[FORWARD, b] == count[BACKWARD, b] == 1]
    kinds = [s.what for s in stretches if s.block in blocks]
    if not blocks or FORWARD in kinds[kinds.index(BACKWARD) :]:
        raise SpecError(
            "the blocks cannot be planned together: "
            + ("some run forward after others ran backward." if blocks else "backward reaches none of them.")
        )
    loaded = {g: store.load(folder / str(g)) for g in {used[b] for b in blocks}}
    graphs = {b: loaded[used[b]] for b in blocks}
    gathers = tuple(_gathers(told["gathers"], stretches, graphs, links))
    composing = _Composing(stretches, graphs, {g.block: g for g in gathers if g.storage >= 0})
    step = Composed(
        trace=composing.step(), graphs=graphs, starts=composing.starts, gathers=gathers, links=links
    )
    run = Problem(step.trace).replay(step.script)
    each = zip(by_category(step.trace, run.schedule, run.timeline), run.timeline.recompute, strict=True)
    running = [now for now, again in each if not again]
    inside = (max(running[a:b], key=lambda now: sum(now.values())) for a, b in composing.ranges)
    beside = [n for s, now in zip(stretches, inside, strict=True) for n in s.beside(now)]
    nbytes = (*beside, *step.trace.storages.nbytes[len(beside) :])
    shape = (*((n,) for n in beside), *step.trace.storages.shape[len(beside) :])
    storages = replace(step.trace.storages, nbytes=nbytes, shape=shape)
    return replace(step, trace=replace(step.trace, storages=storages))


def _gathers(
    told: Mapping[str, Any], stretches: Sequence[Stretch], graphs: Mapping[str, Trace], links: Links
) -> Iterator[Gather]:
    storage = len(stretches) * len(KINDS)
    for k, s in enumerate(stretches):
        if s.what != BACKWARD or s.block not in told or s.block not in graphs:
            continue
        nbytes, reshards, *ranks = told[s.block]
        behind = graphs.get(stretches[k - 1].block) if stretches[k - 1].what == BACKWARD else None
        hidden_ns = sum(behind.ops.time_ns[behind.meta.forward_ops :]) if behind else 0
        reduced_bytes = stretches[k - 2].reduced_bytes
        reduce_ns = links.gather_ns(reduced_bytes, *ranks) if reduced_bytes else 0
        both_ns = reduce_ns + links.gather_ns(nbytes, *ranks)
        exposed_ns = max(hidden_ns, both_ns) - max(hidden_ns, reduce_ns)
        # Of the last block they are taken at once.
        decides = reshards is not None and (exposed_ns or not reshards) and stretches[k - 2].block != s.block
        yield Gather(s.block, nbytes, reshards, exposed_ns, storage if decides else -1)
        storage += bool(decides)


class _Composing:
    """The tables of the composed step: in each stretch an op that makes what lies beside, then those of the block.
    Before them, one that gathers the parameters of the block before it, or takes those of the block behind it.

    Storages: what lies beside, of each stretch and kind; then gathered parameters; then those of the blocks.
    """

    def __init__(
        self, stretches: Sequence[Stretch], graphs: Mapping[str, Trace], gathers: Mapping[str, Gather]
    ) -> None:
        self._graphs, self._gathers = graphs, gathers
        initial = len(stretches) * len(KINDS) + len(gathers)
        sizes = accumulate((len(g.storages) for g in graphs.values()), initial=initial)
        self.starts = {b: {STORAGE: n} for b, n in zip(graphs, sizes, strict=False)}
        self.ranges: list[tuple[int, int]] = []
        rows: list[dict[str, Any]] = []
        made = dict.fromkeys(gathers, -1)
        phase = FORWARD_PHASE
        for k, s in enumerate(stretches):
            phase = BACKWARD_PHASE if s.what == BACKWARD else phase
            before, after = stretches[k - 1], stretches[(k + 1) % len(stretches)]
            if before.what == FORWARD and (g := gathers.get(before.block)):
                made[g.block] = len(rows)
                rows.append(_row(f"gather {g.block}", phase, time_ns=g.exposed_ns, writes=(g.storage,)))
            if after.what == BACKWARD and (g := gathers.get(after.block)):
                rows.append(_row(f"take {g.block}", phase, inputs=(made[g.block],), reads=(g.storage,)))
            at = len(rows)
            writes = (*range(k * len(KINDS), (k + 1) * len(KINDS)),)
            rows.append(_row(f"beside {s.what} {s.block}".strip(), phase, flags=EAGER, writes=writes))
            if s.what in (FORWARD, BACKWARD) and s.block in graphs:
                rows += self._ops(s.block, s.what, at + 1)
            self.ranges.append((at, len(rows)))
        self._producers = [*(at for at, _ in self.ranges for _ in KINDS), *made.values()]
        self._ops_table = Ops(**{f.name: tuple(row[f.name] for row in rows) for f in fields(Ops)})

    def _op(self, block: str, op: int) -> int:
        first, start = self._graphs[block].meta.forward_ops, self.starts[block]
        return op if op < 0 else start[FORWARD] + op if op < first else start[BACKWARD] + op - first

    def _ops(self, block: str, what: str, at: int) -> Iterator[dict[str, Any]]:
        graph, self.starts[block][what] = self._graphs[block], at
        base = self.starts[block][STORAGE]
        first = graph.meta.forward_ops
        outputs = {s for s, hold in enumerate(graph.storages.hold) if hold == first - 1}
        for i in range(first) if what == FORWARD else range(first, len(graph.ops)):
            row = {f.name: getattr(graph.ops, f.name)[i] for f in fields(Ops)}
            # What a block returns is the next one's, which holds it whatever the plan.
            kept = what == FORWARD and not outputs.isdisjoint(row["writes"])
            yield row | {
                "inputs": tuple(self._op(block, j) for j in row["inputs"]),
                "reads": tuple(base + s for s in row["reads"]),
                "writes": tuple(base + s for s in row["writes"]),
                "overwrites": base + row["overwrites"] if row["overwrites"] >= 0 else -1,
                "flags": row["flags"] | (EFFECT if kept else 0),
                "module": f"{block}.{row['module']}".rstrip("."),
            }

    def step(self) -> Trace:
        """The step with nothing beside the blocks."""
        n, gathers = len(self._producers), self._gathers.values()
        kinds = [*KINDS] * len(self.ranges)
        table: dict[str, list[Any]] = {
            "name": [self._ops_table.name[op] for op in self._producers],
            "nbytes": [*(0 for _ in kinds), *(g.nbytes for g in gathers)],
            "category": [*kinds, *(COMMUNICATION for _ in gathers)],
            "producer": [*self._producers],
            "hold": [*(end - 1 for _, end in self.ranges for _ in KINDS), *(-1 for _ in gathers)],
            "dtype": ["uint8"] * n,
            "shape": [()] * n,
        }
        for block, graph in self._graphs.items():
            sts = graph.storages
            table["name"] += [f"{block}.{name}" for name in sts.name]
            # What it does not make itself is counted beside.
            table["nbytes"] += [size * (op >= 0) for size, op in zip(sts.nbytes, sts.producer, strict=True)]
            table["producer"] += [self._op(block, op) for op in sts.producer]
            table["hold"] += [self._op(block, op) for op in sts.hold]
            for column in ("category", "dtype", "shape"):
                table[column] += getattr(sts, column)
        ops = self._ops_table
        columns = {k: tuple(v) for k, v in table.items()} | uses_of(ops, len(table["name"]))
        of = next(iter(self._graphs.values())).meta
        meta = TraceMeta(
            model="blocks",
            mode=REHEARSED_MODE,
            device=RANK,
            target=of.target,
            forward_ops=(first := ops.phase.index(BACKWARD_PHASE)),
            first_backward_graph_op=first,
        )
        return store.validate(Trace(meta=meta, ops=ops, storages=Storages(**columns)))


def _row(name: str, phase: str, **given: Any) -> dict[str, Any]:
    """An op that stands for what is no block's."""
    row: dict[str, Any] = dict.fromkeys((f.name for f in fields(Ops)), ())
    row |= dict.fromkeys(("time_ns", "flops", "bytes_moved", "flags"), 0)
    row |= dict.fromkeys(("module", "arguments"), "")
    return row | {"overwrites": -1, "name": name, "target": BESIDE, "phase": phase} | given

"""Every plan for a tiny trace, and the least time that one within each budget adds: an oracle of planners and bounds.

Nothing here uses `simulator`: which values may come back, what a plan makes run again and what is then allocated when
is read off the trace's tables here, after the definitions in `traces.records.plan` and `traces.records.trace`. So a
value that the simulator takes for fixed, and a plan that it refuses by mistake, still count.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product
from math import prod
from typing import Any

from tests.tiny import Op, trace
from traces.records.plan import RECOMPUTE, SAVE, Action
from traces.records.trace import BACKWARD, EAGER, FORBIDS_RECOMPUTE, FORWARD, OPTIMIZER, RANDOM, VIEW, Trace

Choice = Action | None


class Impossible(Exception):
    """A plan needs a value again that nothing can make again."""


class Facts:
    """What a trace's tables say of its storages; one entry a storage, or an op."""

    def __init__(self, of: Trace) -> None:
        ops, sts = of.ops, of.storages
        n, storages = len(ops), range(len(sts))
        self.view = [bool(f & VIEW) for f in ops.flags]
        self.reruns = [not f & FORBIDS_RECOMPUTE for f in ops.flags]
        self.turn = sum(1 for phase in ops.phase if phase == FORWARD)
        self.made = [{s for s in storages if sts.producer[s] == i} for i in range(n)]
        self.forward = [0 <= sts.producer[s] < self.turn for s in storages]
        self.last_read = [
            max((i for i in range(n) if ops.phase[i] == BACKWARD and s in ops.reads[i]), default=-1)
            for s in storages
        ]
        self.leaves = [  # not saved, it is absent once this op of forward has run
            max([sts.producer[s], *(i for i in range(self.turn) if s in ops.reads[i])]) for s in storages
        ]
        self.saved = [self.forward[s] and self.last_read[s] >= 0 for s in storages]  # without any action
        self.outside = [
            sts.hold[s] >= self.turn
            or any(self._from_outside(of, i, s) for i in range(self.turn, n))
            or any(self._by_another_way(of, i, s) for i in range(n))
            for s in storages
        ]
        self.returns = [self._returns(of, s) for s in storages]

    @staticmethod
    def _from_outside(of: Trace, i: int, s: int) -> bool:
        """Op i after forward is none of the captured graph, and reads s as it finds it."""
        return s in of.ops.reads[i] and (of.ops.phase[i] == OPTIMIZER or bool(of.ops.flags[i] & EAGER))

    def _by_another_way(self, of: Trace, i: int, s: int) -> bool:
        """Op i of the captured graph reads s and takes the value of no op that stands for s: its maker or a view."""
        if s not in of.ops.reads[i] or of.ops.flags[i] & EAGER or of.storages.producer[s] < 0:
            return False
        return not any(self._stands_for(of, j, s) for j in of.ops.inputs[i])

    def _stands_for(self, of: Trace, j: int, s: int) -> bool:
        if not self.view[j]:
            return s in self.made[j]
        return any(self._stands_for(of, k, s) for k in of.ops.inputs[j])

    def _returns(self, of: Trace, s: int) -> bool:
        """Whether s can be made again from what is there by default, or can itself be made again."""
        p = of.storages.producer[s]
        return (
            self.forward[s]
            and self.reruns[p]
            and not self.view[p]
            and all(
                of.storages.producer[r] < 0 or self.saved[r] or self._returns(of, r) for r in of.ops.reads[p]
            )
        )


def choices(of: Trace, *, drops: int, anywhere: bool = False) -> list[list[Choice]]:
    """What can happen to each storage from forward.

    With `drops`, what was made again may also go after each set of up to so many ops of backward; `anywhere`: what was
    saved, too, and after ops of forward.
    """
    facts = Facts(of)
    out: list[list[Choice]] = []
    for s in range(len(of.storages)):
        if not facts.forward[s]:
            continue
        mine: list[Choice] = [None]
        # An empty value that backward reads has nothing to gain; an empty link may be one in a chain.
        worth = of.storages.nbytes[s] > 0 or not facts.saved[s]
        if facts.returns[s] and not facts.outside[s] and worth:
            mine.append(Action(storage=s, recipe=RECOMPUTE, retain=True))
            if facts.saved[s]:  # a link that is not shared is one without an action
                mine.append(Action(storage=s, recipe=RECOMPUTE, retain=False))
            mine += [
                Action(storage=s, recipe=recipe, retain=retain, evict_after=chosen)
                for k in range(1, drops + 1)
                for chosen in combinations(_may_go_after(of, facts, s, anywhere), k)
                for recipe, retain in ((RECOMPUTE, True), (SAVE, True), (SAVE, False))[: 3 if anywhere else 1]
            ]
        if not facts.saved[s] and not facts.outside[s]:
            mine.append(Action(storage=s, recipe=SAVE))
        if len(mine) > 1:
            out.append(mine)
    return out


def _may_go_after(of: Trace, facts: Facts, s: int, anywhere: bool) -> range:
    """Ops after which s may go: not while the user's own code in forward still reads or holds it."""
    if not anywhere:
        return range(facts.turn, len(of.ops) - 1)
    outside = [i for i in range(facts.turn) if of.ops.flags[i] & EAGER and s in of.ops.reads[i]]
    return range(max(of.storages.producer[s], of.storages.hold[s], *outside), len(of.ops) - 1)


@dataclass
class Instance:
    """A storage from the step that made it to the last one that needs it."""

    storage: int
    born: int
    end: int


@dataclass
class Walk:
    """What runs under a plan, step by step."""

    op: list[int] = field(default_factory=list)
    again: list[bool] = field(default_factory=list)
    born: list[list[int]] = field(default_factory=list)  # storages that the step makes, or makes again
    instances: list[Instance] = field(default_factory=list)
    forward_steps: int = 0


def walk(of: Trace, actions: Iterable[Action], facts: Facts | None = None) -> Walk:
    """The steps of a plan: each op after whatever must be made again for it.

    Raises:
        Impossible: an op reads what is not there and cannot be made again.
    """
    facts = facts or Facts(of)
    ops, sts = of.ops, of.storages
    plan = {a.storage: a for a in actions}
    out = Walk()
    present: dict[int, Instance] = {}  # storage -> the instance that an op would read now
    of_view: dict[int, list[Instance]] = {}  # view op -> the instances that its value points into

    def there(s: int) -> bool:
        return sts.producer[s] < 0 or s in present

    def bases(i: int) -> list[Instance]:
        return [present[s] for s in ops.reads[i] if s in present]

    def run(i: int, again: bool, makes: Iterable[int]) -> None:
        step = len(out.op)
        if not all(there(s) for s in ops.reads[i]):
            raise Impossible(f"op {i} reads what is not there")
        for instance in bases(i):
            instance.end = step
        if facts.view[i]:
            of_view[i] = bases(i)
        for s in makes:
            present[s] = Instance(s, step, step)
            out.instances.append(present[s])
        out.op.append(i)
        out.again.append(again)
        out.born.append(sorted(makes))

    def lacks(reader: int, i: int) -> bool:
        """Whether `reader` cannot take the value of op i as things are."""
        if facts.view[i]:
            now = bases(i)
            same = len(now) == len(of_view[i]) and all(a is b for a, b in zip(now, of_view[i], strict=True))
            return not (same and all(there(s) for s in ops.reads[i]))
        return any(s in ops.reads[reader] and not there(s) for s in facts.made[i])

    def collect(reader: int, order: list[int], asked: set[int]) -> None:
        """Ops to run again for the sake of `reader`, deepest first, and the storages that are asked of them."""
        for i in ops.inputs[reader]:
            if not lacks(reader, i):
                continue
            if not facts.view[i]:
                asked.update(s for s in facts.made[i] if s in ops.reads[reader])
            if i not in seen:
                if not (facts.view[i] or facts.reruns[i]):
                    raise Impossible(f"op {i} may not run again")
                seen.add(i)
                collect(i, order, asked)
                order.append(i)

    def saved(s: int) -> bool:
        return facts.outside[s] or (plan[s].recipe == SAVE if s in plan else facts.saved[s])

    def welcome(s: int, c: int) -> bool:
        """Whether s, made again beside what op c needs, stays for a later op."""
        later = facts.last_read[s] > c and (saved(s) or c >= facts.turn)
        return s in plan and plan[s].retain and (later or (c < facts.turn and facts.leaves[s] > c))

    for c in range(len(ops)):
        order: list[int] = []
        asked: set[int] = set()
        seen: set[int] = set()
        collect(c, order, asked)
        back: list[int] = []
        for i in order:
            makes = [s for s in sorted(facts.made[i]) if not there(s) and (s in asked or welcome(s, c))]
            run(i, True, makes)
            back += makes
        run(c, False, facts.made[c])
        gone = [s for s in back if s not in plan or not plan[s].retain]
        gone += [s for s, action in plan.items() if c in action.evict_after]
        if c < facts.turn:
            gone += [s for s in present if facts.forward[s] and not saved(s) and facts.leaves[s] <= c]
            out.forward_steps = len(out.op)
        for s in gone:
            present.pop(s, None)
    for s in range(len(sts)):
        if sts.hold[s] >= 0 and sts.producer[s] >= 0:
            first = next(x for x in out.instances if x.storage == s)
            held = next(k for k, i in enumerate(out.op) if i == sts.hold[s] and not out.again[k])
            first.end = max(first.end, held)
    return out


@dataclass
class Bytes:
    """What a walk allocates and takes."""

    peaks: list[int] = field(default_factory=list)  # while each step runs
    live: list[int] = field(default_factory=list)  # after it
    time_ns: int = 0


def step_by_step(of: Trace, walked: Walk) -> Bytes:
    """Bytes and ns of a walk, from what lives when and what each op allocates while it runs."""
    ops, sts = of.ops, of.storages
    change = [0] * (len(walked.op) + 1)  # bytes that stay alive through a step, as differences
    ending: list[set[int]] = [set() for _ in walked.op]
    for x in walked.instances:
        if x.end > x.born:
            change[x.born + 1] += sts.nbytes[x.storage]
            change[x.end + 1] -= sts.nbytes[x.storage]
            ending[x.end].add(x.storage)
    out = Bytes()
    alive = sum(sts.nbytes[s] for s, p in enumerate(sts.producer) if p < 0)
    for k, i in enumerate(walked.op):
        alive += change[k]
        rise = sum(sts.nbytes[s] for s in ops.writes[i] if sts.producer[s] == i)
        live = 0
        for event in ops.events[i]:
            live += event
            rise = max(rise, live)
        taken = ops.overwrites[i]
        rise -= sts.nbytes[taken] if taken in ending[k] else 0
        out.peaks.append(alive + rise)
        out.live.append(alive + change[k + 1])
        if not (walked.again[k] and ops.flags[i] & VIEW):
            out.time_ns += ops.time_ns[i]
    return out


def peak_and_time(of: Trace, walked: Walk) -> tuple[int, int]:
    """Peak bytes and ns of a walk."""
    found, sts = step_by_step(of, walked), of.storages
    resident = sum(sts.nbytes[s] for s, p in enumerate(sts.producer) if p < 0)
    return max([resident, *found.peaks]), found.time_ns


def plans(
    of: Trace,
    *,
    drops: int = 0,
    anywhere: bool = False,
    most: int = 4_000,
    drawn: random.Random | None = None,
) -> list[tuple[Action, ...]] | None:
    """Every plan; if there are more than `most`, so many that are drawn, or None if nothing draws."""
    options = choices(of, drops=drops, anywhere=anywhere)
    if prod(len(mine) for mine in options) > most:
        if drawn is None:
            return None
        return [
            tuple(
                a for mine in options if (a := drawn.choice(mine[: drawn.choice((3, len(mine)))])) is not None
            )
            for _ in range(most)
        ]
    return [tuple(a for a in chosen if a is not None) for chosen in product(*options)]


def frontier(of: Trace, **how: Any) -> dict[int, int] | None:
    """Peak -> the least added time of a plan with that peak, over all `plans`; None if these are too many."""
    every = plans(of, **how)
    if every is None:
        return None
    facts = Facts(of)
    best: dict[int, int] = {}
    for actions in every:
        try:
            peak, time_ns = peak_and_time(of, walk(of, actions, facts))
        except Impossible:
            continue
        best[peak] = min(time_ns - of.time_ns, best.get(peak, time_ns - of.time_ns))
    return best


def optimum(front: dict[int, int], budget_bytes: int) -> int | None:
    """The least added time within a budget; None if no plan fits."""
    return min((t for peak, t in front.items() if peak <= budget_bytes), default=None)


def budgets(front: dict[int, int]) -> Iterator[int]:
    """Budgets at, just below and between the peaks that plans reach."""
    peaks = sorted(front)
    seen = {p + d for p in peaks for d in (-1, 0)} | {(a + b) // 2 for a, b in pairwise(peaks)}
    return iter(sorted(seen))


def draw_trace(seed: int) -> Trace:
    """A small training step from a seed, shaped so that memory is tight after the turn: forward, loss, backward.

    Views, several outputs, random, eager and in-place ops, workspaces, holds, links that only chains need.
    """
    draw = random.Random(seed)
    sizes = (4, 8, 12, 20, 40, 64)
    resident = {"w": draw.choice(sizes)}
    ops: list[Op] = []
    readable = ["w"]
    forward: list[str] = []
    made: dict[str, int] = {}
    base = {"w": "w"}

    def add(phase: str, reads: tuple[str, ...], flags: int) -> None:
        i = len(ops)
        if draw.random() < 0.12 and phase != OPTIMIZER:
            ops.append(Op(phase, {}, reads[:1], view=f"v{i}", time_ns=draw.randrange(2)))
            base[f"v{i}"] = base[reads[0]]
            names = [f"v{i}"]
        else:
            makes = {f"s{i}_{k}": draw.choice(sizes) for k in range(draw.choice((1, 1, 1, 2)))}
            total, scratch = sum(makes.values()), draw.choice((0, 0, 8, 40))
            events = (
                () if not scratch else draw.choice(((scratch, total, -scratch), (total + scratch, -scratch)))
            )
            mine = [r for r in reads if base[r] != "w"]
            takes = draw.choice(mine) if mine and draw.random() < 0.2 else ""
            ops.append(
                Op(
                    phase,
                    makes,
                    reads,
                    time_ns=draw.randrange(1, 10),
                    flags=flags,
                    events=events,
                    overwrites=takes,
                )
            )
            for name in makes:
                base[name], made[name] = name, i
            names = list(makes)
        readable.extend(names)
        if phase == FORWARD:
            forward.extend(names)

    for k in range(draw.randrange(2, 7)):
        reads = {readable[-1], *draw.sample(readable, k=min(len(readable), draw.choice((0, 1, 1))))}
        add(FORWARD, tuple(sorted(reads)), RANDOM if k and draw.random() < 0.1 else 0)
    if draw.random() < 0.3:
        add(FORWARD, (readable[-1],), EAGER)
    for k in range(draw.randrange(1, 7)):
        back = forward[-1 - min(k, len(forward) - 1)] if draw.random() < 0.7 else draw.choice(forward)
        reads = {readable[-1], back} if draw.random() < 0.9 else {readable[-1]}
        add(BACKWARD, tuple(sorted(reads)), EAGER if draw.random() < 0.08 else 0)
    if draw.random() < 0.3:
        add(OPTIMIZER, (readable[-1],), EAGER)
    hold = {s: draw.randrange(i, len(ops)) for s, i in made.items() if draw.random() < 0.1}
    return trace(ops, resident, hold)

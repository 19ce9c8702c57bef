"""What planners' states reserve, hundreds of times a second; `reserved_peak` says the same of a schedule.

Counts and ignores: what `simulator.allocator.reserved` does, and what `simulator.kernels.requests` ignores beside.
"""

from __future__ import annotations

import numpy as np

from simulator.allocator.requests import Asked, Residents, asked_by
from simulator.allocator.reserved import ITERATIONS, rules_of
from simulator.allocator.settings import AllocatorSettings
from simulator.core.evaluator import Evaluator, State
from simulator.kernels.best_fit import SUMS, Memory, memory
from simulator.kernels.records import pack_rows
from simulator.kernels.requests import ASKED, OF_OP, Asks, Stream, reserve, stream
from traces.records.trace import BACKWARD, OPTIMIZER


class Reserver:
    """The allocator of one trace under one setting, for states of its evaluator."""

    def __init__(self, evaluator: Evaluator, settings: AllocatorSettings) -> None:
        self.evaluator = evaluator
        self.rules = rules_of(settings)
        self.asks = evaluator.problem.once("asks", lambda _: _asks(evaluator))
        self.rows = np.zeros(ITERATIONS, SUMS)
        self.requests = len(self.asks.asks)  # about as many as an iteration makes
        self._room = -1
        self.memory: Memory
        self.stream: Stream

    def make_room(self, steps: int) -> None:
        """Make work space for so many steps, if there is less."""
        if steps <= self._room:
            return
        self._room = max(16, 2 * steps)
        self.stream = stream(self.evaluator.facts, self.asks, self._room)
        ever = len(self.stream.blocks) // 2 + len(self.asks.residents) + len(self.stream.once)
        self.memory = memory(ever, *self.rules)

    def reserved_bytes(self, state: State) -> int:
        """The peak of reserved memory, of the last iteration. Raises PlanError if a chain needs an op that may not run
        again.
        """
        _, _, _, steps = self.evaluator.walk(state)
        self.make_room(steps)
        pairs = [(k, s) for k, each in sorted(state.evictions.items()) for s in each]
        evictions = np.array(pairs, np.int32).reshape(-1, 2).T.copy()
        while True:
            reserved = reserve(
                self.evaluator.facts, state.saved, state.retained, evictions[0], evictions[1],
                self.evaluator.work_space(0), self.asks, self.stream, self.rows, self.memory,
            )  # fmt: skip
            if reserved >= 0:
                return int(reserved)
            self.make_room(2 * self._room)


def _asks(ev: Evaluator) -> Asks:
    trace, problem = ev.trace, ev.problem
    ops, sts = trace.ops, trace.storages
    n_op = len(ev.op_id)
    residents = Residents.of(trace)
    goes, takes = _settled(ev)
    asked: list[Asked] = []
    for k, i in enumerate(ev.op_id):
        taken = ev.overwrites[k] if ev.overwrites[k] >= 0 else takes[k]
        taken = taken if taken >= 0 and sts.nbytes[taken] else -1
        asked += [asked_by(problem, i, -1), asked_by(problem, i, taken)]
    rows = np.zeros(len(asked) + 1, ASKED)
    rows["asks_at"], asks = pack_rows([a.asks for a in asked], np.int64)
    rows["made_at"], _ = pack_rows([a.made for a in asked])
    rows["gives_back"][:-1] = [a.gives_back for a in asked]
    workspaces: dict[int, list[int]] = {}
    for i, sizes in sorted(residents.workspaces.items()):
        workspaces.setdefault(ev.before[i], []).extend(sizes)
    of_op = np.zeros(n_op + 1, OF_OP)
    of_op["frees_at"], frees = pack_rows(goes)
    of_op["workspaces_at"], wanted = pack_rows([workspaces.get(k, ()) for k in range(n_op)], np.int64)
    of_op["takes"][:-1] = takes
    of_op["keeps"][:-1] = [problem.asks_again[i] for i in ev.op_id]
    of_op["rerun_bytes"][:-1] = [problem.rerun_bytes[i] for i in ev.op_id]
    backward = sorted({ev.before[i] for i in residents.workspaces if ops.phase[i] == BACKWARD})
    first = next((k for k, i in enumerate(ev.op_id) if ops.phase[i] == OPTIMIZER), n_op)
    return Asks(
        asked=rows,
        asks=asks,
        made=np.array([pair for a in asked for pair in a.made], np.int32).reshape(-1, 2).T.copy(),
        of_op=of_op,
        frees=frees,
        workspaces=wanted,
        backward_workspaces=np.array(backward, np.int32),
        state=np.array(residents.state, np.int64),
        optimizer=first,
        residents=np.array(residents.first, np.int64),
    )


def _settled(ev: Evaluator) -> tuple[list[list[int]], list[int]]:
    """By position: the storages that backward makes and that go with that op, and which of them it takes over (-1)."""
    ops, sts = ev.trace.ops, ev.trace.storages
    late = {s for s, p in enumerate(sts.producer) if p >= ev.problem.forward_end and sts.nbytes[s]}
    goes: list[list[int]] = [[] for _ in ev.op_id]
    for s in sorted(late):
        goes[ev.last[s][0]].append(s)
    takes = [
        s if s in late and ev.last[s] == (k, False) and s not in ev.problem.creates[i] else -1
        for k, (i, s) in enumerate((i, ops.overwrites[i]) for i in ev.op_id)
    ]
    return goes, takes

"""The optimum by a constraint programme after Moccasin, solved with CP-SAT, beside our planners on small graphs.

python -m tests.bench.moccasin [GRAPH ...] [--shares 0.75,0.5,0.25] [--planners P,...] [--seconds 60] [--json]

Source: Bartan et al., "Moccasin", ICML 2023, section 3 (retention intervals, staged input topological order), written
anew for OR-tools (`pip install ortools`) and for ops with several outputs. Time is a sequence of instants: in stage t
ops 0 to t have one each, and op t runs there for the first time. Each op runs at most `COPIES` times, and each run of
it opens an interval for each of its outputs, over which the output stays in memory.

As in `simulator.core.schedule`, only forward runs again and only after the turn. What its plans can do and
ours cannot: keep
a value from forward to its first use in backward, and compute it again for the next. What ours can: run an op more than
`COPIES` times.
"""

from __future__ import annotations

import time
from math import gcd

from tests.bench.small import Small, Solved, command

COPIES = 2  # as published


def solve(problem: Small, budget_bytes: int, seconds: float) -> Solved:
    """The least added time within the budget, if CP-SAT finds and proves it in time.

    Counts: every storage's bytes at every run of an op, workspace included. Ignores: takeovers of memory.
    """
    from ortools.sat.python import cp_model

    begin = time.perf_counter()
    m = cp_model.CpModel()
    n, forward = len(problem.times_ns), problem.forward

    def instant(stage: int, op: int) -> int:
        return stage * (stage + 1) // 2 + op

    last = instant(n - 1, n - 1)
    unit = gcd(*problem.nbytes, *problem.workspace_bytes) or 1
    starts: list[list[object]] = []  # op -> instant of each run
    runs: list[list[object]] = []  # op -> whether that run happens
    for i in range(n):
        mine: list[object] = [instant(i, i)]
        happens: list[object] = [True]
        stages = range(max(forward, i + 1), n)
        if problem.may_rerun[i] and stages:
            for c in range(1, COPIES):
                values = cp_model.Domain.from_values([instant(t, i) for t in stages])
                mine.append(m.new_int_var_from_domain(values, f"start {i} {c}"))
                happens.append(m.new_bool_var(f"runs {i} {c}"))
        starts.append(mine)
        runs.append(happens)
    ends: list[list[object]] = []  # storage -> last instant of each interval
    intervals, demands = [], []
    for s, maker in enumerate(problem.producer):
        mine = []
        for c, (start, happens) in enumerate(zip(starts[maker], runs[maker], strict=True)):
            first = max(
                instant(maker, maker),
                instant(problem.hold[s], problem.hold[s]) if problem.hold[s] >= 0 else 0,
            )
            end = m.new_int_var(first if c == 0 else 0, last, f"end {s} {c}")
            size = m.new_int_var(1, last + 1, f"size {s} {c}")
            interval = m.new_optional_interval_var(start, size, end + 1, happens, f"stays {s} {c}")
            intervals.append(interval)
            demands.append(problem.nbytes[s] // unit)
            mine.append(end)
        ends.append(mine)
    for i in range(n):
        for start, happens in zip(starts[i], runs[i], strict=True):
            if problem.workspace_bytes[i]:
                intervals.append(m.new_optional_fixed_size_interval_var(start, 1, happens, f"works {i}"))
                demands.append(problem.workspace_bytes[i] // unit)
            for s in problem.reads[i]:
                served = []
                maker = problem.producer[s]
                for c, (made, there) in enumerate(zip(starts[maker], runs[maker], strict=True)):
                    by = m.new_bool_var(f"op {i} reads {s} {c}")
                    m.add(made + 1 <= start).only_enforce_if(by)
                    m.add(ends[s][c] >= start).only_enforce_if(by)
                    if there is not True:
                        m.add_implication(by, there)
                    served.append(by)
                m.add_bool_or([*served, *([] if happens is True else [happens.negated()])])
    m.add_cumulative(intervals, demands, (budget_bytes - problem.resident_bytes) // unit)
    again = [(problem.times_ns[i], r) for i in range(n) for r in runs[i] if r is not True]
    m.minimize(sum(t * r for t, r in again))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    status = solver.solve(m)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return Solved(
        added_ns=round(solver.objective_value) if found else None,
        proved=status in (cp_model.OPTIMAL, cp_model.INFEASIBLE),
        lower_bound_ns=max(0, int(solver.best_objective_bound)) if status != cp_model.INFEASIBLE else 0,
        seconds=time.perf_counter() - begin,
        variables=len(m.proto.variables),
    )


main = command(
    "The optimum by a constraint programme after Moccasin (CP-SAT) beside ours on small graphs.", solve
)

if __name__ == "__main__":
    main()

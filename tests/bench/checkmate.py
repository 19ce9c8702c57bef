"""The optimum by an integer programme after Checkmate, solved with HiGHS, beside our planners on small graphs.

python -m tests.bench.checkmate [GRAPH ...] [--shares 0.75,0.5,0.25] [--planners P,...] [--seconds 60] [--json]

Source: Jain et al., "Checkmate", MLSys 2020, sections 4.3 to 4.8 (frontier-advancing stages), written anew for HiGHS
as scipy has it, and for ops with several outputs. Stage t ends with the first run of op t. R[t,i]: op i runs in
stage t; S[t,s]: storage s is kept into stage t; A[t,s]: it is allocated there; F[t,s,k]: it is freed when op k has run
there.

What its plans can do and ours cannot: drop a value that was kept from forward between two uses in backward and compute
it again (a kept value of ours goes at its last use). The published programme may also run forward twice during forward,
and backward twice: `solve(..., as_ours=False)`; the benchmark forbids both, as `simulator.core.schedule` does.
"""

from __future__ import annotations

import math
import time

from tests.bench.small import Small, Solved, command


class Programme:
    """Rows and columns of a mixed-integer programme, collected before HiGHS sees them."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[float, list[int], list[float]]] = []  # sum <= right-hand side

    def column(self, *, cost: float = 0.0, upper: float = 1.0, whole: bool = True) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(whole)
        return len(self.cost) - 1

    def at_most(self, right: float, *terms: tuple[int, float]) -> None:
        self.rows.append((right, [c for c, _ in terms], [v for _, v in terms]))


def solve(problem: Small, budget_bytes: int, seconds: float, *, as_ours: bool = True) -> Solved:
    """The least added time within the budget, if HiGHS finds and proves it in time.

    Counts: every storage's bytes at every run of an op, workspace included. Ignores: takeovers of memory.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    begin = time.perf_counter()
    n, p = len(problem.times_ns), Programme()
    readers = problem.readers
    unit = max(1, max(problem.nbytes, default=1))  # so that coefficients are about 1
    time_unit = max(1, max(problem.times_ns))

    def allowed(t: int, i: int) -> bool:
        if i == t:
            return True
        again = i < t and (problem.may_rerun[i] or not as_ours)
        return again and (t >= problem.forward or not as_ours)

    run_: dict[tuple[int, int], int] = {}
    keep: dict[tuple[int, int], int] = {}
    for t in range(n):
        for i in range(t + 1):
            if allowed(t, i):
                run_[t, i] = p.column(cost=problem.times_ns[i] / time_unit if i < t else 0.0)
        for s, maker in enumerate(problem.producer):
            if maker < t:
                keep[t, s] = p.column()
    needed_true: list[int] = [run_[t, t] for t in range(n)]
    for s, until in enumerate(problem.hold):
        needed_true += [keep[t, s] for t in range(problem.producer[s] + 1, min(until, n - 1) + 1)]
    for t in range(n):
        for i in range(t + 1):
            if (t, i) not in run_:
                continue
            for s in problem.reads[i]:
                terms = [(run_[t, i], 1.0)]
                if (t, problem.producer[s]) in run_:
                    terms.append((run_[t, problem.producer[s]], -1.0))
                if (t, s) in keep:
                    terms.append((keep[t, s], -1.0))
                p.at_most(0.0, *terms)
        for s, maker in enumerate(problem.producer):
            if maker < t:
                terms = [(keep[t, s], 1.0)]
                if (t - 1, maker) in run_:
                    terms.append((run_[t - 1, maker], -1.0))
                if (t - 1, s) in keep:
                    terms.append((keep[t - 1, s], -1.0))
                p.at_most(0.0, *terms)
    for t in range(n):
        _memory(p, problem, readers, t, budget_bytes, unit, run_, keep)

    lower = np.zeros(len(p.cost))
    lower[needed_true] = 1.0
    row = np.repeat(np.arange(len(p.rows)), [len(c) for _, c, _ in p.rows])
    column = np.array([k for _, c, _ in p.rows for k in c])
    values = np.array([v for _, _, vs in p.rows for v in vs])
    matrix = csr_array((values, (row, column)), shape=(len(p.rows), len(p.cost)))
    result = milp(
        c=np.array(p.cost),
        integrality=np.array(p.whole, dtype=int),
        bounds=Bounds(lower, np.array(p.upper)),
        constraints=LinearConstraint(matrix, ub=np.array([r for r, _, _ in p.rows])),
        options={"time_limit": float(seconds), "mip_rel_gap": 0.0},
    )
    optimal, infeasible = 0, 2  # of scipy's status; 1 is a limit
    proved = result.status in (optimal, infeasible)
    added = None
    if result.x is not None:
        added = sum(problem.times_ns[i] for (t, i), c in run_.items() if i < t and round(result.x[c]))
    bound = getattr(result, "mip_dual_bound", None) or 0.0
    return Solved(
        added_ns=added,
        proved=proved,
        lower_bound_ns=max(0, int(bound * time_unit)) if math.isfinite(bound) else 0,
        seconds=time.perf_counter() - begin,
        variables=len(p.cost),
    )


def _memory(
    p: Programme,
    problem: Small,
    readers: tuple[tuple[int, ...], ...],
    t: int,
    budget_bytes: int,
    unit: int,
    run_: dict[tuple[int, int], int],
    keep: dict[tuple[int, int], int],
) -> None:
    """The bytes at each run in stage t, which are never more than the budget."""
    room = (budget_bytes - problem.resident_bytes) / unit
    live: list[tuple[int, float]] = [
        (c, problem.nbytes[s] / unit) for (at, s), c in keep.items() if at == t and problem.nbytes[s]
    ]
    for k in range(t + 1):
        if (t, k) not in run_:
            continue
        for s in problem.makes[k]:
            # Allocated if it runs and the storage is not there: at least R - S, and no more than wanted.
            made = p.column(whole=False)
            terms = [(run_[t, k], 1.0), (made, -1.0)]
            if (t, s) in keep:
                terms.append((keep[t, s], -1.0))
            p.at_most(0.0, *terms)
            live.append((made, problem.nbytes[s] / unit))
        p.at_most(room, *live, (run_[t, k], problem.workspace_bytes[k] / unit))
        for s in dict.fromkeys((*problem.reads[k], *problem.makes[k])):
            if not problem.nbytes[s]:
                continue
            freed = p.column(whole=False)
            p.at_most(0.0, (freed, 1.0), (run_[t, k], -1.0))
            if (t + 1, s) in keep:
                p.at_most(1.0, (freed, 1.0), (keep[t + 1, s], 1.0))
            for j in readers[s]:
                if k < j <= t and (t, j) in run_:
                    p.at_most(1.0, (freed, 1.0), (run_[t, j], 1.0))
            live.append((freed, -problem.nbytes[s] / unit))


main = command(
    "The optimum by an integer programme after Checkmate (HiGHS) beside ours on small graphs.", solve
)

if __name__ == "__main__":
    main()

"""`simulate levers`: what each lever alone, and all together, could do to one step."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from simulator.bounds import bounder_of
from simulator.core.limits import Levers
from simulator.core.problem import Problem
from simulator.levers import LEVERS, exactness_of, rewritten_problem
from simulator.planners.outcome import percent
from simulator.prediction.levers import climb, floor_of, ladders
from simulator.show.tables import table
from simulator.studies.rows import Study
from traces.errors import SpecError
from traces.files import to_json
from traces.records.plan import APPROXIMATE, EXACT, EXACTNESS, FP, Rewrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far a lever reaches by itself, or some together."""

    lever: str
    exactness: str
    rewrites: int  # how many are taken
    peak_allocated_bytes: int  # with everything saved
    floor_bytes: int  # no plan can go below
    added_time_ns: int  # with everything saved


IN_WORDS: Final = {EXACT: "equal in every bit", FP: "equal but for rounding", APPROXIMATE: "approximate"}
RECOMPUTE_ALONE: Final = "recompute"


def study(problem: Problem, name: str) -> Study[Reach]:
    """Return what each lever alone does to the step, and all of a class together.

    Counts: the step with everything saved, and the floor of its plans; of a stretch the number of tiles with the lowest
    floor, of other kinds all that is offered. Ignores: that fewer may do.
    """
    found = _each_alone(problem)
    rows = [_reach(problem, RECOMPUTE_ALONE, ())]
    rows += [_reach(problem, kind, rewrites) for kind, rewrites in found.items()]
    for name_of_all, most in (("all exact", EXACT), ("all up to rounding", FP), ("all", APPROXIMATE)):
        kinds = [k for k in found if EXACTNESS.index(LEVERS[k].exactness) <= EXACTNESS.index(most)]
        together = _together(problem, {k: found[k] for k in kinds})
        if len({r.kind for r in together}) > 1:
            rows.append(_reach(problem, name_of_all, together))
    meta, whole, time_ns = problem.trace.meta, rows[0].peak_allocated_bytes, problem.trace.time_ns
    what = "each lever alone, and those of a class together"
    return Study(
        problem=problem,
        rows=tuple(rows),
        data={
            "trace": name,
            "model": meta.model,
            "fingerprint": meta.fingerprint,
            "levers": [to_json(row) for row in rows],
        },
        words=f"{name}: {what}",
        short=f"{meta.model}: {what}",
        table=table(
            rows,
            (
                ("lever", "", lambda r: r.lever),
                ("gradients", "", lambda r: IN_WORDS[r.exactness]),
                ("rewrites", "count", lambda r: r.rewrites),
                ("everything saved", "bytes", lambda r: r.peak_allocated_bytes),
                ("", "share", lambda r: percent(r.peak_allocated_bytes, whole)),
                ("time", "+percent", lambda r: percent(r.added_time_ns, time_ns)),
                ("no plan below", "bytes", lambda r: r.floor_bytes),
                (" ", "share", lambda r: percent(r.floor_bytes, whole)),
            ),
        ).known(),
    )


def _each_alone(problem: Problem) -> dict[str, tuple[Rewrite, ...]]:
    """Return the rewrites with the lowest floor, of each kind that a step offers."""
    found: dict[str, tuple[Rewrite, ...]] = {}
    for kind in LEVERS:
        with suppress(SpecError):  # nobody says how fast copies to host memory are
            of = ladders(problem, Levers(allow="approximate", kinds=(kind,)))
            lowest = climb(of, lambda rs: -floor_of(problem, rs))
            if chosen := lowest or next((rung for rungs in of for rung in rungs), ()):
                found[kind] = chosen
    return found


def _together(problem: Problem, found: dict[str, tuple[Rewrite, ...]]) -> tuple[Rewrite, ...]:
    """All kinds together; of those that pack the same values in different formats the one with the lowest floor."""
    alike = [k for k in found if LEVERS[k].exactness == APPROXIMATE]
    rest = tuple(r for k, rewrites in found.items() if k not in alike for r in rewrites)
    taken = {r.storage for r in rest}
    choices = [(*rest, *(r for r in found[k] if r.storage not in taken)) for k in alike] or [rest]
    return min(choices, key=lambda rewrites: floor_of(problem, rewrites))


def _reach(problem: Problem, lever: str, rewrites: tuple[Rewrite, ...]) -> Reach:
    step = rewritten_problem(problem, rewrites)
    return Reach(
        lever=lever,
        exactness=exactness_of(rewrites),
        rewrites=len(rewrites),
        peak_allocated_bytes=step.saved.timeline.peak_allocated_bytes,
        floor_bytes=bounder_of(step).floor.peak_bytes,
        added_time_ns=step.saved.timeline.step_time_ns - problem.trace.time_ns,
    )

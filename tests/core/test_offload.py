"""Copies to host memory: where their ops stand, what the step then takes, and when it waits for them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations, product

import pytest

from simulator import compare
from simulator.bounds import bounder_of
from simulator.core.evaluator import Evaluator
from simulator.core.facts import LATENCY_NS, OFFLOAD, PREFETCH, RELOAD, WAIT_OUT, copy_ns
from simulator.core.limits import Levers, Limits
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule
from simulator.levers import exactness_of, offload, rewritten_problem
from simulator.planners import plan_with
from simulator.prediction.levers import changed_steps, lower_bound, plan_with_levers
from tests.tiny import bwd, fwd, storage, trace
from tests.walked import rewritten, state_of
from traces.devices import device
from traces.errors import PlanError, SpecError
from traces.records.plan import EXACT, Action, Plan, Rewrite
from traces.records.trace import EAGER, VIEW, Trace

M = 1 << 20
RATE = 10**9  # a byte a nanosecond
U = M + LATENCY_NS  # ns that the copy of M bytes takes
HOST = Levers(kinds=("offload",), host_bytes_per_s=RATE)


def on_gpu(made: Trace, products: bool = True) -> Trace:
    """Whose ops are matrix products, so that nothing is taken to be recomputed."""
    ops = replace(made.ops, flops=(1,) * len(made.ops)) if products else made.ops
    return replace(made, ops=ops, meta=replace(made.meta, device="cuda", target="H100"))


def step(u: int = U) -> Trace:
    """a, b and c of M bytes wait for backward, which reads the last first; each op takes u, and d 3 M while it runs."""
    ops = [
        fwd({"a": M}, "w", time_ns=u),
        fwd({"b": M}, "a", time_ns=u),
        fwd({"c": M}, "b", time_ns=u),
        fwd({"d": 4}, "c", time_ns=u, events=(3 * M, -3 * M, 4)),
        bwd({"gd": 4}, "d", time_ns=u),
        bwd({"gc": M}, "gd", "c", time_ns=u),
        bwd({"gb": M}, "gc", "b", time_ns=u),
        bwd({"ga": M}, "gb", "a", time_ns=u),
    ]
    return on_gpu(trace(ops, {"w": 4}))


def all_hidden(t: Trace) -> tuple[Rewrite, ...]:
    return max(rungs(t, HOST), key=len)


def rungs(t: Trace, levers: Levers) -> list[tuple[Rewrite, ...]]:
    return [rung for ladder in offload.ladders(Problem(t), offered(t), levers) for rung in ladder]


def offered(t: Trace) -> list[Rewrite]:
    return [replace(r, bytes_per_s=RATE) for r in offload.offer(Problem(t))]


def test_the_four_ops_stand_where_the_copies_hide() -> None:
    t = step()
    # a is there at U, so out from U to 2 U, before c runs; b out from 2 U to 3 U, before d runs. c is read by d, the
    # last op of forward, and cannot be out before. In backward a is read at 7 U and b at 6 U: a comes in from 6 U on,
    # when gb runs, and b from 5 U on, when gc does.
    first, second = sorted(all_hidden(t), key=lambda r: r.storage)
    assert (first.op, first.out_before, first.in_before) == ("a", "c", "gb")
    assert (second.op, second.out_before, second.in_before) == ("b", "d", "gc")
    made = rewritten(t, (first, second))
    assert made.ops.name == (
        "a", "a_offloaded", "a_reloaded", "b", "b_offloaded", "b_reloaded", "a_out", "c", "b_out", "d",
        "gd", "b_prefetched", "gc", "a_prefetched", "gb", "ga",
    )  # fmt: skip
    at = {name: i for i, name in enumerate(made.ops.name)}
    assert [made.storages.name[s] for s in made.ops.reads[at["ga"]]] == ["gb", "a_reloaded"]
    assert exactness_of((first, second)) == EXACT


def test_bytes_and_times_are_what_by_hand_they_are() -> None:
    t = step()
    line = rewritten_problem(Problem(t), all_hidden(t)).saved.timeline
    assert line.step_time_ns == 8 * U  # nothing waits
    # Without, while d runs: w, a, b, c and its 3 M.
    assert Problem(t).saved.timeline.peak_allocated_bytes == 6 * M + 4
    # With: a (w besides); the same while it is handed on; a and b; they are handed on; both until a is out; b and c;
    # both until b is out; c and 3 M; c, d and gd; then b comes in: c, d went, gd, b; c, gc and b, and gd; a comes in:
    # a, b, gc; with gb; ga with gb and a.
    assert [n - 4 for n in line.peak_bytes] == [
        M, M, M, 2 * M, 2 * M, 2 * M, 2 * M, 2 * M, 2 * M, 4 * M, M + 8,
        2 * M + 4, 2 * M + 4, 3 * M + 4, 3 * M, 3 * M, 4 * M, 3 * M,
    ]  # fmt: skip
    # One that comes in no earlier than it is read.
    late = [replace(r, in_before={"a": "ga", "b": "gc"}[r.op]) for r in all_hidden(t)]
    line = rewritten_problem(Problem(t), late).saved.timeline
    assert max(line.peak_bytes[-5:]) == 3 * M + 8  # gc is made of c, b and gd
    assert line.step_time_ns == 9 * U  # ga waits for a


def test_what_is_recomputed_takes_the_copy_that_came_in() -> None:
    """y is made of x without a product, and read in backward before x: x comes in before y is recomputed."""
    ops = [
        fwd({"x": M}, "w", time_ns=U),
        fwd({"y": M}, "x", time_ns=1),
        fwd({"z": 4}, "y", time_ns=4 * U),
        fwd({"l": 4}, "z", time_ns=U),
        bwd({"gl": 4}, "l", time_ns=4 * U),
        bwd({"gz": 4}, "gl", "y", time_ns=U),
        bwd({"gy": M}, "gz", "x", time_ns=U),
        bwd({"gx": 4}, "gy", "w", time_ns=U),
    ]
    t = on_gpu(trace(ops, {"w": 4}), products=False)
    t = replace(t, ops=replace(t.ops, flops=(1, 0, 1, 1, 1, 1, 1, 1)))
    of_x = next(r for r in offered(t) if r.op == "x")
    assert of_x.in_before == "gl"  # gz, which reads y, runs at 11 U
    problem = rewritten_problem(Problem(t), (of_x,))
    found = problem.replay([Action(storage=storage(problem.trace, "y"))])
    names = [problem.trace.ops.name[i] for i in found.schedule.op]
    assert names[-7:] == ["x_reloaded", "x_prefetched", "gl", "y", "gz", "gy", "gx"]
    assert found.timeline.step_time_ns == t.time_ns + 1


def finished(t: Trace, schedule: Schedule) -> int:
    """The end of a schedule as the longest way through all that must come before: an oracle of the three clocks."""
    ops, nbytes, rate = t.ops, t.storages.nbytes, t.meta.rates["host_bytes_per_s"]
    end: dict[tuple[str, int], int] = {}
    copy_of: dict[int, tuple[str, int]] = {}  # storage or ticket -> its latest copy
    last: dict[str, tuple[str, int]] = {}
    for k, i in enumerate(schedule.op):
        target, again = ops.target[i], schedule.recompute[k]
        before = [("op", k - 1)]
        touches = target not in (OFFLOAD, RELOAD, PREFETCH) and not ops.flags[i] & VIEW
        if touches:
            before += [
                copy_of[s]
                for s in ops.reads[i]
                if s in copy_of and (copy_of[s][0] == "in" or target == WAIT_OUT)
            ]
        begin = max((end[b] for b in before if b in end), default=0)
        end["op", k] = begin + (0 if again and ops.flags[i] & VIEW else ops.time_ns[i])
        way = {OFFLOAD: "out", RELOAD: "in" if again else ""}.get(target, "")
        if way:
            value = ops.reads[i][0] if way == "out" else ops.writes[i][0]
            after = [begin, *(end[x] for x in (last.get(way), copy_of.get(ops.reads[i][0])) if x is not None)]
            end[way, k] = max(after) + copy_ns(nbytes[value], rate)
            last[way] = copy_of[ops.writes[i][0]] = (way, k)
            if t.meta.device == "cpu":  # nothing runs beside it
                end["op", k] = end[way, k]
    return end["op", len(schedule) - 1] if len(schedule) else 0


def random_step(seed: int) -> Trace:
    rng = random.Random(seed)
    n = rng.randint(4, 6)
    names = [f"x{i}" for i in range(n)]
    ops = [fwd({"x0": M * rng.randint(1, 3)}, "w", time_ns=rng.randint(1, 2 * U))]
    for i in range(1, n):
        reads = {names[i - 1], rng.choice(names[:i])}
        ops.append(fwd({f"x{i}": M * rng.randint(1, 3)}, *sorted(reads), time_ns=rng.randint(1, 2 * U)))
    ops.append(fwd({"loss": 4}, names[-1], time_ns=1))
    ops.append(bwd({"g": 4}, "loss", time_ns=1))
    ops.append(bwd({f"g{n}": M}, "g", names[-1], time_ns=rng.randint(1, 2 * U)))
    for i in reversed(range(n)):
        reads = [names[i]] if rng.random() < 0.8 else []
        ops.append(bwd({f"g{i}": M}, f"g{i + 1}", *reads, time_ns=rng.randint(1, 3 * U)))
    return on_gpu(trace(ops, {"w": 4}), products=False)


def subsets(of: list[int]) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(of, k) for k in range(len(of) + 1)))


@pytest.mark.parametrize("seed", range(40))
def test_the_replay_waits_as_the_oracle_and_the_planners_count_the_same_bytes(seed: int) -> None:
    t = random_step(seed)
    found = offered(t)
    rng = random.Random(seed)
    some = [r for r in found if rng.random() < 0.7]
    problem = rewritten_problem(Problem(t), some)
    for of in (t, replace(t, meta=replace(t.meta, device="cpu"))) if some else ():
        changed = rewritten_problem(Problem(of), some)
        assert finished(changed.trace, changed.saved.schedule) == changed.saved.timeline.step_time_ns
    evaluator = Evaluator(problem)
    for chosen in subsets(list(problem.candidates))[:16]:
        actions = [Action(storage=s, retain=rng.random() < 0.5) for s in chosen]
        found = problem.replay(actions)
        assert found.timeline.step_time_ns == (
            finished(problem.trace, found.schedule) if some else found.timeline.step_time_ns
        )
        assert evaluator.cost(state_of(evaluator, actions))[0] == found.timeline.peak_allocated_bytes


def test_plans_lie_between_the_bound_and_the_plan_without_and_near_the_best_there_is() -> None:
    """The best: of all sets of values copied away, each placed as the lever does, and all sets recomputed."""
    gaps = []
    for seed in (0, 1, 2, 3, 8, 9):
        t = random_step(seed)
        problem = Problem(t)
        saved = problem.saved.timeline.peak_allocated_bytes
        budget = (9 * bounder_of(problem).floor.peak_bytes + 11 * saved) // 20
        found = offered(t)
        times = []
        for chosen in subsets([r.storage for r in found]):
            q = rewritten_problem(problem, offload._Step(problem).placed(chosen, RATE))
            for what in product((None, False, True), repeat=len(q.candidates)):
                retained = {s: r for s, r in zip(q.candidates, what, strict=True) if r is not None}
                line = q.replay([Action(storage=s, retain=r) for s, r in retained.items()]).timeline
                times += [line.step_time_ns] * (line.peak_allocated_bytes <= budget)

        def make(p: Problem, budget: int = budget) -> Plan:
            return plan_with("search", p, budget, Limits(seconds=0.2))

        with_it = plan_with_levers(problem, budget, HOST, make, helps=True).predicted["plan"]["step_time_ns"]
        assert with_it <= make(problem).predicted["plan"]["step_time_ns"]
        assert t.time_ns + lower_bound(problem, budget, HOST).added_time_ns <= with_it
        gaps.append((with_it - min(times)) / t.time_ns)
    assert max(gaps) < 0.06, gaps
    assert sum(gaps) / len(gaps) < 0.01, gaps


def test_the_rate_that_a_trace_measured_is_taken_before_the_table() -> None:
    t = step()
    assert {r.bytes_per_s for r in offload.offer(Problem(t))} == {device("H100").host_bytes_per_s}
    for target in ("H100", "NVIDIA Quux"):
        measured = replace(t, meta=replace(t.meta, target=target, rates={"host_bytes_per_s": 7 * RATE}))
        assert {r.bytes_per_s for r in offload.offer(Problem(measured))} == {7 * RATE}


def test_host_memory_is_limited() -> None:
    t = step()
    assert len(offered(t)) == 2  # c is read by forward's last op
    limited = replace(HOST, host_bytes=2 * M - 1)
    assert {len(x) for x in rungs(t, limited)} == {1}


def test_a_device_that_nobody_knows_is_refused_unless_its_rate_is_given() -> None:
    t = step()
    t = replace(t, meta=replace(t.meta, target="NVIDIA Quux"))
    with pytest.raises(SpecError, match="--host-bandwidth"):
        changed_steps(Problem(t), 4 * M, Levers(kinds=("offload",)))
    assert len(changed_steps(Problem(t), 5 * M, HOST)) > 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"storage": 99}, "there is none"),
        ({"storage": 0}, "not made in forward"),
        ({"bytes_per_s": 0}, "how fast"),
        ({"out_before": "nothing"}, "before nothing of forward"),
        ({"in_before": "b"}, "before b of backward"),
    ],
)
def test_what_cannot_be_copied_is_refused(wrong: dict[str, object], why: str) -> None:
    t = step()
    with pytest.raises(PlanError, match=why):
        rewritten(t, [replace(all_hidden(t)[0], **wrong)])


def test_what_code_outside_the_graph_reads_stays() -> None:
    t = step()
    t = replace(t, ops=replace(t.ops, flags=(0, EAGER, 0, 0, 0, 0, 0, 0)))
    assert [r.op for r in offered(t)] == ["b"] or not offered(t)


def test_mu_two_as_printed_swaps_or_recomputes_by_overhead() -> None:
    # A copy of M bytes takes 36 us of an H100's rate: where ops take a millisecond it hides, which recomputing does
    # not; where they take 2 us, it does not either, and one op is cheaper.
    long = Problem(step())
    plan = plan_with("mu-two-swap", long, 4 * M + 8)
    assert [r.kind for r in plan.rewrites] == ["offload"] * 2
    assert not plan.actions
    line = rewritten_problem(long, plan.rewrites).saved.timeline
    assert (line.step_time_ns, line.peak_allocated_bytes) == (long.trace.time_ns, 4 * M + 4)
    rows = compare(long, 4 * M + 8, ("mu-two-swap", "mu-two")).rows
    assert [(row.feasible, row.overhead_percent) for row in rows] == [(True, 0.0), (True, 25.0)]
    assert rows[0].gap_points is None  # the bound is of plans that copy nothing
    short = plan_with("mu-two-swap", Problem(step(u=2000)), 5 * M + 8)
    assert not short.rewrites
    assert len(short.actions) == 1
    with pytest.raises(SpecError, match="lacks NVIDIA Quux"):
        plan_with(
            "mu-two-swap",
            Problem(replace(step(), meta=replace(step().meta, target="NVIDIA Quux"))),
            4 * M + 8,
        )

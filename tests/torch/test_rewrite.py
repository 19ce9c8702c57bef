"""The rewritten graphs hold what the schedule says and nothing else, and the guards against the rest hold."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from executor.graphs.match import program_actions
from executor.rewrite import Rewritten, rewrite
from simulator.core.problem import Problem
from simulator.core.schedule import Schedule, build
from tests.torch import small_nets
from tests.torch.steps import plan_of, program, random_actions, recompute_all, recorded, reruns
from tracer.record.program import Program, inplace_twin
from tracer.step.step import load_spec
from traces.errors import PlanError
from traces.records.plan import SAVE, Action

aten = torch.ops.aten


@pytest.fixture(scope="module")
def residual() -> Program:
    return program(small_nets.Residual(), torch.randn(2, 3, 8, 8))


def rewritten(p: Program, *actions: Action) -> Rewritten:
    return rewrite(p, build(Problem(p.trace()), actions))


def names(module: Any) -> list[str]:
    return [n.name for n in module.graph.nodes]


def expected_saved(p: Program, actions: tuple[Action, ...]) -> set[int]:
    problem = Problem(p.trace())
    kept = {s for s, wanted in enumerate(problem.saved_by_default) if wanted}
    kept -= {a.storage for a in actions if a.recipe != SAVE}
    kept |= {s for s, pinned in enumerate(problem.pinned) if pinned and problem.saved_by_default[s]}
    return kept


def test_with_everything_kept_nothing_runs_twice(residual: Program) -> None:
    r = rewritten(residual)
    assert not reruns(r)
    assert set(r.saved_storages) == expected_saved(residual, ())
    computed = [n for m in (r.forward, r.backward) for n in m.graph.nodes if n.op == "call_function"]
    picks = [n for n in computed if "getitem" in n.name]
    assert len(computed) - len(picks) == len(residual.ops)


def test_with_everything_recomputed_only_the_rest_crosses(residual: Program) -> None:
    trace = residual.trace()
    actions = recompute_all(Problem(trace))
    r = rewritten(residual, *actions)
    assert set(r.saved_storages) == expected_saved(residual, actions)
    assert not {a.storage for a in actions} & set(r.saved_storages)
    assert len(rewritten(residual).saved_storages) > len(r.saved_storages)


def test_recomputed_ops_and_only_they_are_named_so(residual: Program) -> None:
    actions = recompute_all(Problem(residual.trace()))
    r = rewritten(residual, *actions)
    schedule = build(Problem(residual.trace()), actions)
    ran = [residual.ops[i].node.name for i in schedule.recomputed_ops]
    assert not any("_recomputed" in n for n in names(r.forward))
    again = [n for n in r.backward.graph.nodes if n.meta.get("recomputed")]
    assert {f"{name}_recomputed" for name in ran} <= {n.name for n in again}
    assert ran
    assert all("_recomputed" in n.name for n in again)
    others = [n for n in r.backward.graph.nodes if not n.meta.get("recomputed")]
    assert not [n.name for n in others if "_recomputed" in n.name]


def test_random_ops_and_writes_to_buffers_never_run_again(residual: Program) -> None:
    for seed in range(20):
        r = rewritten(residual, *random_actions(residual.trace(), random.Random(seed)))
        nodes = [n for n in r.backward.graph.nodes if n.op == "call_function"]
        nodes += [n for n in r.forward.graph.nodes if n.meta.get("recomputed")]
        assert not [n.name for n in nodes if n.target is torch.ops.lowtide.dropout_mask.default]
        assert not [n.name for n in nodes if n.target is aten.copy_.default]


@pytest.mark.parametrize("model", ["mlp", "residual"])
def test_of_forward_only_what_the_plan_keeps_lives_into_backward(model: str) -> None:
    made = recorded(load_spec(small_nets.spec(model)))
    p = made.program
    for seed in range(5):
        plan = plan_of(made.trace, *random_actions(made.trace, random.Random(seed)))
        actions = program_actions(plan, p)
        r = rewrite(p, build(Problem(p.trace()), actions))
        problem = Problem(p.trace())
        allowed = expected_saved(p, actions) | {a.storage for a in actions if a.recipe == SAVE}
        assert set(r.saved_storages) <= allowed | {s for s, x in enumerate(problem.pinned) if x}
        gone = {a.storage for a in actions if a.recipe != SAVE}
        assert not gone & set(r.saved_storages)


def test_a_value_called_like_an_argument_does_not_take_its_place() -> None:
    # Ops called `saved_...`, as GoogLeNet has `cat_1` beside an argument of that name in its backward.
    p = program(small_nets.Residual(), torch.randn(2, 3, 8, 8))
    graph = p.captured.graph_module.graph
    for k, n in enumerate(m for m in graph.nodes if m.op == "call_function"):
        n.name = f"saved_{n.name}" if k % 2 else n.name
    r = rewritten(p)
    for module in (r.forward, r.backward):
        arguments = {str(n.target) for n in module.graph.nodes if n.op == "placeholder"}
        assert not arguments & {n.name for n in module.graph.nodes if n.op != "placeholder"}


class Thirds(nn.Linear):
    """Attention-like: one projection, split in three, of which backward reads all parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = super().forward(x).tanh().split(4, dim=1)
        return q @ k.t() @ v


def test_a_split_is_rebuilt_with_all_its_parts() -> None:
    p = program(Thirds(4, 12), torch.randn(5, 4))
    actions = recompute_all(Problem(p.trace()))
    assert actions
    r = rewritten(p, *actions)
    # What backward reads must come from the rebuilt split, not from parts that forward left behind.
    saved = [n.name for n in r.backward.graph.find_nodes(op="placeholder")]
    assert not [n for n in saved if "getitem" in n or "split" in n]
    assert set(r.saved_storages) == expected_saved(p, actions)


def test_takeovers_become_in_place_ops(residual: Program) -> None:
    r = rewritten(residual)
    schedule = build(Problem(residual.trace()))
    taking = [residual.ops[i].node for i, t in zip(schedule.op, schedule.takes, strict=True) if t >= 0]
    assert taking
    in_place = {
        n.name
        for m in (r.forward, r.backward)
        for n in m.graph.nodes
        if isinstance(n.target, torch._ops.OpOverload)
        and n.target._schema.is_mutable
        and n.target is not aten.copy_.default
    }
    assert in_place == {n.name for n in taking}
    assert all(inplace_twin(n.target) is not None for n in taking)


# Guards


def without_step(schedule: Schedule, step: int) -> Schedule:
    columns = {c: v for c in Schedule.__dataclass_fields__ if isinstance(v := getattr(schedule, c), tuple)}
    cut = {c: v[:step] + v[step + 1 :] for c, v in columns.items()}
    return replace(schedule, **cut, forward_steps=schedule.forward_steps - (step < schedule.forward_steps))


def test_a_schedule_that_forgets_an_op_is_refused(residual: Program) -> None:
    schedule = build(Problem(residual.trace()))
    with pytest.raises(PlanError, match="before it exists"):
        rewrite(residual, without_step(schedule, 1))


def test_a_schedule_that_releases_what_backward_takes_is_refused(residual: Program) -> None:
    """The guard `_check_crossing`: the graph would hold a value that the simulator has counted as gone."""
    trace = residual.trace()
    schedule = build(Problem(trace))
    problem = Problem(trace)
    s = problem.candidates[0]
    frees = [tuple(x for x in f if x != s) for f in schedule.frees]
    frees[problem.forward_end - 1] = (*frees[problem.forward_end - 1], s)
    with pytest.raises(PlanError, match="plan evicted"):
        rewrite(residual, replace(schedule, frees=tuple(frees)))

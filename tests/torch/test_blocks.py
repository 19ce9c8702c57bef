"""Plans for the blocks of a model: which modules are blocks, and what a model does that has such plans."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executor import apply_plan, remove_plan, unplanned
from executor.rehearsed.compose import Composed, compose
from executor.rehearsed.record import STEP
from executor.training.wrapped import blocks_of
from simulator.core.problem import Problem
from tests import tiny
from tests.torch.steps import build_of, plan_of, recompute_all, recorded
from traces.devices import Links, device
from traces.errors import PlanError, SpecError
from traces.records.plan import Action, BlockPlan, BlockPlans, Plan, load_plan
from traces.records.store import save
from traces.records.trace import HELD


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(expert(x) for expert in self.experts)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return sum(head(x).pow(2).mean() for head in self.heads)


def plans(*blocks: str) -> BlockPlans:
    def make() -> Any:
        return Block(), (torch.randn(4, 8).requires_grad_(),), lambda y: y.pow(2).mean(), None

    trace = recorded(build_of(make)).trace
    plan = plan_of(trace, *recompute_all(Problem(trace)))
    return BlockPlans(
        model="train.py", plans=(BlockPlan(blocks=blocks, plan=plan),), predicted={"gpu_bytes": 1}
    )


def gradients(net: nn.Module) -> list[torch.Tensor]:
    net.zero_grad()
    net(torch.ones(4, 8).requires_grad_()).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def test_blocks_are_the_outermost_alike_members_that_have_parts() -> None:
    assert [*blocks_of(Net())] == ["layers.0", "layers.1", "layers.2"]
    assert [*blocks_of(nn.Sequential(Block(), Block()))] == ["0", "1"]
    assert [*blocks_of(nn.ModuleDict({"a": Block(), "b": Block()}))] == ["a", "b"]


def test_blocks_share_what_is_compiled_and_their_steps_are_counted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    before = gradients(net)
    file = plans("layers.0", "layers.1", "layers.2").save(tmp_path / "plan.json")
    assert load_plan(file) == BlockPlans.load(file)
    assert apply_plan(net, file) is net
    copied = copy.deepcopy(net)
    for model in (net, copied):
        assert all(map(torch.equal, before, gradients(model)))
        told = model.receipt()
        assert (told.planned_steps, told.unplanned_steps) == (1, 0)
    assert len(net.receipt().captures) == 1  # of three blocks
    with unplanned(net):
        gradients(net)
    assert net.receipt().unplanned_because == {"inside `with unplanned`": 3}
    assert net.receipt().unplanned_steps == 1
    apply_plan(net, plans("layers.0"))  # takes the place of those that were there
    assert [path for path, m in net.named_modules() if hasattr(m, "receipt")] == ["", "layers.0"]
    assert all(map(torch.equal, before, gradients(net)))
    remove_plan(net)
    assert not hasattr(net, "receipt")
    assert all(map(torch.equal, before, gradients(net)))


def test_plans_for_other_blocks_and_files_that_hold_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"blocks of train.py, and this Net has no h\.0"):
        apply_plan(Net(), plans("h.0"))
    net = apply_plan(Net(), plans("layers.0"))
    net.layers[0].experts[0] = nn.Identity()
    with pytest.raises(PlanError, match="another graph"):
        gradients(net)
    file = plans("layers.0").save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="holds no plan"):
        Plan.load(file)
    file.write_text("[]")
    with pytest.raises(PlanError, match="holds no plan"):
        load_plan(file)


def composed_in(folder: Path, gathers: Any, *marks: str, gbit: float = 400, **graphs: int) -> Composed:
    """The step with a mebibyte at each mark, of a tiny graph whose backward takes 4 ns."""
    of = tiny.chain(3)
    if not (folder / "0").exists():
        save(replace(of, meta=replace(of.meta, forward_ops=4, first_backward_graph_op=4)), folder / "0")
    held = dict.fromkeys(HELD, 0) | {"the rest": 1 << 20}
    told = [[*f"{mark} ".split(" ")[:2], 0, held] for mark in marks]
    text = json.dumps({"graphs": [*graphs.items()], "marks": told, "gathers": gathers})
    (folder / STEP).write_text(text)
    return compose(folder, Links(gpu=device("h100"), network_gbit_per_s=gbit))


def test_gathered_parameters_stay_or_are_gathered_again_for_what_is_not_hidden(tmp_path: Path) -> None:
    marks = [f"forward {b}" for b in "abc"] + ["loss"] + [f"backward {b}" for b in "cba"] + ["rest"]
    graphs = dict.fromkeys("abc", 0)

    def step(*reshards: bool | None) -> Composed:
        told = {b: [1000, r, 8, 1] for b, r in zip("abc", reshards, strict=True)}
        return composed_in(tmp_path, told, *marks, **graphs)

    gather_ns = Links(gpu=device("h100")).gather_ns(1000, 8, 1)
    backward_ns = sum(tiny.chain(3).ops.time_ns[4:])
    for by_script in (False, True):
        made = step(by_script, by_script, by_script)
        a, b, c = (next(g for g in made.gathers if g.block == name) for name in "abc")
        assert [g.exposed_ns for g in (a, b, c)] == [gather_ns - backward_ns] * 2 + [gather_ns]
        assert c.storage < 0  # is taken as soon as its forward has ended
        problem = Problem(made.trace)
        assert {a.storage, b.storage} < {*problem.candidates}
        # As recorded it takes what was measured, whatever that was.
        assert problem.replay(made.script).timeline.peak_allocated_bytes == 1 << 20
        kept, again = (problem.replay(x).timeline for x in ((), [Action(storage=g.storage) for g in (a, b)]))
        assert again.step_time_ns - kept.step_time_ns == a.exposed_ns + b.exposed_ns
        loss = made.trace.ops.name.index("beside loss")
        assert kept.peak_bytes[kept.op.index(loss)] - again.peak_bytes[again.op.index(loss)] == 2000
        assert made.again(()).keys() == ({"c"} if by_script else set())
        assert made.again([Action(storage=b.storage)]).keys() == ({"b", "c"} if by_script else {"b"})
        assert [p.plan.actions for p in made.plans([Action(storage=b.storage)], "search")] == [()]
    # To fewer ranks: it stays as it is.
    assert [g.storage for g in step(None, None, None).gathers] == [-1] * 3


def test_blocks_that_run_once_each_are_composed_and_others_left_out_or_refused(tmp_path: Path) -> None:
    def composed(*marks: str, **graphs: int) -> Composed:
        return composed_in(tmp_path, {}, *marks, **graphs)

    made = composed("forward a", "forward b", "loss", "backward b", "backward a", "rest", a=0, b=0)
    assert [*made.graphs] == ["a", "b"]
    assert Problem(made.trace).saved.timeline.peak_allocated_bytes == 1 << 20
    # One that runs twice, as no graph, or whose backward never comes, is left to what lies beside.
    more = ("forward c", "forward c", "forward d", "forward e", "loss", "backward c", "backward e")
    made = composed("forward a", *more, "backward a", a=0, c=0, d=0, e=-1)
    assert [*made.graphs] == ["a"]
    with pytest.raises(SpecError, match="backward reaches none"):
        composed("forward a", "loss", a=0)
    with pytest.raises(SpecError, match="forward after others ran backward"):
        composed("forward a", "loss", "backward a", "forward b", "loss", "backward b", a=0, b=0)

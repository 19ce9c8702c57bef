"""DistributedDataParallel and fully_shard around plans: two processes train as without them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from executor import apply_plan, remove_plan
from simulator.core.problem import Problem
from tests.torch.steps import build_of, plan_of, recompute_all, recorded
from tracer.measure.probes import cpu_loop
from traces.errors import CaptureError
from traces.records.plan import BlockPlan, BlockPlans, Plan

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 48


def net() -> nn.Module:
    """Wide enough for several buckets of 10 kB; the batch norm has buffers, which are broadcast."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 5))


def batch(rank: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(100 * k + rank)
    return torch.randn(8, WIDTH, generator=g), torch.randint(5, (8,), generator=g)


def the_plan() -> Plan:
    def make() -> Any:
        model = net()
        return model, batch(0, 0), functional.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-2)

    trace = recorded(build_of(make)).trace
    return plan_of(trace, *recompute_all(Problem(trace)))


def once_a_step(ddp: nn.Module, rank: int, k: int) -> torch.Tensor:
    x, y = batch(rank, k)
    loss = functional.cross_entropy(ddp(x), y)
    loss.backward()
    return loss


def accumulated(ddp: nn.Module, rank: int, k: int) -> torch.Tensor:
    with ddp.no_sync():
        once_a_step(ddp, rank, 2 * k)
    return once_a_step(ddp, rank, 2 * k + 1)


def two_forwards(ddp: nn.Module, rank: int, k: int) -> torch.Tensor:
    """As a discriminator's step does: real, then fake, then one backward."""
    pairs = [batch(rank, 2 * k), batch(rank, 2 * k + 1)]
    losses = [functional.cross_entropy(ddp(x), y) for x, y in pairs]
    loss = losses[0] + 0.5 * losses[1]
    loss.backward()
    return loss


LOOPS: dict[str, Callable[[nn.Module, int, int], torch.Tensor]] = {
    "once": once_a_step,
    "accumulated": accumulated,
    "two_forwards": two_forwards,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def train(
    model: nn.Module, rank: int, loop: str, settings: str, later: Plan | None = None
) -> list[torch.Tensor]:
    """Ten steps; returns the losses, then all gradients, parameters, buffers and the random state."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, **SETTINGS[settings])
    if later is not None:
        assert apply_plan(ddp, later) is ddp
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    torch.manual_seed(7 + rank)
    losses = []
    for k in range(10):
        optimizer.zero_grad()
        losses.append(LOOPS[loop](ddp, rank, k).detach())
        optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*losses, *gradients, *model.state_dict().values(), torch.get_rng_state()]


class Block(nn.Module):
    """One of the blocks that FSDP2 shards one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.dropout(torch.relu(self.up(x)), 0.1))


def sharded(rank: int, order: str, plan: Plan) -> list[torch.Tensor]:
    """Five steps of three blocks under `fully_shard`, each with a plan from before it or after it, or without one."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(*(Block() for _ in range(3))), init_device_mesh("cpu", (2,))
    for block in model:
        for step in order.split():
            fully_shard(block, mesh=mesh) if step == "shard" else apply_plan(block, plan)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(7 + rank)
    losses = []
    for k in range(5):
        loss = model(batch(rank, k)[0].requires_grad_()).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if "plan" in order:
        assert [block.receipt().planned_steps for block in model] == [5] * 3
    return [*losses, *(p.full_tensor().detach() for p in model.parameters()), torch.get_rng_state()]


def sharded_root(rank: int, plan: Plan) -> tuple[bool, list[str]]:
    """Whether a planned model that is sharded as one trains as without, and what is said where its blocks are, too."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for planned in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Block())
        fully_shard(apply_plan(model, plan) if planned else model, mesh=mesh)
        torch.manual_seed(7 + rank)
        loss = model(batch(rank, 0)[0].requires_grad_()).pow(2).mean()
        loss.backward()
        found.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    said = []
    for first in (False, True):
        model = nn.Sequential(Block())
        if first:
            apply_plan(model, plan)
        fully_shard(model[0], mesh=mesh)
        try:
            fully_shard(model if first else apply_plan(model, plan), mesh=mesh)(batch(rank, 0)[0])
        except CaptureError as error:
            said.append(str(error))
    return all(map(torch.equal, *found)), said


def resharded(
    rank: int, by_script: bool, plans: BlockPlans | None, order: str
) -> tuple[list[Any], list[Any]]:
    """Two steps of blocks under `fully_shard` that reshard after forward as the script says, or the plans; losses and
    gradients, and which blocks are in shards behind each forward, the last of them without plans again."""
    torch.manual_seed(0)
    model, mesh = Blocks(), init_device_mesh("cpu", (2,))
    if order == "before" and plans is not None:
        apply_plan(model, plans)
    for block in model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=by_script)
    fully_shard(model, mesh=mesh)
    if order == "after" and plans is not None:
        apply_plan(model, plans)
    torch.manual_seed(7 + rank)
    seen, shards = [], []
    for k in range(3):
        if k == 2 and plans is not None:
            remove_plan(model)
        x, y = batch(rank, k)
        loss = functional.cross_entropy(model(x.requires_grad_()), y)
        shards.append([hasattr(block.up.weight, "placements") for block in model.layers])
        loss.backward()
        seen += [loss.detach(), *(p.grad.full_tensor().clone() for p in model.parameters())]
        model.zero_grad()
    return seen, shards


def plan_of_block(*, within: bool = False, saved: bool = False) -> Plan:
    def make() -> Any:
        model = nn.Sequential(Block()) if within else Block()
        return model, (batch(0, 0)[0].requires_grad_(),), lambda y: y.pow(2).mean(), None

    trace = recorded(build_of(make)).trace
    return plan_of(trace, *(() if saved else recompute_all(Problem(trace))))


class Blocks(nn.Module):
    """A model whose blocks get their plans from one file."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = block(x)
        return self.head(x)


def in_blocks(
    rank: int, ranks: int, how: str, plans: Path | None, planned: str
) -> tuple[list[torch.Tensor], int]:
    """Three steps under `fully_shard` or DistributedDataParallel, of the blocks by plans from before or after it, or
    without; the losses, gradients, parameters and the random state, and the steady peak in bytes."""
    torch.manual_seed(0)
    model: Any = Blocks()
    with cpu_loop() as loop:
        if planned == "before" and plans is not None:
            assert apply_plan(model, plans) is model
        if how == "fsdp2":
            mesh = init_device_mesh("cpu", (ranks,))
            for block in model.layers:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            # Else the order in which gradients come makes the buckets, and so that of the sums of more than two.
            model = DistributedDataParallel(model, find_unused_parameters=ranks > 2)
        if planned == "after" and plans is not None:
            assert apply_plan(model, str(plans)) is model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(7 + rank)
        seen = []
        for k in range(3):
            g = torch.Generator().manual_seed(100 * k + rank)
            x = torch.randn(8192, WIDTH, generator=g).requires_grad_()
            y = torch.randint(5, (8192,), generator=g)
            with loop.iteration():
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                whole = [
                    getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone() for p in model.parameters()
                ]
                optimizer.step()
                optimizer.zero_grad()
            seen += [loss.detach(), *whole]
    if plans is not None:
        inner = getattr(model, "module", model)
        told = inner.receipt()
        assert (told.planned_steps, told.unplanned_steps) == (3, 0)
        assert len(told.captures) == len(BlockPlans.load(plans).plans)
        assert remove_plan(model) is model
        assert not hasattr(inner, "receipt")
    parts = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return [*seen, *parts, torch.get_rng_state()], max(loop.peaks[1:])


def plans_of_blocks(folder: Path) -> tuple[Path, Path, int]:
    """The file of plans by which all blocks save all; by which all but the last recompute all; how much less is saved
    by these, in bytes."""

    def make() -> Any:
        return Block(), (torch.randn(8192, WIDTH).requires_grad_(),), lambda y: y.pow(2).mean(), None

    trace = recorded(build_of(make)).trace
    problem = Problem(trace)
    actions = recompute_all(problem)
    names = [f"layers.{k}" for k in range(4)]
    saved = BlockPlans(model="train.py", plans=(BlockPlan(blocks=tuple(names), plan=plan_of(trace)),))
    again = BlockPlan(blocks=tuple(names[:-1]), plan=plan_of(trace, *actions))
    mixed = BlockPlans(model="train.py", plans=(again, BlockPlan(blocks=(names[-1],), plan=plan_of(trace))))
    less = 3 * sum(trace.storages.nbytes[a.storage] for a in actions)
    return saved.save(folder / "saved.json"), mixed.save(folder / "plan.json"), less


def worker(rank: int, port: int, ranks: int = 2) -> None:
    """What each of the processes does; the first prints what it found."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    blocks: dict[str, Any] = {}
    with TemporaryDirectory() as name:
        saved, file, less = plans_of_blocks(Path(name))
        for how in ("fsdp2", "ddp"):
            eager, _ = in_blocks(rank, ranks, how, None, "")
            _, before = in_blocks(rank, ranks, how, saved, "after")
            for order_of in ("before", "after"):
                planned, after = in_blocks(rank, ranks, how, file, order_of)
                equal = len(eager) == len(planned) and all(map(torch.equal, eager, planned))
                blocks[f"{how} {order_of}"] = [equal, (before - after) / less]
    if ranks > 2:
        dist.barrier()
        if rank == 0:
            sys.stdout.write(json.dumps(blocks))
        dist.destroy_process_group()
        return
    plan = the_plan()
    found: dict[str, Any] = {"blocks": blocks}
    for loop, settings in [*((loop, "") for loop in LOOPS), *(("once", s) for s in SETTINGS if s)]:
        eager = train(net(), rank, loop, settings)
        planned = train(apply_plan(net(), plan), rank, loop, settings)
        equal = len(eager) == len(planned) and all(map(torch.equal, eager, planned))
        found[f"{loop} {settings}".strip()] = equal
        if loop == "once":
            around = train(net(), rank, loop, settings, plan)
            found[f"around {settings}".strip()] = all(map(torch.equal, eager, around))
    plan_b = plan_of_block()
    eager = sharded(rank, "shard", plan_b)
    for order_of in ("plan shard", "shard plan"):
        found[order_of] = all(map(torch.equal, eager, sharded(rank, order_of, plan_b)))
    names = [f"layers.{k}" for k in range(4)]
    of_blocks = BlockPlans(
        model="train.py",
        plans=(
            BlockPlan(blocks=tuple(names[1:]), plan=plan_b),
            BlockPlan(blocks=(names[0],), plan=plan_of_block(saved=True)),
        ),
    )
    for by_script in (True, False):
        eager, was = resharded(rank, by_script, None, "")
        other = replace(of_blocks, reshard_after_forward=dict.fromkeys(names[::3], not by_script))
        for order_of in ("before", "after"):
            planned, now = resharded(rank, by_script, other, order_of)
            mixed = [by_script ^ (k in (0, 3)) for k in range(4)]
            equal = all(map(torch.equal, eager, planned))
            found[f"reshards {by_script} {order_of}"] = (
                equal and was == [[by_script] * 4] * 3 and now == [mixed, mixed, [by_script] * 4]
            )
    found["root"] = sharded_root(rank, plan_of_block(within=True))
    dist.barrier()
    if rank == 0:
        sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return of_processes(2)


def of_processes(ranks: int) -> dict[str, Any]:
    """What so many processes find together."""
    port = 29500 + (os.getpid() + ranks) % 2000
    code = "import sys; from tests.torch.test_distributed import worker; worker(*map(int, sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(port), str(ranks)],
            env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [p.communicate(timeout=600) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert processes[0].returncode == 0, outputs[0][1][-3000:]
    answer: dict[str, Any] = json.loads(outputs[0][0])
    return answer


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo"),
]
ROWS = [
    *LOOPS,
    *(f"{how} {s}".strip() for s in SETTINGS for how in ("once", "around") if s or how == "around"),
]


@pytest.mark.parametrize("row", ROWS)
def test_ten_steps_of_two_processes_are_those_without_a_plan(found: dict[str, Any], row: str) -> None:
    assert found[row] is True


@pytest.mark.parametrize(
    "order_of",
    ["plan shard", "shard plan", *(f"reshards {s} {o}" for s in (True, False) for o in ("before", "after"))],
)
def test_blocks_under_fully_shard_train_as_without_plans(found: dict[str, Any], order_of: str) -> None:
    assert found[order_of] is True


def test_a_planned_model_is_sharded_as_one_and_sharded_blocks_in_it_are_refused(
    found: dict[str, Any],
) -> None:
    equal, said = found["root"]
    assert equal
    assert len(said) == 2
    for text in said:
        assert text.startswith(
            "a plan of a model cannot hold blocks that fully_shard shards by themselves (0)"
        )


@pytest.mark.parametrize("ranks", [2, 4])
def test_blocks_train_by_plans_from_one_file_with_the_same_bits_in_less_memory(
    found: dict[str, Any], ranks: int
) -> None:
    blocks = found["blocks"] if ranks == 2 else of_processes(ranks)
    assert len(blocks) == 4
    for how, (equal, share) in blocks.items():
        assert equal, how
        assert abs(share - 1) < 0.01, how  # of the bytes that the traces say are saved no more

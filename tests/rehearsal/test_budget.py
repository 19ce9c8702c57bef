"""Plans for the blocks of a rank within a budget of its GPU: recorded, planned and rehearsed on the null driver."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from executor.cli.main import execute
from executor.rehearsed.budget import RECORD
from executor.rehearsed.record import STEP
from simulator.core.problem import Problem, peak_by_category
from simulator.prediction.ask import plan
from tests.commands import call
from tests.rehearsal.test_rehearsal import script
from tracer.cli.main import trace as recorder
from tracer.rehearsal.jobs import Job
from tracer.rehearsal.run import rehearse
from traces.records.plan import BlockPlans
from traces.records.store import check_fingerprints, load
from traces.records.trace import COMMUNICATION, HELD
from traces.units import GIB

pytestmark = pytest.mark.rehearsal
LAYERS = 6  # of the programs

RANK = """
import os, torch, torch.distributed as dist
from executor import apply_plan
from tests.rehearsal.distributed import adamw, ddp, fsdp2, train
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group()
model = MODEL
# apply_plan(model, FILE)
train(model, adamw(model), 16, 512, clip=False)
"""
ALONE = """
import torch
from tests.rehearsal.distributed import Net, adamw, loss_of
model = Net().cuda()
optimizer = adamw(model)
for step in range(6):
    for _ in range(2):
        loss_of(model, 16, 512).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def plan_for(program: str, budget: str, *words: str) -> Result:
    given = ("rehearse", program, "--gpu", "h100", "--iterations", 3, "--budget", budget, "--json", "-q")
    return call(execute, *given, *words)


def answer_of(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["fsdp2()", "ddp()"])
def test_a_rank_is_planned_within_a_budget_and_keeps_it_when_it_is_rehearsed(
    tmp_path: Path, model: str
) -> None:
    program, file = script(tmp_path, RANK.replace("MODEL", model)), tmp_path / "plan.json"
    found = answer_of(plan_for(program, "75%", "--ranks", "8", "-o", str(file)))
    untouched, saved, planned = (found["rehearsals"][name] for name in ("untouched", "saved", "plan"))
    assert found["budget_bytes"] == untouched["gpu_bytes"] * 75 // 100
    assert planned["gpu_bytes"] <= found["budget_bytes"] < saved["gpu_bytes"]
    told = found["predicted"]
    # What is composed is what is rehearsed, but for what torch reserves beyond.
    beyond = [r["gpu_bytes"] - r["steady"]["requested_bytes"] for r in (saved, planned)]
    difference = planned["gpu_bytes"] - told["gpu_bytes"] - (beyond[1] - beyond[0])
    assert abs(difference) < 0.01 * planned["steady"]["requested_bytes"]
    assert 0 < told["bound_percent"] <= told["added_percent"]
    assert told["every_block_percent"] > told["added_percent"]
    others = {other["what"]: other["rehearsed"] for other in found["others"]}
    assert others == {
        "every block checkpointed": False, "half the micro-batch, no plan": False, "16 ranks, no plan": True,
    }  # fmt: skip
    plans = BlockPlans.load(file)
    assert sorted(b for p in plans.plans for b in p.blocks) == [f"layers.{k}" for k in range(LAYERS)]
    # One line in the program trains by the file as it was rehearsed.
    applied = RANK.replace("MODEL", model).replace("# apply", "apply").replace("FILE", repr(str(file)))
    again = rehearse(script(tmp_path, applied), "h100", script=True, job=Job(ranks=8), iterations=3)
    assert again.steady.requested_bytes == planned["steady"]["requested_bytes"]


def test_an_impossible_budget_is_refused_with_the_floor(tmp_path: Path) -> None:
    program = script(tmp_path, ALONE)
    done = plan_for(program, "1GiB")
    assert done.exit_code == 1
    assert "None goes below" in done.output
    assert "half of it would take about" in done.output


@pytest.mark.slow
def test_a_step_of_several_micro_batches_is_planned_by_its_last_without_frozen_blocks(tmp_path: Path) -> None:
    frozen = "for m in (model.embedding, model.layers[0]):\n    m.requires_grad_(False)\noptimizer ="
    program = script(tmp_path, ALONE.replace("optimizer =", frozen))
    found = answer_of(plan_for(program, "80%"))
    assert found["within_budget"]
    assert found["predicted"]["blocks"] == LAYERS - 1
    assert found["rehearsals"]["plan"]["gpu_bytes"] <= found["budget_bytes"]
    kept = answer_of(plan_for(program, f"{9 * GIB}"))
    assert kept["within_budget"]
    assert kept["predicted"] is None


CHECKPOINTED = """torch.utils.checkpoint.checkpoint(
            model, torch.ones(4, 8, dtype=int, device="cuda"), use_reentrant=False).sum()"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss", "why"),
    [
        ("Net()", CHECKPOINTED, "checkpoints its blocks itself, which the plan is to do"),
        (
            "torch.nn.Linear(4096, 40960)",
            "model(torch.ones(8, 4096).cuda()).sum()",
            "no model with blocks was called",
        ),
        ("applied(Net())", "loss_of(model, 16, 512)", "the script applies a plan itself"),
    ],
)
def test_programs_that_no_plan_of_blocks_is_for_are_told_why(
    tmp_path: Path, model: str, loss: str, why: str
) -> None:
    applied = """
def applied(model):
    from executor import apply_plan
    from tests.torch.steps import build_of, plan_of, recorded
    trace = recorded(build_of(lambda: (torch.nn.Linear(8, 8), (torch.ones(8, 8),), torch.sum, None))).trace
    return model if apply_plan(model.head, plan_of(trace), on_mismatch="eager") is None else model
"""
    code = ALONE.replace("Net()", model).replace("loss_of(model, 16, 512)", loss)
    code = code.replace("model =", f"{applied}\nmodel =", 1) if "applied" in model else code
    done = plan_for(script(tmp_path, code), "600MiB")
    assert done.exit_code == 2
    assert why in done.output


@pytest.mark.slow
def test_tensor_parallel_blocks_are_refused(tmp_path: Path) -> None:
    model = (
        RANK.replace("MODEL", 'tensor_parallel(dist.init_device_mesh("cuda", (8,)))')
        .replace("ddp,", "tensor_parallel,")
        .replace("adamw(model)", "adamw(model, foreach=False)")
    )
    done = plan_for(script(tmp_path, model), "600MiB", "--ranks", "8")
    assert (done.exit_code, "are DTensors while it runs" in done.output) == (2, True)


@pytest.mark.parametrize("model", ["fsdp2()", pytest.param("ddp()", marks=pytest.mark.slow)])
def test_a_ranks_step_is_recorded_with_what_is_gathered_and_reduced(
    tmp_path: Path, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    program, place = script(tmp_path, RANK.replace("MODEL", model)), tmp_path / "rank"
    assert not call(recorder, program, "--target=h100", "--ranks", 8, "--json", "-q", "-o", place).exit_code
    told = json.loads(capfd.readouterr().out)
    trace = load(place)
    check_fingerprints(trace, place, graph=True)
    run = Problem(trace).replay()
    assert run.timeline.peak_allocated_bytes == told["steady"]["requested_bytes"]
    held = {HELD[what]: nbytes for what, nbytes in told["at_the_peak"].items()}
    found = peak_by_category(trace, run.schedule, run.timeline)
    assert {kind: found[kind] for kind in held} == held
    kinds = {k for k, n in zip(trace.storages.category, trace.storages.nbytes, strict=True) if n}
    assert COMMUNICATION in kinds
    plan(trace, "80%").save(tmp_path / "plan.json")
    refused = call(execute, tmp_path / "plan.json", "--device", "cuda")
    assert (refused.exit_code, "come from `execute rehearse --budget`" in refused.output) == (2, True)


def test_what_a_budget_is_not_for_is_refused(tmp_path: Path) -> None:
    program = script(tmp_path, ALONE)
    for words in (["--ranks", "1,2"], ["--iterations", "2"], ["--plan", program]):
        done = plan_for(program, "80%", *words)
        assert (done.exit_code, "--budget plans for one rank" in done.output) == (2, True)
    assert "--budget makes" in call(execute, "rehearse", program, "--gpu=h100", "-o", tmp_path / "p").output
    assert "for a --target such as h100" in call(recorder, program, "--ranks", "8", "--device", "cuda").output


def of_rank(folder: Path, reshard: bool | int, shape: str) -> str:
    return script(folder, RANK.replace("MODEL", f"fsdp2(reshard={reshard})").replace("16, 512", shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reshard", "shape", "budget", "words"),
    [(False, "2, 256", "98%", ()), (True, "8, 256", "3GiB", ("--nodes", "2", "--network", "20"))],
)
def test_gathered_parameters_go_where_memory_is_short_and_stay_where_the_network_is_slow(
    tmp_path: Path, reshard: bool, shape: str, budget: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "plan.json"
    program = of_rank(tmp_path, reshard, shape)
    found = answer_of(plan_for(program, budget, "--ranks", "8", *words, "-o", str(file)))
    saved, planned = (found["rehearsals"][name] for name in ("saved", "plan"))
    told, changed = found["predicted"], BlockPlans.load(file).reshard_after_forward
    assert planned["gpu_bytes"] <= found["budget_bytes"]
    assert changed
    assert {*changed.values()} == {not reshard}
    assert told["communication"]["sharded_blocks"] == LAYERS
    assert told["communication"]["gathered_again"] == (LAYERS - len(changed) if reshard else len(changed))
    assert told["communication"]["assumed"].startswith("NVLink 360 GB/s within a machine, ")
    # To the byte, since hardly anything else is changed.
    beside = saved["gpu_bytes"] - saved["steady"]["requested_bytes"]
    assert abs(told["gpu_bytes"] - beside - planned["steady"]["requested_bytes"]) < 1 << 20
    if reshard:  # it fits untouched, and gains by what it keeps
        assert told["added_ns"] < 0
        assert len(changed) == LAYERS - 1
        assert found["rehearsals"]["untouched"]["gpu_bytes"] < planned["gpu_bytes"]


@pytest.mark.slow
def test_parameters_that_stay_on_fewer_ranks_are_seen_as_such(tmp_path: Path) -> None:
    program = of_rank(tmp_path, 4, "2, 256")
    around = (RECORD, str(tmp_path / "recorded"))
    rehearse(program, "h100", script=True, job=Job(ranks=8), iterations=2, around=around)
    gathers = json.loads((tmp_path / "recorded" / STEP).read_text())["gathers"]
    assert [*gathers] == [f"layers.{k}" for k in range(LAYERS)]
    assert {reshards for _, reshards, *_ in gathers.values()} == {None}
    assert {(ranks, nodes) for *_, ranks, nodes in gathers.values()} == {(8, 1)}

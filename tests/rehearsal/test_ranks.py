"""Ranks of distributed jobs on the null driver: programs as people write them, of which one process is there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from executor.cli.main import execute
from executor.rehearsed.shard import sharded
from tests.rehearsal.test_rehearsal import script
from tracer.rehearsal.jobs import COMMUNICATOR_BYTES, GPUS, Job, Launch, jobs_of, launch_of
from tracer.rehearsal.record import Peaks, Rehearsal
from tracer.rehearsal.run import rehearse
from tracer.step.step import load_spec
from traces.devices import CONTEXT_BYTES, device
from traces.errors import SpecError
from traces.units import GIB, MIB

pytestmark = pytest.mark.rehearsal
PROGRAM = str(Path(__file__).with_name("distributed.py"))
FAKE = "fake"


@cache
def run(*words: str, ranks: int = 8, rank: int = 0, iterations: int = 3, said: str = "") -> Rehearsal:
    given: dict[str, Any] = {"arguments": words, "iterations": iterations, "said": said}
    return rehearse(PROGRAM, "h100", script=True, job=Job(ranks=ranks), rank=rank, **given)


def peaks(found: Rehearsal) -> list[Peaks]:
    return [i.peaks for i in found.iterations]


def started(line: str) -> Launch:
    launch = launch_of(line.split(), distributed=False)
    assert launch is not None
    return launch


def test_the_lines_that_start_jobs_are_read_and_nothing_is_started() -> None:
    launch = started("bin/torchrun --nnodes 2 --nproc-per-node=4 --master-port 1 train.py --lr 1")
    assert (launch.program, launch.arguments, launch.module) == ("train.py", ("--lr", "1"), False)
    ((job, number),) = jobs_of(launch, (), (), None)
    assert job == Job(ranks=8, nodes=2)
    assert number == 0
    told = job.variables(6)
    names = ("LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    assert [told[name] for name in names] == ["2", "1", "4", "8"]
    launch = started("python3.11 -m torch.distributed.run --nproc-per-node gpu -m a.b x")
    assert (launch.program, launch.module, launch.ranks) == ("a.b", True, 0)
    assert launch_of(["python", "train.py"], distributed=False) is None
    with pytest.raises(SpecError, match="--ranks"):
        jobs_of(launch, (), (), None)
    wide = Job(ranks=16, nodes=16 // GPUS)
    assert jobs_of(launch, (1, 16), (0,), None) == [(Job(ranks=1), 0), (wide, 0)]
    with pytest.raises(SpecError, match="there is no rank 8"):
        jobs_of(None, (8,), (8,), None)
    with pytest.raises(SpecError, match="evenly"):
        jobs_of(None, (8,), (), 3)
    with pytest.raises(SpecError, match="does not shard itself among several ranks"):
        rehearse("bert-base", "h100", script=True, job=wide)
    with pytest.raises(SpecError, match="does not understand"):
        launch_of(["torchrun", "--nproc-per-node"], distributed=False)


def test_what_accelerate_would_start_it_says_itself() -> None:
    pytest.importorskip("accelerate")
    launch = started("accelerate launch --multi_gpu --num_processes 4 --mixed_precision bf16 train.py --lr 1")
    assert (launch.program, launch.arguments, launch.ranks, launch.nodes) == ("train.py", ("--lr", "1"), 4, 1)
    assert launch.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    launch = started("accelerate-launch --use_deepspeed --zero_stage 3 --num_processes 4 train.py")
    assert launch.environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"


@pytest.mark.parametrize(
    "kind",
    [
        *("fsdp2 by half", "experts"),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (
                "fsdp2", "fsdp2 kept", "fsdp2 checkpointed", "fsdp2 accumulates", "fsdp2 compiled", "hsdp", "fsdp1",
                "tp", "tp of sequences", "fsdp2 x tp", "fsdp2 saved",
            )
        ),
    ],
)  # fmt: skip
def test_memory_is_as_under_torch_s_fake_group(kind: str) -> None:
    """Which communicates nothing, and allocates as NCCL's group does where it gathers into one tensor."""
    found, fake = run(kind), run(kind, FAKE)
    # In the first iteration of one of the two, Inductor compiles and times what the other finds in its cache.
    ours, theirs = (peaks(r)["compiled" in kind :] for r in (found, fake))
    assert [p.requested_bytes for p in ours] == [p.requested_bytes for p in theirs]
    assert [p.allocated_bytes for p in ours] == [p.allocated_bytes for p in theirs]
    assert all(len(i.phases) == 3 for i in found.iterations)
    assert found.communicators
    assert not fake.communicators


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "ddp accumulates", "compile", "zero", "fsdp2 offloaded"])
def test_what_the_fake_group_does_not_run_becomes_steady(kind: str) -> None:
    found = run(kind, iterations=5)
    assert found.iterations[2].peaks == found.iterations[4].peaks
    assert found.fits


@pytest.mark.slow
def test_a_stage_of_a_pipeline_hears_shapes_from_its_neighbours(tmp_path: Path) -> None:
    """Which are run for it as far as that; with shapes that the program gives, none is asked."""
    first, last = (run("gpipe", ranks=3, rank=rank, said=str(tmp_path)) for rank in (0, 2))
    assert peaks(last) == peaks(run("gpipe", ranks=3, rank=2))  # to which nobody had spoken
    assert first.steady != last.steady
    assert run("1f1b", ranks=3, rank=2).steady.requested_bytes < last.steady.requested_bytes


@pytest.mark.parametrize("split", [(), pytest.param(("at once",), marks=pytest.mark.slow)])
def test_each_communicator_keeps_its_own_ranks_and_values(split: tuple[str, ...]) -> None:
    """Which the program asserts; those that are split off too."""
    found = run("communicators", *split, ranks=4)
    two, more = COMMUNICATOR_BYTES["TWO"], COMMUNICATOR_BYTES["MORE"] + 3 * COMMUNICATOR_BYTES["PEER"]
    pairs = 2 + 2 * len(split)
    assert [c.ranks for c in found.communicators] == [4, *[2] * pairs]
    assert [c.nbytes for c in found.communicators] == [more, *[two] * pairs]
    assert found.outside_bytes == CONTEXT_BYTES + more + pairs * two
    assert found.gpu_bytes == found.outside_bytes + found.figures.peak_reserved_bytes


@pytest.mark.slow
def test_the_store_answers_for_others_and_what_only_one_knows_is_heard_or_refused() -> None:
    assert len(run("objects", ranks=2, iterations=2).iterations) == 2
    with pytest.raises(
        SpecError, match="rank 0 takes the objects that rank 1 sends, which that rank does not say"
    ):
        run("objects", ranks=2, iterations=3)


def test_torch_s_bounds_for_fully_shard_hold() -> None:
    """Those of its own tests, in float32, beside cuBLAS's workspaces, of which backward's thread has one of its own."""
    n, width, words, layers, room, workspace = 8, 512, 32, 6, 16 * 10**6, 32 * MIB
    block, rest = 12 * width**2 + 4 * width, 2 * words * width + 2 * width
    whole = layers * block + rest
    shards = -(-whole // n)
    for kind, forward in (("bounds", 3 * block + rest), ("bounds kept", whole + block)):
        phases = run(kind).iterations[0].phases
        assert phases["forward"].allocated_bytes <= 4 * (shards + forward) + room + workspace
        if kind == "bounds":
            backward = 4 * (2 * shards + 3 * block + rest) + room + 2 * workspace
            assert phases["backward"].allocated_bytes <= backward
            assert phases["optimizer"].allocated_bytes <= 16 * shards + room + 2 * workspace


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "hsdp"])
def test_ranks_are_alike_and_every_run_is(kind: str) -> None:
    assert peaks(run(kind)) == peaks(run(kind, rank=7)) == peaks(run.__wrapped__(kind))


ALONE = """
import os, torch
if "WORLD_SIZE" in os.environ:
    torch.distributed.init_process_group("nccl")
net = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(9):
    net(torch.randn(64, 512, device="cuda")).sum().backward()
    if "WORLD_SIZE" in os.environ:
        for p in net.parameters():
            torch.distributed.all_reduce(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    LATER
"""


def test_a_rank_fits_by_the_sum_of_what_torch_and_nccl_take(tmp_path: Path) -> None:
    # What torch reserves has room beside the context, and not beside NCCL.
    board = device("t4")
    size = board.memory_bytes - CONTEXT_BYTES - GIB // 2
    large = script(
        tmp_path, ALONE.replace("LATER", f"x = torch.empty({size}, dtype=torch.uint8, device='cuda')")
    )
    found = rehearse(large, board, script=True, job=Job(ranks=8), iterations=2)
    assert not found.fits
    assert found.figures.peak_reserved_bytes + CONTEXT_BYTES < board.memory_bytes < found.gpu_bytes


BOTH = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tests.rehearsal.distributed import Net, batch

def build():
    model = Net()
    with torch.device("cuda"):
        x, y = batch()
    return model, (x, y), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), adamax(model)

def adamax(model):
    groups = [{"params": list(model.layers.parameters()), "eps": 1e-6}, {"params": list(model.head.parameters())}]
    return torch.optim.Adamax(groups, foreach=True)

if __name__ == "__main__":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model, (x, y), loss = build()[:3]
    if sys.argv[1] == "ddp":
        sharded, mixed = DistributedDataParallel(model.cuda(), device_ids=[int(os.environ["LOCAL_RANK"])]), True
    else:
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in (*model.layers, model):
            sharded = fully_shard(block, mp_policy=mixed)
    optimizer = adamax(model)
    while True:
        sharded.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=mixed is True):
            value = loss(sharded(x), y)
        value.backward()
        optimizer.step()
        del value
"""


@pytest.mark.parametrize("how", ["fsdp2", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_model_for_one_gpu_is_sharded_as_a_script_would(tmp_path: Path, how: str) -> None:
    """To the byte, and its optimizer holds what the model does then."""
    words = ["--gpu", "h100", "--ranks", "8", "--rank", "3", "--shard", how, "--amp", "bf16", "--json", "-q"]
    program = script(tmp_path, BOTH)
    done = CliRunner().invoke(execute, ["rehearse", f"{program}:build", *words, "--iterations", "3"])
    assert done.exit_code == 0, (done.output, done.exception)
    ours = json.loads(done.stdout)
    written = rehearse(program, "h100", arguments=(how,), script=True, job=Job(ranks=8), rank=3, iterations=3)
    for key in ("iterations", "gpu_bytes", "communicators"):
        assert ours[key] == json.loads(json.dumps(written.to_json()[key])), key
    assert (ours["shard"], written.shard) == (how, "")


def test_what_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    step = load_spec("resnet18", {"batch_size": 2, "image_size": 32})("cpu")
    halves = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    for change, why in (
        ({"loop": replace(step.loop, release_gradients=True)}, "not released"),
        ({"loss_parameters": {"loss.weight": halves}}, "into one module"),
        ({"model": nn.ParameterList([halves])}, "sharded already"),
    ):
        with pytest.raises(SpecError, match=why):
            sharded(replace(step, **change), "fsdp2")
    for model, job in (("resnet18", None), (script(tmp_path, ALONE), Job(ranks=2))):
        with pytest.raises(SpecError, match="leave --shard out"):
            rehearse(model, "h100", shard=("a:b", "ddp"), job=job)


@pytest.mark.slow
def test_memory_of_a_gpu_that_is_another_rank_s_is_told(tmp_path: Path) -> None:
    careless = script(tmp_path, ALONE.replace("LATER", ""))
    with pytest.raises(SpecError, match="nothing was allocated on GPU 1"):
        rehearse(careless, "h100", script=True, job=Job(ranks=2), rank=1, iterations=1)


def test_several_ranks_are_one_answer_and_one_rank_takes_what_the_program_takes_alone(tmp_path: Path) -> None:
    # It ends by itself, while a collective goes on.
    end = 'if "WORLD_SIZE" in os.environ:\n    torch.distributed.all_reduce(net.weight)\n'
    end += "    torch.distributed.destroy_process_group()\n"
    train = script(tmp_path, ALONE.replace("LATER", "").replace("range(9)", "range(2)") + end)
    words = ["rehearse", train, "--gpu", "h100", "--ranks", "1,16", "--iterations", "3", "--json", "-q"]
    done = CliRunner().invoke(execute, words)
    assert done.exit_code == 0, (done.output, done.exception)
    one, many = json.loads(done.stdout)["rehearsals"]
    assert one["steady"] == asdict(rehearse(train, "h100").steady)
    assert (one["ranks"], many["ranks"], many["rank"]) == (1, 16, 0)
    assert one["steady"] == many["steady"]
    parameters = 4 * (512 * 512 + 512)
    held = many["at_the_peak"]
    assert (held["parameters"], held["optimizer state"]) == (parameters, 2 * parameters)
    assert sum(held.values()) <= many["steady"]["requested_bytes"]
    assert many["outside_bytes"] - one["outside_bytes"] == COMMUNICATOR_BYTES["MORE"]
    assert many["gpu_bytes"] == many["outside_bytes"] + many["steady"]["reserved_bytes"]

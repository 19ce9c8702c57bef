"""Training loops on the null driver, with a CUDA build of torch and no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from executor.cli.main import execute
from simulator.allocator.replay import load_plain, peak_reserved
from simulator.history.snapshot import recording_of
from simulator.prediction import ask as api
from simulator.prediction.loop_peaks import untouched_peaks
from tests.commands import python
from tracer import trace
from tracer.rehearsal.jobs import Job
from tracer.rehearsal.record import ASSUMED, HOST_READ, MASK, MISSING
from tracer.rehearsal.run import rehearse
from traces import progress
from traces.errors import LowtideError, SpecError
from traces.records.plan import Plan

pytestmark = pytest.mark.rehearsal
MIB = 2**20

STEP = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(1024, 4096), nn.Linear(4096, 1024)
    def forward(self, x):
        return self.b(F.relu(self.a(x)))

def build(batch_size=256):
    net = Net()
    return net, torch.randn(batch_size, 1024), lambda y: y.pow(2).mean(), torch.optim.SGD(net.parameters())
"""


@pytest.fixture
def step(tmp_path: Path) -> str:
    return f"{script(tmp_path, STEP, 'net.py')}:build"


def script(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_figures_of_a_small_step_are_the_sum_of_its_tensors_and_its_snapshot_is_replayed(
    step: str, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot.pickle"
    found = rehearse(step, "h100", iterations=2, snapshot=snapshot)
    recording = recording_of(load_plain(snapshot), "s")
    assert peak_reserved(recording, recording.settings) == found.figures.peak_reserved_bytes
    weights = 4 * (2 * 1024 * 4096 + 4096 + 1024)
    batch, hidden = 4 * 256 * 1024, 4 * 256 * 4096
    workspace = 32 * MIB
    assert len(found.iterations) == 2
    assert set(found.iterations[1].phases) == {"forward", "backward", "optimizer"}
    assert found.fits
    assert found.provenance == "rehearsed (torch's own code, no GPU)"
    # The first forward: weights, batch, hidden before and after relu; one workspace of cuBLAS at most beside them, and
    # one of cuBLASLt, as far as this torch has them outside of calls.
    forward = found.iterations[0].phases["forward"].requested_bytes
    least = weights + batch + 2 * hidden
    assert least <= forward <= least + workspace + 2 * MIB
    # Backward adds the gradients of the weights, that of the output and of the hidden values.
    assert found.steady.requested_bytes >= 2 * weights + 2 * hidden
    assert found.steady.reserved_bytes >= found.steady.allocated_bytes >= found.steady.requested_bytes
    assert any(row.line.startswith("net.py:") for row in found.alive)


@pytest.mark.slow
def test_what_building_the_model_freed_is_not_reserved(step: str, tmp_path: Path) -> None:
    """A model that is moved to the GPU leaves nothing cached there, whatever its initialisers needed."""
    wasteful = script(
        tmp_path, STEP.replace("    net = Net()\n", "    torch.empty(2**27)\n    net = Net()\n")
    )
    thrifty, found = (rehearse(m, "h100", iterations=2) for m in (step, f"{wasteful}:build"))
    assert found.figures.reserved_bytes == thrifty.figures.reserved_bytes


@pytest.mark.slow
def test_lines_of_torchvision_are_named_at_the_peak() -> None:
    found = rehearse("resnet18", "h100", options={"batch_size": 8}, iterations=2)
    assert any(a.line.startswith("resnet.py:") for a in found.alive)


@pytest.mark.slow
def test_a_gpu_that_is_too_small_says_so_and_what_it_would_take(step: str) -> None:
    found = rehearse(step, "t4", options={"batch_size": 1 << 19})
    assert not found.fits
    assert "out of memory" in found.out_of_memory
    assert found.steady.allocated_bytes > found.memory_bytes
    done = python("-m", "executor", "rehearse", step, "--gpu", "t4", "--batch-size", 1 << 19, code=1)
    assert "does not fit into T4" in done.stderr


def test_a_script_runs_as_it_is_and_ends_after_its_iterations(tmp_path: Path) -> None:
    train = script(
        tmp_path,
        """
import sys, torch
from torch import nn
assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (8, 9)
net = nn.Sequential(nn.Linear(512, int(sys.argv[1])), nn.GELU(), nn.Linear(int(sys.argv[1]), 512)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
scaler = torch.amp.GradScaler("cuda")
seen = []
while True:
    for part in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(torch.randn(64, 512).pin_memory().to("cuda", non_blocking=True)).float().pow(2).mean()
        scaler.scale(loss / 2).backward()
        if torch.isnan(loss):
            raise RuntimeError("a NaN that nobody computed")
        assert not (inf_or_nan := torch.isfinite(loss).logical_not())
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    seen.append(torch.cuda.max_memory_allocated())
    assert seen == sorted(seen)  # the watch resets peaks and the loop does not see it
""",
    )
    found = rehearse(train, "rtx-4090", arguments=("2048",), iterations=4)
    assert len(found.iterations) == 4
    assert found.iterations[1].phases.keys() >= {"forward", "backward", "optimizer"}
    assert found.iterations[2].peaks == found.iterations[3].peaks
    read = {w.subject.split()[0]: w.figures for w in found.warnings if w.code == HOST_READ}
    assert read["train.py:14"] == {"bytes": 1, "told": 0, "times": 8}
    with pytest.raises(SpecError, match="run as a script"):
        rehearse(train, "h100", options={"batch_size": 2})


def test_steps_that_fit_records_are_no_iterations(tmp_path: Path) -> None:
    text = dedent(
        """
        import torch
        from executor import fit
        from net import build

        net, x, loss, _ = build()
        net, x = net.cuda(), x.cuda()
        optimizer = torch.optim.Adam(net.parameters())
        net = fit(net, x, loss=loss, optimizer=optimizer, budget="1GiB", say=lambda line: None)
        for _ in range(3):
            loss(net(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    (tmp_path / "net.py").write_text(STEP)
    shares: list[float | None] = []
    progress.shown_by(lambda share, _: bool(shares.append(share)))
    first, second = rehearse(script(tmp_path, text), "h100", iterations=2).iterations
    progress.shown_by(None)
    assert {0.5, 1.0} <= set(shares)
    assert set(second.phases) == {"forward", "backward", "optimizer"}
    # Adam's state, which no step on fake tensors makes.
    assert second.peaks.requested_bytes - first.phases["forward"].requested_bytes > 2 * 4 * 2 * 1024 * 4096


@pytest.mark.slow
def test_inductor_pads_matrices_without_timing_them(tmp_path: Path) -> None:
    text = dedent(
        """
        import torch
        net = torch.nn.Linear(2048, 5003, bias=False, device="cuda", dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(net.parameters())
        step = torch.compile(lambda x: net(x).square().mean(), options={"force_shape_pad": FORCED})
        for _ in range(2):
            step(torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)).backward()
            optimizer.step()
        """
    )
    asked, forced = (
        rehearse(script(tmp_path, text.replace("FORCED", word)), "h200", iterations=2)
        for word in ("False", "True")
    )
    assert asked.steady.requested_bytes == forced.steady.requested_bytes


@pytest.mark.slow
def test_a_script_without_steps_and_one_that_fails_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LowtideError, match="no optimizer"):
        rehearse(script(tmp_path, "import torch\ntorch.ones(3, device='cuda')\n"), "h100")
    reads = "import torch\nprint('before')\n"
    reads += "if torch.zeros(3, device='cuda').sum() == 0: raise ValueError('my own mistake')\n"
    with pytest.raises(
        LowtideError,
        match=r"ValueError at train.py:3 .*my own mistake.*reads of the GPU's values: train.*were taken",
    ):
        rehearse(script(tmp_path, reads), "h100", job=Job(ranks=2))
    assert "before" in capsys.readouterr().err


@pytest.mark.slow
def test_the_state_with_which_an_optimizer_begins_goes_where_the_parameters_go(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(STEP.replace("SGD(net.parameters())", "Adagrad(net.parameters())"))
    spec = f"{path}:build"
    found, predicted = rehearse(spec, "h100"), untouched_peaks(api.simulate(trace(spec, target="h100")))
    assert found.steady.requested_bytes == predicted.steady.peak_allocated_bytes
    assert found.figures.peak_reserved_bytes == predicted.steady.peak_reserved_bytes


@pytest.mark.slow
def test_autotuning_times_nothing_and_takes_the_first_choice_that_compiles(tmp_path: Path) -> None:
    """Forward and backward of flex attention, whose choices are Triton's alone."""
    text = """
        import torch
        from torch.nn.attention.flex_attention import flex_attention
        from torch._inductor import select_algorithm

        class Timed(Exception): pass
        def timed(*args, **kwargs): raise Timed
        select_algorithm.AlgorithmSelectorCache.make_precompile_fn = timed
        flex = torch.compile(flex_attention, mode="max-autotune-no-cudagraphs")
        w = torch.nn.Parameter(torch.randn(1, 2, 128, 64, device="cuda"))
        optimizer = torch.optim.SGD([w])
        for _ in range(2):
            flex(w, w, w).sum().backward()
            optimizer.step()
    """
    assert rehearse(script(tmp_path, dedent(text)), "h100").fits


def test_choices_that_the_gpu_cannot_run_are_passed_over() -> None:
    from tracer.rehearsal.watch import first_that_compiles

    def choice(fails: bool) -> Any:
        def precompile() -> None:
            if fails:
                raise RuntimeError("out of shared memory")

        return SimpleNamespace(precompile=precompile)

    bad, good, other = choice(True), choice(False), choice(False)
    assert first_that_compiles([bad, good, other]) == [good]
    assert first_that_compiles([bad]) == [bad]
    assert first_that_compiles([bad, bad]) == [bad, bad]


def test_a_mask_selects_all_in_backward_too_and_cublas_has_the_version_that_torch_loaded(
    tmp_path: Path,
) -> None:
    train = script(
        tmp_path,
        """
import ctypes, os, torch
x = torch.zeros(64, 1024, device="cuda", requires_grad=True)
mask = torch.zeros(64, 1024, device="cuda", dtype=torch.bool)
optimizer = torch.optim.SGD([x], lr=0.1)
for _ in range(2):
    chosen = x[mask]
    assert len(chosen) == len(torch.where(mask)[0]) == mask.numel()
    x.new_zeros(mask.shape).masked_scatter(mask, chosen).sum().backward()  # asks again in a thread of torch
    (x @ x.T).sum().backward()
    place = next(line.split()[-1] for line in open("/proc/self/maps") if "libcublasLt.so" in line)
    told, driver = ctypes.c_int(), ctypes.CDLL(os.environ["LD_PRELOAD"].split(os.pathsep)[0])
    driver.cublasGetVersion_v2(None, ctypes.byref(told))
    assert told.value == ctypes.CDLL(place).cublasLtGetVersion() > 0, told.value
    optimizer.step()
""",
    )
    found = rehearse(train, "h100", iterations=2)
    assert {w.subject.partition(" ")[0]: w.figures for w in found.warnings if w.code == MASK} == {
        "train.py:7": {"times": 2},
        "train.py:8": {"times": 2},
        "": {"times": 4},
    }
    assert not [w for w in found.warnings if w.code == HOST_READ]


def test_what_the_driver_lacks_is_named(tmp_path: Path) -> None:
    train = script(tmp_path, "import torch\ntorch.ones(8, device='cuda').untyped_storage()._share_cuda_()\n")
    with pytest.raises(LowtideError, match="cudaIpcGetMemHandle"):
        rehearse(train, "h100")


@pytest.mark.parametrize(("model", "options"), [
    ("resnet18", {"batch_size": 8, "image_size": 64}),
    ("gpt2-tiny", {"batch_size": 4, "seq_len": 64, "amp": "bfloat16", "attention": "sdpa"}),
    ("bert-tiny", {"batch_size": 4, "seq_len": 64, "optimizer": "adamw"}),
])  # fmt: skip
@pytest.mark.slow
def test_models_by_name_run_and_become_steady(model: str, options: dict[str, Any]) -> None:
    found = rehearse(model, "h100", options=options)
    assert found.iterations[1].peaks.allocated_bytes == found.iterations[2].peaks.allocated_bytes
    assert not [w for w in found.warnings if w.code == MISSING]
    if model != "gpt2-tiny":  # whose attention some releases give to cuDNN
        assert bool([w for w in found.warnings if w.code == ASSUMED]) == (model == "resnet18")


CONVOLVED = """
import os, torch
def workspace(image, weight, **options):
    x, w = torch.zeros(image, device="cuda"), torch.zeros(weight, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    y = torch.nn.functional.conv2d(x, w, **options)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - y.nbytes
print("WORKSPACE", workspace((32, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3))
print("PRODUCT", workspace((32, 256, 14, 14), (1024, 256, 1, 1)))
q = torch.zeros(2, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
    torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
print("GRADIENT", q.grad is not None, flush=True)
os._exit(0)  # backward's thread may want the interpreter while that ends, and torch aborts then
"""


def test_cudnn_itself_tells_its_workspaces(tmp_path: Path) -> None:
    """It plans for the GPU that is described to it: here the first convolution of a ResNet, and attention.

    On an H100 it chooses a kernel for channels last, and copies image, weight and result there and back.
    """
    command = ["rehearse", "--gpu", "h100", "--", "python", script(tmp_path, CONVOLVED)]
    done = python("-m", "executor", *command)
    told = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("WO", "PR", "GR")))
    images, weight, result = 4 * 32 * 3 * 224 * 224, 4 * 64 * 3 * 7 * 7, 4 * 32 * 64 * 112 * 112
    assert images + weight + result <= int(told["WORKSPACE"]) < images + weight + result + MIB
    assert (told["PRODUCT"], told["GRADIENT"]) == ("0", "True")


@pytest.mark.slow
def test_the_allocators_settings_reach_torch(step: str) -> None:
    plain, growing = rehearse(step, "h100"), rehearse(step, "h100", alloc_conf="expandable_segments:True")
    assert growing.environment["alloc_conf"] == "expandable_segments:True"
    assert growing.steady.requested_bytes == plain.steady.requested_bytes
    assert growing.steady.reserved_bytes != plain.steady.reserved_bytes


def call(folder: Path, module: str, *words: str) -> str:
    return python("-m", module, *words, cwd=folder).stdout


@pytest.mark.slow
def test_a_step_that_copies_to_host_memory_takes_the_predicted_bytes(tmp_path: Path) -> None:
    """torch's own streams, events and pinned memory run; what the copies wait for nobody checks here."""
    words = ("bert-base", "--batch-size", "4", "--seq-len", "512")
    call(tmp_path, "tracer", *words, "--target", "h100", "-o", "t", "-q")
    call(tmp_path, "simulator", "t", "--budget", "80%", "--levers", "offload", "-o", "plan.json", "-q")
    told = json.loads((tmp_path / "plan.json").read_text())
    assert {r["kind"] for r in told["rewrites"]} == {"offload"}
    found = json.loads(
        call(tmp_path, "executor", "rehearse", *words, "--gpu", "h100", "--plan", "plan.json", "--json", "-q")
    )
    steady = found["steady"]
    predicted = told["predicted"]["plan"]
    assert steady["requested_bytes"] == predicted["peak_allocated_bytes"]
    assert steady["allocated_bytes"] == predicted["peak_block_bytes"]
    assert steady["reserved_bytes"] == predicted["peak_reserved_bytes"]


def run_by_plan(made: Plan, place: Path, *words: str) -> int:
    """Rehearse a planned step, whose figures are those of the plan; returns what it reserves."""
    plan, named = made.save(place / "plan.json"), made.meta.model
    done = CliRunner().invoke(
        execute, ["rehearse", named, *words, "--gpu", "h100", "--plan", str(plan), "--json", "-q"]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    steady, told = json.loads(done.stdout)["steady"], made.predicted["plan"]
    assert (
        steady["requested_bytes"]
        == told["peak_allocated_bytes"]
        < made.predicted["baseline"]["peak_allocated_bytes"]
    )
    assert steady["allocated_bytes"] == told["peak_block_bytes"]
    assert steady["reserved_bytes"] == told["peak_reserved_bytes"]
    return int(steady["reserved_bytes"])


def test_a_planned_step_runs_there_beside_its_prediction(tmp_path: Path) -> None:
    deep = "for _ in range(4): x = x + self.b(F.gelu(self.a(x)))\n        return x"
    (tmp_path / "net.py").write_text(STEP.replace("return self.b(F.relu(self.a(x)))", deep))
    found = trace(f"{tmp_path / 'net.py'}:build", target="h100", batch_size=2048)
    run_by_plan(api.plan(found, "85%", seconds=1), tmp_path, "--batch-size", "2048")


def test_kernels_are_of_the_capability_that_torch_was_compiled_for(tmp_path: Path) -> None:
    """An RTX 4090 (8.9) runs what was compiled for 8.6; CUB refuses to sort, for a long embedding, by another."""
    path = tmp_path / "net.py"
    path.write_text(
        """
import torch
from torch import nn
def build():
    net = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 1))
    return net, (torch.zeros(8, 512, dtype=torch.long), torch.zeros(8, 512, 1)), nn.functional.mse_loss, None
"""
    )
    recorded = trace(f"{path}:build", target="rtx-4090")
    assert recorded.meta.mode == "rehearsed"
    assert "aten.embedding_dense_backward.default" in recorded.ops.target

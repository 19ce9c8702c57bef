"""What is predicted of loops is what torch's own code takes on the null driver, to the byte, in every iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn, optim, randn

from simulator.prediction import ask as api
from simulator.prediction.loop_peaks import LoopPeaks, planned_peaks, untouched_peaks
from tests.bench.rehearsed import rehearsed as run
from tests.commands import python
from tests.rehearsal.test_rehearsal import STEP
from tracer import trace
from tracer.rehearsal.record import Rehearsal
from traces.errors import SpecError
from traces.records.store import load
from traces.records.trace import Trace, Untouched

pytestmark = pytest.mark.rehearsal
GPU = "h100"
LANGUAGE = {"batch_size": 2, "seq_len": 64, "optimizer": "adamw"}
MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"batch_size": 8},
    "gpt2-tiny": LANGUAGE,
    "bert-tiny": LANGUAGE,
}
LOOPS: dict[str, dict[str, Any]] = {
    "before": {},
    "after": {"zero_grad": "after"},
    "keep": {"zero_grad": "keep"},
    "none": {"zero_grad": "none", "clip_grad_norm": 1.0},
    "accumulate": {"accumulate": 2},
    "accumulate and clip": {"accumulate": 4, "clip_grad_norm": 1.0, "zero_grad": "after"},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loop", LOOPS)
def test_predicted_is_rehearsed(model: str, loop: str) -> None:
    """Requested, in blocks and reserved."""
    check(model, {**MODELS[model], **LOOPS[loop]})


def test_a_loop_of_options_is_rehearsed(tmp_path: Path) -> None:
    """Parts, clipping and autocast's casts of weights, beside embedding, norms and a loss that the model computes."""
    (tmp_path / "net.py").write_text(WORDS)
    check(f"{tmp_path / 'net.py'}:build", {**LOOPS["accumulate and clip"], "amp": "bfloat16"})


def check(model: str, options: dict[str, Any], recorded: Trace | None = None) -> None:
    recorded = recorded or trace(model, target=GPU, **options)
    predicted = untouched_peaks(api.simulate(recorded))
    found = run(model, GPU, options, iterations=4)
    alike(predicted, found)
    for phase, theirs in found.iterations[-1].phases.items():
        assert predicted.phases[phase].peak_allocated_bytes == theirs.requested_bytes, phase


def alike(predicted: LoopPeaks, found: Rehearsal) -> None:
    for k, iteration in enumerate(found.iterations):
        ours, theirs = predicted.iterations[min(k, len(predicted.iterations) - 1)], iteration.peaks
        assert ours.peak_allocated_bytes == theirs.requested_bytes
        assert ours.peak_block_bytes == theirs.allocated_bytes
        assert ours.peak_reserved_bytes == theirs.reserved_bytes


WORDS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(2000, 256), nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.head = nn.Linear(256, 2000, bias=False)
        self.head.weight = self.words.weight
    def forward(self, ids, labels):
        x = self.words(ids)
        x = self.norm(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}

def build():
    model = Net()
    ids = torch.randint(2000, (4, 64))
    return model, {"ids": ids, "labels": ids}, None, torch.optim.AdamW(model.parameters())
"""


OWN = f"""{STEP.replace("relu", "gelu")}
def build():
    model = Net()
    batch = (torch.randn(512, 1024), torch.randn(512, 1024))
    optimizer = torch.optim.AdamW(model.parameters())
    return {{"model": model, "batch": batch, "optimizer": optimizer, "loss": F.mse_loss}}
"""


def test_a_loop_with_all_options_is_rehearsed(tmp_path: Path) -> None:
    """Parts, autocast, a gradient scaler, clipping, gradients that stay."""
    (tmp_path / "mine.py").write_text(OWN)
    options = {"amp": "float16", "accumulate": 2, "clip_grad_norm": 1.0, "zero_grad": "keep"}
    check(f"{tmp_path / 'mine.py'}:build", options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("mine.py:build",), ("resnet18", "--batch-size", "8", "--accumulate", "2")]
)
def test_a_trace_that_is_made_there_is_of_the_loop(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    command = ("executor", "rehearse", "--gpu", GPU, "--", "trace", *words)
    python("-m", *command, "--device", "cuda", "-o", "t", "-q", cwd=tmp_path)
    recorded = load(tmp_path / "t")
    assert recorded.meta.mode == "rehearsed"
    model = str(tmp_path / words[0]) if len(words) == 1 else words[0]
    check(model, {"batch_size": 8, "accumulate": 2} if len(words) > 1 else {}, recorded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [
        {"accumulate": 2},
        {"accumulate": 4, "clip_grad_norm": 1.0, "zero_grad": "after"},
        {"accumulate": 2, "zero_grad": "keep"},
        {"zero_grad": "none"},
    ],
)
def test_a_plan_in_a_loop_whose_gradients_add_up(tmp_path: Path, loop: dict[str, Any]) -> None:
    """In every iteration, from the first part of the first on."""
    options = {"batch_size": 16, **loop}
    found = trace("resnet18", target=GPU, **options)
    plan = api.plan(found, "85%", seconds=1)
    assert plan.actions
    path = plan.save(tmp_path / "plan.json")
    rehearsed = run("resnet18", GPU, options, path, iterations=4)
    alike(planned_peaks(api.simulate(found, plan)), rehearsed)


REPLACING = """
import torch
from torch import nn, randn

class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["m"] = 0.9 * self.state[p].get("m", torch.zeros_like(p)) + 0.1 * p.grad
            p.data.sub_(self.state[p]["m"])

def build():
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    return model, torch.randn(64, 256), lambda y: y.sum(), Own(model.parameters())
"""


def test_what_an_optimizer_puts_in_the_place_of_its_state_is_given_back_an_iteration_later(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(REPLACING)
    check(f"{tmp_path / 'mine.py'}:build", {})


class Replaces(optim.SGD):
    """Puts new parameters in the place of the old ones."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = p.data - p.grad


def test_objects_in_hand_are_rehearsed_and_what_cannot_be_carried_is_refused() -> None:
    """Parameters that are replaced leave the peak and no requests."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    batch = randn(32, 64), randn(32, 64)
    found = trace(model, batch, nn.functional.mse_loss, Replaces(model.parameters()), target=GPU)
    assert (found.meta.mode, found.meta.workspace.keys()) == ("rehearsed", {"rehearsed"})
    assert found.untouched == Untouched()
    assert found.meta.untouched_peak_bytes > found.resident_bytes
    model.register_forward_hook(Unknown())
    with pytest.raises(SpecError, match=r"file\.py:build"):
        trace(model, batch, nn.functional.mse_loss, "sgd", target=GPU)


class Unknown:
    """A hook that does not go to another process."""

    def __call__(self, *_: Any) -> None:
        pass

    def __reduce__(self) -> Any:
        raise TypeError("this holds a file")

"""What is predicted of recurrent layers is what torch's own code takes on the null driver, which answers for cuDNN."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from simulator import api
from simulator.prediction.loop_peaks import planned_peaks
from tests.bench.forked import Forked
from tests.rehearsal.test_loops import GPU, alike, check, forked
from tracer import trace
from tracer.record.sketch import CUDNN

__all__ = ["forked"]
pytestmark = pytest.mark.rehearsal

NETS = """
import torch
from torch import nn
from torch.nn import functional as F

CASES = {
    "lstm": ("LSTM", {}),
    "lstm_batch_first": ("LSTM", dict(num_layers=2, batch_first=True)),
    "lstm_bidirectional": ("LSTM", dict(num_layers=3, bidirectional=True)),
    "lstm_projected": ("LSTM", dict(num_layers=2, proj_size=24, bidirectional=True, batch_first=True)),
    "lstm_projected_without_biases": ("LSTM", dict(num_layers=2, proj_size=24, bias=False)),
    "gru": ("GRU", dict(num_layers=3, bidirectional=True, batch_first=True)),
    "gru_without_biases": ("GRU", dict(num_layers=2, bias=False)),
    "rnn_tanh": ("RNN", dict(num_layers=2)),
    "rnn_relu": ("RNN", dict(nonlinearity="relu", batch_first=True)),
}


class Net(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        ways = 2 if options.get("bidirectional") else 1
        wide = ways * (options.get("proj_size") or 256)
        self.words = nn.Embedding(100, 256)
        self.first = getattr(nn, kind)(256, 256, **options)
        self.between = nn.Sequential(nn.Linear(wide, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256), nn.ReLU())
        self.second = getattr(nn, kind)(256, 256, **options)
        self.head = nn.Linear(wide, 100)

    def forward(self, x):
        y, last = self.first(self.words(x))
        return self.head(self.second(self.between(y), last)[0])


def make(case, dtype):
    kind, options = CASES[case]

    def build():
        net = Net(kind, **options).to(dtype)
        x, y = torch.randint(100, (64, 96)), torch.randint(100, (64, 96))
        loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
        return net, (x, y), loss, torch.optim.AdamW(net.parameters())

    return build


for case in CASES:
    globals()[case] = make(case, torch.float32)
    globals()[case + "_half"] = make(case, torch.float16)
    globals()[case + "_bfloat16"] = make(case, torch.bfloat16)
"""
CASES = [line.split('"')[1] for line in NETS.splitlines() if line.startswith('    "')]


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


@pytest.mark.parametrize("case", [*CASES, "lstm_half", "gru_bfloat16", "rnn_tanh_bfloat16"])
def test_predicted_is_rehearsed(case: str, nets: Path, forked: Forked) -> None:
    """Requested, in blocks and reserved, in every iteration."""
    recorded = trace(f"{nets}:{case}", target=GPU, profile=False)
    assert recorded.ops.target.count(CUDNN) == 2
    check(forked, f"{nets}:{case}", {}, recorded)


@pytest.mark.parametrize("share", ["85%", "70%"])
@pytest.mark.parametrize("case", ["lstm_batch_first", "gru", "lstm_projected_without_biases", "rnn_relu"])
def test_a_plan_is_rehearsed_as_predicted(
    case: str, share: str, nets: Path, tmp_path: Path, forked: Forked
) -> None:
    found = trace(f"{nets}:{case}", target=GPU, profile=False)
    plan = api.plan(found, share, seconds=1)
    assert plan.actions
    path = plan.save(tmp_path / "plan.json")
    rehearsed = forked.rehearse(f"{nets}:{case}", GPU, {}, plan=str(path), iterations=4)
    alike(planned_peaks(api.simulate(found, plan)), rehearsed)

"""Objects in hand that go to another process: what is shared stays shared, code that nobody can import goes along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.commands import python
from tracer.rehearsal.objects import SMALL_BYTES, load, save
from traces.errors import SpecError

SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
from tracer.rehearsal.objects import save

SCALE = 2.0

def scaled(x):
    return x * SCALE if x.dim() > 1 else scaled(x[None])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @property
    def width(self):
        return self.layer.out_features

    @staticmethod
    def twice(x):
        return x + x

    def forward(self, x):
        return scaled(self.twice(F.relu(self.layer(x)))) / self.width

power = 2
save({"model": Net(), "loss": lambda out, y: (out - y).pow(power).mean()}, Path(sys.argv[1]))
"""


def test_tensors_go_by_their_layout_and_what_they_share(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.BatchNorm1d(256))
    net[1].weight = net[0].weight
    net[0].bias.requires_grad_(False)
    base = torch.arange(20.0)
    save(
        {"net": net, "view": base[3:9:2], "base": base, "half": torch.ones(3, dtype=torch.bfloat16)},
        tmp_path / "o",
    )
    found = load(tmp_path / "o")
    there = found["net"]
    assert there[1].weight is there[0].weight
    assert isinstance(there[0].weight, nn.Parameter)
    assert [p.requires_grad for p in there.parameters()] == [p.requires_grad for p in net.parameters()]
    # 256 x 256 floats go without their values, the rest with them.
    assert SMALL_BYTES < 4 * 256 * 256
    assert torch.equal(there[2].running_var, torch.ones(256))
    assert found["view"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()
    assert found["view"].tolist() == [3.0, 5.0, 7.0]
    assert found["half"].tolist() == [1.0, 1.0, 1.0]
    assert (tmp_path / "o").stat().st_size < 20_000


def test_a_script_s_own_classes_and_lambdas_go_along(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    python("train.py", "o", cwd=tmp_path)
    found = load(tmp_path / "o")
    x = torch.ones(4, 8)
    layer = found["model"].layer
    assert torch.equal(found["model"](x), torch.relu(layer(x)) * 4 / 8)
    assert found["loss"](x, x + 3) == 9.0


def test_what_cannot_go_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cannot be carried to another process: .*generator"):
        save({"batch": (n for n in range(3))}, tmp_path / "o")

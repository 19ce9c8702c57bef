"""Models that look at their tensors' data: checks and prints are captured and go on checking; branches are not."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from executor.training.module import apply_plan  # noqa: E402
from simulator import plan  # noqa: E402
from tracer import trace  # noqa: E402
from traces.errors import CaptureError  # noqa: E402

F = nn.functional


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def body(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


class Finite(Net):
    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
            if not torch.isfinite(x).all():
                raise ValueError("not finite")
        return x


class Asserts(Net):
    def forward(self, x: Any, labels: Any) -> Any:
        assert labels.max() < 8
        assert labels.min().item() >= 0
        assert not torch.isnan(x).any(), "nan"
        return F.cross_entropy(self.body(x), labels)


class Prints(Net):
    def forward(self, x: Any) -> Any:
        x = self.body(x)
        print(  # noqa: T201
            f"mean {x.mean().item():.3f}, most {round(x.max().item(), 2)}", x.shape
        )
        return x


class Warns(Net):
    def forward(self, x: Any) -> Any:
        if (x.abs() > 1e6).any():
            print("large inputs")  # noqa: T201
        return self.body(x)


class Branches(Net):
    def forward(self, x: Any) -> Any:
        x = self.body(x)
        return x * 2 if x.sum() > 0 else x


class Chooses(Net):
    def forward(self, x: Any) -> Any:
        x = self.body(x)
        a, b = x * 2, x * 2
        return a if x.sum() > 0 else b + 0 * a


class Picks(Net):
    def forward(self, x: Any) -> Any:
        a, b = self.layers[0](x), self.layers[1](x)
        return a if x.sum() > 0 else b


class Detaches(Net):
    def forward(self, x: Any) -> Any:
        with torch.set_grad_enabled(bool(x.sum() > 0)):
            y = self.layers[0](x)
        return self.layers[1](x) + y


class Shapes(Net):
    def forward(self, x: Any) -> Any:
        return self.body(x)[: int(x.abs().max()) + 2]


class Scales(Net):
    def forward(self, x: Any) -> Any:
        return self.body(x) * x.abs().max().item()


class Returns(Net):
    def forward(self, x: Any) -> Any:
        x = self.body(x)
        return x, x.mean().item()


class Counts(Net):
    def forward(self, x: Any) -> Any:
        if x.max() > 100:
            x = torch.clamp(x, max=100)
        return self.body(x)


X, LABELS = torch.linspace(-1, 1, 2048).view(256, 8), torch.arange(256) % 8
BATCHES: dict[type[Net], Any] = {Asserts: {"x": X, "labels": LABELS}}


def train(model: nn.Module, kind: type[Net], steps: int = 3) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(X, LABELS) if kind is Asserts else F.mse_loss(model(X), torch.ones(256, 8))
        loss.backward()
        optimizer.step()
        out.append(loss.detach())
    return out + [p.detach().clone() for p in model.parameters()]


def planned(kind: type[Net]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, untouched = kind(), kind()
    untouched.load_state_dict(model.state_dict())
    loss = None if kind is Asserts else (lambda out, y: F.mse_loss(out[0] if kind is Returns else out, y))
    batch = BATCHES.get(kind, (X, torch.ones(256, 8)))
    recorded = trace(model, batch, loss=loss, optimizer=torch.optim.SGD, profile=False)
    return apply_plan(model, plan(recorded, "80%")), untouched


@pytest.mark.parametrize("kind", [Finite, Asserts, Prints, Warns])
def test_a_look_that_decides_nothing_is_traced_and_refused_in_training(kind: type[Net]) -> None:
    model, _ = planned(kind)
    with pytest.raises(CaptureError, match=r"test_looks\.py:\d+"):
        train(model, kind)


@pytest.mark.parametrize("kind", [Branches, Chooses, Picks, Detaches, Shapes, Scales, Returns, Counts])
def test_a_branch_is_refused_with_its_line(kind: type[Net]) -> None:
    with pytest.raises(CaptureError, match=r"test_looks\.py:\d+"):
        planned(kind)


class Pair(Net):
    def forward(self, x: Any, targets: Any = None) -> Any:
        logits = self.body(x)
        return logits, None if targets is None else F.cross_entropy(logits, targets)


def test_a_model_may_return_its_loss_last() -> None:
    recorded = trace(Pair(), {"x": X, "targets": LABELS}, optimizer=torch.optim.SGD, profile=False)
    assert recorded.meta.grad_outputs == (1,)


class Spread(Net):
    """What is meant and how sure it is, or torch's loss of that, which checks that no variance is negative."""

    def forward(self, x: Any, targets: Any = None) -> Any:
        mean, spread = self.body(x).chunk(2, -1)
        if targets is None:
            return mean, spread
        return F.gaussian_nll_loss(mean, targets, torch.sigmoid(spread) * x[:, :4])

    @staticmethod
    def outside(out: Any, targets: Any) -> Any:
        return F.gaussian_nll_loss(out[0], targets, torch.sigmoid(out[1]))


def test_a_check_of_torch_s_own_loss_is_one_wherever_it_stands() -> None:
    torch.manual_seed(0)
    model, x = Spread(), X.abs()
    outside = trace(model, (x, x[:, :4]), loss=Spread.outside, profile=False)
    assert outside.meta.grad_outputs == (0, 1)
    inside = trace(model, {"x": x, "targets": x[:, :4]}, profile=False)
    assert inside.meta.grad_outputs == (0,)

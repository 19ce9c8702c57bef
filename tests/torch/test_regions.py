"""Models with real branches train by plans for their parts: bit-equal with eager, at the peak that is predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.profiler import record_function  # noqa: E402

from executor import fit, remove_plan, unplanned  # noqa: E402
from executor.fitting.regions import plan_regions  # noqa: E402
from executor.measuring import _ITERATION, peaks_of  # noqa: E402
from executor.training.module import planned_in  # noqa: E402
from executor.training.planning import Wanted  # noqa: E402
from simulator.planners.outcome import Infeasible  # noqa: E402
from tracer.measure.probes import memory_profiler  # noqa: E402
from tracer.step.batch import split_batch  # noqa: E402
from tracer.step.named.vision import import_torchvision  # noqa: E402
from tracer.torch_api import pytree  # noqa: E402
from traces.errors import CaptureError, PlanError, SpecError  # noqa: E402

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


class Branching(nn.Module):
    """Blocks of which a value decides what follows, with statistics that move and a block that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))
        self.norm, self.twice = nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
            if x.mean() > 0:
                x = 2 * x
        return self.last(self.twice(torch.relu(self.twice(x))))


class Packed(nn.Module):
    """Sentences of several lengths: an encoder of tokens, a packed LSTM, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Sequential(nn.Embedding(50, 32), Block(32), Block(32), Block(32))
        self.lstm, self.out = nn.LSTM(32, 16, batch_first=True), nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.words(tokens), lengths, True, enforce_sorted=False)
        return self.out(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], True)[0])


def branching() -> tuple[nn.Module, Any, Any]:
    return Branching(), (torch.randn(512, 32), torch.randint(8, (512,))), functional.cross_entropy


def packed() -> tuple[nn.Module, Any, Any]:
    tokens, lengths = torch.randint(50, (32, 24)), torch.randint(5, 24, (32,))
    lengths[0] = 24

    def loss(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), wanted.flatten())

    return Packed(), (tokens, lengths, tokens), loss


class Pyramid(nn.Module):
    """Features of two sizes, as detectors take them."""

    out_channels = 16

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        fine = self.body(self.stem(x))
        return {"0": fine, "1": functional.max_pool2d(fine, 2)}


def retinanet() -> tuple[nn.Module, Any, Any]:
    import_torchvision()
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    anchors = AnchorGenerator(sizes=((16,), (32,)), aspect_ratios=((1.0,),) * 2)
    model = RetinaNet(Pyramid(), num_classes=5, min_size=96, max_size=128, anchor_generator=anchors)
    boxes = [torch.tensor([[8.0, 8.0, 60.0, 70.0], [30.0, 20.0, 80.0, 90.0]])] * 2
    targets = [{"boxes": b, "labels": torch.tensor([1, 3])} for b in boxes]
    images = [torch.rand(3, 96, 128), torch.rand(3, 96, 128)]
    return model, {"images": images, "targets": targets}, lambda losses: sum(losses.values())


class Matching(nn.Module):
    """A small DETR: convolutions, a transformer, and a loss that matches its queries with the boxes by their costs."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 128, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 2, 128, batch_first=True), 2)
        self.queries = nn.Parameter(torch.randn(4, 32))
        self.boxes = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, images: torch.Tensor, targets: list[torch.Tensor]) -> torch.Tensor:
        memory = self.encoder(self.backbone(images).flatten(2).transpose(1, 2))
        found = self.boxes(self.decoder(self.queries.expand(len(images), -1, -1), memory)).sigmoid()
        losses = []
        for boxes, wanted in zip(found, targets, strict=True):
            costs = torch.cdist(boxes, wanted, p=1).tolist()
            choice = min(
                permutations(range(4), len(wanted)), key=lambda c: sum(costs[q][k] for k, q in enumerate(c))
            )
            losses.append((boxes[list(choice)] - wanted).abs().mean())
        return torch.stack(losses).mean()


def matching() -> tuple[nn.Module, Any, Any]:
    return Matching(), (torch.rand(4, 3, 64, 64), [torch.rand(2, 4) for _ in range(4)]), None


def made(make: Callable[[], tuple[nn.Module, Any, Any]]) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model, batch, loss = make()
    return model.train(), batch, loss


def trained(model: nn.Module, batch: Any, loss: Any) -> tuple[list[torch.Tensor], int]:
    """Losses, gradients, parameters, buffers and random state after some steps, and the steady peak in bytes."""
    given = split_batch(model, batch, loss)
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    there = [
        *model.parameters(),
        *model.buffers(),
        *pytree.tree_leaves((given.args, given.kwargs, given.loss_inputs)),
    ]
    base = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in there if isinstance(x, torch.Tensor)
    }
    with memory_profiler() as prof:
        for k in range(STEPS):
            with record_function(f"{_ITERATION} {k}"):
                optimizer.zero_grad()
                value = given.loss(model(*given.args, **given.kwargs))
                value.backward()
                optimizer.step()
            seen.append(value.detach())
    seen += [x.detach() for x in (*model.parameters(), *model.buffers())]
    seen += [p.grad for p in model.parameters() if p.grad is not None]
    return [*seen, torch.get_rng_state()], sum(base.values()) + max(peaks_of(prof, STEPS)[0][1:])


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Any, Any]], str]] = {
    "branching": (branching, "65%"),
    "packed": (packed, "70%"),
    "matching": (matching, "70%"),
    "retinanet": (retinanet, "85%"),
}
MOST_OFF_BYTES = 64  # scalars that the loop holds


SLOW = ("packed", "matching", "retinanet")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_parts_train_as_eager_within_what_is_predicted(name: str) -> None:
    make, budget = CASES[name]
    model, batch, loss = made(make)
    before = copy.deepcopy(model.state_dict())
    wanted = Wanted(budget=budget, optimizer=torch.optim.AdamW, seconds=2)
    plans = plan_regions(model, batch, loss, wanted, None, lambda text: None)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    eager, eager_bytes = trained(copy.deepcopy(model), batch, loss)
    plans.apply(model, "error")
    planned, planned_bytes = trained(model, batch, loss)
    assert len(eager) == len(planned)
    assert all(torch.equal(a, b) for a, b in zip(eager, planned, strict=True))
    said = planned_bytes, plans.peak_bytes, eager_bytes
    assert plans.peak_bytes < plans.saved_peak_bytes
    assert planned_bytes < eager_bytes, said
    assert abs(planned_bytes - plans.peak_bytes) <= MOST_OFF_BYTES, said
    assert all(part.receipt().planned_steps == STEPS for part in planned_in(model))


def test_fit_plans_parts_of_a_model_that_branches() -> None:
    model, batch, loss = made(branching)
    with pytest.raises(CaptureError, match='engine="regions"'):
        fit(model, batch, loss, budget="65%", say=lambda text: None)
    told: list[str] = []
    planned = fit(
        model, batch, loss, torch.optim.AdamW, budget="65%", engine="regions", say=told.append, seconds=2
    )
    assert any("branch" in line for line in told)
    assert any("blocks.0" in line and "allocated peak" in line for line in told)
    assert type(planned) is type(model)
    with pytest.raises(PlanError):
        planned_in(model)
    eager = copy.deepcopy(model)
    for rows in (512, 512, 100):  # the last is smaller
        x, y = torch.randn(rows, 32), torch.randint(8, (rows,))
        for one in (planned, eager):
            torch.manual_seed(1)
            loss(one(x), y).backward()
        for p, q in zip(planned.parameters(), eager.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    with unplanned(planned):
        planned(x)
    remove_plan(planned)
    with pytest.raises(PlanError):
        planned_in(planned)


def test_a_budget_that_parts_cannot_keep_is_refused_with_the_lowest_peak() -> None:
    model, batch, loss = made(branching)
    with pytest.raises(Infeasible, match="the lowest peak that they reach is") as refused:
        plan_regions(model, batch, loss, Wanted(budget="5%", seconds=2), None, lambda text: None)
    lowest = refused.value.figures["lowest_peak_bytes"]
    plans = plan_regions(model, batch, loss, Wanted(budget=lowest, seconds=2), None, lambda text: None)
    assert plans.peak_bytes == lowest


def test_what_parts_cannot_be_planned_for_is_refused() -> None:
    model, batch, loss = made(branching)
    with pytest.raises(SpecError, match="allocated"):
        plan_regions(model, batch, loss, Wanted(budget="65%", budget_of="reserved"), None, print)
    with pytest.raises(SpecError, match="engine"):
        fit(model, batch, loss, budget="65%", engine="parts")

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight if x.sum() > 0 else x - self.weight

    with pytest.raises(CaptureError, match="no part of the model can be captured"):
        plan_regions(Alone(), (torch.ones(3),), lambda out: out.sum(), Wanted(budget="65%"), None, print)

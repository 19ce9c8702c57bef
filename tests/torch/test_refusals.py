"""What no plan can hold is refused in one sentence that says what to do; what only looks so is captured."""

from __future__ import annotations

import copy
import random
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from executor import fit
from executor.verifying import verify
from simulator.core.problem import Problem
from tests.torch.steps import build_of, plan_of, random_actions, recompute_all, recorded
from tracer import trace
from tracer.step.context import made_with_values
from tracer.step.user_errors import is_library
from traces.errors import CaptureError, OptimizerError, SpecError


def refused(model: Any, batch: Any, loss: Any = None, optimizer: Any = None) -> str:
    """What the refusal of a step says; the model is a function, so that it may be made on fake tensors."""

    def make() -> tuple[Any, ...]:
        made = model()
        return made, batch(), loss or (lambda y: y.sum()), None if optimizer is None else optimizer(made)

    with pytest.raises(CaptureError) as error:
        recorded(build_of(make))
    return str(error.value)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def row() -> torch.Tensor:
    return torch.randn(2, 4)


def words() -> torch.Tensor:
    return torch.randint(9, (2, 3))


def compiled() -> nn.Module:
    model = linear()
    model[0].compile(backend="eager")
    return model


class Asks(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2 if torch.compiler.is_compiling() else y


class Prints(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("forward of", x.shape)  # noqa: T201
        return super().forward(x)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(linear())


def test_what_pip_put_into_a_folder_of_any_name_is_no_code_of_the_user_s(tmp_path: Path) -> None:
    for name, record in (("there-1.dist-info", "RECORD"), ("mine.egg-info", "SOURCES.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / record).write_text(f"{name.partition('.')[0].partition('-')[0]}/a.py,,\n")
    assert is_library(str(tmp_path / "there" / "a.py"))
    assert not is_library(str(tmp_path / "mine" / "a.py"))


def test_optimizers_that_run_the_model_themselves_are_refused() -> None:
    said = refused(linear, row, optimizer=lambda m: torch.optim.LBFGS(m.parameters()))
    assert "LBFGS runs forward and backward itself" in said
    model = linear()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(OptimizerError, match="optimizer=None"):
        fit(model, (row(),), lambda y: y.sum(), optimizer, budget="100%", say=str)
    fit(model, (row(),), lambda y: y.sum(), None, budget="100%", say=str)


class Checkpointed(nn.Module):
    """A batch norm that the model itself runs twice."""

    def __init__(self, *, training: bool) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4).train(training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: self.norm(self.a(y)).relu(), x, use_reentrant=False)


def test_a_batch_norm_inside_a_checkpoint_is_refused_where_it_updates_its_statistics() -> None:
    said = refused(lambda: Checkpointed(training=True), row)
    assert "a batch norm runs inside torch.utils.checkpoint" in said
    assert re.search(r"test_refusals\.py:\d+", said)
    recorded(build_of(lambda: (Checkpointed(training=False), row(), lambda y: y.sum(), None)))


class Graph(nn.Module):
    """A sparse matrix of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("adjacency", torch.eye(2).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.adjacency, self.a(x))


class Counting(nn.Module):
    """Divides by the number of steps so far, which is 0 only before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return self.a(x) / float(self.steps)


def test_a_batch_norm_that_averages_over_all_batches_is_refused() -> None:
    def model(**options: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None, **options))

    assert "looks at the data of a tensor" in refused(model, row)
    recorded(build_of(lambda: (model(track_running_stats=False), row(), lambda y: y.sum(), None)))


class Stack(nn.Module):
    """Torch's own stack of transformer layers with a mask, of which it asks whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class Density(nn.Linear):
    """Returns an object with a tensor in it."""

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y, torch.distributions.Normal(y, 1.0, validate_args=False)


class Results(dict[str, Any]):
    """A mapping that torch's trees do not know."""


class Named(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return [Results(out=super().forward(x))]


class Factors(nn.Module):
    """Two linear-algebra ops that check for errors, one of them with several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 9), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).view(-1, 3, 3)
        s = h @ h.mT + torch.eye(3)
        values, _vectors = torch.linalg.eigh(s)
        return self.b(torch.linalg.cholesky(s).diagonal(dim1=-1, dim2=-2).exp() + values)


def wishart(y: torch.Tensor) -> torch.Tensor:
    df = 5 + y.exp().sum()
    return torch.distributions.Wishart(df, covariance_matrix=torch.eye(3)).entropy()


LINE = r"test_refusals\.py:\d+"
HIDDEN = "in which nobody finds its tensors"
REFUSED: dict[str, tuple[Any, Any, Any, str]] = {  # a model, a batch, a loss, and what the refusal says
    "compiled": (lambda: torch.compile(linear(), backend="eager"), row, None, "it was compiled by torch.compile"),
    "compiled inside": (compiled, row, None, "its module 0 was compiled by torch.compile"),
    "scripted": (scripted, row, None, "TorchScript"),
    "asks for the compiler": (lambda: Asks(4, 4), row, None, rf"whether it is compiled \(.*{LINE}, in forward\)"),
    "prints": (lambda: Prints(4, 4), row, None, r"print\("),
    "sparse gradient": (
        lambda: nn.Embedding(9, 4, sparse=True), words, None, "makes a tensor of the layout torch.sparse_coo",
    ),
    "sparse buffer": (Graph, row, None, "its buffer adjacency has the layout torch.sparse_coo"),
    "sparse batch": (linear, lambda: torch.eye(4).to_sparse(), None, "the batch holds .* layout torch.sparse_coo"),
    "overwritten parameter": (
        lambda: nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Linear(4, 2)),
        words, None, "forward overwrites the parameter 0.weight",
    ),
    "a value from the time of building": (Counting, row, None, rf"(?s){LINE}.*float\(self\.steps\)"),
    "a mask that torch asks": (Stack, lambda: torch.randn(2, 3, 4), None, r"self\.layers\(x, x, tgt_mask="),
    "hidden tensors": (
        lambda: Density(4, 4), row, lambda out: out[0].sum() - out[1].log_prob(torch.zeros(2, 4)).sum(),
        f"a Normal, {HIDDEN}",
    ),
    "another mapping": (lambda: Named(4, 4), row, lambda out: out[0]["out"].sum(), f"a Results, {HIDDEN}"),
    "an op with an effect": (Factors, lambda: (row(), torch.randn(2, 2)), functional.mse_loss, "by tokens"),
    "a distribution that branches": (linear, row, wishart, "look at the data"),
}  # fmt: skip


@pytest.mark.usefixtures("checked_distributions")
@pytest.mark.parametrize(("model", "batch", "loss", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_plan_can_hold_is_refused(model: Any, batch: Any, loss: Any, said: str) -> None:
    assert re.search(said, refused(model, batch, loss))


def test_a_nested_tensor_in_a_batch_is_named() -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(SpecError, match=r"holds a nested tensor.*pad it"):
        trace(nn.Linear(4, 4), (rows,), loss=lambda y: y.values().sum())


def test_copies_of_a_model_with_counters_can_be_made_on_fake_tensors() -> None:
    def make() -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        twin = copy.deepcopy(model)
        assert twin[1].num_batches_tracked is not model[1].num_batches_tracked
        return nn.Sequential(model, twin), row(), lambda y: y.square().mean(), None

    assert len(recorded(build_of(make)).trace.ops) > 4


class Sampler(nn.Module):
    """Samples through a distribution, which looks at its arguments unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, width = self.a(x).chunk(2, -1)
        return self.b(torch.distributions.Normal(mean, width.exp()).rsample())


@pytest.fixture
def checked_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile switches these checks off for the whole process when it is first called."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


def test_a_sampler_trains_to_the_same_bits() -> None:
    build = build_of(lambda: (Sampler(), (row(), torch.randn(2, 3)), functional.mse_loss, None))
    trace = recorded(build).trace
    for actions in (recompute_all(Problem(trace)), random_actions(trace, random.Random(1))):
        outcome = verify(build, plan_of(trace, *actions), steps=2)
        assert outcome.bit_equal, outcome.first_difference


def test_recurrent_layers_are_refused() -> None:
    """torch takes them apart without their dropout, or not at all; `fit(..., parts=True)` leaves them outside."""

    said = refused(
        lambda: nn.LSTM(4, 3, 3, dropout=0.5), lambda: torch.randn(2, 2, 4), lambda out: out[0].mean()
    )
    assert "LSTM" in said


@pytest.mark.parametrize("create_graph", [True, False])
def test_a_loss_that_takes_a_gradient_through_the_model(create_graph: bool) -> None:
    x = row().requires_grad_()

    def loss(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=create_graph, retain_graph=True)
        return y.mean() + (g.norm(2, 1) - 1).square().mean()

    assert "gradient penalty" in refused(linear, lambda: (x, x), loss)


def test_a_model_that_asks_for_values_or_sizes_when_it_is_made_is_made_in_memory_first() -> None:
    """As timm's RegNets ask for the widths that differ."""
    for ask in (lambda: torch.arange(4).unique(), lambda: torch.arange(4).sum().item()):

        def make(ask: Any = ask) -> nn.Module:
            ask()
            return nn.Linear(4, 4)

        with FakeTensorMode() as mode:
            model = made_with_values(make)
        assert all(p.fake_mode is mode for p in model.parameters())

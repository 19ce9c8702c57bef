"""Activations written out in steps, run as torch's one op: found in captured steps, equal to rounding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from executor.verifying import verify  # noqa: E402
from simulator.core.problem import Problem  # noqa: E402
from simulator.core.rewrites import exactness_of, rewritten_problem  # noqa: E402
from simulator.core.rewrites.fuse import chains, offer  # noqa: E402
from tests.torch import small_nets  # noqa: E402
from tests.torch.steps import recorded  # noqa: E402
from tracer.step.step import load_spec  # noqa: E402
from traces.records.plan import Plan  # noqa: E402
from traces.records.trace import Trace  # noqa: E402

ROOT = math.sqrt(2 / math.pi)
FORMULAS = {
    # transformers' gelu_new, gelu_fast and gelu_python, and others that are seen.
    "new": lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
    "fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "python": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "cubed": lambda x: x * (1 + torch.tanh(ROOT * (x + 0.044715 * x * x * x))) / 2,
    "sigmoid": lambda x: x * torch.sigmoid(2 * ROOT * (x + 0.044715 * x**3)),
    "swish": lambda x: x * torch.sigmoid(x),
    "exp": lambda x: x / (1 + torch.exp(-x)),
    "mish": lambda x: x * torch.tanh(functional.softplus(x)),
    # These are other functions, or something else reads what they make.
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "rough": lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
    "turned": lambda x: x * torch.sigmoid(x.reshape(64, 8, 256).flip(0).reshape(8, 64, 256)),
    "read": lambda x: torch.sigmoid(x) * x + 1e-3 * torch.sigmoid(x).cumsum(-1),
}
FUSED = {
    "new": "gelu", "fast": "gelu", "python": "gelu", "cubed": "gelu", "sigmoid": "gelu",
    "swish": "silu", "exp": "silu", "mish": "mish",
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, formulas: tuple[str, ...]) -> None:
        super().__init__()
        self.formulas = formulas
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in formulas)
        self.up = nn.ModuleList(nn.Linear(64, 256) for _ in formulas)
        self.down = nn.ModuleList(nn.Linear(256, 64) for _ in formulas)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for formula, norm, up, down in zip(self.formulas, self.norms, self.up, self.down, strict=True):
            x = x + down(FORMULAS[formula](up(norm(x))))
        return x.mean(1)


def net(formulas: str) -> small_nets.Built:
    torch.manual_seed(0)
    model = Net(tuple(formulas.split()))
    batch = torch.randn(8, 64, 64), torch.randint(8, (8,))
    return model, batch, functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)


SPEC = f"{Path(__file__).resolve()}:net"


def traced(formulas: str) -> Trace:
    return recorded(load_spec(SPEC, {"formulas": formulas})).trace


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_function_is_known_however_it_is_written(formula: str) -> None:
    found = [c.name for c in chains(traced(formula)).values()]
    assert found == ([FUSED[formula]] if formula in FUSED else [])


@pytest.mark.parametrize("formulas", ["new python swish mish", "fast cubed sigmoid exp"])
def test_it_trains_to_rounding_and_saves_less(formulas: str) -> None:
    spec, trace = load_spec(SPEC, {"formulas": formulas}), traced(formulas)
    rewrites = tuple(offer(Problem(trace)))
    assert len(rewrites) == 4
    plan = Plan(meta=trace.meta, rewrites=rewrites, exactness=exactness_of(rewrites))
    assert plan.exactness == "fp"
    found = verify(spec, plan, steps=2)
    assert found.equal
    assert not found.bit_equal
    assert found.gradient_error < 2e-6
    after = rewritten_problem(Problem(trace), rewrites).trace
    wide = 8 * 64 * 256 * 4
    left = [after.storages.nbytes[s] for s in after.saved].count(wide)
    assert left == 8 < [trace.storages.nbytes[s] for s in trace.saved].count(wide)  # input and output of each

"""Recurrent layers in the graph of a GPU, captured without one: the op, its sizes, and what stays elementary."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from simulator.allocator.requests import Residents, untouched_requests  # noqa: E402
from simulator.core.problem import Problem  # noqa: E402
from simulator.prediction.warnings import warnings_of  # noqa: E402
from tracer import trace  # noqa: E402
from tracer.capture.cuda.recurrent import _buffer, _taken, flatten  # noqa: E402
from tracer.cudnn import definitions, flat_weights, temporary_bytes  # noqa: E402
from tracer.record.sketch import CUDNN  # noqa: E402
from tracer.torch_api import FakeTensorMode  # noqa: E402
from traces.records.trace import BACKWARD, PARAMETER, RANDOM, Trace  # noqa: E402

BACK = "aten._cudnn_rnn_backward.default"
STEPS, BATCH, INPUTS, HIDDEN = 7, 4, 8, 16
KINDS = {
    "LSTM": (nn.LSTM, {}, 4, 6),
    "GRU": (nn.GRU, {}, 3, 4),
    "RNN": (nn.RNN, {"nonlinearity": "relu"}, 1, 2),
}


class Layers(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(INPUTS, HIDDEN, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rnn(x)[0]
        return y.square().mean()


def of(kind: Any, target: str | None = "h100", amp: str | None = None, **options: Any) -> Trace:
    shape = (BATCH, STEPS, INPUTS) if options.get("batch_first") else (STEPS, BATCH, INPUTS)
    dtype = options.pop("dtype", torch.float32)
    net = Layers(kind, **options).to(dtype)
    return trace(net, torch.randn(shape, dtype=dtype), optimizer="sgd", target=target, amp=amp, profile=False)


def op(of: Trace, target: str) -> int:
    assert of.ops.target.count(target) == 1
    return of.ops.target.index(target)


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_one_op_with_its_reserve(kind: str, ways: int) -> None:
    layer, options, gates, kept = KINDS[kind]
    recorded = of(layer, num_layers=2, bidirectional=ways == 2, batch_first=True, **options)
    i, k = op(recorded, CUDNN), op(recorded, BACK)
    made = [recorded.storages.nbytes[s] for s in recorded.ops.writes[i]]
    item, cells = 4, 2 * ways * BATCH * HIDDEN
    states = [item * cells] * (2 if kind == "LSTM" else 1)
    assert [n for n in made if n] == [
        item * STEPS * BATCH * ways * HIDDEN,
        *states,
        item * STEPS * cells * kept,
    ]
    # The batch lies with its sequences first, and so is copied, in forward and twice in backward, as is a gradient.
    copy, workspace = item * STEPS * BATCH * INPUTS, item * STEPS * BATCH * HIDDEN * ways * gates
    freed = [sorted(-n for n in recorded.ops.events[x] if n < 0) for x in (i, k)]
    assert freed[0] == sorted([copy, workspace])
    gradients = [item * STEPS * BATCH * ways * HIDDEN, *states]
    assert freed[1] == sorted([copy, copy, workspace, workspace, *gradients])
    assert recorded.ops.phase[k] == BACKWARD
    assert recorded.ops.flops[k] == 2 * recorded.ops.flops[i] > 0
    assert not recorded.ops.flags[i] & RANDOM
    # Backward reads what forward kept, and no elementary op of a layer is left.
    reserve = next(s for s in recorded.ops.writes[i] if recorded.storages.nbytes[s] == made[-1])
    assert reserve in recorded.ops.reads[k]
    assert not any("sigmoid" in t or "tanh" in t for t in recorded.ops.target)


@pytest.mark.parametrize("options", [{}, {"proj_size": 5}, {"bias": False}, {"bidirectional": True}])
def test_weights_are_one_buffer_which_the_op_gets(options: dict[str, Any]) -> None:
    recorded = of(nn.LSTM, num_layers=2, **options)
    weights = [s for s, c in enumerate(recorded.storages.category) if c == PARAMETER]
    assert len(weights) == 1
    assert weights[0] in recorded.ops.reads[op(recorded, CUDNN)]
    ways = 1 + options.get("bidirectional", False)
    elements, _ = flat_weights(2, INPUTS, HIDDEN, options.get("proj_size", 0), 2, ways)
    assert recorded.storages.nbytes[weights[0]] == 4 * elements
    parts = nn.LSTM(INPUTS, HIDDEN, 2, **options).parameters()
    assert recorded.meta.flattened == ((weights[0], *(4 * w.numel() for w in parts)),)


def test_bfloat16_weights_are_not_flattened_and_copied_in_each_call() -> None:
    """`flatten_parameters` asks torch.backends.cudnn.is_acceptable, which does not know the type."""
    recorded = of(nn.LSTM, dtype=torch.bfloat16)
    assert recorded.storages.category.count(PARAMETER) == 4
    assert recorded.meta.flattened == ()
    copied = 2 * flat_weights(2, INPUTS, HIDDEN, 0, 1, 1)[0]
    assert copied in [recorded.storages.nbytes[s] for s in recorded.ops.writes[op(recorded, CUDNN)]]


@pytest.mark.parametrize(
    ("options", "amp"), [({"num_layers": 2, "dropout": 0.1}, None), ({}, "float16"), ({}, "bfloat16")]
)
def test_what_is_not_known_of_cudnn_stays_elementary_and_is_warned_of(options: Any, amp: Any) -> None:
    recorded = of(nn.LSTM, amp=amp, **options)
    assert CUDNN not in recorded.ops.target
    assert recorded.meta.sketch["recurrent"] == ["rnn"]
    assert [w.subject for w in warnings_of(Problem(recorded)) if w.code == "recurrent"] == ["rnn"]


def test_without_cudnn_it_stays_elementary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    recorded = of(nn.GRU)
    assert CUDNN not in recorded.ops.target
    assert recorded.meta.flattened == ()


def test_cudnn_takes_floats_of_one_type() -> None:
    x, weights = torch.empty(2, 3, 4), [torch.empty(4, 4)]
    assert _taken(x, weights, 0.0)
    assert not _taken(x[:0], weights, 0.0)
    assert not _taken(x.double(), weights, 0.0)
    assert not _taken(x.to(torch.complex64), [weights[0].to(torch.complex64)], 0.0)


def test_a_buffer_is_one_whose_weights_lie_where_cudnn_has_them() -> None:
    shape = 0, INPUTS, HIDDEN, 0, 1, 1
    elements, (places,) = flat_weights(*shape)
    sizes = [(HIDDEN, INPUTS), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN,)]
    strides = [(INPUTS, 1), (HIDDEN, 1), (1,), (1,)]
    whole = torch.arange(float(elements))
    weights = [whole.as_strided(*given) for given in zip(sizes, strides, places, strict=True)]
    found = _buffer(weights, 4, *shape)
    assert found is not None
    assert torch.equal(found, whole)
    assert _buffer([*weights[:3], weights[2]], 4, *shape) is None
    assert _buffer([weights[0], weights[1].t(), *weights[2:]], 4, *shape) is None
    elsewhere = whole.clone().as_strided(sizes[1], strides[1], places[1])
    assert _buffer([weights[0], elsewhere, *weights[2:]], 4, *shape) is None


def test_the_graph_of_a_cpu_has_elementary_ops() -> None:
    recorded = of(nn.LSTM, target=None)
    assert CUDNN not in recorded.ops.target
    assert recorded.storages.category.count(PARAMETER) == 4


@pytest.mark.parametrize("projection", [0, 5])
@pytest.mark.parametrize("ways", [1, 2])
def test_the_buffer_of_weights_has_each_once(ways: int, projection: int) -> None:
    net = nn.LSTM(INPUTS, HIDDEN, 3, bidirectional=ways == 2, proj_size=projection)
    elements, places = flat_weights(2, INPUTS, HIDDEN, projection, 3, ways)
    ranges = sorted(
        (at, at + w.numel())
        for at, w in zip(itertools.chain.from_iterable(places), net.parameters(), strict=True)
    )
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == elements == sum(math.prod(w.shape) for w in net.parameters())


def test_flattened_weights_keep_their_shapes() -> None:
    with FakeTensorMode():
        net = nn.GRU(INPUTS, HIDDEN, 2)
        before = [(w.shape, w.stride()) for w in net.parameters()]
        flatten(net)
        assert [(w.shape, w.stride()) for w in net.parameters()] == before
        assert len({w.untyped_storage()._cdata for w in net.parameters()}) == 1


def test_weights_that_cudnn_would_not_flatten_stay() -> None:
    """Tied ones, and where one is not there yet."""
    tied, made = nn.GRU(HIDDEN, HIDDEN, 2), nn.GRU(HIDDEN, HIDDEN)
    tied.weight_hh_l1 = tied.weight_hh_l0
    made.weight_hh_l0 = None  # type: ignore[assignment]
    for net in (tied, made):
        before = [w.untyped_storage()._cdata for w in net.parameters()]
        flatten(net)
        assert [w.untyped_storage()._cdata for w in net.parameters()] == before


def test_weights_are_moved_one_by_one_and_given_back() -> None:
    recorded = of(nn.RNN)
    parts = [4 * w.numel() for w in nn.RNN(INPUTS, HIDDEN).parameters()]
    first = Residents.of(recorded).first
    assert first[:9] == (*parts, sum(parts), ~0, ~1, ~2, ~3)
    requests = untouched_requests(Problem(recorded).trace)
    assert requests is not None
    assert requests.residents == first


def test_the_null_driver_is_compiled_with_the_same_tables() -> None:
    told = dict(x.removeprefix("-DRNN_").split("=") for x in definitions())
    for cell in range(4):
        workspace, reserve = temporary_bytes(cell, 1, 1, 1, 1, 1, 1)
        assert [int(told[k].split(",")[cell]) for k in ("GATES", "RESERVED")] == [workspace, reserve]

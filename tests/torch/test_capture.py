"""What a capture makes of a model: categories, tied and frozen weights, buffers, dropout, paths, refusals."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.torch import small_nets
from tests.torch.steps import build_of, program, recorded
from tracer.capture.capture import capture
from tracer.capture.passes.dropout import _scale, dropout_mask
from tracer.record.eager import EagerRecorder
from tracer.record.program import Program
from tracer.step.step import load_spec
from tracer.step.user_errors import blame
from traces.errors import CaptureError
from traces.records.trace import BUFFER, EFFECT, GRADIENT, INPUT, MUTATES, OPTIMIZER_STATE, PARAMETER, RANDOM

aten = torch.ops.aten


def targets(p: Program) -> list[str]:
    return [r.target for r in p.rows]


def by_category(trace: Any, category: str) -> dict[str, int]:
    sts = trace.storages
    return {
        n: b for n, b, c in zip(sts.name, sts.nbytes, sts.category, strict=True) if c == category and b > 0
    }


def test_categories_come_from_what_a_tensor_is_and_not_from_its_name() -> None:
    class Misnamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tangents_1 = nn.Parameter(torch.ones(3, 3))
            self.register_buffer("primals_weight", torch.ones(3))

        def forward(self, buffer: torch.Tensor) -> torch.Tensor:
            return buffer @ self.tangents_1 + self.primals_weight

    def make() -> tuple[Any, ...]:
        model = Misnamed()
        return model, torch.randn(2, 3), lambda y: y.sum(), torch.optim.Adam(model.parameters())

    trace = recorded(build_of(make)).trace
    assert by_category(trace, PARAMETER) == {"tangents_1": 36}
    assert by_category(trace, BUFFER) == {"primals_weight": 12}
    assert by_category(trace, INPUT) == {"argument 0": 24}
    assert by_category(trace, GRADIENT) == {"gradient of tangents_1": 36}
    # Adam: exp_avg and exp_avg_sq of 36 bytes each, and a step counter of 4.
    assert sorted(by_category(trace, OPTIMIZER_STATE).values()) == [4, 36, 36]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_a_tied_weight_is_one_storage_with_one_summed_gradient() -> None:
    p = program(Tied(), torch.arange(6))
    assert p.captured.parameters == ("embed.weight",)
    (gradient,) = p.captured.parameter_grads
    assert gradient is not None
    assert gradient.target is aten.add.Tensor
    assert sum(s.category == PARAMETER for s in p.storages) == 1
    assert sum(s.category == GRADIENT and s.producer >= 0 for s in p.storages) == 1


def test_a_frozen_parameter_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    p = program(model, torch.randn(5, 3))
    got = dict(zip(p.captured.parameters, p.captured.parameter_grads, strict=True))
    assert got.pop("0.weight") is None
    assert all(g is not None for g in got.values())
    assert [s.name for s in p.storages if s.category == GRADIENT and s.producer >= 0].count(
        "gradient of 0.weight"
    ) == 0


def test_in_place_ops_become_functional_and_the_caller_s_tensor_is_safe() -> None:
    x = torch.randn(2, 3, 8, 8)
    before = x.clone()
    p = program(small_nets.Residual(), x)
    assert torch.equal(x, before)
    assert "aten.relu.default" in targets(p)
    written = [r.target for r in p.rows if r.flags & MUTATES]
    assert set(written) == {"aten.copy_.default"}  # only the batch norm's statistics


def test_batch_norm_s_statistics_are_written_once_each() -> None:
    p = program(small_nets.Residual(), torch.randn(2, 3, 8, 8))
    buffers = [k for k, s in enumerate(p.storages) if s.category == BUFFER]
    assert [p.storages[k].name for k in buffers] == [
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    ]  # fmt: skip
    for k in buffers:
        writers = [r for r in p.rows if k in r.writes]
        assert [r.target for r in writers] == ["aten.copy_.default"]
        assert writers[0].phase == "forward"
        assert writers[0].flags & MUTATES


def test_a_buffer_that_is_read_after_it_was_written_is_read_as_it_was() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = self.seen * 1.0
            self.seen += 1
            return x * self.weight * self.seen + old

    p = program(Counter(), torch.randn(2))
    for op, row in zip(p.ops, p.rows, strict=True):
        touches = 1 in row.reads  # the placeholders: weight, seen, argument, tangent
        if touches and op.node.target is not aten.copy_.default:
            assert row.flags & EFFECT, row.name  # a second run might see another value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_split_dropout_is_f_dropout_bit_by_bit(p: float, dtype: torch.dtype) -> None:
    x = torch.randn(7, 33, dtype=dtype)
    torch.manual_seed(3)
    want = functional.dropout(x, p, training=True)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    mask = dropout_mask(x, p)
    got = x * mask * _scale(p, x)
    assert torch.equal(got, want)
    assert torch.equal(torch.get_rng_state(), state)


def test_only_the_mask_of_a_dropout_is_random() -> None:
    p = program(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), torch.randn(2, 3))
    random = [r.target for r in p.rows if r.flags & RANDOM]
    assert random == ["lowtide.dropout_mask.default"]
    assert "aten.native_dropout.default" not in targets(p)


def test_every_op_has_the_path_of_its_module() -> None:
    p = program(small_nets.Residual(), torch.randn(2, 3, 8, 8))
    assert {"stem", "conv", "norm", "drop", "head"} <= {r.module for r in p.rows}
    convolutions = [r.module for r in p.rows if r.target == "aten.convolution.default"]
    assert convolutions == ["stem", "conv"]
    backward = {r.module for r in p.rows if r.target == "aten.convolution_backward.default"}
    assert backward == {"stem", "conv"}


def test_only_outputs_that_the_loss_differentiates_take_part_in_backward() -> None:
    p = program(small_nets.TwoHeads(), torch.randn(2, 4), lambda out: out["b"].sum())
    assert p.captured.grad_outputs == (1,)
    grads = dict(zip(p.captured.parameters, p.captured.parameter_grads, strict=True))
    assert [n for n, g in grads.items() if g is None] == ["a.weight", "a.bias"]


def line_of(text: str) -> int:
    lines = Path(small_nets.__file__).read_text().splitlines()
    return next(k for k, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("function", "op", "line"),
    [
        ("branching", "looks at the data", "if y.sum() > 0"),
        ("nonzero", "nonzero", "rows = x.sum(1).nonzero()"),
        ("loss_reads_data", "_local_scalar_dense", "return total * 2 if total.item()"),
    ],
)
def test_what_depends_on_data_is_refused_with_the_op_and_the_user_s_line(
    function: str, op: str, line: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        recorded(load_spec(small_nets.spec(function)))
    assert op in str(caught.value)
    assert f"{small_nets.__file__}:{line_of(line)}" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("unused", "no output of the model that the loss differentiates depends on a parameter"),
        ("wrong_targets", "broadcast"),
        ("loss_raises", f"{re.escape(small_nets.__file__)}:\\d+, in loss"),
        ("detached_loss", "does not require grad"),
    ],
)
def test_what_goes_wrong_around_the_model_is_explained(function: str, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        recorded(load_spec(small_nets.spec(function)))


def test_a_failed_capture_leaves_the_model_as_it_was() -> None:
    model = small_nets.Branching(4, 4)
    parameters = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(2, 4),), {}, lambda y: {id(y)})
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert model(torch.ones(2, 4)).shape == (2, 4)


def test_a_user_s_folder_may_be_called_torch(tmp_path: Path) -> None:
    file = tmp_path / "torch" / "net.py"
    file.parent.mkdir()
    file.write_text("def boom():\n    raise ValueError\n")
    space: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        space["boom"]()
    # The innermost frame outside torch and Lowtide is in that folder.
    caught.value.__traceback__ = caught.tb.tb_next
    assert f"{file}:2, in boom" in blame(caught.value)


def fingerprints(build: Any) -> tuple[str, str, str]:
    meta = recorded(build).trace.meta
    return meta.fingerprint, meta.graph_fingerprint, meta.structure_fingerprint


def test_fingerprints_tell_models_apart_and_nothing_else() -> None:
    path = small_nets.spec("residual")
    four, again = fingerprints(load_spec(path)), fingerprints(load_spec(path))
    assert four == again
    eight = fingerprints(load_spec(path, {"batch_size": 8}))
    assert eight[2] == four[2]
    assert eight[1] != four[1]
    assert eight[0] != four[0]
    other = fingerprints(load_spec(small_nets.spec("mlp")))
    assert not set(other) & {*four, *eight}


def test_the_optimizer_changes_the_trace_but_not_the_graph() -> None:
    path = small_nets.spec("mlp")
    with_sgd, without = fingerprints(load_spec(path)), fingerprints(load_spec(path, {"optimizer": "none"}))
    assert with_sgd[0] != without[0]
    assert with_sgd[1:] == without[1:]


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_each_way_of_running_an_optimizer(kind: dict[str, bool]) -> None:
    def make() -> tuple[Any, ...]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": model[1].parameters(), "weight_decay": 0.0},
        ]
        return model, torch.randn(2, 4), lambda y: y.sum(), torch.optim.AdamW(groups, lr=0.01, **kind)

    trace = recorded(build_of(make)).trace
    names = [t for t, p in zip(trace.ops.target, trace.ops.phase, strict=True) if p == "optimizer"]
    per_group = sum("_fused_adamw" in n for n in names)
    if kind.get("fused"):
        assert per_group == 2  # one call for each parameter group
    elif kind["foreach"]:
        assert any("_foreach_" in n for n in names)
    else:
        assert not any("_foreach_" in n or "_fused_" in n for n in names)
    mark = "fused" if kind.get("fused") else "foreach" if kind["foreach"] else "for-loop"
    assert trace.meta.optimizer == f"AdamW({mark})"
    # Two moments and a step counter for each parameter.
    parameters = by_category(trace, PARAMETER)
    assert sum(by_category(trace, OPTIMIZER_STATE).values()) == 2 * sum(parameters.values()) + 4 * 4


@pytest.mark.parametrize(
    "kind", [{"foreach": False}, {"foreach": True}, {"foreach": False, "maximize": True}]
)
def test_an_optimizer_is_told_the_numbers_that_it_keeps(
    kind: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # NAdam divides by 1 - mu_product, which starts at 1 and is multiplied by mu(k) = 0.9 (1 - 0.5 * 0.96 ** (k / 250)).
    answers: list[Any] = []
    value = EagerRecorder._answer

    def watched(self: EagerRecorder, x: torch.Tensor) -> Any:
        answers.append(value(self, x))
        return answers[-1]

    def make() -> tuple[Any, ...]:
        model = nn.Linear(4, 4)
        return model, torch.randn(2, 4), lambda y: y.sum(), torch.optim.NAdam(model.parameters(), **kind)

    monkeypatch.setattr(EagerRecorder, "_answer", watched)
    recorded(build_of(make))
    mu = [0.9 * (1 - 0.5 * 0.96 ** (k * 0.004)) for k in (1, 2)]
    # The recorded step is the second: its number, and the product of both.
    assert sorted({round(x, 5) for x in answers}) == sorted(
        [1.0, 2.0, round(mu[0], 5), round(mu[0] * mu[1], 5)]
    )


def test_torch_logs_no_traceback_of_what_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match="too small"):
        program(nn.Sequential(nn.Conv2d(3, 3, 3), nn.AvgPool2d(5)), torch.randn(1, 3, 4, 4))
    assert not [r for r in caplog.records if r.levelname == "ERROR"]

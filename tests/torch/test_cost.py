"""What an op computes and moves, against torch's own counter and its defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tracer.costs.roofline import compute_dtype, op_bytes, op_flops, op_kind
from tracer.record.rows import op_row
from tracer.step.step import load_spec


def test_the_defaults_of_tf32_are_torchs() -> None:
    assert torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_bytes_count_each_tensor_once_and_expanded_ones_by_what_exists() -> None:
    x, y = torch.zeros(10, 10), torch.zeros(10, dtype=torch.bfloat16)
    assert op_bytes([x, x, y], [y]) == 400 + 20 + 20
    assert op_bytes([torch.zeros(10, 1).expand(10, 1000)], []) == 40
    assert op_bytes([x[:, :3]], []) == 120
    assert op_bytes([torch.zeros(0, 5)], []) == 0
    table, ids = torch.zeros(1000, 10), torch.zeros(2, dtype=torch.int64)
    rows = torch.zeros(2, 10)
    # 80 bytes of rows read and written and 16 bytes of ids, not the table's 40,000.
    assert op_bytes([table, ids], [rows], torch.ops.aten.embedding.default) == 80 + 16 + 80


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet18", {"batch_size": 2}),
        ("bert-tiny", {"batch_size": 2, "attention": "eager"}),
        ("gpt2-tiny", {"batch_size": 2, "dropout": 0.1}),
        ("t5-tiny", {"batch_size": 2}),
    ],
)
def test_flops_of_a_step_are_those_of_torchs_counter(name: str, options: dict[str, Any]) -> None:

    class Sum(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.total += op_flops(func, args, kwargs or {}, out)
            return out

    with FakeTensorMode():
        step = load_spec(name, options)()
        with FlopCounterMode(display=False) as counter, Sum() as ours:
            step.loss_of(step.model(*step.args, **step.kwargs)).backward()
    assert ours.total == counter.get_total_flops() > 10**6


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("mask", [(True, True), (False, True), (True, False)])
def test_each_gradient_of_a_convolution_in_groups_counts_as_much_as_forward(
    groups: int, mask: tuple[bool, bool]
) -> None:
    """Which torch's formula of the weight's gradient does not know: it counts all channels for each group."""
    x, weight = torch.empty(4, 8, 6, 6, device="meta"), torch.empty(16, 8 // groups, 3, 3, device="meta")
    where = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    out = torch.ops.aten.convolution(x, weight, None, *where)
    forward = op_flops(torch.ops.aten.convolution.default, (x, weight, None, *where), {}, out)
    assert forward == 2 * out.numel() * 8 // groups * 9
    args = (out, x, weight, [0], *where, [*mask, False])
    made = torch.ops.aten.convolution_backward(*args)
    assert op_flops(torch.ops.aten.convolution_backward.default, args, {}, made) == sum(mask) * forward


def test_attention_on_the_cpu_counts_as_much_as_on_a_gpu() -> None:

    q, k = torch.zeros(2, 4, 8, 16), torch.zeros(2, 4, 6, 16)
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    # Scores and their product with the values: twice 2*batch*heads*queries*keys*width, which is 32 at least.
    assert op_flops(target, (q, k, k), {}, out) == 2 * 2 * 2 * 4 * 8 * 6 * 32
    # As many where two heads share keys and values.
    assert op_flops(target, (q, k[:, :2], k[:, :2]), {}, out) == op_flops(target, (q, k, k), {}, out)
    assert op_flops(torch.ops.aten.add.Tensor, (q, q), {}, q) == 0


def test_an_op_is_of_a_kind() -> None:
    def kind(name: str, groups: int, *weight: int, half: bool = False) -> tuple[str, str]:
        x = torch.empty(weight, dtype=torch.bfloat16 if half else torch.float32)
        of = op_kind(f"aten.{name}.default", [*[None] * (9 if "backward" in name else 8), groups], [x])
        return of, compute_dtype([x], of)

    assert kind("convolution", 2, 8, 4, 3, 3) == ("convolution", "tf32")
    assert kind("convolution", 1, 8, 1, 3, 3) == ("convolution", "tf32")
    assert kind("convolution_backward", 1, 8, 8, 3, 3) == ("backward of a convolution", "tf32")
    assert kind("convolution_backward", 8, 8, 1, 3) == ("backward of a depthwise convolution", "float32")
    assert kind("mm", 0, 8, 3) == ("matrix product", "float32")
    assert kind("mm", 0, 8, 3, half=True) == ("unaligned product", "bfloat16")
    assert kind("native_layer_norm_backward", 0, 8) == ("backward of a norm", "float32")
    assert kind("_foreach_norm", 0, 8) == ("elementwise", "float32")
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
    try:
        assert kind("mm", 0, 8, 3) == ("matrix product", "tf32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_ops_in_place_write_what_they_read() -> None:
    x = [torch.zeros(10), torch.zeros(20)]
    row = op_row(torch.ops.aten._foreach_mul_.Scalar, (x, 2), {}, None, x, flags=0, name="", phase="")
    assert row.bytes_moved == 2 * 120

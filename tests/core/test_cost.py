"""The roofline and its device table, against figures worked out by hand and torch's own counter."""

from __future__ import annotations

from typing import Any

import pytest

from tracer.costs.roofline import op_time_ns, uses_tf32
from traces.devices import DEVICES, Device, device
from traces.errors import SpecError

# 1 TFLOP/s and 1 GB/s, so that every figure below can be read off.
ROUND = Device(
    name="round",
    kind="cuda",
    memory_bytes=1,
    bandwidth_bytes_per_s=10**9,
    flops_per_s={"float32": 10**12, "tf32": 8 * 10**12, "bfloat16": 2 * 10**12},
    launch_ns=100,
    source="none",
)


def test_compute_bound() -> None:
    # 7e9 flops at 0.7 of 1e12 a second: 10 ms; 8 bytes take 10 ns.
    assert op_time_ns(7 * 10**9, 8, "float32", ROUND) == 10_000_000 + 100
    assert op_time_ns(7 * 10**9, 8, "bfloat16", ROUND) == 5_000_000 + 100


def test_memory_bound() -> None:
    # 800 bytes at 0.8 of 1e9 a second: 1 us; 7 flops take no time.
    assert op_time_ns(7, 800, "float32", ROUND) == 1_000 + 100


def test_a_launch_is_the_least_and_a_view_is_free() -> None:
    assert op_time_ns(0, 0, "int64", ROUND) == 100
    assert op_time_ns(7 * 10**9, 800, "float32", ROUND, view=True) == 0


def test_tf32_is_a_choice_and_its_defaults_are_torchs() -> None:
    assert op_time_ns(56 * 10**9, 0, "float32", ROUND, tf32=True) == 10_000_000 + 100
    # Where there are no such units, and for other types, it changes nothing.
    assert device("t4").peak_flops_per_s("float32", tf32=True) == device("t4").peak_flops_per_s("float32")
    assert ROUND.peak_flops_per_s("bfloat16", tf32=True) == 2 * 10**12
    assert uses_tf32("aten.convolution_backward.default")
    assert not uses_tf32("aten.addmm.default")
    assert uses_tf32("aten.addmm.default", matmul_tf32=True)
    torch = pytest.importorskip("torch")
    assert torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("rtx 4090", "RTX-4090"),
        ("RTX_3090", "RTX-3090"),
        ("4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("a100-40", "A100-40"),
        ("A100 80GB", "A100-80"),
        ("l40s", "L40S"),
        ("T4", "T4"),
        ("CPU", "cpu"),
    ],
)
def test_devices_are_found_however_they_are_written(said: str, meant: str) -> None:
    assert device(said).name == meant


@pytest.mark.parametrize(
    ("said", "message"),
    [("a100", "A100-80 or A100-40; say which"), ("h20", "H200"), ("xyz", "Known are H200"), ("", "unknown")],
)
def test_unknown_devices_are_refused(said: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        device(said)


@pytest.mark.parametrize("entry", DEVICES, ids=lambda d: d.name)
def test_the_table_is_plausible(entry: Device) -> None:
    assert 10**10 <= entry.bandwidth_bytes_per_s <= 10**13
    assert 2**33 < entry.memory_bytes < 2**38
    assert entry.flops_per_s["float32"] <= entry.flops_per_s["float16"]
    assert entry.source
    # Between the peaks, the balance of flops to bytes: between 5 and 500 for float32.
    assert 5 < entry.flops_per_s["float32"] / entry.bandwidth_bytes_per_s < 500


def test_bytes_count_each_tensor_once_and_expanded_ones_by_what_exists() -> None:
    torch = pytest.importorskip("torch")
    from tracer.costs.roofline import op_bytes

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
    pytest.importorskip("transformers")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    from tracer.build.step import load_spec
    from tracer.costs.roofline import op_flops

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


def test_attention_on_the_cpu_counts_as_much_as_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    from tracer.costs.roofline import op_flops

    q, k = torch.zeros(2, 4, 8, 16), torch.zeros(2, 4, 6, 16)
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    # Scores and their product with the values: twice 2*batch*heads*queries*keys*width.
    assert op_flops(target, (q, k, k), {}, out) == 2 * 2 * 2 * 4 * 8 * 6 * 16
    assert op_flops(torch.ops.aten.add.Tensor, (q, q), {}, q) == 0

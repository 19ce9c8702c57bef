"""The roofline and its device table, against figures worked out by hand and torch's own counter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tracer.costs.roofline import PRODUCT, op_time_ns
from traces.devices import Device, Links, board_of, device, devices
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


TEN = replace(ROUND, multiprocessors=10, l2_bytes=600_000, bandwidth_bytes_per_s=10**11)


def test_compute_bound() -> None:
    # 7e9 flops at 0.7 of 1e12 a second: 10 ms; 8 bytes take 10 ns.
    assert op_time_ns(7 * 10**9, 8, "float32", ROUND) == 10_000_000 + 100
    assert op_time_ns(7 * 10**9, 8, "bfloat16", ROUND, "attention") == 5_000_000 + 100
    # A GPU's kernels reach what their kind does: 0.72, or 0.3.
    assert op_time_ns(576 * 10**8, 0, "tf32", TEN, PRODUCT) == 10_000_000 + 100
    assert op_time_ns(3 * 10**9, 0, "float32", TEN, "attention") == 10_000_000 + 100


def test_memory_bound() -> None:
    # 800 bytes at 0.8 of 1e9 a second: 1 us; 7 flops take no time.
    assert op_time_ns(7, 800, "float32", ROUND) == 1_000 + 100
    # Ten multiprocessors move 600 GB/s of what the cache holds, and 100 GB/s in a norm.
    assert op_time_ns(0, 600_000, "float32", TEN) == 1_000 + 100
    assert op_time_ns(0, 800_000, "float32", TEN) == 10_000 + 100
    assert op_time_ns(0, 500_000, "float32", TEN, "norm") == 5_000 + 100


def test_a_launch_is_the_least_and_a_view_is_free() -> None:
    assert op_time_ns(0, 0, "int64", ROUND) == 100
    assert op_time_ns(10**12, 0, "tf32", device("t4")) == op_time_ns(10**12, 0, "float32", device("t4"))


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
    [("a100", "A100-80 or A100-40; say which"), ("h20", "H200"), ("xyz", "known are H200"), ("", "unknown")],
)
def test_unknown_devices_are_refused(said: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        device(said)


@pytest.mark.parametrize("entry", devices(), ids=lambda d: d.name)
def test_the_table_is_plausible(entry: Device) -> None:
    assert 10**10 <= entry.bandwidth_bytes_per_s <= 10**13
    assert 2**33 < entry.memory_bytes < 2**38
    assert entry.flops_per_s["float32"] <= entry.flops_per_s["float16"]
    assert bool(entry.multiprocessors * entry.l2_bytes * entry.memory_mhz) is (entry.kind == "cuda")
    assert entry.source
    # Between the peaks, the balance of flops to bytes: between 5 and 500 for float32.
    assert 5 < entry.flops_per_s["float32"] / entry.bandwidth_bytes_per_s < 500


@pytest.mark.parametrize(
    ("name", "board"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090 Ti", ""),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("Tesla T4", "T4"),
        ("Some Other GPU", ""),
        # The same chips at other clocks: whoever wants their figures nearly right names the entry.
        ("NVIDIA A100 80GB PCIe", ""),
        ("NVIDIA H100 NVL", ""),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""),
        ("NVIDIA GH200 480GB", ""),
    ],
)
def test_boards_by_the_driver_s_name(name: str, board: str) -> None:
    assert board_of(name) == board


def test_a_gather_takes_its_slowest_link_and_a_latency_a_step() -> None:
    h100 = Links(gpu=device("h100"))
    # 7 of 8 parts of 800 MB at 360 GB/s, seven steps by NVLink.
    assert h100.gather_ns(8 * 10**8, 8, 1) == 8_400 + 7 * 3_400 + 7 * 10**8 * 1000 // 360_000
    # Two machines: eight cards of 50 GB/s are faster than NVLink; of 5 GB/s they are not.
    assert h100.gather_ns(16 * 10**8, 16, 2) == 8_400 + 14 * 3_400 + 9_600 + 15 * 10**8 * 1000 // 360_000
    slow = Links(gpu=device("h100"), network_gbit_per_s=40)
    assert slow.gather_ns(16 * 10**8, 16, 2) == 8_400 + 14 * 3_400 + 9_600 + 15 * 10**8 // 40
    assert Links(gpu=device("l4")).gather_ns(2 * 10**9, 2, 1) == 8_400 + 5_700 + 10**9 // 25
    assert str(slow) == "NVLink 360 GB/s within a machine, 40 Gbit/s of each GPU between machines"
    assert str(Links(gpu=device("l4"))).startswith("PCI Express 25 GB/s within a machine, 400 Gbit/s")

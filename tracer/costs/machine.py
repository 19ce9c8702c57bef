"""Measure this processor for a second: its rates of arithmetic and of memory, and the cost of calling an op.

A GPU's rates stand in its datasheet; a CPU's depend on cores, threads, clocks and memory that no name tells. These
three kinds of figures, measured, take the place of the device table's nominal ones. No op of a model is run.

Counts: square matrix products by type, sums of tensors that are larger than caches, into fresh memory and as often into
memory used before, sums of a few numbers.
Ignores: that other shapes reach less, and that small tensors stay in caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from tracer.costs.roofline import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY
from traces.devices import Device, device

SIDE: Final = 768  # of the matrices: 0.9 GFLOP a product
SLOW_SIDE: Final = 256  # for types that a processor may emulate
PLAIN: Final = ("float32", "float64")
# 40 MiB in float32, of which a sum moves three times as much. The C library takes more than 32 MiB from the system and
# gives it back each time, so such a result's pages are new: memory that forward fills for the first time.
ELEMENTS: Final = 10 << 20
CALLS: Final = 500  # of the small op, timed together
RUNS: Final = 5

Clock = Callable[[], int]


def probed_cpu(clock: Clock = time.perf_counter_ns) -> Device:
    """The device table's `cpu` with this machine's rates, for the number of threads that torch has now."""
    import torch

    nominal = device("cpu")
    with torch.no_grad():
        flops = {name: _flops_per_s(torch, name, clock) for name in nominal.flops_per_s}
        a, b, c, x = torch.ones(ELEMENTS), torch.ones(ELEMENTS), torch.ones(ELEMENTS), torch.ones(16)
        sums_ns = _median_ns(lambda: a + b, clock) + _median_ns(lambda: torch.add(a, b, out=c), clock)

        def small() -> None:
            for _ in range(CALLS):
                x + x

        launch_ns = _median_ns(small, clock) // CALLS
    moved = 2 * 3 * ELEMENTS * 4
    threads = torch.get_num_threads()
    # What is measured is what ops reach, and the cost model reduces what the table says to that.
    return replace(
        nominal,
        flops_per_s={k: round(v / COMPUTE_EFFICIENCY) for k, v in flops.items()},
        bandwidth_bytes_per_s=round(moved * 1e9 / sums_ns / BANDWIDTH_EFFICIENCY),
        launch_ns=max(1, launch_ns),
        measured=True,
        source=f"measured on this machine with {threads} thread" + ("s" if threads > 1 else ""),
    )


def rates_of(entry: Device) -> dict[str, int]:
    """What a trace's header says of measured rates: what ops reach, by type in FLOP/s, and the other two figures."""
    return {
        **{f"{k}_flops_per_s": round(v * COMPUTE_EFFICIENCY) for k, v in entry.flops_per_s.items()},
        "bytes_per_s": round(entry.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY),
        "op_ns": entry.launch_ns,
    }


def rates_text(entry: Device) -> str:
    """Measured rates for people."""
    rates = rates_of(entry)
    return (
        f"Rates {entry.source}: {rates['float32_flops_per_s'] / 1e9:.0f} GFLOP/s in float32, "
        f"{rates['bytes_per_s'] / 1e9:.1f} GB/s, {rates['op_ns'] / 1e3:.1f} us an op."
    )


def _flops_per_s(torch: Any, dtype: str, clock: Clock) -> float:
    side = SIDE if dtype in PLAIN else SLOW_SIDE
    a = torch.ones(side, side, dtype=getattr(torch, dtype))
    return 2 * side**3 * 1e9 / _median_ns(lambda: a @ a, clock)


def _median_ns(work: Callable[[], object], clock: Clock) -> int:
    """The median time of a few runs after one that warms up; at least 1."""
    work()
    times = []
    for _ in range(RUNS):
        begin = clock()
        work()
        times.append(clock() - begin)
    return max(1, int(statistics.median(times)))

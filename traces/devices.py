"""The device table: what the cost model needs to know of a device, memory, bandwidth, peak rates.

Peak rates are dense (without structured sparsity) and at boost clock, from the makers' datasheets; tensor-core
rates accumulate in float32. How much of them a real kernel reaches is the business of `tracer.costs.roofline`.
Compute capabilities are NVIDIA's (developer.nvidia.com/cuda-gpus).
Memory is about what the driver reports for a whole board; it differs a little between boards and drivers.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from traces.errors import SpecError

GIB: Final = 2**30
MIB: Final = 2**20
TERA: Final = 10**12
GIGA: Final = 10**9
TF32: Final = "tf32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of device."""

    name: str
    kind: str  # "cuda" or "cpu"
    memory_bytes: int  # all of it; a process gets less
    bandwidth_bytes_per_s: int
    flops_per_s: dict[str, int]  # dtype (as torch names it, or "tf32") -> dense peak
    launch_ns: int  # least time between the starts of two dependent kernels
    source: str
    sm: tuple[int, int] = (0, 0)  # CUDA compute capability, which decides the kernels; (0, 0): no NVIDIA GPU
    multiprocessors: int = 0  # of the board, by which some kernels choose how to split their work
    l2_bytes: int = 0  # its cache, by which some kernels choose their tiles

    def peak_flops_per_s(self, dtype: str, *, tf32: bool = False) -> int:
        """The dense peak for a dtype. tf32: for float32, the rate of TF32 tensor cores if there are any.

        A dtype that the device has no rate for is computed at the rate of float32.
        """
        if dtype == "float32" and tf32:
            return self.flops_per_s.get(TF32, self.flops_per_s["float32"])
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


def _rates(fp64: float, fp32: float, tf32: float | None, bf16: float | None, fp16: float) -> dict[str, int]:
    """Peak rates from TFLOP/s."""
    named = {"float64": fp64, "float32": fp32, TF32: tf32, "bfloat16": bf16, "float16": fp16}
    return {k: int(v * TERA) for k, v in named.items() if v is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """What a multiprocessor of a compute capability can hold at once.

    Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """

    threads: int
    blocks: int
    shared_bytes: int
    block_shared_bytes: int  # the most that one block may ask for


_ARCHITECTURES: Final = {
    (7, 5): Architecture(threads=1024, blocks=16, shared_bytes=65_536, block_shared_bytes=65_536),
    (8, 0): Architecture(threads=2048, blocks=32, shared_bytes=167_936, block_shared_bytes=166_912),
    (8, 6): Architecture(threads=1536, blocks=16, shared_bytes=102_400, block_shared_bytes=101_376),
    (8, 9): Architecture(threads=1536, blocks=24, shared_bytes=102_400, block_shared_bytes=101_376),
    (9, 0): Architecture(threads=2048, blocks=32, shared_bytes=233_472, block_shared_bytes=232_448),
    (10, 0): Architecture(threads=2048, blocks=32, shared_bytes=233_472, block_shared_bytes=232_448),
}

GPU_LAUNCH_NS: Final = 4_000  # an eager kernel launch; small kernels of a stream start about this far apart


def _gpu(
    name: str,
    memory_mib: int,
    gb_per_s: int,
    rates: dict[str, int],
    sm: tuple[int, int],
    multiprocessors: int,
    l2_mib: int,
    source: str,
) -> Device:
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=memory_mib * MIB,
        bandwidth_bytes_per_s=gb_per_s * GIGA,
        flops_per_s=rates,
        launch_ns=GPU_LAUNCH_NS,
        source=source,
        sm=sm,
        multiprocessors=multiprocessors,
        l2_bytes=l2_mib * MIB,
    )


HOPPER: Final = _rates(33.5, 66.9, 494.7, 989.4, 989.4)
AMPERE: Final = _rates(9.7, 19.5, 156, 312, 312)
# fmt: off
DEVICES: Final = (
    # name, memory in MiB, GB/s, rates, compute capability, multiprocessors, MiB of L2 cache, source
    _gpu("H200", 143_771, 4_800, HOPPER, (9, 0), 132, 50,
         "NVIDIA H200 datasheet (SXM), sparse rates halved"),
    _gpu("H100", 81_559, 3_350, HOPPER, (9, 0), 132, 50,
         "NVIDIA H100 datasheet (SXM5 80 GB), sparse rates halved"),
    _gpu("B200", 183_359, 8_000, _rates(40, 80, 1_100, 2_250, 2_250), (10, 0), 148, 126,
         "NVIDIA Blackwell architecture technical brief, table on HGX B200 (1,000 W), sparse rates halved; 74 "
         "multiprocessors a die: chipsandcheese.com on B200"),
    _gpu("A100-80", 81_920, 2_039, AMPERE, (8, 0), 108, 40,
         "NVIDIA A100 datasheet (80 GB SXM)"),
    _gpu("A100-40", 40_960, 1_555, AMPERE, (8, 0), 108, 40,
         "NVIDIA A100 datasheet (40 GB)"),
    _gpu("L40S", 46_068, 864, _rates(1.43, 91.6, 183, 362, 362), (8, 9), 142, 96,
         "NVIDIA L40S datasheet; float64 is 1/64 of float32; memory with ECC on"),
    _gpu("L4", 23_034, 300, _rates(0.473, 30.3, 60, 121, 121), (8, 9), 58, 48,
         "NVIDIA L4 datasheet, sparse rates halved; float64 is 1/64 of float32; 7,424 CUDA cores; memory with ECC on"),
    _gpu("RTX-4090", 24_564, 1_008, _rates(1.29, 82.6, 82.6, 165.2, 165.2), (8, 9), 128, 72,
         "NVIDIA Ada GPU architecture whitepaper, appendix on the GeForce RTX 4090"),
    _gpu("RTX-3090", 24_576, 936, _rates(0.556, 35.6, 35.6, 71.2, 71.2), (8, 6), 82, 6,
         "NVIDIA GA102 GPU architecture whitepaper, table on the GeForce RTX 3090"),
    _gpu("T4", 15_360, 320, _rates(0.254, 8.1, None, None, 65), (7, 5), 40, 4,
         "NVIDIA T4 datasheet; no TF32 and no bfloat16 units; memory with ECC on"),
    Device(
        name="cpu",
        kind="cpu",
        memory_bytes=16 * GIB,
        bandwidth_bytes_per_s=32 * GIGA,
        flops_per_s=_rates(0.3, 0.6, None, 2.8, 0.6),
        launch_ns=4_000,
        source=(
            "a nominal small server: two cores with AVX-512 and AMX, set so that the efficiencies of the roofline "
            "give the 0.42 and 2.0 TFLOP/s (float32, bfloat16 2048^3 matmul), 26 GB/s and 4-5 us an op measured "
            "on one; the memory is nominal. Trace with --device cpu for the times of your own machine"
        ),
    ),
)
# fmt: on


def device(name: str) -> Device:
    """The device of that name, whatever its case and punctuation: "h200", "RTX 4090", "a100_40gb".

    Raises:
        SpecError: there is none, or the name fits several (a100); names the close ones.
    """
    known = {_key(d.name): d for d in DEVICES}
    key = _key(name)
    for prefix in ("nvidia", "geforce"):
        key = key.removeprefix(prefix)
    for candidate in (key, key.removesuffix("gb"), "rtx" + key):
        if candidate in known:
            return known[candidate]
    names = ", ".join(d.name for d in DEVICES)
    starting = [d.name for k, d in known.items() if len(key) > 1 and k.startswith(key)]
    if len(starting) > 1:
        raise SpecError(f"device {name!r} may be {' or '.join(starting)}; say which.")
    close = [known[k].name for k in difflib.get_close_matches(key, known, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise SpecError(f"device {name!r} is unknown; {hint}Known are {names}.")


def architecture(gpu: Device) -> Architecture:
    """What a multiprocessor of the device holds; SpecError if it is no GPU whose compute capability is known."""
    found = _ARCHITECTURES.get(gpu.sm)
    if found is None:
        raise SpecError(f"{gpu.name} is no NVIDIA GPU of the device table; name one, such as h100.")
    return found


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())

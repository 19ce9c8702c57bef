"""The Triton kernels of packing: in Triton's interpreter where there is no GPU, and compiled for one all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tests.torch.test_inverted_kernels import INTERPRETED, run

VALUES = """
import torch
from executor.codecs import cpu, cuda
from executor.codecs.payloads import new_payload, parts
from simulator.core.formats import CHUNK
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
keys = (123456789, 4123456789)
floats = (torch.float32, torch.bfloat16, torch.float16)
formats = ("fp8_e4m3", "fp8_e5m2", "int8", "int4", "int2", "fewbit4:gelu", "fewbit3:silu", "fewbit2:gelu")
cases = [(format, dtype, n) for format in formats for dtype in floats for n in (1, 1003)]
for format, dtype, n in (*cases, ("fewbit3:gelu", torch.float32, CHUNK + 300)):
    x = (torch.randn(n) * torch.randn(n).exp()).to(dtype)
    x[::7] *= 1e-5
    if n == 1003:
        x[300], x[600] = torch.inf, torch.nan
    mine = new_payload(x, format)
    theirs = torch.zeros_like(mine).to(device)
    cpu.convert(x, *parts(mine, format), format, keys)
    cuda.convert(x.to(device), *parts(theirs, format), format, keys)
    # Bits of NaNs aside, all bytes; a GPU's division may be off by the last digit, which few numbers' codes tell.
    (rows, codes), (found, other) = parts(mine, format), parts(theirs.cpu(), format)
    for a, b in zip(rows, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0, equal_nan=True)
    assert (codes != other).sum() <= (len(codes) // 1000 if device == "cuda" else 0), (format, dtype, n)
    y, z = torch.empty_like(x), torch.empty_like(x).to(device)
    cpu.convert(y, *parts(mine, format), format, None)
    cuda.convert(z, *parts(mine.to(device), format), format, None)
    # The interpreter cuts bfloat16 off where a GPU rounds.
    near = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(z.cpu().float(), y.float(), atol=1e-6, rtol=near, equal_nan=True)
print("compared")
"""

COMPILED = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from executor.codecs import cuda

def compiled(kernel, word, numbers):
    types = {"x": f"*{word}", "out": f"*{word}", "codes": "*u8", "key": "i32", "other": "i32"}
    types |= dict.fromkeys(("scales", "least", "width"), "*fp32")
    names = kernel.arg_names
    signature = {n: types.get(n, "constexpr" if n in numbers else "i64") for n in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in numbers.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]  # which has no float8
    assert ".target sm_80" in made
    assert ".f64" not in made

compiled(cuda._pack_floats, "bf16", cuda.float8("fp8_e4m3", True))
compiled(cuda._unpack_floats, "bf16", cuda.float8("fp8_e5m2", False))
compiled(cuda._pack_levels, "fp32", cuda.levels(4, True))
compiled(cuda._unpack_levels, "bf16", cuda.levels(2, False))
compiled(cuda._pack_few, "bf16", cuda.few("gelu", 3, 0, torch.bfloat16))
compiled(cuda._unpack_few, "fp32", cuda.few("gelu", 4, 1, torch.float32))
print("compiled")
"""


@pytest.mark.slow
def test_kernels_pack_what_the_cpu_packs(tmp_path: Path) -> None:
    assert run(VALUES, tmp_path, **INTERPRETED) == "compared\n"


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    assert run(COMPILED, tmp_path) == "compiled\n"

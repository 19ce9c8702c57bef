"""The Triton kernels: in Triton's interpreter where there is no GPU, and compiled for one all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}

VALUES = """
import torch
from executor.inverted import kernels, ops
from executor.inverted.formulas import FORWARD
device = "cuda" if torch.cuda.is_available() else "cpu"
ops.COMPILED_FROM = 1 << 60
torch.manual_seed(0)
for dtype, near in ((torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)):
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    every = every.view(dtype) if dtype.itemsize == 2 else every.view(torch.bfloat16).float()
    for kind in FORWARD:
        for x in (torch.randn(4096).to(dtype), torch.randn(1003).to(dtype), torch.randn(3).to(dtype), every, every[:0]):
            y, side = (t.cpu() for t in kernels.forward(x.to(device), kind, True))
            # The interpreter cuts bfloat16 off where a GPU rounds, which a second bit tells.
            m = (x.numel() + 7) // 8
            assert torch.equal(side[:m], ops.side(x, kind)[:m]), (kind, dtype)
            assert torch.equal(kernels.forward(x.to(device), kind, False)[1].cpu(), side)
            torchs, side = ops.activate(x, kind)
            usual = x.isfinite() & (x.abs() < 100) & torchs.isfinite()
            torch.testing.assert_close(y[usual].float(), torchs[usual].float(), atol=near, rtol=near)
            grad = torch.randn(x.shape).to(dtype)
            found = kernels.backward(grad.to(device), torchs.to(device), side.to(device), kind).cpu()
            wanted = ops.backward_from_output(grad, torchs, side, kind)
            assert torch.equal(found.isnan(), wanted.isnan()), (kind, dtype)
            torch.testing.assert_close(found.float(), wanted.float(), atol=near, rtol=near, equal_nan=True)
    y, side = ops.activate(torch.randn(24, 17).to(dtype), "gelu")
    grad = torch.randn(17, 24).to(dtype).t()  # lies otherwise
    found = kernels.backward(grad.to(device), y.to(device), side.to(device), "gelu").cpu()
    assert found.stride() == y.stride()
    torch.testing.assert_close(found, ops.backward_from_output(grad, y, side, "gelu"), atol=near, rtol=near)
print("compared")
"""

COMPILED = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from executor.inverted import kernels
from executor.inverted.fits import X_MIN

def compiled(kernel, pointers, numbers):
    names = kernel.arg_names
    signature = {n: pointers.get(n, "constexpr" if n in numbers else "i64") for n in names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in numbers.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

for word, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    for kind in X_MIN:
        made = compiled(
            kernels._forward, {"x": f"*{word}", "y": f"*{word}", "side": "*u8"},
            {"x_min": X_MIN[kind], "kind": kind, "with_y": True, "two": word == "bf16", "block": kernels.BLOCK},
        )
        assert ".target sm_90" in made
        made = compiled(
            kernels._backward, {"grad": f"*{word}", "y": f"*{word}", "side": "*u8", "out": f"*{word}"},
            kernels.constants(kind, dtype),
        )
        assert ".f64" not in made
print("compiled")
"""


def run(code: str, tmp_path: Path, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_kernels_compute_what_the_formulas_do(tmp_path: Path) -> None:
    assert run(VALUES, tmp_path, **INTERPRETED) == "compared\n"


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    assert run(COMPILED, tmp_path) == "compiled\n"

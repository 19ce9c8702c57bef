"""The CPU's rules against torch's profiler, on torch's own samples of its ops, forward and backward."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tracer.costs.rules_cpu import onednn  # noqa: E402
from tracer.costs.rules_cpu.workspaces import TABLE  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE_BYTES = 64  # a few scalars
LEAST_CALLS = {"float32": 10_000, "bfloat16": 6_000}
LEAST_SHARE = {"float32": 0.9, "bfloat16": 0.6}  # of the rules, that some call meets


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Calls that the rules are known to get wrong."""

    op: str
    calls: str  # what their texts match
    reason: str

    def matches(self, call: dict[str, Any]) -> bool:
        return self.op == call["op"] and re.search(self.calls, call["call"]) is not None


SOME_KB = "what the table says it ignores: places along edges, sums of norms, sizes of repeats, tiles"
TYPES = "copies of what has another type, and of indices of 32 bits, in comparisons and gathers are left out"
COMPLEX = "complex numbers have no rule of their own"
BATCHES = "a batch of triangles that do not lie behind each other is copied"
POINTWISE = "tagged as pointwise, but made of several kernels"
KNOWN = {
    "float32": [
        Known(op="aten.upsample_nearest1d.default", calls="", reason=SOME_KB),
        *(Known(op=f"aten.{op}.default", calls="complex64", reason=COMPLEX) for op in ("mm", "bmm", "abs")),
        *(
            Known(op=f"aten.{op}.Tensor", calls="int32|float64", reason=TYPES)
            for op in ("eq", "ge", "gt", "le", "lt")
        ),
        Known(
            op="aten.convolution.default",
            calls=r"float32\[[1-4]\|1\], \(",
            reason="biases that are padded to whole blocks of channels",
        ),
    ],
    "bfloat16": [
        *(
            Known(op=f"aten.{op}.Tensor", calls="int32|float32", reason=TYPES)
            for op in ("eq", "ge", "le", "lt")
        ),
        Known(
            op="aten.index_add.default",
            calls=r"bfloat16\[5,5\|5,1\], (-1|0|1), ",
            reason="which calls go through a scatter, in float32, was not told apart",
        ),
        *(
            Known(op=f"aten.{op}.default", calls=r"-> bfloat16\[\|\]", reason="means in float32 are left out")
            for op in (
                "binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "mse_loss",
                "smooth_l1_loss", "soft_margin_loss",
            )
        ),
    ],
}  # fmt: skip
for calls in KNOWN.values():
    calls += [
        Known(op=f"aten.{op}.default", calls="", reason=reason)
        for reason, ops in (
            (SOME_KB, ("native_group_norm_backward", "repeat", "upsample_bicubic2d", "upsample_linear1d")),
            (SOME_KB, ("upsample_nearest3d", "upsample_trilinear3d")),
            (BATCHES, ("tril", "triu")),
            (POINTWISE, ("isinf", "mvlgamma")),
            ("a matrix of one number, expanded, is copied", ("mv",)),
        )
        for op in ops
    ]
    calls += [
        Known(op=f"aten.{op}", calls="int32", reason=TYPES)
        for op in ("gather.default", "scatter.src", "scatter.value", "scatter_add.default")
    ]
    calls.append(Known(op="aten.ldexp.Tensor", calls="", reason=POINTWISE))


def compared(dtype: str) -> list[dict[str, Any]]:
    """In a process of its own; see `tests.torch.op_samples`."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch.op_samples", dtype],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stderr.strip().splitlines()
    if done.returncode and "torch/testing/_internal" in done.stderr and "Error: No module" in lines[-1]:
        pytest.skip(f"torch's op samples cannot be imported: {lines[-1]}")
    assert done.returncode == 0, lines[-20:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def off(call: dict[str, Any]) -> bool:
    return call["told"] is None or abs(call["told"] - call["found"]) > TOLERANCE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("dtype", KNOWN)
def test_the_rules_are_right_but_for_what_is_known(dtype: str) -> None:
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the rules, and what they are known to miss, were compared with torch 2.13")
    if onednn.block() != 16:
        pytest.skip("the rules were read off a processor with AVX-512")
    calls = compared(dtype)
    met = {rule for c in calls if (rule := TABLE.rule_for(c["op"]))}
    assert len(calls) > LEAST_CALLS[dtype]
    assert len(met) > len(TABLE.rules) * LEAST_SHARE[dtype]
    wrong = [call for call in calls if off(call)]
    known = KNOWN[dtype]
    assert [call for call in wrong if not any(k.matches(call) for k in known)] == []
    # What has become right is known no longer.
    assert [k for k in known if not any(k.matches(call) for call in wrong)] == []


def test_what_is_off_is_told_apart() -> None:
    call = {"op": "aten.mm.default", "call": "aten.mm.default(complex64[5,5|5,1])", "told": 200, "found": 400}
    assert off(call)
    assert [k.op for k in KNOWN["float32"] if k.matches(call)] == ["aten.mm.default"]
    assert off({**call, "told": None})
    assert not off({**call, "told": 336})

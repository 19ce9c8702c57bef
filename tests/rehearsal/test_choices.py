"""What a laptop's capture chooses for a GPU, against what torch chooses there, on the null driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tracer.rehearsal import run_on_null_driver
from traces.devices import device

pytestmark = pytest.mark.rehearsal
GPUS = ["t4", "a100-80", "h100"]
# Optimizers that look at values or at the device of their state, which fake tensors on the CPU refuse with an error.
REFUSED = ("AdamW, capturable", "ASGD", "Adafactor")
# Torch 2.11 has these fused kernels for the CPU alone, and says so; 2.15 has them on CUDA.
CPU_ALONE = {"Adagrad {'fused': True}"}

# On a GPU one kernel each, which torch takes apart on fake tensors of the CPU: more is saved than there.
COMPOSITE = ("lstm cell",)


def chosen(what: str, gpu: str, **arguments: Any) -> dict[str, Any]:
    return run_on_null_driver(
        f"tests.rehearsal.choices:{what}",
        {"gpu": gpu, **arguments},
        replace(device(gpu), memory_bytes=1 << 42),
        what="chose kernels",
    )


@pytest.mark.parametrize("gpu", [*GPUS, "l4", "b200"])
def test_the_kernel_of_attention(gpu: str) -> None:
    found = chosen("attention", gpu)
    assert found["compared"] == 500
    assert found["differ"] == []


@pytest.mark.parametrize("gpu", GPUS)
def test_the_kernel_of_a_batch_norm(gpu: str) -> None:
    found = chosen("batch_norm", gpu)
    assert found["compared"] == 200
    assert found["differ"] == []


@pytest.mark.parametrize("gpu", ["t4", "h100"])
def test_the_kernel_of_a_depthwise_convolution_of_halves(gpu: str) -> None:
    found = chosen("depthwise", gpu)
    assert found["compared"] > 500
    assert found["by_cudnn"] > 50
    assert found["differ"] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gpu", GPUS)
def test_the_ops_and_types_under_autocast(gpu: str, dtype: str) -> None:
    found = chosen("autocast", gpu, dtype=dtype)
    assert found["compared"] > 300
    assert [d for d in found["differ"] if not d["call"].startswith(COMPOSITE)] == []
    assert len(found["differ"]) == 3 * len(COMPOSITE)


def test_the_ops_of_optimizers() -> None:
    found = chosen("optimizers", "a100-80")
    assert found["compared"] + len(found["left_out"]) == 80
    assert set(found["left_out"]) <= CPU_ALONE
    differ = [d for d in found["differ"] if not d["call"].startswith(REFUSED)]
    assert differ == []
    assert {d["laptop"] for d in found["differ"]} <= {
        "['AssertionError']",
        "['DataDependentOutputException']",
    }


def test_a_gradient_that_lies_otherwise_is_not_copied() -> None:
    pytest.importorskip("triton")
    assert chosen("gradients_from_output", "h100") == {"524288": [0, 0], "524799": [0, 0]}

"""Code that says cuda is traced for a GPU on a laptop, as the GPU would run it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.torch.steps import build_of  # noqa: E402
from tracer.record.step import trace_step  # noqa: E402
from tracer.step.cuda_words import cuda_words  # noqa: E402
from tracer.step.step import load_spec  # noqa: E402
from traces.devices import device  # noqa: E402
from traces.errors import CaptureError  # noqa: E402
from traces.records.trace import Trace  # noqa: E402

H100 = device("h100")


class Says(nn.Module):
    """Asks whatever code asks that knows of one GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("shift", torch.zeros(64, device="cuda"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        assert x.device == torch.device("cuda:0")
        torch.cuda.nvtx.range_push("forward")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            y = self.a(x)
            assert y.dtype == torch.get_autocast_gpu_dtype() == torch.bfloat16
        with torch.autocast(x.device.type):
            assert self.b(y.float()).dtype == torch.float16  # CUDA's default
        ones = torch.ones(64, device=x.device) + torch.arange(64, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        return y.cuda() + ones.to("cuda", torch.bfloat16).cuda(non_blocking=True) + self.shift


def says_cuda() -> tuple[Any, ...]:
    assert torch.cuda.is_available()
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 132
    with torch.device("cuda"):
        model = Says().cuda().to(torch.device("cuda", 0))
    x = torch.randn(8, 64).pin_memory().cuda(non_blocking=True)
    torch.cuda.reset_peak_memory_stats()
    return model, x, lambda y: y.float().sum().cuda(), torch.optim.SGD(model.parameters())


def traced(make: Any, target: Any = H100) -> Trace:
    return trace_step(build_of(make), target).finish()


def test_what_says_cuda_is_traced_as_it_stands() -> None:
    before = (torch.cuda.is_available, torch.is_autocast_enabled, torch.amp.autocast_mode.autocast.__init__)
    trace = trace_step(load_spec(f"{__file__}:says_cuda"), H100).finish()
    assert "aten._to_copy.default" in trace.ops.target
    assert (
        torch.cuda.is_available,
        torch.is_autocast_enabled,
        torch.amp.autocast_mode.autocast.__init__,
    ) == before


class Cast(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.kind, dtype=torch.bfloat16):
            return self.layers(x)


@pytest.mark.parametrize("target", ["h100", "cpu"])
def test_autocast_of_cuda_casts_for_a_gpu_what_it_casts_there(target: str) -> None:
    """As one that names the device of the tensors on the laptop; on a CPU it does nothing."""
    ops = {}
    for kind in ("cuda", "cpu"):

        def make(kind: str = kind) -> tuple[Any, ...]:
            return Cast(kind), torch.randn(8, 64), lambda y: y.float().sum(), None

        with (
            pytest.warns(UserWarning, match="CUDA is not available")
            if (kind, target) == ("cuda", "cpu")
            else nullcontext()
        ):
            ops[kind] = traced(make, device(target)).ops.target
    assert (ops["cuda"] == ops["cpu"]) is (target == "h100")
    assert ("aten._to_copy.default" in ops["cuda"]) is (target == "h100")


class Waits(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        return y


def test_what_asks_the_gpu_itself_is_refused_with_the_line() -> None:
    def make() -> tuple[Any, ...]:
        return Waits(4, 4), torch.randn(2, 4), lambda y: y.sum(), None

    with pytest.raises(
        CaptureError, match=r"asks the GPU itself.*test_cuda_words\.py:\d+, in forward: torch.cuda.cu"
    ):
        traced(make)


def test_torch_itself_may_ask_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does to save the generators' states while it captures."""
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: asked.append("torch"))
    call = "torch.cuda._lazy_init()"
    with cuda_words(H100):
        exec(call, {"__name__": "torch._dynamo.utils", "torch": torch})
        with pytest.raises(RuntimeError, match="asks the GPU itself"):
            exec(call, {"__name__": "my_training", "torch": torch})
    assert asked == ["torch"]


def test_names_imported_one_by_one_mean_the_target_too() -> None:
    """And torch's own functions again afterwards, also by a name that was imported meanwhile."""
    from torch.cuda import get_device_name, is_available, synchronize
    from torch.cuda.nvtx import range_push

    here = torch.cuda.is_available()
    with cuda_words(H100):
        from torch.cuda import device_count

        assert is_available()
        assert get_device_name(0) == "H100"
        assert device_count() == 1
        synchronize()
        range_push("mine")
    assert is_available() == here
    assert device_count() == torch.cuda.device_count()


def test_a_scaler_for_cuda_scales_where_a_gpu_is_meant() -> None:
    with cuda_words(H100):
        scaler = torch.amp.GradScaler("cuda")
        assert scaler.is_enabled()
        assert torch.amp.GradScaler().is_enabled()

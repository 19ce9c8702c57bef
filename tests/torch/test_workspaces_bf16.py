"""The CPU's rules for bfloat16: bytes worked out by hand, and what the profiler measures on such a processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from simulator.core.problem import Problem  # noqa: E402
from tests.torch import cpu_calls  # noqa: E402
from tests.torch.cpu_calls import CPU  # noqa: E402
from tests.torch.steps import build_of, recorded  # noqa: E402
from tracer.costs.calibration import ELSEWHERE  # noqa: E402
from tracer.costs.rules_cpu import onednn  # noqa: E402
from tracer.costs.rules_cpu.workspaces import cpu_events, product_blocks  # noqa: E402
from tracer.costs.signature import Signature, TensorSpec  # noqa: E402


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say which processor this is: by default one with AVX-512 and its bfloat16 instructions, one thread."""

    def say(*, block: int = 16, known: bool = True, library: bool = True) -> None:
        for name, value in (
            ("block", block), ("threads", 1), ("known_bfloat16", known), ("bfloat16_in_onednn", library),
        ):  # fmt: skip
            monkeypatch.setattr(onednn, name, lambda value=value: value)

    say()
    return say


def spec(*shape: int, dtype: str = "bfloat16", last: bool = False, turned: bool = False) -> TensorSpec:
    return cpu_calls.spec(*shape, dtype=dtype, last=last, turned=turned)


def forward(
    x: TensorSpec,
    w: TensorSpec,
    y: TensorSpec,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    swap: bool = False,
) -> tuple[int, ...] | None:
    args = (x, w, None, (stride,) * 2, (padding,) * 2, (1, 1), swap, (0, 0), groups)
    return cpu_events(Signature(target="aten.convolution.default", args=args, outputs=(y,)), CPU)


def backward(
    dy: TensorSpec, x: TensorSpec, w: TensorSpec, *, stride: int = 1, padding: int = 0, groups: int = 1,
    swap: bool = False, image: bool = True,
) -> tuple[int, ...] | None:  # fmt: skip
    mask = (image, True, False)
    args = (dy, x, w, (0,), (stride,) * 2, (padding,) * 2, (1, 1), swap, (0, 0), groups, mask)
    return cpu_events(Signature(target="aten.convolution_backward.default", args=args, outputs=()), CPU)


@pytest.mark.usefixtures("processor")
def test_a_convolution_reorders_image_weight_and_result() -> None:
    # Image 4 x 32 (20) x 16 x 16 x 2 = 65,536; weight 32 x 32 x 9 x 2 = 18,432; result 4 x 32 (24) x 256 x 2 = 65,536,
    # and without the padding 49,152.
    found = forward(spec(4, 20, 16, 16), spec(24, 20, 3, 3), spec(4, 24, 16, 16), padding=1)
    assert found == (65536, 18432, 65536, -18432, -65536, 49152, -65536)
    # A first layer reads the plain image, its weight for 4 channels: 16 x 4 x 9 x 2.
    found = forward(spec(4, 3, 32, 32), spec(16, 3, 3, 3), spec(4, 16, 32, 32), padding=1)
    assert found == (1152, 131072, -1152, 131072, -131072)


@pytest.mark.usefixtures("processor")
def test_a_1x1_convolution_sums_one_image_in_float32() -> None:
    # 32 channels x 256 places x 4 bytes, and 128.
    found = forward(spec(4, 16, 16, 16), spec(32, 16, 1, 1), spec(4, 32, 16, 16))
    assert found == (32896, 32768, 1024, 65536, -1024, -32768, -32896, 65536, -65536)
    # With a stride also one image thinned: 64 x 64 x 4 + 128, and 32 x 64 x 2 + 128.
    found = forward(spec(4, 32, 16, 16), spec(64, 32, 1, 1), spec(4, 64, 8, 8), stride=2)
    assert found == (20736, 65536, 4096, 32768, -4096, -65536, -20736, 32768, -32768)


@pytest.mark.usefixtures("processor")
def test_the_gradient_of_a_weight_transposes_one_image_of_each() -> None:
    # Sums 32 x 16 x 9 x 4 = 18,432; one image with rows of 18: 16 x 16 x 18 x 2 = 9,216; one gradient
    # 32 x 256 x 2 = 16,384; and 8,580.
    x, w, dy = spec(4, 16, 16, 16), spec(32, 16, 3, 3), spec(4, 32, 16, 16)
    found = backward(dy, x, w, padding=1)
    assert found == (
        65536, 9216, 32768, -9216, -65536, 32768, -32768,
        65536, 32768, 9216, 52612, -52612, -32768, -65536, 9216, -9216,
    )  # fmt: skip
    # Rows of 14, two apart: 7 and 2 on either side make 9, even 10, so 20: 128 x 14 x 20 x 2 = 71,680; gradient
    # 256 x 7 x 8 x 2 = 28,672; sums 1,179,648.
    found = backward(
        spec(8, 256, 7, 7), spec(8, 128, 14, 14), spec(256, 128, 3, 3), stride=2, padding=1, image=False
    )
    assert found == (
        200704, 401408, 589824, 1288580, -1288580, -401408, -200704, 589824, -589824,
    )  # fmt: skip


@pytest.mark.usefixtures("processor")
def test_groups_go_through_columns_and_depthwise_ones_do_not() -> None:
    # 16 bytes for each of 4,608 elements, columns 8 x 9 x 256 x 2 = 36,864, and 256.
    x, w, dy = spec(4, 32, 16, 16), spec(64, 8, 3, 3), spec(4, 64, 16, 16)
    assert backward(dy, x, w, padding=1, groups=4, image=False) == (9216, 110848, -110848, 9216, -9216)
    # 24 groups are 32: 32 x 9 x 2 = 576, sums twice that and 128.
    x, w = spec(4, 24, 16, 16), spec(24, 1, 3, 3)
    assert backward(x, x, w, padding=1, groups=24, image=False) == (
        65536, 65536, 576, 1280, -1280, -65536, -65536, 432, -576,
    )  # fmt: skip


@pytest.mark.usefixtures("processor")
def test_channels_last_is_not_reordered() -> None:
    x, w, y = spec(4, 16, 16, 16, last=True), spec(32, 16, 3, 3), spec(4, 32, 16, 16, last=True)
    assert forward(x, w, y, padding=1) == (9216, 65536, 9216, -9216, -9216)
    assert backward(y, x, w, padding=1) == (
        9216, 32768, 9216, -9216, 9216, 52612, -52612, 9216, 9216, -9216, -9216, -9216,
    )  # fmt: skip


@pytest.mark.usefixtures("processor")
def test_a_transposed_convolution_is_the_gradient_of_a_plain_one() -> None:
    x, w, y = spec(4, 32, 32, 32), spec(32, 16, 2, 2), spec(4, 16, 64, 64)
    # One image of 65,536, 32 KiB of scratch, and 128; what comes out is reordered twice.
    assert forward(x, w, y, stride=2, swap=True) == (
        98432, 262144, 4096, 524288, -4096, -262144, -98432, 524288, 524288, -524288, -524288,
    )  # fmt: skip
    # Sums 8,192, the larger image with rows of 68: 16 x 64 x 68 x 2 = 139,264, the other 65,536, and 8,580.
    assert backward(y, x, w, stride=2, swap=True) == (
        524288, 4096, 262144, -4096, -524288, 262144, -262144,
        262144, 524288, 4096, 221572, -221572, -524288, -262144, 4096, -4096,
    )  # fmt: skip


@pytest.mark.usefixtures("processor")
def test_products_have_blocks() -> None:
    def product(a: TensorSpec, b: TensorSpec, y: TensorSpec) -> tuple[int, ...] | None:
        return cpu_events(Signature(target="aten.mm.default", args=(a, b), outputs=(y,)), CPU)

    # Second factor 128 x 64 x 2 = 16,384, sums 68 x 64 x 4 = 17,408, and 1,024.
    found = product(spec(68, 128), spec(128, 64), spec(68, 64))
    assert found == (8704, 34816, -34816)
    # Transposed, the first factor too: 68 x 128 x 2 and 128.
    found = product(spec(68, 128, turned=True), spec(128, 64), spec(68, 64))
    assert found == (8704, 52352, -52352)
    # One number, expanded, is copied first: 68 x 128 x 2.
    number = replace(spec(68, 128), stride=(0, 0))
    assert product(number, spec(128, 64), spec(68, 64)) == (8704, 17408, 34816, -34816, -17408)
    assert product(spec(16, 16), spec(16, 16), spec(16, 16)) == (512,)  # aten's own
    number = replace(spec(16, 16), stride=(0, 0))
    assert product(number, spec(16, 16), spec(16, 16)) == (512, 512, -512)
    # 25 products of 500 multiplications are oneDNN's: 32 x 64 x 2, 10 x 5 x 4 and 1,024.
    batch = (spec(25, 10, 10), spec(25, 10, 5))
    found = cpu_events(Signature(target="aten.bmm.default", args=batch, outputs=(spec(25, 10, 5),)), CPU)
    assert found == (2500, 5320, -5320)
    whole = (spec(68, 128, dtype="float32"), spec(128, 64, dtype="float32"), spec(68, 64, dtype="float32"))
    assert product(*whole) == (17408,)
    # Rows in blocks of 250; a depth above 512 in two blocks, with the sums of 768 columns.
    assert product_blocks(1000, 128, 3815, False) == 128 * 64 * 2 + 250 * 64 * 4 + 1024
    assert product_blocks(768, 2048, 768, True) == 512 * 64 * 2 + 256 * 768 * 4 + 256 * 544 * 2 + 128 + 1024


def test_other_processors(processor: Callable[..., None]) -> None:
    x, w, y = spec(4, 16, 16, 16), spec(32, 16, 3, 3), spec(4, 32, 16, 16)
    factors = (spec(68, 128), spec(128, 64))
    mm = Signature(target="aten.mm.default", args=factors, outputs=(spec(68, 64),))
    processor(known=False)  # nothing was measured there
    assert forward(x, w, y, padding=1) is None
    assert cpu_events(mm, CPU) is None
    processor(block=8, known=False, library=False)  # aten's own kernels
    assert forward(x, w, y, padding=1) is None
    assert cpu_events(mm, CPU) == (8704,)
    # In float32 without AVX-512, rows of 2 under a weight of 3: 16 x 18,432, columns 32 x 9 x 4 x 4, and 256.
    x, w, y = (spec(*s, dtype="float32") for s in ((2, 32, 2, 2), (64, 32, 3, 3), (2, 64, 2, 2)))
    assert backward(y, x, w, padding=1, image=False) == (73728, 299776, -299776, 73728, -73728)


class Small(nn.Module):
    """Convolutions of every kind, a linear layer and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.reduce = nn.Conv2d(32, 16, 1)
        self.middle = nn.Conv2d(16, 48, 3, stride=2, padding=1)
        self.depth = nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.up = nn.ConvTranspose2d(48, 32, 2, 2)
        self.linear = nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(x)))
        y = x + self.up(self.depth(self.middle(self.reduce(x))))
        q = self.linear(y.flatten(2).transpose(1, 2)).unflatten(2, (2, 24)).transpose(1, 2)
        return functional.scaled_dot_product_attention(q, q, q).sum((1, 2))


def test_the_peak_is_what_is_measured_here() -> None:
    if not onednn.known_bfloat16() or torch.get_num_threads() > 1:
        pytest.skip("the rules were read off one thread of a processor with AVX-512, bfloat16 and no AMX")

    def make() -> tuple[Any, ...]:
        model = Small()
        return (
            model,
            torch.randn(4, 3, 64, 64),
            lambda y: y.float().square().mean(),
            torch.optim.SGD(model.parameters(), lr=0.1),
        )

    traces = cpu_calls.faked_and_measured(make, amp="bfloat16")
    told, seen = (Problem(t).saved.timeline.peak_allocated_bytes for t in traces)
    assert abs(told - seen) <= seen // 100


def test_a_trace_says_where_its_rules_hold(processor: Callable[..., None]) -> None:
    def make() -> tuple[Any, ...]:
        model = nn.Linear(4, 4)
        return model, torch.randn(2, 4), lambda y: y.sum(), torch.optim.SGD(model.parameters())

    assert "rules" in recorded(build_of(make)).trace.meta.workspace
    processor(block=8, known=False)
    counted = recorded(build_of(make)).trace.meta.workspace
    assert counted.get(ELSEWHERE, 0) > 0
    assert "rules" not in counted

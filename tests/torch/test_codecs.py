"""Codecs: payloads come back in every bit, or as near as their format says, and take what the simulator counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from executor.codecs.approximate import intervals, noise
from executor.codecs.payloads import pack, unpack
from simulator.core.formats import CHUNK, FORMATS, GROUP, Format, narrow
from traces.errors import PlanError

LOSSY = tuple(name for name, rule in FORMATS.items() if rule.scales)
INTS = tuple(name for name in LOSSY if name.startswith("int"))
EXACT = tuple(sorted(name for name, rule in FORMATS.items() if rule.exact))
FEWBIT = tuple(f"{name}:gelu" for name, rule in FORMATS.items() if rule.of_activations)
ALL = (*EXACT, *LOSSY, *FEWBIT)
SIZES = (0, 1, 7, 8, 9, 255, 256, 257, 5000)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    noise.cache_clear()


def rule_of(format: str) -> Format:
    return FORMATS[format.partition(":")[0]]


def there_and_back(x: torch.Tensor, format: str) -> torch.Tensor:
    payload = pack(x, format)
    assert payload.dtype is torch.uint8
    assert len(payload) == payload.untyped_storage().nbytes() == rule_of(format).payload_bytes(x.numel())
    y = unpack(payload, format, x.shape, x.stride(), x.dtype)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    return y


def values(format: str, n: int) -> torch.Tensor:
    if format == "bits":
        return torch.rand(n) > 0.3
    if format.startswith("narrow"):
        return torch.randint(0, {"narrow8": 1 << 8, "narrow16": 1 << 15, "narrow32": 1 << 31}[format], (n,))
    return torch.randn(n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("format", EXACT)
def test_exact_formats_come_back_in_every_bit(format: str, n: int) -> None:
    x = values(format, n)
    assert torch.equal(there_and_back(x, format), x)


@pytest.mark.parametrize("format", ALL)
def test_layouts_without_gaps_come_back_as_they_lay(format: str) -> None:
    x = values(format, 2 * 3 * 4 * 5).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    gaps = x[:, :, ::2]
    for y in (x, x.transpose(0, 2), x[1:], gaps):
        back = there_and_back(y, format)
        assert back.stride() == (y.contiguous() if y is gaps else y).stride()
        if format in EXACT:
            assert torch.equal(back, y)
        elif format in LOSSY:
            assert (back - y).abs().max() <= (y.max() - y.min()) / (1 if format == "int2" else 3)


def test_narrow_takes_the_smallest_type_that_holds_every_position() -> None:
    assert [narrow(n) for n in (1, 256, 257, 1 << 15, (1 << 15) + 1, 1 << 31, (1 << 31) + 1)] == [
        "narrow8", "narrow8", "narrow16", "narrow16", "narrow32", "narrow32", "",
    ]  # fmt: skip
    _, at = torch.nn.functional.max_pool2d(torch.randn(2, 3, 100, 200), 3, return_indices=True)
    format = narrow(100 * 200)
    assert format == "narrow16"
    assert torch.equal(there_and_back(at, format), at)


# Of normal numbers; the step of int* is a level's, and its rounding's variance t (1 - t) of that, at most 1 / 4.
@pytest.mark.parametrize(
    ("format", "error"),
    [("fp8_e4m3", 0.03), ("fp8_e5m2", 0.06), ("int8", 0.011), ("int4", 0.18), ("int2", 0.9)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1000, CHUNK + 300])
def test_lossy_formats_come_back_near(format: str, error: float, dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n).to(dtype)
    y = there_and_back(x, format)
    assert error / 2 < (y.float() - x.float()).norm() / x.float().norm() < error
    whole = y[: n // GROUP * GROUP].view(-1, GROUP).float()
    theirs = x[: n // GROUP * GROUP].view(-1, GROUP).float()
    edges = (whole.amax(1), theirs.amax(1)), (whole.amin(1), theirs.amin(1))
    for mine, other in edges if format in INTS else ():  # a group's ends are levels
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("format", INTS)
def test_rounding_is_right_on_average(format: str) -> None:
    x = torch.rand(4 * GROUP)
    n = 2000
    mean = sum(there_and_back(x, format).double() for _ in range(n)) / n
    level = 1.0 / ((1 << FORMATS[format].bits) - 1)
    # Five standard deviations of the mean of draws that differ by a level.
    assert (mean - x).abs().max() < 5 * level / 2 / n**0.5
    nearest = (x / level).round() * level
    assert (nearest - x).abs().max() > 5 * level / 2 / n**0.5  # what rounding to nearest would be off


@pytest.mark.parametrize("format", INTS)
def test_rounding_leaves_the_models_random_stream_alone_and_can_be_repeated(format: str) -> None:
    x, state = torch.randn(1000), torch.get_rng_state()
    first, second = pack(x, format), pack(x, format)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    noise.cache_clear()
    assert torch.equal(pack(x, format), first)
    assert torch.equal(pack(x, format), second)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", LOSSY)
def test_a_group_with_a_number_that_is_not_finite_has_no_finite_one(format: str, bad: float) -> None:
    x = torch.randn(3 * GROUP + 10)
    x[GROUP + 5] = bad
    finite = there_and_back(x, format).isfinite()
    assert not finite[GROUP : 2 * GROUP].any()
    assert finite[:GROUP].all()
    assert finite[2 * GROUP :].all()


@pytest.mark.parametrize("format", LOSSY)
def test_a_range_beyond_float32_is_not_finite_instead_of_wrong(format: str) -> None:
    x = torch.full((GROUP,), -3e38)
    x[::2] = 3e38
    y = there_and_back(x, format)
    assert not y.isfinite().any() if format in INTS else (y - x).abs().max() < 3e37


@pytest.mark.parametrize("format", LOSSY)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7e4, 1e-20, 1e30])
def test_a_group_of_equal_numbers(format: str, value: float) -> None:
    x = torch.full((GROUP + 3,), value)
    y = there_and_back(x, format)
    if format in INTS:
        assert torch.equal(y, x)
    else:
        torch.testing.assert_close(y, x, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("dtype", "format"),
    [(torch.float32, "bits"), (torch.int32, "narrow8"), (torch.float64, "int8"), (torch.bool, "fp8_e4m3")],
)
def test_a_type_that_a_format_does_not_take_is_refused(dtype: torch.dtype, format: str) -> None:
    with pytest.raises(PlanError, match="cannot be packed"):
        pack(torch.ones(3, dtype=dtype), format)


@pytest.mark.parametrize("format", ALL)
def test_fake_tensors_say_what_real_ones_are(format: str) -> None:
    x = values(format, 7 * 11).view(7, 11).t()
    payload = pack(x, format)
    with FakeTensorMode() as mode:
        fake = torch.ops.lowtide.pack(mode.from_tensor(x), format)
        back = torch.ops.lowtide.unpack(fake, format, x.shape, x.stride(), x.dtype)
    assert (fake.shape, fake.dtype, fake.stride()) == (payload.shape, payload.dtype, payload.stride())
    assert (back.shape, back.dtype, back.stride()) == (x.shape, x.dtype, x.stride())


def allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes that a call allocates and frees, in order, without those of single numbers."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        made = run()
    del made
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    rows = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return [nbytes for _, nbytes in rows if abs(nbytes) > 8]


@pytest.mark.parametrize("n", [0, 5000, CHUNK + 300])
@pytest.mark.parametrize("format", ALL)
def test_they_allocate_what_the_simulator_counts(format: str, n: int) -> None:
    x, rule = values(format, n), rule_of(format)
    payload = there = pack(x, format)  # what it looks up stays
    unpack(payload, format, x.shape, x.stride(), x.dtype)
    made = (
        allocations(lambda: pack(x, format)),
        allocations(lambda: unpack(there, format, x.shape, x.stride(), x.dtype)),
    )
    assert made == ([*rule.pack_events(n, x.itemsize)], [*rule.unpack_events(n, x.itemsize)])


def test_intervals_of_few_bits_are_the_papers() -> None:
    """The levels that its authors publish for GELU in 3 bits, to their digits and the step of our grid."""
    inner, points = (torch.tensor(v).double() for v in intervals("gelu", 8))
    x = points.requires_grad_()
    (levels,) = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)
    published = torch.tensor([-0.0002, -0.088, 0.126, 0.372, 0.628, 0.875, 1.088, 1.0002]).double()
    torch.testing.assert_close(levels, published, rtol=0, atol=1e-2)
    edges = torch.cat([torch.tensor([-10.0]), inner, torch.tensor([10.0])])
    assert (edges[:-1] < points).all()
    assert (points < edges[1:]).all()


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize(("dtype", "n"), [
    *((dtype, n) for dtype in (torch.float32, torch.bfloat16, torch.float16) for n in SIZES[1:]),
    (torch.bfloat16, CHUNK + 300),
])  # fmt: skip
def test_an_input_comes_back_as_its_intervals_point(activation: str, dtype: torch.dtype, n: int) -> None:
    x = torch.randn(n).to(dtype)
    x[:3] = torch.tensor([-torch.inf, torch.inf, 0.0])[:n]
    for bits in (2, 3, 4):
        inner, points = map(torch.tensor, intervals(activation, 1 << bits))
        at = torch.bucketize(x, inner.to(dtype))
        assert torch.equal(there_and_back(x, f"fewbit{bits}:{activation}"), points.to(dtype)[at])


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_is_torchs_own_cast_in_every_bit(format: str, dtype: torch.dtype) -> None:
    """Of numbers of all sizes, those that fp8 has as less than its least normal one, ties and ends included."""
    to = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[format]
    every = torch.arange(128, dtype=torch.uint8).view(to).float()
    every = every[every.isfinite()]
    ties = (every[1:] + every[:-1]) / 2
    n = 400 * GROUP
    drawn = torch.randn(n) * torch.randn(n).exp().square()
    drawn[:GROUP] *= 1e-38 if dtype is not torch.float16 else 1e-6  # below the least normal numbers
    x = torch.cat([drawn, every, -ties, ties, -every]).to(dtype)
    wide = torch.nn.functional.pad(x, (0, -len(x) % GROUP), value=x[-1]).view(-1, GROUP).float()
    scales = (wide.abs().amax(1, keepdim=True) / torch.finfo(to).max).clamp_min(torch.finfo().tiny)
    codes = (wide / scales).to(to)
    payload = pack(x, format)
    assert torch.equal(payload, torch.cat([v.view(torch.uint8).view(-1) for v in (scales, codes)]))
    back = (codes.float() * scales).to(dtype).view(-1)[: len(x)]
    assert torch.equal(unpack(payload, format, x.shape, x.stride(), x.dtype), back)

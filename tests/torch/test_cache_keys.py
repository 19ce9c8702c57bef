"""The keys by which torch remembers what ops make of fake tensors, made at once."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tracer.capture.torch_fixes.cache_keys import quick_keys  # noqa: E402
from tracer.torch_api import FakeTensorMode, ShapeEnv  # noqa: E402
from tracer.torch_api import TensorMetadata as Metadata  # noqa: E402


def made(mode: FakeTensorMode) -> list[torch.Tensor]:
    """Fake tensors, each unlike all others in one thing that a result may depend on."""
    with mode:
        x = torch.empty(4, 6)
        return [
            x, torch.empty(6, 4), x.t(), x[:, 1:5], x[1:], x.double(), x.to(torch.int32),
            torch.empty(4, 6, requires_grad=True), torch.empty(4, 6, device="meta"), torch.empty(()),
            torch.empty(2, 3, 4, 5), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.view_as_complex(torch.empty(4, 6, 2)).conj(),
        ]  # fmt: skip


def key_of(x: torch.Tensor, mode: FakeTensorMode) -> tuple[object, ...]:
    state = torch._subclasses._fake_tensor_utils._CacheKeyState(mode.shape_env)
    result: list[object] = []
    torch._subclasses.fake_tensor.extract_tensor_metadata(x)._flatten_into(result, mode, state)
    return tuple(result)


def test_keys_differ_where_torch_s_do():
    mode = FakeTensorMode()
    tensors = [*made(mode), *made(mode)]
    before = [key_of(x, mode) for x in tensors]
    with quick_keys():
        quick = [key_of(x, mode) for x in tensors]
    assert all(len(key) == 1 for key in quick)
    assert len(set(quick)) == len(tensors) // 2
    for a, first in zip(quick, before, strict=True):
        for b, second in zip(quick, before, strict=True):
            assert (a == b) == (first == second)
            assert a != b or hash(a) == hash(b)


def test_symbolic_sizes_have_torch_s_own_keys():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(4, 6), static_shapes=False)
    with quick_keys():
        assert len(key_of(x, mode)) > 1
        own = Metadata._flatten_into
    assert key_of(x, mode)
    assert own is not Metadata._flatten_into  # and torch has its own back


def test_results_are_remembered():
    mode = FakeTensorMode()
    with quick_keys(), mode:
        x, y = torch.empty(4, 6), torch.empty(4, 6)
        mode.cache_clear()
        a = x + y
        hits = mode.cache_info().hits
        b = x + y
        assert mode.cache_info().hits == hits + 1
        assert (x.t() + y.t()).stride() == (1, 6)  # another layout is another call
        assert a.shape == b.shape == (4, 6)

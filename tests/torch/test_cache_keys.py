"""What ops make of fake tensors, looked up at once: told apart and made as torch itself does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import _BypassDispatchCache, disable_fake_tensor_cache  # noqa: E402
from torch.fx.experimental.proxy_tensor import snapshot_fake  # noqa: E402

from tracer.capture.torch_fixes.cache_keys import quick_keys  # noqa: E402
from tracer.torch_api import FakeTensorMode, ShapeEnv, dispatch_keys, proxy_tensor  # noqa: E402

aten = torch.ops.aten


def made(mode: FakeTensorMode) -> list[torch.Tensor]:
    """Fake tensors, each unlike all others in one thing that a result may depend on."""
    with mode:
        x = torch.empty(4, 6)
        z = torch.view_as_complex(torch.empty(4, 6, 2))
        return [
            x, torch.empty(6, 4), x.t(), x[:, 1:5], x[:2], x[2:], torch.empty(2, 6), x.double(), x.to(torch.int32),
            torch.empty(4, 6, requires_grad=True), torch.empty(4, 6, device="meta"), torch.empty(()),
            torch.empty(2, 3, 4, 5), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
            z, z.conj(), z.conj().imag,
        ]  # fmt: skip


def key_of(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> Any:
    state = torch._subclasses._fake_tensor_utils._CacheKeyState(mode.shape_env)
    return mode._cache_key(state, op, args, kwargs)


def test_keys_differ_where_torch_s_do():
    mode, op = FakeTensorMode(), aten.relu.default
    tensors = [*made(mode), *made(mode)]
    plain = (1, 1.0, True, None, "1", torch.int8, [1], (1,), [[1, 2], 3], [[1], 2, 3], torch.device("cpu"))
    calls: list[tuple[Any, list[Any], dict[str, Any]]] = [
        *((op, [x], {}) for x in (*tensors, *plain)),
        *((op, [], {name: x}) for name in ("a", "b") for x in plain),
        (aten.neg.default, [tensors[0]], {}),
        (op, [[tensors[0]]], {}),
    ]
    before = [key_of(mode, op, *args, **kwargs) for op, args, kwargs in calls]
    with quick_keys(), quick_keys():
        quick = [key_of(mode, op, *args, **kwargs) for op, args, kwargs in calls]
        with torch.inference_mode():
            inferring = key_of(mode, op, tensors[0])
    assert all(type(key) is tuple for key in quick)
    assert inferring not in quick
    for a, first in zip(quick, before, strict=True):
        for b, second in zip(quick, before, strict=True):
            assert (a == b) == (first == second)
            assert a != b or hash(a) == hash(b)


def test_what_a_few_fields_do_not_tell_is_torch_s_own():
    symbolic, mode = FakeTensorMode(shape_env=ShapeEnv()), FakeTensorMode()
    x, own = symbolic.from_tensor(torch.empty(4, 6), static_shapes=False), FakeTensorMode._cache_key
    with mode:
        counted = torch.tensor(3)  # whose number the mode knows
    with quick_keys():
        assert own is not FakeTensorMode._cache_key
        assert type(key_of(symbolic, aten.relu.default, x)) is not tuple
        for given in (x, torch.empty(2), counted, [counted]):  # of another mode, real, of a known number
            with pytest.raises(_BypassDispatchCache):
                key_of(mode, aten.relu.default, given)
    assert own is FakeTensorMode._cache_key


def looks(x: Any, given: torch.Tensor) -> Any:
    """All that can be seen of a result."""
    if not isinstance(x, torch.Tensor):
        return x
    storage = x.untyped_storage()
    return (
        *(type(x), x.shape, x.stride(), x.storage_offset(), storage.nbytes(), x.dtype, x.device, x.layout),
        *(x.requires_grad, x.is_conj(), x.is_neg(), dispatch_keys(x).raw_repr(), x._version),
        *(sorted(vars(x)), x.fake_mode, x.fake_device, x.constant),
        *(x is given, given.untyped_storage()._cdata == storage._cdata),
    )


OPS: list[Callable[[Any], Any]] = [
    aten.relu.default,
    lambda x: aten.add.Tensor(x, x),
    lambda x: aten.add_.Tensor(x, 1),
    lambda x: aten.sum.default(x),
    lambda x: aten._to_copy.default(x, dtype=torch.float64),
    lambda x: aten.new_empty.default(x, [3]),
    lambda x: aten.bernoulli.p(x, 0.5),
    # views, with storages and offsets that are not their own
    aten.t.default,
    aten.detach.default,
    lambda x: aten.expand.default(x, [2, 4, 6]),
    lambda x: aten.slice.Tensor(x, 1, 2, 5),
    lambda x: aten.view.default(x, [24]),
    lambda x: aten.view.dtype(x, torch.int32),
    # several results
    lambda x: aten.native_layer_norm.default(x, [6], None, None, 1e-5),
    lambda x: aten.split.Tensor(x, 2),
    lambda x: aten.var_mean.correction(x),
    # layouts, and what is read otherwise than it is stored
    lambda x: aten.clone.default(x[None, None], memory_format=torch.channels_last),
    lambda x: aten.view.default(aten._conj.default(torch.complex(x, x)), [24]),
    lambda x: aten.view.default(aten._neg_view.default(x), [24]),
    lambda x: torch.empty(3),
]


def test_results_are_those_of_torch():
    mode = FakeTensorMode()

    def run() -> list[Any]:
        found = []
        for op in OPS:
            with mode, torch.no_grad():
                x = torch.empty(4, 6)
                out = op(x)
            found.append([looks(y, x) for y in (out if isinstance(out, tuple | list) else [out])])
        return found

    mode.cache_clear()
    with disable_fake_tensor_cache(mode):
        right = run()
    with quick_keys():
        first, hits = run(), mode.cache_info().hits
        assert run() == first == right
        assert mode.cache_info().hits >= hits + len(OPS)
    mode.cache_clear()


def test_a_result_has_fields_of_its_own():
    with quick_keys(), FakeTensorMode():
        x = torch.empty(4, requires_grad=True)
        a, b, c = x + 1, x + 1, x + 1
        b.sum().backward()
        b.constant = torch.ones(())
        assert [y.constant is None for y in (a, b, c, x + 1)] == [True, False, True, True]
        assert x.grad is not None
        assert c.grad_fn is not b.grad_fn


def test_a_node_s_value_is_that_of_torch_and_shares_its_storage():
    mode = FakeTensorMode()
    tensors = made(mode)
    right = [snapshot_fake(x) for x in tensors]
    with quick_keys():
        quick = [proxy_tensor.snapshot_fake(x) for x in tensors]
        with FakeTensorMode(shape_env=ShapeEnv()) as symbolic:
            sized = symbolic.from_tensor(torch.empty(3, 4))
        assert proxy_tensor.snapshot_fake(sized).shape == sized.shape
        assert proxy_tensor.snapshot_fake(torch.ones(2)).tolist() == [1, 1]
    for x, a, b in zip(tensors, right, quick, strict=True):
        assert b.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert (b.shape, b.stride(), b.storage_offset()) == (a.shape, a.stride(), a.storage_offset())
        assert (type(b), b.dtype, b.device, b.requires_grad) == (type(a), a.dtype, a.device, a.requires_grad)
        assert dispatch_keys(b).raw_repr() == dispatch_keys(a).raw_repr()
        assert vars(b).keys() == vars(a).keys()
        assert b.fake_mode is mode

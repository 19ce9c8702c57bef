"""What only changes numbers is not run on fake tensors: initialisers, and most ops of an optimizer's loop."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tracer.record import eager  # noqa: E402
from tracer.record.eager import WRITTEN_ALIKE, EagerRecorder, _only_values_change  # noqa: E402
from tracer.step.context import initialisers_without_values  # noqa: E402
from tracer.torch_api import FakeTensorMode  # noqa: E402

OTHERS = {"addcdiv_": 2, "addcmul_": 2, "lerp_": 1}  # tensors beside the first; of all else one


def given(func: Any, like: Any) -> tuple[Any, ...]:
    name = func._schema.name.removeprefix("aten::")
    others = [torch.empty_like(like) for _ in range(OTHERS.get(name, 1))]
    return (like, *others, 0.5) if name == "lerp_" else (like, *others)


@pytest.mark.parametrize("func", sorted(WRITTEN_ALIKE, key=str), ids=str)
def test_torch_finds_the_tensor_as_it_was(func: Any) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4)
        args = given(func, x)
        before = (x.shape, x.stride(), x.dtype, x.device, x.untyped_storage().nbytes())
        assert _only_values_change(func, args, {})
        assert func(*args) is x
        assert (x.shape, x.stride(), x.dtype, x.device, x.untyped_storage().nbytes()) == before


def test_what_torch_may_refuse_or_make_something_of_it_is_asked() -> None:
    add, mul = torch.ops.aten.add_.Tensor, torch.ops.aten.mul_.Tensor
    real = torch.zeros(3, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 4)
        for func, args in (
            (mul, (x, 1j)),
            (add, (x, torch.empty(4))),
            (add, (x, torch.empty(3, 4, dtype=torch.float64))),
            (add, (torch.empty(3, 4, dtype=torch.int64), 1)),
            (add, (torch.empty(4).expand(3, 4), 1.0)),
            (add, (torch.empty(()), 1.0)),
            (add, (x, real)),
            (torch.ops.aten.add.Tensor, (x, x)),
        ):
            assert not _only_values_change(func, args, {}), (func, args)


def test_the_recorder_does_not_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 4)
        with EagerRecorder([]) as recorder:
            x.mul_(2.0).add_(x, alpha=3.0)
        names = [row.name for row in recorder.rows]
        monkeypatch.setattr(eager, "_only_values_change", lambda *_: False)
        with EagerRecorder([]) as plain:
            x.mul_(2.0).add_(x, alpha=3.0)
        assert names == [row.name for row in plain.rows] == ["mul__0", "add__1"]
        assert [r.signature for r in recorder.rows] == [r.signature for r in plain.rows]


def test_initialisers_leave_fake_tensors_but_change_values_that_torch_knows() -> None:
    with FakeTensorMode(), initialisers_without_values():
        made = torch.empty(3, 4)
        before = made._version
        assert torch.nn.init.normal_(made) is made
        assert made._version == before  # nothing ran
        known = torch.tensor(1.0)
        torch.nn.init.zeros_(known)
        assert known.item() == 0.0
        with pytest.raises(ValueError, match="Fan in and fan out"):
            torch.nn.init.xavier_uniform_(torch.empty(3))

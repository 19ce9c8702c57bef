"""Which kernel torch takes for an attention on which GPU, by its rules, case by case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tracer.capture.cuda.attention import (
    CUDNN,
    DEFAULT_ORDER,
    EFFICIENT,
    FLASH,
    MATH,
    Call,
    View,
    choose,
    cudnn_version,
)
from traces.devices import device
from traces.errors import CaptureError

T4, A100, RTX3090, L40S, H200 = (device(n).sm for n in ("t4", "a100-40", "rtx-3090", "l40s", "h200"))
B200 = (10, 0)


def call(
    q: tuple[int, ...] = (2, 4, 128, 64),
    k: tuple[int, ...] | None = None,
    v: tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
    *,
    grad: bool = True,
    **more: Any,
) -> Call:
    def view(shape: tuple[int, ...]) -> View:
        return View(shape=shape, stride=strides(shape), dtype=dtype, requires_grad=grad)

    k = k or q
    return Call(query=view(q), key=view(k), value=view(v or k), **more)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    out = [1]
    for n in reversed(shape[1:]):
        out.append(out[-1] * n)
    return tuple(reversed(out))


def mask(shape: tuple[int, ...], dtype: str = "bool", *, grad: bool = False) -> View:
    return View(shape=shape, stride=strides(shape), dtype=dtype, requires_grad=grad)


PLAIN = call()
FLOAT = call(dtype="float32")
GROUPED = call((2, 8, 128, 64), (2, 2, 128, 64), grouped=True)


@pytest.mark.parametrize(
    ("given", "sm", "release", "kernel"),
    [
        # Half precision, no mask: flash, but cuDNN first on Hopper; neither before Ampere.
        (PLAIN, A100, (2, 13), FLASH),
        (PLAIN, L40S, (2, 13), FLASH),
        (PLAIN, RTX3090, (2, 13), FLASH),
        (PLAIN, H200, (2, 13), CUDNN),
        (PLAIN, H200, (2, 11), CUDNN),
        (PLAIN, T4, (2, 13), MATH),  # no bfloat16 kernel at all
        (call(dtype="float16"), T4, (2, 13), EFFICIENT),
        # float32: only the efficient kernel, if the head size is a multiple of 4 on Ampere and later.
        (FLOAT, H200, (2, 13), EFFICIENT),
        (FLOAT, A100, (2, 13), EFFICIENT),
        (FLOAT, T4, (2, 13), EFFICIENT),
        (call((2, 4, 128, 66), dtype="float32"), A100, (2, 13), MATH),
        (call((2, 4, 128, 66), dtype="float32"), T4, (2, 13), EFFICIENT),
        (call(dtype="float64"), H200, (2, 13), MATH),
        # A mask excludes flash; cuDNN takes it if it broadcasts and needs no gradient.
        (replace(PLAIN, mask=mask((2, 1, 1, 128))), A100, (2, 13), EFFICIENT),
        (replace(PLAIN, mask=mask((2, 1, 1, 128))), H200, (2, 13), CUDNN),
        (replace(PLAIN, mask=mask((2, 1, 128, 128), "bfloat16", grad=True)), H200, (2, 13), EFFICIENT),
        (replace(PLAIN, mask=mask((128, 128))), H200, (2, 13), CUDNN),
        (replace(PLAIN, mask=mask((4, 128, 128))), H200, (2, 13), EFFICIENT),  # three dimensions
        (replace(PLAIN, mask=mask((3, 1, 1, 128))), H200, (2, 13), EFFICIENT),  # another batch size
        # Dropout: cuDNN knows sixteenths, and torch respects that from 2.12 on.
        (replace(PLAIN, dropout=0.1), H200, (2, 13), FLASH),
        (replace(PLAIN, dropout=0.1), H200, (2, 11), CUDNN),
        (replace(PLAIN, dropout=0.125), H200, (2, 13), CUDNN),
        (replace(PLAIN, dropout=0.1, mask=mask((2, 1, 1, 128))), H200, (2, 13), EFFICIENT),
        # Head sizes: flash to 256, cuDNN to 128 in multiples of 8 (or 192 with values of 128 on Hopper).
        (call((2, 4, 128, 160)), H200, (2, 13), CUDNN),  # its limit is 256 there, and 128 elsewhere
        (call((2, 4, 128, 256)), H200, (2, 11), CUDNN),
        (call((2, 4, 128, 160)), B200, (2, 13), FLASH),
        (call((2, 4, 128, 192), v=(2, 4, 128, 128)), B200, (2, 13), CUDNN),
        (call((2, 4, 128, 192), v=(2, 4, 128, 128)), H200, (2, 13), CUDNN),
        (call((2, 4, 128, 192), v=(2, 4, 128, 128)), A100, (2, 13), EFFICIENT),
        (call((2, 4, 128, 264)), H200, (2, 13), EFFICIENT),
        (call((2, 4, 128, 260)), H200, (2, 13), MATH),
        (call((2, 4, 128, 60)), H200, (2, 13), FLASH),  # padded to 64 for flash
        # Gradients of large heads do not fit the small shared memory of 8.6 and 8.9.
        (call((2, 4, 128, 256)), A100, (2, 13), FLASH),
        (call((2, 4, 128, 200)), L40S, (2, 13), EFFICIENT),
        (call((2, 4, 128, 256)), L40S, (2, 13), FLASH),
        (replace(call((2, 4, 128, 256)), dropout=0.1), L40S, (2, 13), EFFICIENT),
        (call((2, 4, 128, 200), grad=False), L40S, (2, 13), FLASH),
        (replace(call((2, 4, 128, 200)), grad=False), L40S, (2, 13), FLASH),  # gradients are off
        # Lengths.
        (call((2, 4, 64, 64), (2, 4, 128, 64), causal=True), A100, (2, 13), EFFICIENT),
        (call((2, 4, 64, 64), (2, 4, 128, 64)), A100, (2, 13), FLASH),
        (call((2, 4, 8, 64), (2, 4, 1, 64)), H200, (2, 13), FLASH),
        (call((2, 4, 8, 64), (2, 4, 0, 64)), H200, (2, 13), MATH),
        # Grouped queries: flash and cuDNN know them, the efficient kernel does not in these releases.
        (GROUPED, A100, (2, 13), FLASH),
        (GROUPED, H200, (2, 13), CUDNN),
        (replace(GROUPED, mask=mask((2, 1, 1, 128))), A100, (2, 13), MATH),
        (replace(GROUPED, grouped=False), H200, (2, 13), MATH),  # would broadcast
        (call((2, 8, 128, 64), (2, 3, 128, 64), grouped=True), A100, (2, 13), MATH),
        # Layout and determinism.
        (call((4, 128, 64)), A100, (2, 13), MATH),
        (replace(PLAIN, deterministic=True), H200, (2, 13), FLASH),
        (replace(FLOAT, key=replace(FLOAT.key, stride=(32768, 8192, 1, 128))), A100, (2, 13), MATH),
        (replace(FLOAT, key=replace(FLOAT.key, offset=2)), A100, (2, 13), MATH),
        (replace(FLOAT, key=replace(FLOAT.key, offset=2)), A100, (2, 12), EFFICIENT),
    ],
)  # fmt: skip
def test_the_choice(given: Call, sm: tuple[int, int], release: tuple[int, int], kernel: str) -> None:
    assert choose(given, sm, release) == kernel


@pytest.mark.parametrize(
    ("given", "sm", "kernel"),
    [
        (call((2, 4, 128, 64), (2, 2, 128, 64), dtype="float32", grouped=True), A100, EFFICIENT),
        (call((2, 4, 128, 64), (2, 1, 128, 64), dtype="float32"), A100, EFFICIENT),
        (call((2, 4, 128, 64), (2, 1, 128, 64)), A100, FLASH),
        (call((2, 4, 128, 64), (2, 1, 128, 64)), H200, CUDNN),
        (call((2, 4, 128, 64), (2, 2, 128, 64)), A100, MATH),
        *((call((2, 4, 128, d)), sm, CUDNN) for d in (128, 256) for sm in (H200, B200)),
        *((call((2, 4, 128, d)), sm, FLASH) for d in (136, 192, 248) for sm in (H200, B200)),
        (call((2, 4, 128, 192), v=(2, 4, 128, 128)), H200, CUDNN),
        (call((2, 4, 128, 128), v=(2, 4, 128, 192)), H200, EFFICIENT),
        (call((2, 4, 128, 192), grad=False), B200, CUDNN),
    ],
)
@pytest.mark.parametrize("release", [(2, 14), (2, 15)])
def test_what_the_wheels_from_2_14_on_answer(
    given: Call, sm: tuple[int, int], kernel: str, release: tuple[int, int]
) -> None:
    assert choose(given, sm, release) == kernel


def test_switches_and_order_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = frozenset({MATH, FLASH, EFFICIENT, CUDNN})
    assert choose(PLAIN, H200, (2, 13), enabled=everything - {CUDNN}) == FLASH
    assert choose(PLAIN, H200, (2, 13), enabled=everything - {CUDNN, FLASH}) == EFFICIENT
    assert choose(PLAIN, H200, (2, 13), enabled=frozenset({MATH})) == MATH
    assert choose(PLAIN, A100, (2, 13), order=(EFFICIENT, FLASH, MATH, CUDNN)) == EFFICIENT
    assert choose(PLAIN, A100, (2, 13), order=DEFAULT_ORDER) == FLASH
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(PLAIN, H200, (2, 13)) == FLASH


def test_an_unknown_release_counts_as_the_nearest() -> None:
    assert cudnn_version((2, 9)) == cudnn_version((2, 11)) == 91900
    assert cudnn_version((2, 16)) == cudnn_version((2, 15)) == 92600


def test_a_call_that_no_enabled_kernel_takes_is_refused_as_torch_refuses_it() -> None:
    """float32 has no flash kernel; without the math kernel torch stops with `No available kernel`."""
    only = frozenset((FLASH,))
    assert choose(PLAIN, A100, (2, 13), enabled=only) == FLASH
    with pytest.raises(CaptureError, match=r"\(flash\) takes query \[2, 4, 128, 64\] of float32"):
        choose(FLOAT, A100, (2, 13), enabled=only)
    assert choose(FLOAT, A100, (2, 13), enabled=only | {MATH}) == MATH

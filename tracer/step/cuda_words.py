"""Let code that says "cuda" mean the GPU that a laptop's fake tensors on the CPU stand for.

Counts: `.cuda()`, `.to("cuda")`, `device="cuda"`, `with torch.device("cuda")`, `torch.autocast("cuda")` and what asks
for it, `torch.amp.GradScaler`, `x.is_cuda` and `x.device`, and of `torch.cuda` whether there is a GPU and what it is,
`synchronize`, NVTX and memory statistics, which are 0. torch's own code gets true answers. Refused: all else that would
reach the driver (streams, events, graphs, generators), by the message of torch or of `_initialised_by_torch`, which the
caller gives the user's line.
A name that was imported from torch.cuda one by one (`from torch.cuda import synchronize`) means the same.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from tracer.torch_api import DeviceContext, FunctionalTensor, replaced
from traces.devices import Device

CPU: Final = torch.device("cpu")
GPU: Final = torch.device("cuda", 0)
ASKED: Final = {torch.Tensor.is_cuda.__get__: True, torch.Tensor.device.__get__: GPU}
DONE: Final = (
    "synchronize empty_cache init set_device manual_seed manual_seed_all reset_peak_memory_stats "
    "reset_accumulated_memory_stats reset_max_memory_allocated reset_max_memory_cached ipc_collect"
)
COUNTED: Final = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved current_device"
MARKS: Final = "range_push range_pop range_start range_end mark"


@contextlib.contextmanager
def cuda_words(target: Device | None) -> Iterator[None]:
    """In the body, "cuda" is the target; None: it is what torch says it is."""
    if target is None:
        yield
        return
    cuda, autocast = torch.cuda, torch.amp.autocast_mode.autocast
    enter_autocast, enter_device = autocast.__init__, DeviceContext.__init__
    init_scaler = torch.amp.GradScaler.__init__

    def autocast_of(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and dtype is None:
            dtype = default("cuda")
        enter_autocast(self, _kind(device_type), dtype, *args, **kwargs)

    def scaler_for(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        init_scaler(self, _kind(device), *args, **kwargs)

    known = SimpleNamespace(
        name=target.name,
        total_memory=target.memory_bytes,
        major=target.sm[0],
        minor=target.sm[1],
        multi_processor_count=target.multiprocessors,
    )
    default, enabled, total = torch.get_autocast_dtype, torch.is_autocast_enabled, target.memory_bytes
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_name": target.name,
        "get_device_capability": target.sm,
        "get_device_properties": known,
        "mem_get_info": (total, total),
        "is_bf16_supported": True,
        **dict.fromkeys(DONE.split()),
        **dict.fromkeys(COUNTED.split(), 0),
    }
    asked = {getattr(cuda, name): value for name, value in answers.items()}
    with (
        _answering(asked | {getattr(cuda.nvtx, name): None for name in MARKS.split()}),
        replaced(cuda, _lazy_init=_initialised_by_torch(cuda._lazy_init)),
        replaced(autocast, __init__=autocast_of),
        replaced(torch.amp.GradScaler, __init__=scaler_for),
        # Where a step is captured it is Python, which asks torch for the current device.
        replaced(FunctionalTensor, cuda=lambda self, *_args, **_kwargs: self),
        replaced(DeviceContext, __init__=lambda self, device: enter_device(self, _place(device))),
        replaced(
            torch,
            is_autocast_enabled=lambda kind="cuda": enabled(_kind(kind)),
            get_autocast_dtype=lambda kind: default(_kind(kind)),
            get_autocast_gpu_dtype=lambda: default("cpu"),
        ),
        _Devices(),
    ):
        yield


class _Devices(TorchFunctionMode):
    """Puts the CPU where a call names a GPU, and answers for tensors where they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKED and not _torch_asks():
            return ASKED[func]
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device:  # which says where something goes, and is nowhere itself
            return func(*args, **(kwargs or {}))
        given = {k: _place(v) for k, v in (kwargs or {}).items()}
        return func(*(_place(a) for a in args), **given)


def _torch_asks(frames: int = 2) -> bool:
    """Whether what called our caller is code of torch or of this package, which is to know where a tensor is.

    frames: how many calls ago that was.
    """
    frame = sys._getframe(frames)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back  # of a mode above
    return _module(frame).partition(".")[0] in ("torch", "tracer")


def _place(value: Any) -> Any:
    """The CPU for a CUDA device, by whichever name; all else as it is."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" else value
    return CPU if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")) else value


def _kind(device_type: str) -> str:
    return "cpu" if device_type == "cuda" else device_type


ANSWERS: Final[dict[str, Callable[..., Any]]] = {}  # by the function's name


def _asked(*args: Any, **kwargs: Any) -> Any:
    """What a function of torch.cuda does in the meantime: its code, with its name in place of the ?."""
    import sys

    return sys.modules["tracer.step.cuda_words"].ANSWERS["?"](*args, **kwargs)


@contextlib.contextmanager
def _answering(values: dict[Any, Any]) -> Iterator[None]:
    """In the body, functions say their value to everybody but torch, under whatever name somebody has imported them:
    it is their code that is another."""
    with contextlib.ExitStack() as back:
        for wrapped, value in values.items():
            function: Any = inspect.unwrap(wrapped)  # as what is deprecated is
            ANSWERS[function.__name__] = _answer(function, value)
            back.callback(setattr, function, "__code__", function.__code__)
            consts = tuple(function.__name__ if c == "?" else c for c in _asked.__code__.co_consts)
            function.__code__ = _asked.__code__.replace(co_consts=consts)
        yield


def _answer(function: Any, value: Any) -> Callable[..., Any]:
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__

    def answer(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _torch_asks(3) else value

    return answer


def _initialised_by_torch(original: Callable[[], None]) -> Callable[[], None]:
    """torch.cuda's initialisation, which torch may ask for itself where a GPU is (it saves the generators' states)."""

    def initialise() -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _module(frame).startswith(("torch.cuda", __name__)):
            frame = frame.f_back
        if frame is None or _module(frame).partition(".")[0] != "torch":
            raise RuntimeError(
                "this asks the GPU itself, and the trace is made on fake tensors that stand for one; leave it out of "
                "the step, or trace with --device cuda where the GPU is"
            )
        original()

    return initialise


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))

"""Set up what surrounds the building of a model: real or fake tensors, a device, a floating type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import nn
from torch.utils import swap_tensors

from tracer.torch_api import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    detect_fake_mode,
    replaced,
    unset_fake_temporarily,
)
from traces.provenance import rehearsing

# What torch raises where code asks fake tensors for what only values say.
NEEDS_VALUES: Final = (DataDependentOutputException, DynamicOutputShapeException)
INITIALISERS: Final = (
    "normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_",
    "xavier_uniform_", "orthogonal_",
)  # fmt: skip


def is_fake() -> bool:
    """Return whether tensors made now would be fake."""
    return detect_fake_mode() is not None


@contextmanager
def made_on(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Floating tensors made in the body are of `dtype` unless they say otherwise, fake ones on the device, real ones on
    the CPU, from where `moved` takes them.

    Converting a finished model would take both copies' memory, and fails for fake parameters.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device if is_fake() else "cpu"), initialisers_without_values():
            yield
    finally:
        torch.set_default_dtype(before)


def moved(device: str, model: nn.Module, *batch: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A batch on the device, to which the model is moved first, as a training script does. Fake ones are there."""
    if is_fake():
        return batch
    placed(model, device)
    return tuple(x.to(device) for x in batch)


def placed(model: nn.Module, device: str) -> None:
    """Move a model that was made on the CPU; replaced where it is to wait there, to be sharded."""
    model.to(device)


def initialisers_without_values() -> AbstractContextManager[None]:
    """Skip torch's initialisers where values mean nothing: under a fake mode the one that asks tensors for theirs, on
    the null driver all, since untouched pages take no memory. Elsewhere nothing changes.
    """
    skipped = ("trunc_normal_",) if is_fake() else INITIALISERS if rehearsing() else ()
    return replaced(nn.init, **dict.fromkeys(skipped, lambda tensor, *_args, **_kwargs: tensor))


def copies_of_constants() -> AbstractContextManager[None]:
    """Let `copy.deepcopy` in the body copy fake tensors of which torch still knows the value, like `torch.tensor(0)`.

    torch takes those for tensors with memory and fails to copy it. A batch norm counts its batches in such a one.
    """

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        known, self.constant = self.constant, None
        try:
            return torch.Tensor.__deepcopy__(self, memo)
        finally:
            self.constant = known

    return replaced(FakeTensor, __deepcopy__=deepcopy)


@contextmanager
def fake_conversions() -> Iterator[None]:
    """Under a fake mode, let `module.to(...)`, `.half()`, `.cpu()` work in the body: parameters stay the objects that
    they are, as real ones do.

    Fake ones torch may replace, so that an optimizer or another module has the old ones; told to, it swaps what is in
    them.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before or is_fake())
    try:
        with _swapping() if is_fake() else nullcontext():
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _swapping() -> AbstractContextManager[None]:
    """Let torch swap tensors to which there are weak references: a mode has some to its own, and loses nothing."""
    none = {**vars(torch.utils.weakref), "getweakrefs": lambda _: []}
    return replaced(torch.utils, weakref=SimpleNamespace(**none))


def make_fake(model: nn.Module, mode: Any) -> None:
    """Make the parameters and buffers of a model fake, where it was made outside the mode: the same objects."""
    for parameter in model.parameters():
        if not isinstance(parameter, FakeTensor):
            with _swapping():
                swap_tensors(parameter, mode.from_tensor(parameter))
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            if not isinstance(buffer, FakeTensor):
                setattr(module, key, mode.from_tensor(buffer))


def made_with_values(make: Callable[[], nn.Module]) -> nn.Module:
    """Return what `make` makes; under a fake mode a fake, made in memory first only where making it needs values."""
    with initialisers_without_values():
        try:
            return make()
        except NEEDS_VALUES:
            if (mode := detect_fake_mode()) is None:
                raise
    with unset_fake_temporarily():
        model = make()
    make_fake(model, mode)
    return model

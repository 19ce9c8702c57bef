"""What the export wants to know of a forward before it traces it, learnt by running it as it is on fake tensors.

The export runs forward once with every tensor wrapped, only to see which inputs it writes into and what its outputs
are: a fourth of a capture. Here forward runs unwrapped, and the export looks at a stand-in that writes into the same
inputs and returns tensors laid out alike. The trace that follows says whether that was right (`Seen`); where it was
not, the capture is made again with the export's own pass, which also looks where outputs share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tracer.build.user_errors import is_data_dependent
from tracer.capture.passes.shared_outputs import shared
from tracer.torch_api import (
    FunctionalTensor,
    aot_autograd,
    detect_fake_mode,
    has_data_mutation,
    no_python_dispatcher,
    replaced,
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run of forward did: into which inputs it wrote, and which outputs have a gradient or share memory."""

    written: tuple[bool, ...]
    differentiable: tuple[bool, ...]
    sharing: tuple[bool, ...]


class AnotherPass(Exception):
    """The trace did something else than the plain run."""


class Watched:
    """The inputs of a forward that is about to run, and what it did to them once it has."""

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        self._model, self._inputs = model, inputs
        self._before = [(x._version, x.shape, x.stride(), x.requires_grad) for x in inputs]

    def seen(self, outputs: Sequence[torch.Tensor]) -> Seen:
        """What it did, with these outputs."""
        if any(isinstance(x, FunctionalTensor) for x in self._inputs):
            written = [isinstance(x, FunctionalTensor) and has_data_mutation(x.elem) for x in self._inputs]
        else:
            now = [(x._version, x.shape, x.stride(), x.requires_grad) for x in self._inputs]
            written = [a != b for a, b in zip(self._before, now, strict=True)]
            # A batch norm writes its statistics without a word.
            counted = {id(x) for x, w in zip(self._inputs, written, strict=True) if w}
            silent = {
                id(x)
                for m in self._model.modules()
                if isinstance(m, nn.modules.batchnorm._BatchNorm) and id(m.num_batches_tracked) in counted
                for x in (m.running_mean, m.running_var)
            }
            written = [w or id(x) in silent for x, w in zip(self._inputs, written, strict=True)]
        return Seen(
            tuple(written), tuple(x.requires_grad for x in outputs), tuple(shared(outputs, self._inputs))
        )


@contextmanager
def plain_first_pass(passes: Sequence[Seen]) -> Iterator[None]:
    """In the body the export's first pass is of a stand-in. `passes`: what each run of forward did so far."""
    analyse = aot_autograd.run_functionalized_fw_and_collect_metadata

    def analysed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def look(*inputs: Any) -> Any:
            return analyse(_stand_in(forward, inputs, passes) or forward, **options)(*inputs)

        return look

    with replaced(aot_autograd, run_functionalized_fw_and_collect_metadata=analysed):
        yield


def _stand_in(
    forward: Callable[..., Any], inputs: Sequence[torch.Tensor], passes: Sequence[Seen]
) -> Callable[..., Any] | None:
    """A function that writes into the same inputs as `forward` and returns outputs like its own; None: it does more."""
    copies = {id(x): x.detach().requires_grad_(x.requires_grad) for x in inputs}
    symbolic = (mode := detect_fake_mode()) is not None and mode.shape_env is not None
    try:
        with nullcontext() if symbolic else no_python_dispatcher():
            outputs = list(forward(*(copies[id(x)] for x in inputs)))
    except RuntimeError as error:
        if is_data_dependent(error):
            raise
        return None
    did = passes[-1]
    changed = any(
        (x.shape, x.stride(), x.requires_grad) != (y.shape, y.stride(), y.requires_grad)
        for x, y in ((x, copies[id(x)]) for x in inputs)
    )
    if (
        changed
        or any(did.sharing)
        or any(w and x.requires_grad for x, w in zip(inputs, did.written, strict=True))
    ):
        return None

    def like(x: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(
            x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
        )
        return made.view_as(made) if x._is_view() else made

    def stand_in(*given: torch.Tensor) -> list[torch.Tensor]:
        for x, written in zip(given, did.written, strict=True):
            if written:
                x.copy_(torch.empty_like(x))
        return [like(x) for x in outputs]

    return stand_in

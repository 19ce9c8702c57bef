"""A value in host memory and back: the ops `lowtide::offload`, `reload`, `wait_out`, `prefetch` and `wait_in`.

`simulator.core.facts` says what they mean. On CUDA copies run on two streams of their own, one a direction, to and
from pinned memory. `wait_out` has the compute stream wait for the end of a copy out, so memory that is freed behind it
is not written before. A copy in begins when what the compute stream had before is done, since the memory may have been
another's; `wait_in`, which `executor.rewrite` puts before the first op that reads the value, waits for it. On a CPU the
copies are plain ones, to memory of numpy's, which torch's profiler does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch


@dataclass(slots=True, eq=False, kw_only=True)
class _Copy:
    """The copy that a ticket stands for."""

    host: torch.Tensor  # bytes
    here: torch.Tensor | None  # the value, until it is handed on
    is_out: torch.cuda.Event | None


# Tagged as random so that it never runs twice.
@torch.library.custom_op("lowtide::offload", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def offload(x: torch.Tensor) -> torch.Tensor:
    """Begin to copy a value, which lies without gaps, to host memory; its ticket, an empty tensor."""
    given, event = _bytes(x), None
    if x.is_cuda:
        host = torch.empty(len(given), dtype=torch.uint8, pin_memory=True)
        event = _beside(host, given, "out")
    else:
        host = torch.from_numpy(np.empty(len(given), np.uint8))
        host.copy_(given)
    ticket = new_ticket(x)
    ticket.lowtide = _Copy(host=host, here=x, is_out=event)
    return ticket


@offload.register_fake
def new_ticket(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((0,), dtype=torch.uint8)


@torch.library.custom_op("lowtide::reload", mutates_args=())
def reload(
    ticket: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """The value of a ticket: at first what is there, later as it comes back."""
    copy: _Copy = ticket.lowtide
    x, copy.here = copy.here, None
    if x is not None:
        return x
    out = new_value(ticket, size, stride, dtype)
    if out.is_cuda:
        out.lowtide = _beside(_bytes(out), copy.host, "in")
    else:
        _bytes(out).copy_(copy.host)
    return out


@reload.register_fake
def new_value(
    ticket: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=ticket.device)


@torch.library.custom_op("lowtide::wait_out", mutates_args=())
def wait_out(x: torch.Tensor, ticket: torch.Tensor) -> None:
    """Let what runs from here on wait until the value's copy is in host memory."""
    if (event := ticket.lowtide.is_out) is not None:
        event.wait()


@torch.library.custom_op("lowtide::prefetch", mutates_args=())
def prefetch(x: torch.Tensor, ticket: torch.Tensor) -> None:
    """Nothing: it takes the value, so that it is reloaded before."""


@torch.library.custom_op("lowtide::wait_in", mutates_args=())
def wait_in(x: torch.Tensor) -> None:
    """Let what runs from here on wait until the value is back."""
    if (event := getattr(x, "lowtide", None)) is not None:
        event.wait()


WAIT_IN = torch.ops.lowtide.wait_in.default
wait_out.register_fake(lambda x, ticket: None)
prefetch.register_fake(lambda x, ticket: None)
wait_in.register_fake(lambda x: None)


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


@cache
def _stream(device: torch.device, way: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _beside(to: torch.Tensor, given: torch.Tensor, way: str) -> torch.cuda.Event:
    """Copy on a stream of its own, once what the compute stream has before is done; the event of its end."""
    device = to.device if to.is_cuda else given.device
    stream = _stream(device, way)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        to.copy_(given, non_blocking=True)
        return stream.record_event()

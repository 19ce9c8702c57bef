"""Tell what was in use at the highest point: by the line that asked for it, and by what it is to training."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from linecache import getline
from pathlib import Path
from typing import Any, Final

import torch

from tracer.rehearsal.record import Alive
from tracer.step.user_errors import is_foreign
from traces.records.trace import BACKWARD, FORWARD, HELD

MOST_LINES: Final = 20  # of those that hold memory at the peak, and of those that read values
BEFORE: Final = "before"  # the first iteration
PARAMETERS, GRADIENTS, STATE, COMMUNICATION, ACTIVATIONS, REST = HELD
_PASSED_BY: Final = ("/torch/_ops.py", "/torch/utils/_contextlib.py", "/torch/distributed/c10d_logger.py")
_COMMUNICATING: Final = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    "/deepspeed/runtime/zero/",
)
Event = dict[str, Any]  # of torch's memory history


@torch.no_grad()
def owned_by(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """The addresses on GPUs of what an optimizer trains, its gradients and its state, with what they are."""
    found: dict[int, str] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            for kind, tensors in ((STATE, state.values()), (GRADIENTS, (p.grad,)), (PARAMETERS, (p,))):
                for x in tensors:
                    if hasattr(x, "to_local"):
                        x = x.to_local()
                    if isinstance(x, torch.Tensor) and x.is_cuda and x.numel():
                        found[x.data_ptr()] = kind
    return found


def by_line(held: Iterable[Event], phase_at: Callable[[int], str]) -> tuple[Alive, ...]:
    """What was in use, by the line that asked for it and the phase in which, the largest first."""
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for event in held:
        key = _line(event), phase_at(event["time_us"])
        sizes[key] += event["size"]
        counts[key] += 1
    return tuple(
        Alive(line=line, phase=phase, blocks=counts[line, phase], requested_bytes=size)
        for (line, phase), size in sizes.most_common(MOST_LINES)
    )


def held_at_peaks(events: Sequence[Event], begins_us: Sequence[int]) -> list[list[Event]]:
    """What was in use at the highest point of each stretch of time, until the next begins."""
    blocks: dict[int, Event] = {}
    levels = [*accumulate((_step(blocks, event) for event in events), initial=0)]
    times = [event["time_us"] for event in events]
    ends = [*(bisect_left(times, begins) for begins in begins_us), len(events)]
    highest = [max(range(a, b + 1), key=levels.__getitem__) for a, b in pairwise(ends)]
    blocks, found = {}, {}
    wanted = {*highest}
    for k, event in enumerate((*events, {"action": ""})):
        if k in wanted:
            found[k] = [*blocks.values()]
        _step(blocks, event)
    return [found[k] for k in highest]


def by_category(
    held: Iterable[Iterable[Event]],
    events: Sequence[Event],
    owned: Mapping[int, str],
    owned_us: int,
    phase_at: Callable[[int], str],
) -> Iterator[dict[str, int]]:
    """The bytes by category of what `held_at_peaks` found. `owned`: addresses of parameters, gradients and state, as
    they were at `owned_us`."""
    there: dict[int, Event] = {}
    for event in events[: bisect_right([event["time_us"] for event in events], owned_us)]:
        _step(there, event)
    addresses = sorted(owned)
    known: dict[int, str] = {}  # by identity, since an event is held at many peaks
    for each in held:
        found = dict.fromkeys(HELD, 0)
        for event in each:
            if (kind := known.get(id(event))) is None:
                k = bisect_left(addresses, event["addr"])
                inside = k < len(addresses) and addresses[k] < event["addr"] + event["size"]
                mine = inside and there.get(event["addr"]) is event
                kind = owned[addresses[k]] if mine else _category(event, phase_at(event["time_us"]))
                known[id(event)] = kind
            found[kind] += event["size"]
        yield found


def _line(event: Event) -> str:
    return innermost((f["filename"], f["line"], f["name"]) for f in event["frames"])[0]


def _category(event: Event, phase: str) -> str:
    """What a block is that nobody owns: of code for several ranks, if that asked for it, or of forward."""
    asked = (f["filename"] for f in event["frames"] if f["filename"].endswith(".py"))
    inner = next((f for f in asked if not f.endswith(_PASSED_BY)), "")
    if any(part in inner for part in _COMMUNICATING) and "/torch/distributed/tensor/" not in inner:
        return COMMUNICATION
    return ACTIVATIONS if phase == FORWARD or (phase == BACKWARD and _line(event)) else REST


def _step(blocks: dict[int, Event], event: Event) -> int:
    """Follow an event of torch's; returns by how many bytes it changes what is in use."""
    if event["action"] == "alloc":
        blocks[event["addr"]] = event
        return int(event["size"])
    if event["action"] == "free_requested":
        old = blocks.pop(event["addr"], None)
        return -int(old["size"]) if old else 0
    return 0


def innermost(frames: Iterable[tuple[str, int | None, str]]) -> tuple[str, str]:
    """The innermost line that users look at, of no code of torch's or Lowtide's ("modeling_bert.py:362 forward"), and
    its text; "": there is none. `frames`: files, lines and functions, from the innermost on."""
    for file, line, name in frames:
        if file.endswith(".py") and not is_foreign(file):
            return f"{Path(file).name}:{line} {name}", getline(file, line or 0).strip()
    return "", ""

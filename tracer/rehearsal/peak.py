"""Tell what was in use at the highest point: by the line that asked for it, and by what it is to training."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from linecache import getline
from pathlib import Path
from typing import Any, Final

import torch

from tracer.rehearsal.record import Alive
from tracer.step.user_errors import is_foreign
from traces.records.trace import BACKWARD, FORWARD

MOST_LINES: Final = 20  # of those that hold memory at the peak, and of those that read values
BEFORE: Final = "before"  # the first iteration
PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
COMMUNICATION, ACTIVATIONS, REST = "gathered and reduced", "activations", "the rest"
CATEGORIES: Final = (PARAMETERS, GRADIENTS, STATE, COMMUNICATION, ACTIVATIONS, REST)
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


def at_the_peak(
    events: list[Event],
    began_us: int,
    owned: Mapping[int, str],
    owned_us: int,
    phase_at: Callable[[int], str],
) -> tuple[tuple[Alive, ...], dict[str, int]]:
    """What was in use at the highest point since `began_us`, and its bytes by category. `owned`: addresses of
    parameters, gradients and state, as they were at `owned_us`."""
    blocks: dict[int, Event] = {}
    now = highest = 0
    at = -1
    for k, event in enumerate(events):
        now += _step(blocks, event)
        if now > highest and event["time_us"] >= began_us:
            highest, at = now, k
    blocks = {}
    for event in events[: at + 1]:
        _step(blocks, event)
    held = list(blocks.values())
    for event in events[at + 1 :]:
        if event["time_us"] > owned_us:
            break
        _step(blocks, event)
    addresses = sorted(owned)
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    categories = dict.fromkeys(CATEGORIES, 0)
    for event in held:
        line, _ = innermost((f["filename"], f["line"], f["name"]) for f in event["frames"])
        key = line, phase = line, phase_at(event["time_us"])
        sizes[key] += event["size"]
        counts[key] += 1
        k = bisect_left(addresses, event["addr"])
        inside = k < len(addresses) and addresses[k] < event["addr"] + event["size"]
        if inside and blocks.get(event["addr"]) is event:
            categories[owned[addresses[k]]] += event["size"]
        else:
            categories[_category(event["frames"], phase, line)] += event["size"]
    lines = tuple(
        Alive(line=line, phase=phase, blocks=counts[line, phase], requested_bytes=size)
        for (line, phase), size in sizes.most_common(MOST_LINES)
    )
    return lines, categories


def _category(frames: Iterable[Mapping[str, Any]], phase: str, line: str) -> str:
    """What a block is that nobody owns: of code for several ranks, if that asked for it, or of forward."""
    asked = (f["filename"] for f in frames if f["filename"].endswith(".py"))
    inner = next((f for f in asked if not f.endswith(_PASSED_BY)), "")
    if any(part in inner for part in _COMMUNICATING) and "/torch/distributed/tensor/" not in inner:
        return COMMUNICATION
    return ACTIVATIONS if phase == FORWARD or (phase == BACKWARD and line) else REST


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

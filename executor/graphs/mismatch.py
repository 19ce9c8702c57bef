"""Say why a plan is not for the graph of a call: what differs in the call, the model and the ops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from tracer.record.sketch import ops_of
from traces.errors import PlanError
from traces.records.trace import TraceMeta

HINT: Final = ', or apply the plan with on_mismatch="replan" or "eager".'
FEW: Final = 4  # differences of one kind that are named
# What of a sketch decides a graph: its key, and the word for what is in it.
TOLD: Final = {
    "arguments": "argument",
    "frozen": "frozen (requires_grad is off)",
    "evaluated": "in evaluation mode",
    "dtypes": "parameters of type",
}


def describe(meta: TraceMeta) -> str:
    """A trace in a few words, for messages."""
    amp = f", autocast {meta.amp}" if meta.amp else ""
    return (
        f"{meta.model}, batch size {meta.batch_size}{amp}, torch {meta.torch_version}, device {meta.device}"
    )


def another_graph(meta: TraceMeta, now: dict[str, Any], structure: str, device: str) -> PlanError:
    """The error for a call whose graph is not the plan's.

    Args:
        meta: of the plan.
        now: the sketch of the call (`tracer.record.sketch`) and `amp`, the type of autocast around it; {}: unknown.
        structure: the fingerprint of the structure of its graph; device: the kind of its device.
    """
    causes = list(_causes(meta, now, device))
    otherwise = f"its structure is {meta.structure_fingerprint}, and here {structure}"
    told = "; ".join(causes) or otherwise
    return PlanError(
        f"the plan was made for another graph ({describe(meta)}): {told}. Call the model as it was traced, or trace "
        f"it as it is now and plan again{HINT}"
    )


def _causes(meta: TraceMeta, now: dict[str, Any], device: str) -> Iterator[str]:
    """Return what differs, the likeliest cause first."""
    then = meta.sketch
    if meta.device.partition(":")[0] != device:
        yield f"it is for {meta.device}, and the model is on {device}"
    amp = now.get("amp", meta.amp)
    if meta.amp != amp:
        yield f"the step was under {_autocast(meta.amp)}, and this call is under {_autocast(amp)}"
    if not now or then.keys() < now.keys() - {"amp"}:
        return  # nothing to compare
    for key, word in TOLD.items():
        for verb, names in (
            ("new", _kinds(now, key) - _kinds(then, key)),
            ("gone", _kinds(then, key) - _kinds(now, key)),
        ):
            if names:
                yield f"{word}: {', '.join(_few(sorted(names)))} {verb}"
    if meta.torch_version != torch.__version__:
        yield f"torch was {meta.torch_version} and is {torch.__version__}"
    yield from _ops(ops_of(then), ops_of(now))
    if then["shares"] != now["shares"]:
        yield "arguments share memory otherwise"


def _autocast(dtype: str) -> str:
    return f"autocast {dtype}" if dtype else "no autocast"


def by_ones_alone(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """True if two calls, by their sketches, differ in nothing that decides a graph but which sizes are one."""
    if not now or any(then.get(k) != now[k] for k in ("frozen", "evaluated", "dtypes", "parameters")):
        return False
    a, b = dict(then["arguments"]), dict(now["arguments"])
    alike = a.keys() == b.keys() and all(_kind(a[k]) == _kind(b[k]) for k in a)
    return alike and any(_ones(a[k]) != _ones(b[k]) for k in a)


def _kinds(sketch: dict[str, Any], key: str) -> set[str]:
    """Return what is in a sketch under a key, in words; arguments without their sizes, but for those of one."""
    if key != "arguments":
        return {name or "the whole model" for name in sketch[key]}
    return {f"{name} ({_shape(shown)})" for name, shown in sketch[key]}


def _shape(shown: str) -> str:
    """An argument without its sizes, but for those of one: "float32[8, 1] with a gradient" -> "float32[n, 1] ..."."""
    head, bracket, rest = shown.partition("[")
    sizes, _, more = rest.partition("]")
    one = ["1" if n.strip() == "1" else "n" for n in sizes.split(",")]
    return (
        f"{head}[{', '.join(one)}]{more}"
        if bracket and isinstance(getattr(torch, head, None), torch.dtype)
        else shown
    )


def _kind(shown: str) -> str:
    return _shape(shown).replace("1,", "n,").replace("1]", "n]")


def _ones(shown: str) -> list[bool]:
    return [n.strip() == "1" for n in shown.partition("[")[2].partition("]")[0].split(",")]


def _ops(then: list[tuple[str, str]], now: list[tuple[str, str]]) -> Iterator[str]:
    if then == now or not then:
        return
    pairs = zip(then, now, strict=False)
    k = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(then), len(now)))
    shown = [
        f"{ops[k][0]} in {ops[k][1] or 'the model itself'}" if k < len(ops) else "none" for ops in (then, now)
    ]
    yield (
        f"the plan's graph has {len(then)} ops and this one {len(now)}; the first that differs is op {k}, {shown[1]} "
        f"where the plan has {shown[0]}"
    )


def _few(names: list[str]) -> list[str]:
    return names if len(names) <= FEW else [*names[: FEW - 1], f"{len(names) - FEW + 1} more"]

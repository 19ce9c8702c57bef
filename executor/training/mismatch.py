"""Why a plan is not for the graph of a call: what differs in the call, the model and the ops, and what helps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from tracer.record.sketch import names_digest, ops_of
from traces.errors import PlanError
from traces.records.plan import Plan
from traces.records.trace import TraceMeta

HINT: Final = ', or apply the plan with on_mismatch="replan" or "eager".'
FEW: Final = 4  # differences of one kind that are named


def check_parameters(model: nn.Module, plan: Plan) -> None:
    """Raise PlanError if a plan is for a model with other parameters, as far as the plan says."""
    told = plan.meta.sketch.get("parameters")
    names = [name for name, _ in model.named_parameters()]
    if not told or told == [len(names), names_digest(names)]:
        return
    raise PlanError(
        f"the plan was made for another model: {describe(plan.meta)}, has {told[0]} parameters, and this "
        f"{type(model).__name__} has {len(names)}{' of other names' if len(names) == told[0] else ''}; trace this "
        "model and plan again."
    )


def describe(meta: TraceMeta) -> str:
    """A trace in a few words, for messages."""
    amp = f", autocast {meta.amp}" if meta.amp else ""
    return (
        f"{meta.model}, batch size {meta.batch_size}{amp}, torch {meta.torch_version}, device {meta.device}"
    )


def another_graph(meta: TraceMeta, now: dict[str, Any], structure: str, device: str) -> PlanError:
    """The error for a call whose graph is not the plan's (`meta`), from its sketch (`tracer.record.sketch`), the
    fingerprint of its structure and the kind of the model's device."""
    causes = list(_causes(meta, now, device))
    otherwise = f"its structure is {meta.structure_fingerprint}, and here {structure}"
    told = "; ".join(cause for cause, _ in causes) or otherwise
    advice = next((a for _, a in causes if a), "trace this model as it is now and plan again")
    return PlanError(
        f"the plan was made for another graph ({describe(meta)}): {told}. {advice[0].upper()}{advice[1:]}{HINT}"
    )


def _causes(meta: TraceMeta, now: dict[str, Any], device: str) -> Iterator[tuple[str, str]]:
    """What differs, the likeliest cause first: in words, and what to do about it."""
    if meta.device.partition(":")[0] != device:
        yield f"it is for {meta.device}, and the model is on {device}", f"trace with --device {device}"
    then = meta.sketch
    if then.keys() < now.keys() or not now:
        return  # a plan that does not say, or nothing to compare it with
    yield from _arguments(dict(then["arguments"]), dict(now["arguments"]))
    frozen = "freeze the same parameters, or trace the model with these frozen and plan again"
    yield from _sets(then["frozen"], now["frozen"], "frozen (requires_grad is off)", "trainable", frozen)
    modes = "bring the modules into the plan's modes, or trace the model in these and plan again"
    yield from _sets(then["evaluated"], now["evaluated"], "in evaluation mode", "in training mode", modes)
    if then["dtypes"] != now["dtypes"]:
        a, b = (" and ".join(x["dtypes"]) for x in (then, now))
        yield f"its parameters were {a} and are {b}", f"trace the model in {b} and plan again"
    if meta.torch_version != torch.__version__:
        told = f"torch was {meta.torch_version} and is {torch.__version__}"
        yield told, "trace with this torch and plan again"
    yield from _ops(ops_of(then), ops_of(now))
    if then["shares"] != now["shares"] and ops_of(then) == ops_of(now):
        told = "the same ops, on arguments that share memory otherwise"
        yield told, "pass arguments that share memory likewise"


def _arguments(then: dict[str, str], now: dict[str, str]) -> Iterator[tuple[str, str]]:
    again = "call the model with the plan's arguments, or trace it with these and plan again"
    for word, names in (("is missing", then.keys() - now.keys()), ("is new", now.keys() - then.keys())):
        for name in _few(sorted(names)):
            yield f"the argument {name} {word} ({(then | now)[name]})", again
    for name in then.keys() & now.keys():
        told = f"the argument {name} was {then[name]} and is {now[name]}"
        if _kind(then[name]) != _kind(now[name]):
            yield told, again
        elif _ones(then[name]) != _ones(now[name]):
            yield f"{told}, where a size of one makes other ops", "give more than one of each"


def by_ones_alone(then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two calls, by their sketches, differ in nothing that decides a graph but which sizes are one."""
    if any(then.get(k) != now[k] for k in ("frozen", "evaluated", "dtypes", "parameters")):
        return False
    a, b = dict(then["arguments"]), dict(now["arguments"])
    alike = a.keys() == b.keys() and all(_kind(a[k]) == _kind(b[k]) for k in a)
    return alike and any(_ones(a[k]) != _ones(b[k]) for k in a)


def elements(shown: str) -> int:
    """How many elements an argument of a sketch has; 0 for one that is no tensor."""
    head, _, sizes = shown.partition("[")
    if not isinstance(getattr(torch, head, None), torch.dtype):
        return 0
    return math.prod(int(n) for n in sizes.partition("]")[0].split(",") if n.strip())


def _kind(shown: str) -> tuple[str, int, bool]:
    """What the structure of a graph depends on: the type, how many dimensions, whether a gradient is wanted."""
    head, bracket, sizes = shown.partition("[")
    return head, sizes.count(",") if bracket else -1, shown.endswith("with a gradient")


def _ones(shown: str) -> list[bool]:
    return [n.strip() == "1" for n in shown.partition("[")[2].partition("]")[0].split(",")]


def _sets(then: list[str], now: list[str], word: str, other: str, advice: str) -> Iterator[tuple[str, str]]:
    for verb, names in (word, set(now) - set(then)), (other, set(then) - set(now)):
        if names:
            told = ", ".join(_few([n or "the whole model" for n in sorted(names)]))
            yield f"{told} is {verb}, and was not", advice


def _ops(then: list[tuple[str, str]], now: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    if then == now or not then:
        return
    counts = f"the plan's graph has {len(then)} ops and this one {len(now)}"
    pairs = zip(then, now, strict=False)
    k = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(then), len(now)))
    shown = [
        f"{ops[k][0]} in {ops[k][1] or 'the model itself'}" if k < len(ops) else "none" for ops in (then, now)
    ]
    yield f"{counts}; the first that differs is op {k}, {shown[1]} where the plan has {shown[0]}", ""


def _few(names: list[str]) -> list[str]:
    return names if len(names) <= FEW else [*names[: FEW - 1], f"{len(names) - FEW + 1} more"]

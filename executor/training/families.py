"""Calls that differ in nothing but sizes, and the capture that serves them all once two or three were seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from executor.training.engine import Engine, all_saved, captured_for, engine_of
from tracer.capture.sizes import Layout, symbolic, with_numbers
from tracer.record.one_graph import check_same
from tracer.record.program import program_of
from tracer.torch_api import no_garbage, pytree
from traces.errors import CaptureError

SEEN: Final = 8  # calls that are remembered, of which what varies is learnt


@dataclass(slots=True)
class Family:
    """The calls of one kind (`kind_of`) that were captured one by one, and what serves others."""

    calls: list[Any] = field(default_factory=list)
    new: bool = False  # a single call was captured since the last try
    tried: set[frozenset[Any]] = field(default_factory=set)  # what varied, and what alike, in each try
    # Engines of the capture for many sizes, by the call.
    resized: dict[Any, Any] = field(default_factory=dict)
    why_not: str = ""  # there is no such capture

    def add(self, call: Any) -> None:
        """Note a call that was captured for itself."""
        self.new = True
        if call not in self.calls:
            self.calls[SEEN // 2 :] = [*self.calls[SEEN // 2 :], call][-SEEN // 2 :]

    def worth_a_try(self, call: Any) -> bool:
        """Whether a capture for many sizes should be made now, of what has not been tried yet. It is made at the
        smallest sizes, and must have a capture of larger ones to be compared with."""
        seen = [layouts_of(c) for c in (*self.calls, call)]
        if not self.new or max(map(size_of, seen[:-1])) == min(map(size_of, seen)):
            return False
        alike: dict[tuple[int, ...], set[tuple[int, int]]] = {}
        for k, same in enumerate(zip(*([x.shape for x in layouts] for layouts in seen), strict=True)):
            for d, sizes in enumerate(zip(*same, strict=True)):
                alike.setdefault(sizes, set()).add((k, d))
        varying = frozenset(frozenset(where) for sizes, where in alike.items() if len(set(sizes)) > 1)
        if varying in self.tried:
            return False
        self.tried.add(varying)
        self.new = False
        return True


@no_garbage()
def many_sizes(module: nn.Module, leaves: Sequence[Any], call: Any, singles: Mapping[Any, Engine]) -> Engine:
    """An engine for all calls of a family.

    Args:
        module, leaves, call: what is called, with these flat arguments.
        singles: by the call, the engines that were captured for single ones, with which it is compared.

    Raises:
        CaptureError: the model decides by sizes, so that none is for all of these calls.
    """
    spec, _, autocast = call
    first = next(iter(singles.values()), None)
    if first is None or first.plan is None or first.writes_arguments:
        raise CaptureError("the calls to compare it with are gone, or forward writes into its arguments.")
    # The smallest call decides: the largest may be where a slice takes all, and a graph with that is for it alone.
    sizes = symbolic(sorted(map(layouts_of, (*singles, call)), key=size_of))
    given = iter(sizes.arguments)
    args, kwargs = pytree.tree_unflatten(
        [next(given) if isinstance(x, torch.Tensor) else x for x in leaves], spec
    )
    captured = with_numbers(captured_for(module, args, kwargs, first.plan, autocast), sizes)
    programs = []
    for single, engine in singles.items():
        known = sizes.known(layouts_of(single))
        if known is None:
            raise CaptureError("the model decides by sizes, and otherwise in another call.")
        programs.append(program_of(captured, engine.program.shares, known))
        check_same(programs[-1], engine.program.as_captured)
    make = all_saved if first.all_saved else engine_of
    made = make(programs[0], first.plan, first.kind)
    made.sizes, made.why, made.exact = sizes, "sizes vary", False
    return made


def kind_of(call: Any) -> Any:
    """What calls have in common that differ in nothing but sizes; a size of one is another matter."""
    spec, arguments, autocast = call
    return spec, tuple(map(_without_sizes, arguments)), autocast


def _without_sizes(argument: Any) -> Any:
    if not is_tensor(argument):
        return argument
    shape, stride, *rest = argument
    order = sorted(range(len(shape)), key=lambda d: (-stride[d], -shape[d]))
    return tuple(min(n, 2) for n in shape), tuple(order), *rest


def is_tensor(argument: Any) -> bool:
    """Whether an argument in a call's key is a tensor."""
    return isinstance(argument, tuple) and isinstance(argument[0], torch.Size)


def layouts_of(call: Any) -> tuple[Layout, ...]:
    """The layouts of a call's tensor arguments."""
    return tuple(
        Layout(shape=tuple(shape), stride=stride, dtype=dtype, device=device, requires_grad=wants)
        for shape, stride, dtype, device, wants in filter(is_tensor, call[1])
    )


def size_of(layouts: Sequence[Layout]) -> int:
    """How many elements tensors of these layouts have together."""
    return sum(math.prod(x.shape) for x in layouts)

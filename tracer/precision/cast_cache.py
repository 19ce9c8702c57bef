"""Make autocast cast a parameter once in a capture, as eager's cache does, and not at each use.

torch caches the casts of leaves, and what a capture passes to the model in place of parameters is no leaf. Autocast's
kernels cast by `aten::to.dtype`, so that op gets a kernel that remembers, above autograd: the uses then share one cast
and their gradients are summed in the lower precision, as they are in eager.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from tracer.torch_api import enter_autocast, replaced


@contextlib.contextmanager
def cached_casts(kind: str, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let autocast remember the casts of `leaves` in the body, until its outermost region ends. `leaves`: what stands
    for the parameters, and for arguments that require a gradient.
    """
    cached = {id(x): x for x in leaves if x.requires_grad and x.dtype == torch.float32}
    casts: dict[int, torch.Tensor] = {}
    clear = torch.clear_autocast_cache

    def to(x: torch.Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`x.to(dtype)`; from the cache where torch's own would have it (at::autocast::cached_cast).

        Inside autocast's kernels autocast counts as off, which tells their casts from those of the model's own code.
        """
        by_autocast = dtype == torch.get_autocast_dtype(kind) and not torch.is_autocast_enabled(kind)
        if id(x) not in cached or not by_autocast or not torch.is_autocast_cache_enabled():
            return torch.ops.aten.to.dtype.decompose(x, dtype, *args, **kwargs)
        if id(x) not in casts:
            casts[id(x)] = torch.ops.aten.to.dtype.decompose(x, dtype, *args, **kwargs)
        return casts[id(x)]

    def clear_both() -> None:
        clear()
        casts.clear()

    with (
        replaced(torch, clear_autocast_cache=clear_both),
        kernels(f"Autograd{kind.upper()}", {"to.dtype": to}),
    ):
        yield


@contextlib.contextmanager
def casts_cached(graph: fx.GraphModule, kind: str) -> Iterator[None]:
    """In the body the graph that dynamo captured casts its inputs as eager does, whenever it is interpreted."""
    calls = graph.graph.find_nodes(op="call_function", target=enter_autocast)
    if not torch.is_autocast_enabled(kind) and not calls:
        yield
        return
    opened: list[contextlib.ExitStack] = []

    def enter(*inputs: Any) -> None:
        leave()
        stack = contextlib.ExitStack()
        opened.append(stack)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(True)
        stack.enter_context(cached_casts(kind, [x for x in inputs if isinstance(x, torch.Tensor)]))

    def leave() -> None:
        while opened:
            opened.pop().close()

    holders = graph.graph.find_nodes(op="placeholder")
    first = next(n for n in graph.graph.nodes if n.op != "placeholder")
    (last,) = graph.graph.find_nodes(op="output")
    with graph.graph.inserting_before(first):
        added = [graph.graph.call_function(enter, tuple(holders))]
    with graph.graph.inserting_before(last):
        added.append(graph.graph.call_function(leave, ()))
    try:
        yield
    finally:
        leave()
        for n in added:
            graph.graph.erase_node(n)


@contextlib.contextmanager
def kernels(key: str, functions: dict[str, Any]) -> Iterator[None]:
    """In the body aten ops have other kernels for one dispatch key. `functions`: op.overload -> kernel."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            for name, function in functions.items():
                library.impl(name, function, key, allow_override=True)
        _forget(functions)
        yield
    finally:
        library._destroy()
        _forget(functions)


def _forget(functions: dict[str, Any]) -> None:
    """Captures resolve kernels in Python and keep what they found."""
    for name in functions:
        aten_op(name)._dispatch_cache.clear()


def aten_op(name: str) -> Any:
    """The op of that name, with its overload ("softmax.int") or the default one ("relu")."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")

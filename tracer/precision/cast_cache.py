"""Make autocast cast a parameter once in a capture, as eager's cache does, and not at each use.

torch caches the casts of leaves, and what a capture passes to the model in place of parameters is no leaf. Autocast's
kernels cast by `aten::to.dtype`, so that op gets a kernel that remembers, above autograd: the uses then share one cast
and their gradients are summed in the lower precision, as they are in eager.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from tracer.torch_api import enter_autocast, replaced


@contextlib.contextmanager
def casts_cached(graph: fx.GraphModule, kind: str) -> Iterator[None]:
    """In the body the graph that dynamo captured casts its inputs as eager does, whenever it is interpreted."""
    around = torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled()
    if not around and not graph.graph.find_nodes(op="call_function", target=enter_autocast):
        yield
        return
    leaves: dict[int, torch.Tensor] = {}  # inputs, while the graph is interpreted
    casts: dict[int, torch.Tensor] = {}
    clear, before = torch.clear_autocast_cache, torch.is_autocast_cache_enabled()
    outside = before

    def to(x: torch.Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`x.to(dtype)`; from the cache where torch's own would have it (at::autocast::cached_cast).

        Inside autocast's kernels autocast counts as off, which tells their casts from those of the model's own code.
        """
        by_autocast = dtype == torch.get_autocast_dtype(kind) and not torch.is_autocast_enabled(kind)
        if id(x) not in leaves or not by_autocast or not torch.is_autocast_cache_enabled():
            return torch.ops.aten.to.dtype.decompose(x, dtype, *args, **kwargs)
        if id(x) not in casts:
            casts[id(x)] = torch.ops.aten.to.dtype.decompose(x, dtype, *args, **kwargs)
        return casts[id(x)]

    def enter(*inputs: Any) -> None:
        nonlocal outside
        tensors = (x for x in inputs if isinstance(x, torch.Tensor))
        leaves.update({id(x): x for x in tensors if x.requires_grad and x.dtype == torch.float32})
        outside = torch.is_autocast_cache_enabled()  # AOTAutograd switches it off
        torch.set_autocast_cache_enabled(True)

    def leave() -> None:
        leaves.clear()
        casts.clear()
        torch.set_autocast_cache_enabled(outside)

    def clear_both() -> None:
        clear()
        casts.clear()

    holders = graph.graph.find_nodes(op="placeholder")
    first = next(n for n in graph.graph.nodes if n.op != "placeholder")
    (last,) = graph.graph.find_nodes(op="output")
    with graph.graph.inserting_before(first):
        added = [graph.graph.call_function(enter, tuple(holders))]
    with graph.graph.inserting_before(last):
        added.append(graph.graph.call_function(leave, ()))
    try:
        with (
            replaced(torch, clear_autocast_cache=clear_both),
            kernels(f"Autograd{kind.upper()}", {"to.dtype": to}),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(before)
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
        packet, _, overload = name.partition(".")  # "softmax.int", or "relu" for the default one
        getattr(getattr(torch.ops.aten, packet), overload or "default")._dispatch_cache.clear()

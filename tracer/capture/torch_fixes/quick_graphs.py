"""Leave out of a capture what changes no graph and takes a tenth of the time: descriptions of trees that are mapped and
forgotten, and the code of graphs that nobody calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tracer.torch_api import pytree, replaced, use_lazy_graph_module


@contextmanager
def quick_graphs() -> Iterator[None]:
    """In the body, tuples, lists and dicts are mapped as they stand, and graphs get their code when it is asked for."""
    described = pytree.tree_map

    def tree_map(func: Callable[..., Any], tree: Any, *others: Any, is_leaf: Any = None) -> Any:
        if others or is_leaf is not None:
            return described(func, tree, *others, is_leaf=is_leaf)
        return mapped(func, tree)

    def mapped(func: Callable[..., Any], tree: Any) -> Any:
        kind = type(tree)
        if kind is tuple:
            return tuple([mapped(func, x) for x in tree])
        if kind is list:
            return [mapped(func, x) for x in tree]
        if kind is dict:
            return {k: mapped(func, x) for k, x in tree.items()}
        if kind in pytree.SUPPORTED_NODES or isinstance(tree, tuple):
            return described(func, tree)
        return func(tree)

    with replaced(pytree, tree_map=tree_map), use_lazy_graph_module(True):
        yield

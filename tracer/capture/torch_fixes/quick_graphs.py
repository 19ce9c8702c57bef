"""Leave out of a capture what changes no graph and takes a fifth of the time: descriptions of trees that are mapped and
forgotten and of tensors that are there, code of graphs that nobody calls, bringing up to date what is, and watching
what is not looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from tracer.torch_api import (
    FunctionalTensor,
    FunctionalTensorMode,
    Patcher,
    aot_autograd,
    from_functional,
    functorch_config,
    mutation_counter,
    proxy_tensor,
    pytree,
    replaced,
    use_lazy_graph_module,
)


@contextmanager
def quick_graphs() -> Iterator[None]:
    """In the body, tuples, lists and dicts are mapped as they stand, graphs get their code when it is asked for, and
    tensors are brought up to date if they, or what they share a storage with, were written into."""
    described, described_only = pytree.tree_map, pytree.tree_map_only

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

    def tree_map_only(kinds: Any, func: Callable[..., Any], tree: Any, is_leaf: Any = None) -> Any:
        if is_leaf is not None or not isinstance(kinds, type):
            return described_only(kinds, func, tree, is_leaf=is_leaf)
        return mapped(lambda x: func(x) if isinstance(x, kinds) else x, tree)

    sync = getattr(FunctionalTensorMode, "_sync_view_replay_annotations", None)  # 2.11 has none

    def sync_written(mode: Any, args: Any, kwargs: Any) -> None:
        given = [x for x in pytree.tree_iter((args, kwargs)) if isinstance(x, FunctionalTensor)]
        written = given if not _are_tracked(given) else [x for x in given if mutation_counter(x.elem)]
        if sync is not None and written:
            sync(mode, written, {})

    outermost: list[Any] = []
    patch = Patcher.patch_method

    def patch_method(patcher: Any, owner: type, name: str, *function: Any, **options: Any) -> None:
        """A capture's own tracer takes calls and attributes of modules as they are, and so need not see them."""
        if owner is nn.Module and patcher in (outermost or [patcher]):
            outermost[:] = [patcher]
        else:
            patch(patcher, owner, name, *function, **options)

    # Where random ops do not become ops of a state that torch tracks, it need not make that state anew, of tensors.
    untracked = {} if functorch_config.functionalize_rng_ops else {"PhiloxStateTracker": nullcontext}
    syncs = {} if sync is None else {"_sync_view_replay_annotations": sync_written}
    with (
        replaced(pytree, tree_map=tree_map, tree_map_only=tree_map_only),
        replaced(proxy_tensor, _extract_tensor_metadata=lambda x: None),  # which says what "val" says
        replaced(FunctionalTensorMode, **syncs),
        replaced(Patcher, patch_method=patch_method),
        replaced(aot_autograd, **untracked),
        use_lazy_graph_module(True),
    ):
        yield


def _are_tracked(given: list[Any]) -> bool:
    """Whether the graph that is made, if one is, has nodes for all of these tensors."""
    mode = proxy_tensor.get_proxy_mode()
    return mode is None or all(from_functional(x.elem) in mode.tracer.tensor_tracker for x in given)

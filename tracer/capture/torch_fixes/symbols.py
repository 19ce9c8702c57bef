"""Compute with symbolic sizes quickly while a graph is captured: there are ten operations a tensor (strides, numbers of
elements, whether it is contiguous), nearly all of them repeated.

torch traces each into the graph. There only those are wanted that are an op's argument, and of them what they are as
functions of the sizes (`tracer.capture.sizes.with_numbers`), which they know themselves: each is one node.

Besides, torch below 2.15 computes each again. From 2.15 on it remembers results itself (Note [symbolic op memo] in
torch/fx/experimental/symbolic_shapes.py): by operation and both expressions. So does this, with the expressions as the
shape environment simplifies them by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tracer.torch_api import SymNode, disable_proxy_modes_tracing, proxy_tensor, release, replaced

_OPERATIONS: Final = ("_add", "_sub", "_mul", "_eq", "_ne", "_ge", "_gt", "_le", "_lt")


@contextmanager
def quick_arithmetic(shape_env: Any) -> Iterator[None]:
    """In the body, arithmetic on the symbols of `shape_env` (None: there are none) is not traced, and remembered."""
    if shape_env is None:
        yield
        return

    def untraced(operation: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with disable_proxy_modes_tracing():
            return operation(*args, **kwargs)

    def as_one_node(tracer: Any, expr: Any, out: Any) -> None:
        proxy_tensor._sym_register(tracer, _number, (), out)

    untold = {"handle_sym_dispatch": untraced, "_build_proxy_for_sym_expr": as_one_node}
    with replaced(proxy_tensor, **untold), _remembered(shape_env):
        yield


def _number() -> None:
    """What the graph calls for a number, until that is taken out."""


@contextmanager
def _remembered(shape_env: Any) -> Iterator[None]:
    if release() >= (2, 15):
        yield
        return
    known: dict[Any, Any] = {}

    def remembering(name: str) -> Callable[[Any, Any], Any]:
        compute = getattr(SymNode, name)

        def operation(a: Any, b: Any) -> Any:
            if a.shape_env is not shape_env:
                return compute(a, b)
            key = name, a.expr, b.expr, a.pytype, b.pytype
            found = known.get(key)
            if found is None:
                found = known[key] = compute(a, b)
                return found
            summation = {"optimized_summation": found._optimized_summation}
            return SymNode(
                found._expr, shape_env, found.pytype, found._hint, fx_node=found.fx_node, **summation
            )

        return operation

    with replaced(SymNode, **{name: remembering(name) for name in _OPERATIONS}):
        yield

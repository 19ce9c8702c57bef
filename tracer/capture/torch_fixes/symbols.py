"""Compute with symbolic sizes once what torch below 2.15 computes again for every tensor: strides, numbers of elements,
whether it is contiguous. There are some ten such operations a tensor, nearly all of them repeated.

From 2.15 on torch remembers results itself (Note [symbolic op memo] in torch/fx/experimental/symbolic_shapes.py): by
operation and both expressions. So does this, with the expressions as the shape environment simplifies them by then. As
there, no SymNode is given twice: while a graph is traced, each says by its identity where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from tracer.torch_api import SymNode, get_proxy_mode, release, replaced

_OPERATIONS: Final = ("_add", "_sub", "_mul", "_eq", "_ne", "_ge", "_gt", "_le", "_lt")


@contextmanager
def remembered_arithmetic(shape_env: Any) -> Iterator[None]:
    """In the body, results of arithmetic on the symbols of `shape_env` (None: there are none) are remembered."""
    if shape_env is None or release() >= (2, 15):
        yield
        return
    known: dict[Any, Any] = {}

    def remembering(name: str) -> Callable[[Any, Any], Any]:
        compute = getattr(SymNode, name)

        def operation(a: Any, b: Any) -> Any:
            if a.shape_env is not shape_env or get_proxy_mode():
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

"""Emitters: for each kind of recipe but recompute, the call that stands in the rewritten graph; one module a kind.

A module `executor.emit.KIND` has one function, `emit(program, op, recipe) -> Call`, in terms of the captured nodes, for
an op by its id; `executor.rewrite` puts the call where the schedule says and resolves each node to its current copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What runs in place of a captured node: an op and its arguments, which hold captured nodes."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@cache
def emitter(kind: str) -> Callable[..., Call]:
    """The function `emit` for recipes of a kind."""
    emit: Callable[..., Call] = import_module(f"executor.emit.{kind}").emit
    return emit

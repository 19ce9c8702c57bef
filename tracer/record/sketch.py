"""Describe a captured call of a model, small enough to travel in a plan, so that a mismatch can be explained."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch
from torch import nn

from tracer.record.program import Program
from tracer.record.rows import storage_key
from tracer.torch_api import pytree
from traces.records.trace import ALIAS

LONGEST: Final = 40  # characters of an argument that is no tensor


def sketch(program: Program, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The sketch of a program.

    Returns:
        `arguments`: of each leaf its name and what it is ("int64[8, 128]"); `shares`: groups of tensor arguments, by
        their number, that share a storage; `frozen`, `evaluated`: how many parameters have no gradient, and how many
        modules are in evaluation mode; `dtypes`: of the parameters; `parameters`: how many, and a digest of their
        names; `aliases`: the ops that are slices which take all.
    """
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    tensors = [x for x in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(x, torch.Tensor)]
    sharing: dict[int, list[int]] = {}
    for k, x in enumerate(tensors):
        sharing.setdefault(storage_key(x), []).append(k)
    return {
        "arguments": [list(x) for x in _arguments(model, args, kwargs)],
        "shares": [group for group in sharing.values() if len(group) > 1],
        "frozen": sum(not p.requires_grad for p in parameters.values()),
        "evaluated": sum(not m.training for m in modules.values()),
        "dtypes": sorted({_dtype(p) for p in parameters.values()}),
        "parameters": [len(parameters), names_digest(parameters)],
        "aliases": [i for i, row in enumerate(program.rows) if row.target == ALIAS],
    }


def names_digest(names: Iterable[str]) -> str:
    """A digest of the names of parameters."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:12]


def _arguments(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterable[tuple[str, str]]:
    names: list[str] = []
    with suppress(TypeError, ValueError):
        names += inspect.signature(model.forward).parameters
    leaves, _ = pytree.tree_flatten_with_path((tuple(args), kwargs))
    for (_, first, *rest), x in leaves:
        name = getattr(first, "key", None)
        if name is None:
            k = getattr(first, "idx", 0)
            name = names[k] if k < len(names) else f"argument {k}"
        if isinstance(x, torch.Tensor):
            text = f"{_dtype(x)}{list(x.shape)}{' with a gradient' if x.requires_grad else ''}"
        elif len(text := repr(x)) > LONGEST:
            text = f"{text[:LONGEST]} ..."
        yield f"{name}{pytree.keystr(rest)}", text


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")

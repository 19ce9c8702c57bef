"""Describe a captured call of a model, small enough to travel in a plan, so that a mismatch can be explained."""

from __future__ import annotations

import base64
import hashlib
import inspect
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, Final

import torch
from torch import nn

from tracer.record.program import Program
from tracer.record.rows import shared_groups, storage_key
from tracer.torch_api import pytree

CUDNN: Final = "aten._cudnn_rnn.default"
LARGEST: Final = 1 << 24  # bytes of the ops of a sketch, unpacked; a step of 50,000 ops has 4 MiB
LONGEST: Final = 40  # characters of an argument that is no tensor


def sketch(program: Program, model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The sketch of a program.

    Returns:
        `arguments`: of each leaf its name and what it is ("int64[8, 128]"); `shares`: groups of tensor arguments, by
        their number, that share a storage; `frozen`, `evaluated`: parameters without a gradient and modules in
        evaluation mode, of whole modules only the path; `dtypes`: of the parameters; `parameters`: how many, and a
        digest of their names; `recurrent`: recurrent layers that are captured as elementary ops, if any, which eager
        runs by kernels of their own; `ops`: a line for each, packed (`ops_of`).
    """
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    tensors = [x for x in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(x, torch.Tensor)]
    ops = "\n".join(f"{row.target} {row.module}" for row in program.rows)
    whole = {row.module for row in program.rows if row.target == CUDNN}
    recurrent = [name for name, m in modules.items() if isinstance(m, nn.RNNBase) and name not in whole]
    return {
        "arguments": [list(x) for x in _arguments(model, args, kwargs)],
        "shares": [list(group) for group in shared_groups(map(storage_key, tensors))],
        "frozen": _whole({name for name, p in parameters.items() if not p.requires_grad}, parameters),
        "evaluated": _whole({name for name, m in modules.items() if not m.training}, modules),
        "dtypes": sorted({_dtype(p) for p in parameters.values()}),
        "parameters": [len(parameters), names_digest(parameters)],
        **({"recurrent": recurrent} if recurrent else {}),
        "ops": base64.b85encode(zlib.compress(ops.encode(), 9)).decode(),
    }


def names_digest(names: Iterable[str]) -> str:
    """A digest of the names of parameters."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:12]


def ops_of(sketch: dict[str, Any]) -> list[tuple[str, str]]:
    """The ops of a sketch in their order: target and module; none if it is malformed, or larger than any step's."""
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.b85decode(sketch.get("ops", "")), LARGEST).decode()
    except (ValueError, zlib.error):
        return []
    if unpacking.unconsumed_tail:
        return []
    return [(target, module) for target, _, module in (line.partition(" ") for line in text.splitlines())]


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
        yield f"{name}{pytree.keystr(rest)}", _shown(x)


def _shown(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        text = repr(x)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    return f"{_dtype(x)}{list(x.shape)}{' with a gradient' if x.requires_grad else ''}"


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _whole(chosen: set[str], known: dict[str, Any]) -> list[str]:
    """Names, where all that is below a path is chosen only the path: "encoder" for its parameters; "" for all."""
    left = {"": [p for p in known if p not in chosen]}
    out: set[str] = set()
    for name in sorted(chosen):
        for path in ["", *accumulate(name.split(".") if name else [], lambda a, b: f"{a}.{b}")]:
            if path not in left:
                above = path.rpartition(".")[0]
                left[path] = [p for p in left[above] if p == path or p.startswith(f"{path}.")]
            if not left[path]:
                out.add(path)
                break
    return sorted(out)

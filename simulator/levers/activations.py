"""Activations of one tensor, whose backward op takes their input: which they are, and where backward needs it for no
other op."""

from __future__ import annotations

import json
from typing import Final

from traces.records.trace import FORWARD, Trace

NAMES: Final = ("gelu", "silu")
_TARGETS: Final = {f"aten.{name}.default": f"aten.{name}_backward.default" for name in NAMES}


def kind(trace: Trace, op: int) -> str:
    """The activation of an op of forward, by the name that `executor.inverted` has for it."""
    name = trace.ops.target[op].split(".")[1]
    return "gelu_tanh" if name == "gelu" and json.loads(trace.ops.arguments[op])[1] == "tanh" else name


def activation_of(trace: Trace, s: int, *, copied: bool = False) -> tuple[int, int] | str:
    """The activation of forward that reads a storage, and its op of backward, which alone reads it there; or why there
    is none. `copied`: or which overwrites what the storage is a copy of, as torch saves it for one that works in place.
    """
    ops, made_by = trace.ops, trace.storages.producer[s]
    readers = [i for i in range(made_by + 1, len(ops)) if s in ops.reads[i]]
    backwards = [i for i in readers if ops.phase[i] != FORWARD]
    copied = copied and ops.target[made_by] == "aten.clone.default" and backwards == readers
    users = (
        [i for i in range(made_by, len(ops)) if ops.inputs[i] == ops.inputs[made_by]] if copied else readers
    )
    forwards = [i for i in users if ops.target[i] in _TARGETS]
    if (
        len(forwards) != 1
        or len(backwards) != 1
        or ops.target[backwards[0]] != _TARGETS[ops.target[forwards[0]]]
    ):
        return "backward reads it for something else than one activation"
    f, b = forwards[0], backwards[0]
    if not (ops.arguments[f] and ops.arguments[b]):
        return "the trace does not say with what arguments its ops run"
    if ((made_by,) if copied else ops.inputs[f]) != ops.inputs[b][1:] or json.loads(ops.arguments[f])[
        1:
    ] != json.loads(ops.arguments[b])[2:]:
        return "its activation and that of backward are not one"
    return f, b

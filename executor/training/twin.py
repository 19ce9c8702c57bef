"""A second tree of modules around a model's own tensors, and the class that a planned model has without its plan."""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any, Final, cast

from torch import nn

from executor.training import bypass

STATE: Final = "_lowtide"  # the attribute of a planned module that holds its state
OWN_CLASS: Final = "_lowtide_class"  # and that of a planned module's class with the model's own
OF_MODULES: Final = frozenset(vars(nn.Module()))  # the attributes that torch gives every module
DEEPEST: Final = 4  # how many containers deep a module's attributes are searched for modules


def own_class(kind: type) -> type:
    """The model's own class behind the one that a planned module has; any other class as it is."""
    found: type = vars(kind).get(OWN_CLASS, kind)
    return found


def twin_of(model: nn.Module) -> nn.Module:
    """The same modules once more, without plans, around the same parameters, buffers and other attributes."""
    twins: dict[int, nn.Module] = {}
    for m in model.modules():
        twins[id(m)] = twin = cast(nn.Module, object.__new__(own_class(type(m))))
        vars(twin).update((k, copy.copy(v) if k in OF_MODULES else v) for k, v in vars(m).items())
    for twin in twins.values():
        vars(twin).update((k, _with_twins(v, twins)) for k, v in list(vars(twin).items()))
        if vars(twin).pop(STATE, None) is not None:
            bypass.give_back_forward(twin)
    return twins[id(model)]


def _with_twins(value: Any, twins: dict[int, nn.Module], depth: int = 0) -> Any:
    """A value with the modules in it replaced by their twins; one without any is not copied."""
    if isinstance(value, nn.Module):
        return twins.get(id(value), value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _with_twins(value.__self__, twins, DEEPEST))
    if depth == DEEPEST:
        return value

    def inside(x: Any) -> Any:
        return _with_twins(x, twins, depth + 1)

    made = value
    if type(value) is functools.partial:
        made = functools.partial(inside(value.func), *map(inside, value.args), **inside(value.keywords))
        parts = [(x.func, *x.args, *x.keywords.values()) for x in (made, value)]
        return made if _differ(*parts) else value
    if type(value) in (list, tuple):
        made = type(value)(map(inside, value))
        return made if _differ(made, value) else value
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        found = [inside(x) for x in value.values()]
        if _differ(found, value.values()):
            made = copy.copy(value)
            made.update(zip(value, found, strict=True))
    return made


def _differ(new: Any, old: Any) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))

"""Divide whatever a user calls a batch between the model's arguments and the loss of its output.

The table in the manual (tracer/README.md, "What can be traced") says how. Beyond it: keys of a mapping that `forward`
does not name go to the loss alone, several of them as one dict; inputs in a tuple are `model(*inputs)`, or
`model(inputs)` if `forward` cannot take them one by one. A loss function of one argument gets the output alone;
`forward` then gets all of a tuple of tensors if it cannot do without the last, and what it could take or do without is
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tracer.torch_api import FakeTensor, pytree
from traces.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBatch:
    """A batch, divided between the model and the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any]
    loss_inputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class WithTargets:
    """A loss function that is called with what it needs of the batch."""

    function: Callable[..., Any]
    targets: tuple[Any, ...]

    def __call__(self, outputs: Any) -> Any:
        return self.function(outputs, *self.targets)


pytree.register_pytree_node(
    SplitBatch,
    lambda b: ([b.args, b.kwargs, b.loss_inputs], b.loss),
    lambda parts, loss: SplitBatch(args=parts[0], kwargs=parts[1], loss=loss, loss_inputs=parts[2]),
)


def split_batch(model: nn.Module, batch: Any, loss: Callable[..., Any] | None) -> SplitBatch:
    """Divide a batch between the model and the loss, as the module's docstring says; a divided one stays as it is.
    Raises SpecError if the batch is of an unknown kind, the loss takes more than there is, or the last of a tuple may
    be for the model or for nobody.
    """
    for leaf in pytree.tree_leaves(batch):
        if hidden_tensors(leaf):
            name = type(leaf).__name__
            raise SpecError(
                f"the batch holds a {name}, in which nobody finds its tensors; return them in a tuple or a dict, or, "
                f"if it is a dataclass, make it known with torch.export.register_dataclass({name})."
            )
    split = batch if isinstance(batch, SplitBatch) else _divided(model, batch, loss)
    try:
        inspect.signature(model.forward).bind(*split.args, **split.kwargs)
    except TypeError as error:
        raise SpecError(
            f"{type(model).__name__}.forward cannot be called with what the batch holds for it: {error}. Of a tuple "
            "the last is for the loss function and the rest for the model, of a dict what forward does not name is for "
            "the loss function; several targets are one as a tuple: (inputs, (a, b))."
        ) from None
    except ValueError:
        pass  # it does not say what it takes
    return split


def hidden_tensors(leaf: Any) -> list[torch.Tensor]:
    """The tensors that an object of a class unknown to torch holds as attributes or, as a container, in itself."""
    if isinstance(leaf, (torch.Tensor, type)) or callable(leaf):
        return []
    contents = leaf.values() if isinstance(leaf, Mapping) else leaf if isinstance(leaf, (list, tuple)) else ()
    held = pytree.tree_leaves([*getattr(leaf, "__dict__", {}).values(), *contents])
    return [x for x in held if isinstance(x, torch.Tensor)]


def _divided(model: nn.Module, batch: Any, loss: Callable[..., Any] | None) -> SplitBatch:
    if isinstance(batch, Mapping):
        return _split_mapping(model, batch, loss)
    if isinstance(batch, torch.Tensor):
        return _split((batch,), {}, loss, ())
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise SpecError("the batch is empty.")
        if loss is None or len(batch) == 1:
            return _split(_one_by_one(model, batch), {}, loss, ())
        plain = all(isinstance(x, torch.Tensor) for x in batch)
        if plain and not _takes(loss, 2) and _takes(model, len(batch)):
            if _takes(model, len(batch) - 1):
                raise SpecError(
                    f"the last of the batch may be for {type(model).__name__}.forward or for nobody: the loss function "
                    "takes the output alone, and forward can do with it or without. If it is forward's, give the "
                    "arguments by their names, as a dict, or as ((a, b), None); if not, leave it out: (a,)."
                )
            return _split(tuple(batch), {}, loss, ())
        inputs = batch[0] if len(batch) == 2 else tuple(batch[:-1])
        if isinstance(inputs, Mapping):
            return _split((), _named(inputs), loss, (batch[-1],))
        args = tuple(inputs) if len(batch) > 2 else _one_by_one(model, inputs)
        return _split(args, {}, loss, (batch[-1],))
    raise SpecError(
        f"the batch is a {type(batch).__name__}; return a tensor, a tuple such as (inputs, targets), or a "
        "mapping of the model's keyword arguments (of a DataLoader: next(iter(loader)))."
    )


def _one_by_one(model: nn.Module, inputs: Any) -> tuple[Any, ...]:
    """A tuple's members as arguments, or the tuple itself if `forward` can only be called so."""
    if not isinstance(inputs, (tuple, list)):
        return (inputs,)
    whole = not _takes(model, len(inputs)) and _takes(model, 1)
    return (inputs,) if whole else tuple(inputs)


def _split_mapping(model: nn.Module, batch: Mapping[Any, Any], loss: Callable[..., Any] | None) -> SplitBatch:
    kwargs = _named(batch)
    if loss is None:
        return _split((), kwargs, None, ())
    parameters = inspect.signature(model.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    left = {k: v for k, v in kwargs.items() if not anything and k not in parameters}
    kwargs = {k: v for k, v in kwargs.items() if k not in left}
    if not kwargs:
        raise SpecError(
            f"none of the batch's keys ({', '.join(left)}) is an argument of {type(model).__name__}.forward."
        )
    if not left:
        # forward takes everything; a loss of two arguments can then only mean the batch itself.
        targets: tuple[Any, ...] = () if _takes(loss, 1) else (kwargs,)
    else:
        targets = (next(iter(left.values())) if len(left) == 1 else left,)
    return _split((), kwargs, loss, targets)


def _named(values: Mapping[Any, Any]) -> dict[str, Any]:
    wrong = [k for k in values if not isinstance(k, str)]
    if wrong:
        raise SpecError(f"the batch has the key {wrong[0]!r}; the keys must be names of arguments.")
    return dict(values)


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[..., Any] | None, targets: tuple[Any, ...]
) -> SplitBatch:
    if loss is not None and targets and _takes(loss, 2):
        return SplitBatch(args=args, kwargs=kwargs, loss=WithTargets(loss, targets), loss_inputs=targets)
    if loss is not None and not _takes(loss, 1):
        has = "the model's output and the targets" if targets else "only the model's output, no targets"
        raise SpecError(f"the loss function cannot be called with what there is: {has}.")
    own = loss_in_outputs if loss is None else loss
    return SplitBatch(args=args, kwargs=kwargs, loss=own, loss_inputs=())


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with so many positional arguments; yes if it does not say."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        inspect.signature(called).bind(*[None] * count)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)
    return True


def loss_in_outputs(outputs: Any) -> Any:
    """The loss that a model has computed itself. Raises SpecError if the output holds no loss."""
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 0:
        return outputs
    found = getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, Mapping):
        found = outputs.get("loss")
    if found is None and isinstance(outputs, (tuple, list)) and outputs:
        # The first of them, as transformers returns it, or the only scalar that backward can begin at.
        scalars = [x for x in outputs if isinstance(x, torch.Tensor) and x.dim() == 0]
        able = [x for x in scalars if x.requires_grad]
        found = outputs[0] if scalars and scalars[0] is outputs[0] else able[0] if len(able) == 1 else None
    if found is None:
        shape = f" of shape {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else ""
        raise SpecError(
            f"no loss function was given and the model returned a {type(outputs).__name__}{shape} without a "
            "loss; return a scalar, something with a .loss, or give build() a loss function to return."
        )
    return found


def to_device(batch: Any, device: str, fake_mode: Any | None) -> Any:
    """The batch with its tensors on `device`, made fake if `fake_mode` is given. Mappings become dicts, and a list of
    another class as the whole batch a list. What is there twice stays one tensor. Raises SpecError if it holds a
    nested tensor.
    """
    if isinstance(batch, Mapping):
        batch = dict(batch)
    elif isinstance(batch, list):
        batch = list(batch)

    moved: dict[int, torch.Tensor] = {}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return pytree.tree_map(move, dict(leaf))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_nested:
            raise SpecError(
                "the batch holds a nested tensor, whose rows differ in length; pad it (torch.nested.to_padded_tensor) "
                "and give the lengths or a mask beside it."
            )
        if id(leaf) not in moved:
            held = leaf
            if fake_mode is not None and not isinstance(leaf, FakeTensor):
                held = fake_mode.from_tensor(leaf)
            moved[id(leaf)] = held.to(device)
        return moved[id(leaf)]

    return pytree.tree_map(move, batch)

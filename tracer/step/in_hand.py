"""A training step of objects that the user holds: of copies of model, loss and optimizer, so that hers do not change.

Under a fake mode a copy takes no memory: every parameter and buffer of it is a fake tensor with the sizes, strides and
shared storages of the real one, wherever that is (CPU, CUDA or meta). On a real device the copy has the values too.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tracer.step.context import detect_fake_mode
from tracer.step.loop import TrainingStep
from tracer.step.optimizers import NO_OPTIMIZER, make_optimizer
from tracer.step.release import hands_over
from tracer.step.user_errors import first_line
from tracer.step.user_step import UserStep
from tracer.torch_api import is_traceable_wrapper_subclass, pytree, replaced, unset_fake_temporarily
from traces.errors import SpecError
from traces.model_spec import IN_HAND


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InHand(UserStep):
    """Objects that make up a training step; see `tracer.api.trace`."""

    model: Any
    batch: Any
    loss: Any
    optimizer: Any
    # The loop's hooks step the parameters, in place of the user's, which are not copied.
    released: bool = False

    @property
    def label(self) -> str:
        return f"{IN_HAND}{type(self.model).__name__}"

    def step(self, device: str) -> TrainingStep:
        """A training step of copies on `device`, fake under a fake mode. Raises SpecError: something is of the wrong
        kind, or cannot be copied; CaptureError: the loss or what makes the optimizer reads values, which fakes lack.
        """
        self._check(self.model, self.loss)
        for name, p in self.model.named_parameters():
            if not self.released and hands_over([p]):
                raise SpecError(
                    f"{self.label}: the parameter {name} has a hook that runs when its gradient is there "
                    "(register_post_accumulate_grad_hook), which a trace's copies do not. If it steps the parameter "
                    "and frees the gradient, give release_gradients=True and the optimizer; else take it off."
                )
        twins = _Twins(self.label, device)
        for module in (self.model, self.loss):
            if isinstance(module, nn.Module):
                for name, x in (*module.named_parameters(), *module.named_buffers()):
                    twins.add(x, name)
        with twins.for_attributes():
            model = self._copy("model", self.model, twins.memo)
            loss = self._copy("loss", self.loss, twins.memo)
            optimizer: Any = self.optimizer
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer = self._optimizer_copy(optimizer, twins)
        if isinstance(optimizer, str):
            optimizer = None if optimizer == NO_OPTIMIZER else partial(make_optimizer, optimizer)
        return self._assemble(model, twins.batch(self.batch), loss, optimizer, {}, device)

    def _copy(self, what: str, value: Any, memo: dict[int, Any]) -> Any:
        try:
            return copy.deepcopy(value, memo)
        except Exception as error:
            raise SpecError(
                f"{self.label}: the {what} cannot be copied ({type(error).__name__}: {first_line(error)}), and "
                "a trace leaves yours as it is by copying it; take it off while you trace, or give its class a "
                "__deepcopy__, or write a function that makes the step and trace that: my_training.py:build."
            ) from error

    def _optimizer_copy(self, optimizer: torch.optim.Optimizer, twins: _Twins) -> torch.optim.Optimizer:
        """The optimizer over the copies, before its first step: with its groups, and without state."""
        kind, memo = type(optimizer), twins.memo
        made: torch.optim.Optimizer = object.__new__(kind)
        memo[id(optimizer)], memo[id(optimizer.state)] = made, defaultdict(dict)
        for group in optimizer.param_groups:
            for x in pytree.tree_leaves({k: v for k, v in group.items() if k != "params"}):
                if isinstance(x, torch.Tensor):
                    memo[id(x)] = twins.with_value(x)
            for p in group["params"]:
                twins.add(p, "of the optimizer")
        for name, value in vars(optimizer).items():
            # A learning rate scheduler wraps the optimizer's `step` in one that counts, and refers to the real one.
            if not (callable(value) and hasattr(kind, name)):
                vars(made)[name] = self._copy(f"optimizer's {name}", value, memo)
        return made


class _Twins:
    """Stand-ins for the user's tensors in the copies: tensors that share storages as hers do.

    `memo` is that of `copy.deepcopy`: the id of a tensor -> its twin.
    """

    def __init__(self, label: str, device: str) -> None:
        self.memo: dict[int, Any] = {}
        self._label = label
        self._device = torch.device(device)
        self._mode = detect_fake_mode()
        self._storages: dict[int, torch.UntypedStorage] = {}  # by the address of the real one

    def add(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The twin of a parameter or buffer, made when it is first asked for."""
        if id(x) in self.memo:
            return self.memo[id(x)]
        if is_traceable_wrapper_subclass(x) or x.layout != torch.strided:
            raise SpecError(
                f"{self._label}: {name} is a {type(x).__name__} of the layout {x.layout}; only plain dense tensors "
                "can be planned."
            )
        if self._mode is None and x.is_meta:
            raise SpecError(
                f"{self._label}: {name} is on the device meta and has no values to run with; leave device= out."
            )
        storage = x.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = self._storage(storage, x.device)
        twin = torch.empty(0, dtype=x.dtype, device=self._device)
        twin.set_(self._storages[storage._cdata], x.storage_offset(), x.size(), x.stride())
        if isinstance(x, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=x.requires_grad)
            vars(twin).update(vars(x))  # such as marks for the optimizer
        else:
            twin.requires_grad_(x.requires_grad)
        self.memo[id(x)] = twin
        return twin

    def _storage(self, storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
        if self._mode is not None:
            return torch.empty(storage.nbytes(), dtype=torch.uint8, device=self._device).untyped_storage()
        values = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        return values.to(self._device, copy=True).untyped_storage()

    def with_value(self, x: torch.Tensor) -> torch.Tensor:
        """A twin that has its value under a fake mode too, for what an optimizer's settings hold."""
        if self._mode is None or x.is_meta:
            return self.add(x, "a setting of the optimizer")
        with unset_fake_temporarily():
            real = x.detach().to("cpu", copy=True)
        convert: Callable[..., torch.Tensor] = self._mode.fake_tensor_converter.from_real_tensor
        return convert(self._mode, real, make_constant=True)

    @contextmanager
    def for_attributes(self) -> Iterator[None]:
        """While the body copies: tensors that are no parameter and no buffer of a registered module, but an attribute.

        They are constants of the model. Under a fake mode they are left where they are, since nothing writes into real
        tensors there; one on another device has a fake twin.
        """

        def deepcopy(x: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
            here = self._mode is not None and x.device.type == self._device.type
            own = x if isinstance(x, nn.Parameter) else x.detach()
            return x if here else self.add(own, "a tensor of the model")

        class Copying(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return (deepcopy if func is torch.Tensor.__deepcopy__ else func)(*args, **(kwargs or {}))

        with Copying(), replaced(nn.Parameter, __deepcopy__=deepcopy):
            yield

    def batch(self, batch: Any) -> Any:
        """The batch, with tensors that a real step may write into."""
        if self._mode is not None:
            return batch

        @cache  # what is there twice stays one tensor
        def own(x: torch.Tensor) -> torch.Tensor:
            return x.detach().to(self._device, copy=True).requires_grad_(x.requires_grad)

        return pytree.tree_map_only(torch.Tensor, own, batch)

"""Put around a capture what it needs: fake parameters, module paths on the nodes, library code in its plain path."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.fx import traceback as fx_traceback

from tracer.capture.refusals import check_statistics
from tracer.capture.torch_fixes.dropout import idle_dropout
from tracer.capture.torch_fixes.grouped import true_results
from tracer.capture.torch_fixes.recurrent import trainable_layers
from tracer.capture.torch_fixes.whole_kernels import whole_kernels
from tracer.torch_api import CAPTURING, BatchNorm, FakeTensor, FakeTensorMode, dynamo_utils, pytree, replaced


def fake_mode_of(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> FakeTensorMode | None:
    for x in (*model.parameters(), *model.buffers(), *pytree.tree_leaves((args, kwargs))):
        if isinstance(x, FakeTensor):
            return x.fake_mode
    return None


@contextlib.contextmanager
def fake_constants() -> Iterator[None]:
    """In the body, a graph may have fake parameters as constants: of a model that was built of fakes, those of a frozen
    module in a list. torch refuses them, as it does other fake tensors, which caches leave behind."""
    check = dynamo_utils.assert_no_fake_params_or_buffers

    def but_for_parameters(graph: nn.Module) -> None:
        try:
            check(graph)
        except AssertionError as error:
            if "fake param" not in str(error):
                raise

    with replaced(dynamo_utils, assert_no_fake_params_or_buffers=but_for_parameters):
        yield


@contextlib.contextmanager
def fake_parameters(
    flat: nn.Module, mode: FakeTensorMode
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Swap real parameters and buffers for fake ones while the body runs; yields the converter."""
    converted: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []

    def fake(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, FakeTensor):
            x.constant = None  # a value from the time of building, which training may change
            return x
        if id(x) not in converted:
            leaf = x if x.is_leaf else x.detach().requires_grad_(x.requires_grad)  # of another, torch warns
            y = mode.from_tensor(leaf, static_shapes=True)
            if isinstance(x, nn.Parameter) and not isinstance(y, nn.Parameter):
                y = nn.Parameter(y, requires_grad=x.requires_grad)
            converted[id(x)] = y
            keep.append(x)
        return converted[id(x)]

    swapped: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in flat.modules():
            for slots in (module._parameters, module._buffers):
                for name, x in slots.items():
                    if x is not None and fake(x) is not x:
                        swapped.append((slots, name, x))
                        slots[name] = fake(x)
        yield fake
    finally:
        for slots, name, x in swapped:
            slots[name] = x


def tied_slots(model: nn.Module) -> list[tuple[dict[str, Any], str, dict[str, Any], str]]:
    """Slots that hold the same parameter as an earlier slot: (slots, name, first slots, first name)."""
    first: dict[int, tuple[dict[str, Any], str]] = {}
    ties = []
    for kind in ("_parameters", "_buffers"):
        for module in model.modules():
            slots = getattr(module, kind)
            for name, x in slots.items():
                if x is None:
                    continue
                if id(x) in first:
                    ties.append((slots, name, *first[id(x)]))
                else:
                    first[id(x)] = (slots, name)
    return ties


@contextlib.contextmanager
def retied(ties: list[tuple[dict[str, Any], str, dict[str, Any], str]]) -> Iterator[None]:
    """Inside the export only the first slot of a shared parameter holds the traced one: copy it to the others."""
    saved = [(slots, name, slots[name]) for slots, name, _, _ in ties]
    for slots, name, first_slots, first_name in ties:
        slots[name] = first_slots[first_name]
    try:
        yield
    finally:
        for slots, name, x in saved:
            slots[name] = x


@contextlib.contextmanager
def module_scopes(model: nn.Module) -> Iterator[None]:
    """Annotate every node with the path of the innermost module that ran it (`meta["custom"]["module"]`)."""
    open_scopes: list[Any] = []
    handles = []
    for path, module in model.named_modules():

        def enter(module: nn.Module, _args: Any, path: str = path) -> None:
            if isinstance(module, BatchNorm):
                check_statistics(module, path)
            scope = fx_traceback.annotate({"module": path})
            scope.__enter__()
            open_scopes.append(scope)

        def leave(_module: nn.Module, _args: Any, _outputs: Any) -> None:
            open_scopes.pop().__exit__(None, None, None)

        enter._lowtide_scope = leave._lowtide_scope = True  # type: ignore[attr-defined]  # no hooks of the user's
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        # Forward failed; torch may have put its notes back already, and 2.11 then finds none.
        while open_scopes:
            with contextlib.suppress(KeyError):
                open_scopes.pop().__exit__(None, None, None)


def forget_constants(fake_mode: FakeTensorMode) -> None:
    """Let go of the small real tensors whose values fake ones know: who holds such a fake one, as an object does that
    the model returned, would hold memory of the model's device."""
    for known in fake_mode.fake_tensor_converter.constant_storage_mapping.values():
        for ref in known:
            if (x := ref()) is not None:
                x.constant = None


@contextlib.contextmanager
def as_compiled() -> Iterator[None]:
    """Library code takes the branches that do not look at data."""
    with replaced(torch.compiler, _is_compiling_flag=True):
        yield


@contextlib.contextmanager
def library_code() -> Iterator[None]:
    """Answer what libraries ask about the data of masks, where the answer is known, and mend what they leave out."""
    with (
        _unpacked_sequences(),
        _causal_masks(),
        trainable_layers(),
        whole_kernels(),
        idle_dropout(),
    ):
        yield


@contextlib.contextmanager
def _causal_masks() -> Iterator[None]:
    """torch's transformer stacks compare a mask with a causal one; a mask that torch's own function made is one.

    Of a mask that came about otherwise they ask its data, as ever.
    """
    stacks: Any = nn.modules.transformer
    make, ask = stacks._generate_square_subsequent_mask, stacks._detect_is_causal_mask

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        mask: torch.Tensor = make(*args, **kwargs)
        mask._lowtide_causal = True
        return mask

    def asked(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is None and getattr(mask, "_lowtide_causal", False):
            assert mask is not None
            return mask.shape[-2:] == (size or mask.shape[-2],) * 2
        return bool(ask(mask, is_causal, size))

    with replaced(stacks, _generate_square_subsequent_mask=made, _detect_is_causal_mask=asked):
        yield


@contextlib.contextmanager
def known_to_dynamo(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """In the body, a call that torch.compile may capture finds what `library_code` and `true_results` say. Transformers
    takes positions that a model makes itself for those of one sequence, as they are: it looks into them for packed
    sequences, and where it cannot, in a graph, masks for any.

    Threads may be in the body together.

    Args:
        kwargs: of the call; positions among them are the user's, and may be of packed sequences.
    """
    both = [_results, _positions] if "position_ids" not in kwargs else [_results]
    with contextlib.ExitStack() as stack:
        for shared in both:
            stack.enter_context(shared.body())
        yield


class _Shared:
    """A context that is entered once for all threads in its body, and left by the last of them."""

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self.context, self.inside, self.stack = context, 0, contextlib.ExitStack()

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        with CAPTURING:
            self.inside += 1
            if self.inside == 1:
                self.stack.enter_context(self.context())
        try:
            yield
        finally:
            with CAPTURING:
                self.inside -= 1
                if not self.inside:
                    self.stack.close()


@contextlib.contextmanager
def _unpacked_sequences() -> Iterator[None]:
    """transformers looks into the position ids for packed sequences; without any (the eager answer here), None."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "find_packed_sequence_indices"):
        yield
        return
    with replaced(masking, find_packed_sequence_indices=lambda position_ids: None):
        yield


_results: Final = _Shared(true_results)
_positions: Final = _Shared(_unpacked_sequences)

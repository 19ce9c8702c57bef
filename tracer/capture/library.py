"""Put around a capture what makes its ops those that eager runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from tracer.capture.torch_fixes.grouped import true_results
from tracer.torch_api import CAPTURING, RandomVariable, replaced

OUTPUTS: Final = ("output_hidden_states", "output_attentions")


@contextlib.contextmanager
def known_to_dynamo(kwargs: Mapping[str, Any]) -> Iterator[None]:
    """In the body, a call that torch.compile may capture finds what `true_results` and `_checks_as_ops` say.
    Transformers takes positions that a model makes itself for those of one sequence, as they are: it looks into them
    for packed sequences, and where it cannot, in a graph, masks for any.

    Threads may be in the body together.

    Args:
        kwargs: of the call; positions among them are the user's, and may be of packed sequences.
    """
    contexts = [*_always, *([_positions] if "position_ids" not in kwargs else [])]
    with contextlib.ExitStack() as stack:
        for shared in contexts:
            stack.enter_context(shared.body())
        yield


def record_outputs(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Let a model of transformers record the outputs that a call asks for, or one of its models of another: the hooks
    for that it would put there itself in its first call, under a lock, which dynamo cannot capture."""
    recording: Any = sys.modules.get("transformers.utils.output_capturing")
    if recording is None:
        return
    from transformers import PreTrainedModel

    for m in model.modules():
        if isinstance(m, PreTrainedModel):
            asked = [kwargs.get(name, getattr(m.config, name, False)) for name in OUTPUTS]
            if any(asked) or m.config.sub_configs:
                recording.maybe_install_capturing_hooks(m)


@contextlib.contextmanager
def _checks_as_ops() -> Iterator[None]:
    """What a library has torch check of a tensor's values, as that its images have as many tokens as features, is an op
    of the graph, and no number that Python reads. Nothing is exported."""

    def check(cond: torch.Tensor, message: Any = None) -> None:
        torch.ops.aten._assert_async.msg(
            torch.ops.aten._is_all_true.default(cond), "a check of the model failed"
        )

    # Dynamo of torch 2.11 says of every capture that it exports, and transformers then makes each mask.
    with replaced(torch, _check_tensor_all=check), replaced(torch.compiler, is_exporting=lambda: False):
        yield


def _no_dice() -> contextlib.AbstractContextManager[None]:
    """Refuse Python's generators, which dynamo would set back to where they are now, in every call."""
    make = RandomVariable.__init__

    def refuse(self: Any, rand: Any = None, seed: Any = None, **kwargs: Any) -> None:
        if rand is not None:
            raise NotImplementedError(
                "no graph keeps the state of a random.Random, nor of Python's own (random.sample); draw from torch"
            )
        make(self, rand, seed, **kwargs)

    return replaced(RandomVariable, __init__=refuse)


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


def _unpacked_sequences() -> contextlib.AbstractContextManager[None]:
    """transformers looks into the position ids for packed sequences; without any (the eager answer here), None."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or not hasattr(masking, "find_packed_sequence_indices"):
        return contextlib.nullcontext()
    return replaced(masking, find_packed_sequence_indices=lambda position_ids: None)


_always: Final = [_Shared(true_results), _Shared(_checks_as_ops), _Shared(_no_dice)]
_positions: Final = _Shared(_unpacked_sequences)

"""Capture `nn.LSTM`, `nn.GRU` and `nn.RNN` as the one op of cuDNN's that a GPU runs for them, `aten._cudnn_rnn`.

On a GPU, `flatten_parameters` has put a module's weights into one buffer, of which the op gets a view; weights that lie
otherwise it copies into a buffer in each call (aten/src/ATen/native/RNN.cpp and cudnn/RNN.cpp: `_cudnn_impl`,
`try_get_weight_buf`).

Counts: layers whose input, states and weights are of one type. Ignores: dropout in training, whose random state cuDNN
keeps to itself, autocast and packed sequences; these are captured as elementary ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from tracer.cudnn import flat_weights, steps, temporary_bytes
from tracer.precision.cast_cache import kernels
from tracer.torch_api import (
    BypassDispatchCache,
    DispatchKey,
    FakeTensorMode,
    FunctionalTensor,
    fake_impls,
    from_functional,
    replaced,
)
from traces.devices import Device

aten = torch.ops.aten
CELLS: Final = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # by their numbers in cuDNN
# What cuDNN takes (aten/src/ATen/native/Cudnn.cpp: cudnn_is_acceptable), and what `flatten_parameters` does of that.
TYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLATTENED: Final = (torch.float16, torch.float32, torch.float64)


@contextlib.contextmanager
def recurrent_kernels(target: Device | None, *, eager: bool) -> Iterator[None]:
    """In the body, recurrent layers are cuDNN's op where torch takes it on a GPU.

    Args:
        target: the GPU that CPU tensors stand for; None: they are on CUDA.
        eager: whether layers that cuDNN does not take are run by torch's own code, and not taken apart as in a capture.
    """

    def layer(cell: int) -> Callable[..., Any]:
        op = getattr(aten, CELLS[cell]).input

        def run(*args: Any) -> Any:
            x, states, weights, biases, layers, dropout, train, both, batch_first = args
            if not _taken(x, weights, dropout if train else 0.0):
                key = DispatchKey.CompositeImplicitAutograd
                return op._op_dk(key, *args) if eager else op.py_kernels[key](*args)
            hx, cx = states if CELLS[cell] == "lstm" else (states, None)
            hidden, projection = hx.shape[2], 0
            if cx is not None and cx.shape[2] != hidden:
                hidden, projection = cx.shape[2], hidden
            shape = cell, x.shape[-1], hidden, projection, layers, 1 + both
            each = (4 if biases else 2) + (projection > 0)
            out = aten._cudnn_rnn.default(
                x, weights, each, _buffer(weights, each, *shape), hx, cx, cell, hidden, projection, layers,
                batch_first, dropout, train, both, [], None,
            )  # fmt: skip
            return out[: 2 + (cx is not None)]

        return run

    layers = {f"{name}.input": layer(cell) for cell, name in enumerate(CELLS)}
    with kernels("AutogradCUDA" if target is None else "AutogradCPU", layers):
        yield


def _taken(x: torch.Tensor, weights: Sequence[torch.Tensor], dropout: float) -> bool:
    autocast = torch.is_autocast_enabled(x.device.type)
    return (
        torch.backends.cudnn.enabled
        and x.dtype in TYPES
        and x.numel() > 0
        and not dropout
        and not autocast
        and all(w.dtype == x.dtype for w in weights)
    )


def flatten(model: nn.Module) -> None:
    """Put the weights of each recurrent layer into one storage, as `flatten_parameters` does on CUDA alone."""
    for m in model.modules():
        weights = getattr(m, "_flat_weights", ()) if isinstance(m, nn.RNNBase) else ()
        tensors = all(isinstance(w, torch.Tensor) for w in weights)
        if not weights or not tensors or not torch.backends.cudnn.enabled:
            continue
        kinds, storages = {w.dtype for w in weights}, {w.untyped_storage()._cdata for w in weights}
        if len(kinds) > 1 or not kinds <= {*FLATTENED} or len(storages) < len(weights):
            continue
        shape = (
            CELLS.index(m.mode.lower()),
            m.input_size,
            m.hidden_size,
            m.proj_size,
            m.num_layers,
            1 + m.bidirectional,
        )
        elements, places = _places(len(weights) // (m.num_layers * (1 + m.bidirectional)), *shape)
        with torch.no_grad():
            whole = weights[0].new_zeros(elements)
            for w, at in zip(weights, places, strict=True):
                w.data = whole.as_strided(w.shape, w.stride(), at)


def _places(each: int, *shape: int) -> tuple[int, list[int]]:
    """Elements of the buffer of weights, and where each of them begins; `each` says how many a layer has."""
    elements, rows = flat_weights(*shape)
    return elements, [at for row in rows for at in (row if each > 3 else [*row[:2], *row[4:]])]


def _buffer(weights: Sequence[torch.Tensor], each: int, *shape: int) -> torch.Tensor | None:
    """The one buffer of the weights, if they lie in it as cuDNN has them."""
    elements, places = _places(each, *shape)
    plain = [from_functional(w.elem) if isinstance(w, FunctionalTensor) else w for w in weights]
    # Not by the storage's size: torch 2.11 gives fake copies of real weights one that ends with the last of them.
    together = len({w.untyped_storage()._cdata for w in plain}) == 1
    in_place = [w.storage_offset() for w in plain] == places and all(w.is_contiguous() for w in plain)
    if not together or not in_place:
        return None
    return weights[0].detach().as_strided((elements,), (1,), 0)


@contextlib.contextmanager
def recurrent_results() -> Iterator[None]:
    """In the body, fake tensors know cuDNN's op with its reserve, and its backward."""
    known = fake_impls.op_implementations_dict
    own = {aten._cudnn_rnn.default: _forward, aten._cudnn_rnn_backward.default: _backward}
    remembered = FakeTensorMode._validate_cache_key

    def not_remembered(self: Any, func: Any, *args: Any) -> None:
        if func in own:
            raise BypassDispatchCache("its results share storages with each other or with its arguments")
        remembered(self, func, *args)

    known.update(own)
    try:
        with replaced(FakeTensorMode, _validate_cache_key=not_remembered):
            yield
    finally:
        for op in own:
            known.pop(op, None)


def _forward(
    mode: Any, func: Any, x: torch.Tensor, weights: Any, each: int, buffer: Any, hx: torch.Tensor, cx: Any,
    cell: int, hidden: int, projection: int, layers: int, batch_first: bool, dropout: float, train: bool,
    both: bool, batch_sizes: Any, state: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    ways, wide = 1 + both, (projection or hidden) * (1 + both)
    longest, batch = steps(x, batch_first, batch_sizes)
    y = x.new_empty((*x.shape[:-1], wide) if batch_sizes else (longest, batch, wide))
    kept = temporary_bytes(cell, hidden, layers, ways, longest, batch, x.element_size())[1]
    return (
        y.transpose(0, 1) if batch_first and not batch_sizes else y,
        hx.new_empty(layers * ways, batch, projection or hidden),
        hx.new_empty(0) if cx is None else cx.new_empty(layers * ways, batch, hidden),
        x.new_empty(kept if train else 0, dtype=torch.uint8),
        x.new_empty(flat_weights(cell, x.shape[-1], hidden, projection, layers, ways)[0])
        if buffer is None
        else buffer.view(buffer.shape),
    )


def _backward(
    mode: Any, func: Any, x: torch.Tensor, weights: Any, each: int, buffer: Any, hx: torch.Tensor, cx: Any,
    y: Any, dy: Any, dhy: Any, dcy: Any, cell: int, hidden: int, projection: int, layers: int,
    batch_first: bool, dropout: float, train: bool, both: bool, batch_sizes: Any, state: Any, reserve: Any,
    wanted: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    turned = batch_first and not batch_sizes
    dx = x.new_empty((x.shape[1], x.shape[0], x.shape[2])).transpose(0, 1) if turned else x.new_empty(x.shape)
    gradients = []
    if wanted[3]:
        elements, places = _places(each, cell, x.shape[-1], hidden, projection, layers, 1 + both)
        whole = buffer.new_empty(elements)  # of which gradients are parts, unless weights without biases are
        contiguous = (torch.empty(w.shape, device="meta").stride() for w in weights)
        gradients = [
            whole.as_strided(w.shape, stride, at) if each > 3 else w.new_empty(w.shape)
            for w, stride, at in zip(weights, contiguous, places, strict=True)
        ]
    return dx, hx.new_empty(hx.shape), None if cx is None else cx.new_empty(cx.shape), gradients

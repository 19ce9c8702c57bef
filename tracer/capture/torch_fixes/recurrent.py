"""Mend torch's decomposition of `nn.LSTM`, `nn.GRU` and `nn.RNN` for training.

Both are in `torch/_decomp/decompositions.py` of torch 2.11 to 2.15. `_rnn_helper` compares the layer's number the wrong
way round, so that a stack of layers would train without the dropout between them. `select_one_layer_lstm_function`
takes oneDNN's kernel for an LSTM whose input requires no gradient, in its form for inference, whose backward fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tracer.torch_api import decompositions, replaced


@contextlib.contextmanager
def trainable_layers() -> Iterator[None]:
    """In the body, recurrent layers are decomposed into elementary ops, with their dropout."""
    stack = decompositions._rnn_helper

    def layer_by_layer(
        x: torch.Tensor,
        hidden: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer_fn: Any,
    ) -> tuple[torch.Tensor, list[Any]]:
        x = x.transpose(0, 1) if batch_first else x
        last: list[Any] = []
        each = 2 if bidirectional else 1
        for k in range(num_layers):
            own = slice(k * each, (k + 1) * each)
            x, finals = stack(
                x, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer_fn
            )
            last += finals
            if dropout and train and k < num_layers - 1:
                x = torch.dropout(x, dropout, train=True)
        return (x.transpose(0, 1) if batch_first else x), last

    with replaced(
        decompositions,
        _rnn_helper=layer_by_layer,
        select_one_layer_lstm_function=lambda *_: decompositions.one_layer_lstm,
    ):
        yield

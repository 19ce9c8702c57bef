"""Split dropout into its random mask and the deterministic rest, so that its output can be recomputed from the mask.

`aten.native_dropout` returns output and mask from one random op; nothing that it makes could ever run again. On the
CPU its kernel is `mask = empty.bernoulli_(1 - p); output = input.mul(mask).mul_(1 / (1 - p))`; written as three ops,
the same numbers come out, bit by bit, and only the first of them is random.
"""

from __future__ import annotations

import torch
from torch import fx

from tracer.torch_api import unset_fake_temporarily

aten = torch.ops.aten


def draw(x: torch.Tensor, p: float) -> torch.Tensor:
    """The bool mask that `aten.native_dropout(x, p, True)` would draw, from the same random stream."""
    if x.device.type == "cpu":
        return torch.empty_like(x, dtype=torch.bool).bernoulli_(1.0 - p)
    # Other devices draw the mask inside a fused kernel; its output is dropped here.
    return torch.native_dropout(x, p, True)[1]


RANDOM = (torch.Tag.nondeterministic_seeded,)
dropout_mask = torch.library.custom_op("lowtide::dropout_mask", draw, mutates_args=(), tags=RANDOM)


@dropout_mask.register_fake
def _(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def _scale(p: float, x: torch.Tensor) -> float:
    """Return what a kept element is multiplied by.

    Eager dropout on the CPU multiplies by a tensor of `1 / (1 - p)` in the input's own precision, so in bfloat16 the
    factor itself is rounded; the fused kernels of other devices take it in full.
    """
    if x.device.type != "cpu":
        return 1.0 / (1.0 - p)
    with unset_fake_temporarily():
        return float(torch.ones((), dtype=x.dtype).div_(1.0 - p))


def split_dropout(graph: fx.Graph) -> None:
    """Replace every training `native_dropout` whose probability lies strictly between 0 and 1."""
    for n in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = n.args
        if train is not True or not 0.0 < p < 1.0:
            continue
        val_out, val_mask = n.meta["val"]
        scale = _scale(p, val_out)
        with graph.inserting_before(n):
            mask = graph.call_function(torch.ops.lowtide.dropout_mask.default, (x, p))
            kept = graph.call_function(aten.mul.Tensor, (x, mask))
            out = graph.call_function(aten.mul.Scalar, (kept, scale))
        for new, val in ((mask, val_mask), (kept, val_out), (out, val_out)):
            new.meta = {k: v for k, v in n.meta.items() if k in ("custom", "seq_nr", "partitioner_tag")}
            new.meta["val"] = val
        for part in list(n.users):
            for user in list(part.users):
                if user.target is aten.native_dropout_backward.default and user.args[1] is part:
                    user.update_arg(2, scale)
            part.replace_all_uses_with((out, mask)[part.args[1]])
            graph.erase_node(part)
        graph.erase_node(n)

"""Keep outputs that share memory apart while a model is exported, so that each can have a gradient of its own.

The export gives no gradient to an output that is a view of another output, or of an argument or a parameter: whoever
calls it is to make the view again. A loss may differentiate both (a similarity matrix and its transpose, say). So such
an output leaves the export as a clone, whose place its source takes in the captured graph: nothing is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx


def shared(outputs: Sequence[torch.Tensor], given: Iterable[torch.Tensor]) -> list[bool]:
    """For each output, whether its memory is also another output's or that of one of `given`."""
    taken = Counter(_key(x) for x in outputs)
    there = {_key(x) for x in given}
    return [taken[_key(x)] > 1 or _key(x) in there for x in outputs]


def without_clone(node: fx.Node | None) -> fx.Node | None:
    """What an output was cloned from; the clone goes if only the graph's output takes it."""
    if node is None or node.target is not torch.ops.aten.clone.default:
        return node
    source = node.args[0]
    assert isinstance(source, fx.Node)
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    return source


def _key(x: torch.Tensor) -> int:
    return int(x.untyped_storage()._cdata)

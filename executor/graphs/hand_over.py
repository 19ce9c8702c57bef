"""Gradients that reach their parameters one by one while a planned backward runs, in a loop that frees each there.

To autograd a planned backward is one function, whose gradients all appear when it ends. Where a hook steps the
parameter and frees its gradient (`register_post_accumulate_grad_hook`), autograd is called from inside that function
for each parameter once its gradient exists and nothing reads the parameter any more (reentrant backward).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from executor.rewrite import HANDED
from tracer.step.release import check_alone, hand
from tracer.torch_api import BoxedCodeGen
from traces.errors import PlanError

Backward = Callable[[list[Any]], Sequence[torch.Tensor | None]]
_variants: WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = WeakKeyDictionary()


def backward(
    module: fx.GraphModule, parameters: Sequence[nn.Parameter], places: Sequence[int], values: list[Any]
) -> Sequence[torch.Tensor | None]:
    """Run a backward, hand the parameters their gradients meanwhile, and return the others, with None in the places of
    the parameters' own.
    """
    check_alone(parameters, PlanError)
    made: dict[int, torch.Tensor] = {}
    # Not a second list, which would hold the values until the end.
    values[:0] = [made.__setitem__, lambda k: hand(parameters[k], [made.pop(k)])]
    return _handing(module, places)(values)


def _handing(module: fx.GraphModule, places: Sequence[int]) -> Backward:
    """Return the same backward, which takes `put` and `go` first and calls them for each parameter's gradient once it
    exists and nothing reads the parameter any more.

    Between the two the value's name in the generated code is freed. Returns the other gradients.
    """
    made = _variants.get(module)
    if made is None:
        graph = fx.Graph()
        put, go = graph.placeholder("lowtide_put"), graph.placeholder("lowtide_go")
        copies: dict[fx.Node, fx.Node] = {}
        gradients = list(graph.graph_copy(module.graph, copies))
        left = {k: gradients[place] for k, place in enumerate(places) if gradients[place] is not None}
        for n in list(graph.nodes):
            for k in sorted(left.keys() & n.meta.get(HANDED, ())):
                for call in ((put, k, left.pop(k)), (go, k)):
                    with graph.inserting_after(n):
                        n = graph.call_function(operator.call, call)
        for k, g in left.items():  # made before backward, and read by no op of it
            for call in ((put, k, g), (go, k)):
                graph.call_function(operator.call, call)
        for place in places:
            gradients[place] = None
        graph.output(tuple(gradients))
        graph.set_codegen(BoxedCodeGen())
        graph.lint()
        made = _variants[module] = fx.GraphModule(module, graph, class_name="LowtideBackwardHandingOver")
    return made

"""Gradients that reach their parameters one by one while a planned backward runs, as DistributedDataParallel needs.

To autograd a planned backward is one function, whose gradients all appear when it ends; the buckets of a
DistributedDataParallel would then be summed up one after another with nothing left to compute meanwhile. Here autograd
is called from inside that function for each parameter as soon as its gradient exists (reentrant backward), so that
what hangs on the parameter runs: accumulation, hooks, and the reduction of a bucket that is full. Each parameter is
handed its gradient once for a backward, however often the module was called before it, as the reducer expects.

So it is by a plan of a loop that frees each gradient in backward, where a hook steps the parameter
(`register_post_accumulate_grad_hook`): not before the last op that reads the parameter has run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from executor.rewrite import HANDED
from tracer.step.release import hand, hands_over
from tracer.torch_api import BoxedCodeGen, execution_engine
from traces.errors import PlanError

Backward = Callable[[list[Any]], Any]
_variants: WeakKeyDictionary[fx.GraphModule, fx.GraphModule] = WeakKeyDictionary()


def wanted(module: nn.Module | None, parameters: Sequence[torch.Tensor], released: bool) -> bool:
    """True if a module is being called by a DistributedDataParallel that reduces gradients as they come; or by none,
    its parameters have hooks that wait for them, and the plan is of a loop that frees gradients there (`released`).

    One that looks for unused parameters walks autograd's graph to them, and one with a static graph learns the order in
    which a whole backward brings them; both get them at the end.
    """
    around = DistributedDataParallel._active_ddp_module
    if around is None:
        return released and hands_over(parameters)
    return around.module is module and not around.find_unused_parameters and not around.static_graph


@dataclass(eq=False)
class Pool:
    """The calls of one module whose backward is to come, and what those that ran have left for the last of them."""

    pending: WeakSet[Any] = field(default_factory=WeakSet)
    open: int = 0  # calls whose backward has not run, dropped ones too
    sums: dict[int, tuple[nn.Parameter, torch.Tensor]] = field(default_factory=dict)  # by the parameter's id

    def add(self, call: Any) -> None:
        """Await the backward of a call."""
        self.pending.add(call)
        self.open += 1

    def check_none_dropped(self) -> None:
        """Raise PlanError, once, if a call was dropped without its backward, as where that is given `inputs=`: autograd
        sees no way from the loss to the parameters, and runs nothing.
        """
        dropped, self.open = self.open > len(self.pending), len(self.pending)
        if dropped:
            raise PlanError(
                "an earlier training call was dropped before its backward ran, so that no parameter got a gradient of "
                "it. backward(inputs=...) does that where the plan is of a loop that frees gradients: call backward() "
                "without inputs. If the call needs no backward, run it inside `with unplanned(model):`."
            )

    def backward(
        self,
        call: Any,
        module: fx.GraphModule,
        parameters: Sequence[nn.Parameter],
        places: Sequence[int],
        values: list[Any],
    ) -> Sequence[torch.Tensor | None]:
        """Run the backward of a call, which is pending, and hand its parameters their gradients.

        Args:
            module: takes `values` in one list, and returns a flat sequence of gradients.
            places: of the parameters' gradients among them.

        Returns:
            that sequence, with None for the parameters.
        """
        self.open -= call in self.pending
        self.pending.discard(call)
        if self.pending:  # maybe in this same backward: nobody knows before its end
            gradients = list(module.forward(values))
            for p, k in zip(parameters, places, strict=True):
                if gradients[k] is not None:
                    self._add(p, gradients[k])
                gradients[k] = None
            execution_engine.queue_callback(self.flush)
            return gradients

        # Not a second list, which would hold the values until the end.
        values[:0] = [lambda k, g: self._add(parameters[k], g), lambda k: self._hand(id(parameters[k]))]
        rest: Sequence[torch.Tensor | None] = _handing(module, places)(values)
        self.flush()
        return rest

    def _add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        known = self.sums.get(id(parameter))
        self.sums[id(parameter)] = parameter, gradient if known is None else known[1] + gradient

    def _hand(self, key: int) -> None:
        hand(self.sums[key][0], [self.sums.pop(key)[1]])

    def flush(self) -> None:
        """Hand over what is left."""
        for key in list(self.sums):
            self._hand(key)


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
            graph.call_function(operator.call, (put, k, g))
        for place in places:
            gradients[place] = None
        graph.output(tuple(gradients))
        graph.set_codegen(BoxedCodeGen())
        graph.lint()
        made = _variants[module] = fx.GraphModule(module, graph, class_name="LowtideBackwardHandingOver")
    return made

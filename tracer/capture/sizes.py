"""One captured graph for calls of many sizes: its numbers are functions of the arguments' sizes, and it says of which.

Captured on sizes that are symbols (torch.fx.experimental.symbolic_shapes), a graph holds for all sizes under which
what was decided while it was captured (the guards) would be decided likewise. A size of one never is a symbol: torch
takes other ops there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

import torch
from sympy import Integer  # type: ignore[import-untyped]
from torch import fx

from tracer.capture.capture import Captured
from tracer.torch_api import ConstantSource, DimDynamic, FakeTensorMode, ShapeEnv, check, pytree
from traces.errors import CaptureError

LARGEST: Final = 2**20  # of a size; below torch's infinity even where three are multiplied, so that x[:] is x
NUMBERS: Final = (int, torch.SymInt, torch.SymFloat, torch.SymBool)
Known = Mapping[Any, Any]  # symbol -> size


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What of a tensor argument enters a graph; sizes and strides may be symbols."""

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, x: torch.Tensor) -> Layout:
        rest = {"dtype": x.dtype, "device": x.device, "requires_grad": x.requires_grad}
        return cls(shape=tuple(x.shape), stride=x.stride(), **rest)

    def made(self, known: Known | None = None) -> torch.Tensor:
        """A tensor that lies so, at sizes that are known."""
        shape, stride = self.shape, self.stride
        if known is not None:
            shape, stride = (tuple(number(n, known) for n in ns) for ns in (shape, stride))
        return torch.empty_strided(
            shape, stride, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that vary, and the mode in which a capture with them is made."""

    mode: FakeTensorMode
    layouts: tuple[Layout, ...]  # of the tensor arguments
    arguments: tuple[torch.Tensor, ...]  # fake

    def known(self, layouts: Sequence[Layout]) -> Known | None:
        """The symbols' values in a call with arguments of these layouts; None: the graph is not for it."""
        known: dict[Any, Any] = {}
        for mine, given in zip(self.layouts, layouts, strict=True):
            for a, b in zip(mine.shape, given.shape, strict=True):
                if isinstance(a, int):
                    if a != b:
                        return None
                elif b < 2 or known.setdefault(a.node._expr, Integer(b)) != b:
                    return None
        for mine, given in zip(self.layouts, layouts, strict=True):
            for n, a, b in zip(given.shape, mine.stride, given.stride, strict=True):
                if n != 1 and number(a, known) != b:
                    return None
        held = all(guard.expr.xreplace(known) == True for guard in self.mode.shape_env.guards)  # noqa: E712  # sympy's
        return known if held else None


def symbolic(calls: Sequence[Sequence[Layout]]) -> Sizes:
    """Arguments whose sizes are symbols where the calls differ; sizes that agree in all calls are one symbol.

    Args:
        calls: the layouts of each call's tensor arguments; decisions are those of the first call.

    Raises:
        CaptureError: an argument whose size varies is laid out with gaps or overlaps.
    """
    env = ShapeEnv(duck_shape=False)
    symbols: dict[tuple[int, ...], Any] = {}

    def size(seen: tuple[int, ...]) -> Any:
        if len(set(seen)) == 1:
            return seen[0]
        if seen not in symbols:
            source = ConstantSource(f"size{len(symbols)}")
            made = env.create_symbol(seen[0], source, DimDynamic.DYNAMIC)
            symbols[seen] = env.create_symintnode(made, hint=seen[0], source=source)
            check(symbols[seen] <= LARGEST)
        return symbols[seen]

    layouts = []
    for same in zip(*calls, strict=True):
        sizes = tuple(map(size, zip(*(x.shape for x in same), strict=True)))
        layouts.append(replace(same[0], shape=sizes, stride=_strides(sizes, same[0])))
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    with mode:
        arguments = tuple(x.made() for x in layouts)
    return Sizes(mode=mode, layouts=tuple(layouts), arguments=arguments)


def _strides(sizes: tuple[Any, ...], given: Layout) -> tuple[Any, ...]:
    """The strides of a tensor with these sizes that is laid out as the given one is, its dimensions in that order."""
    strides: list[Any] = list(given.stride)
    step, symbolic_step = 1, 1
    for d in sorted(range(len(sizes)), key=lambda d: (given.stride[d], given.shape[d])):
        if given.stride[d] == step:
            strides[d] = symbolic_step
        elif given.shape[d] != 1:
            if all(isinstance(n, int) for n in sizes):
                return given.stride
            raise CaptureError("an argument whose size varies is laid out with gaps or overlaps.")
        step, symbolic_step = step * given.shape[d], symbolic_step * sizes[d]
    return tuple(strides)


def number(x: Any, known: Known) -> int:
    """The value of a size or stride."""
    return x if isinstance(x, int) else int(x.node.expr.xreplace(known))


def at(x: torch.Tensor, known: Known) -> torch.Tensor:
    """A fake tensor like `x`, at sizes that are known; `x` itself if none of its own varies."""
    if all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return x
    with x.fake_mode:
        return Layout.of(x).made(known)


def with_numbers(captured: Captured, sizes: Sizes) -> Captured:
    """The graph with its numbers taken out: each that depends on sizes is a placeholder after all others. Raises
    CaptureError if a number is no integer, or depends on data; the model returns or sets one.
    """
    graph = captured.graph_module.graph
    computed = [n for n in graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), NUMBERS)]
    last = captured.placeholders[-1]
    numbers: dict[Any, fx.Node] = {}
    symbols = {s for x in sizes.layouts for n in x.shape if not isinstance(n, int) for s in [n.node._expr]}
    unused = (f"size_{k}" for k in count() if f"size_{k}" not in {n.name for n in graph.nodes})
    for n in computed:
        if all(user in computed for user in n.users):
            continue
        val = n.meta["val"]
        if not isinstance(val, torch.SymInt) or not val.node.expr.free_symbols <= symbols:
            raise CaptureError(f"the number {n.name} is no integer that follows from the arguments' sizes.")
        if val.node.expr not in numbers:
            with graph.inserting_after(last):
                last = numbers[val.node.expr] = graph.placeholder(next(unused))
            last.meta = {"val": val}
        n.replace_all_uses_with(numbers[val.node.expr], lambda user: user not in computed)
    for n in reversed(computed):
        graph.erase_node(n)
    told = [captured.output_template, captured.writes, *((n.args, n.kwargs) for n in graph.nodes)]
    if any(isinstance(x, NUMBERS[1:]) for x in pytree.tree_leaves(told)):
        raise CaptureError("a number that depends on sizes is returned, set, or stands in the graph itself.")
    return replace(
        captured,
        numbers=tuple(numbers.values()),
        forward=tuple(n for n in captured.forward if n not in computed),
        backward=tuple(n for n in captured.backward if n not in computed),
    )


def without_numbers(captured: Captured, known: Known) -> Captured:
    """A graph for many sizes (`with_numbers`) at those that are known: with the numbers in it, as of one call alone."""
    graph, now = fx.Graph(), dict[Any, Any]({n: number(n.meta["val"], known) for n in captured.numbers})
    for n in captured.graph_module.graph.nodes:
        if n not in now:
            now[n] = graph.node_copy(n, now.__getitem__)
            vals = pytree.tree_map_only(torch.Tensor, lambda x: at(x, known), n.meta.get("val"))
            now[n].meta["val"] = vals
    now[None] = None

    def there(nodes: Sequence[fx.Node | None]) -> tuple[Any, ...]:
        return tuple(now[n] for n in nodes)

    return replace(
        captured,
        graph_module=fx.GraphModule(captured.graph_module, graph),
        forward=there(captured.forward),
        backward=there(captured.backward),
        outputs=there(captured.outputs),
        parameter_grads=there(captured.parameter_grads),
        argument_grads=there(captured.argument_grads),
        numbers=(),
    )

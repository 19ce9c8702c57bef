"""Make plain ops again, in the graph's order, of those that the export ties together with effect tokens.

Where a model calls an op that does something beside its outputs (`torch.linalg.cholesky` checks for errors), the export
threads a dummy tensor through such ops, from an input of the graph to an output of it, so that no pass may reorder
them. Nothing here reorders ops, so the tokens go.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, Final

from torch import fx

from tracer.torch_api import EffectType, get_effect, register_effectful_op, with_effects

CHECK: Final = "aten::_linalg_check_errors"

TOKEN_INPUTS: Final = ("ForwardTokenAOTInput", "BackwardTokenAOTInput")
TOKEN_OUTPUTS: Final = ("ForwardTokenAOTOutput", "BackwardTokenAOTOutput")


@contextlib.contextmanager
def checks_kept() -> Iterator[None]:
    """Keep the op that checks for errors in graphs that are captured here.

    torch 2.13 and later do so by themselves. In 2.11 and 2.12 the export does not know that the op does anything and
    leaves it out, as nobody reads it: where eager raises LinAlgError, the graph would go on.
    """
    if get_effect(CHECK) is not None:
        yield
        return
    handle = register_effectful_op(CHECK, EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()


def is_token(desc: Any) -> bool:
    """Whether a graph's input or output is an effect token, by its descriptor."""
    return type(desc).__name__ in (*TOKEN_INPUTS, *TOKEN_OUTPUTS)


def without_tokens(graph: fx.Graph) -> None:
    """Replace `with_effects(token, op, ...)` by `op(...)`; None stands where the graph returned tokens."""
    tied = [n for n in graph.nodes if n.op == "call_function" and n.target is with_effects]
    output = next(n for n in graph.nodes if n.op == "output")
    tokens = {n for n in graph.nodes if n.op == "placeholder" and is_token(n.meta.get("desc"))}
    for n in tied:
        tokens |= {p for p in n.users if p.target is operator.getitem and p.args[1] == 0}
    if not tokens:
        return

    output.args = fx.node.map_arg(output.args, lambda n: None if n in tokens else n)
    for n in tied:
        _token, op, *args = n.args
        with graph.inserting_before(n):
            plain = graph.create_node(
                "call_function", op, tuple(args), n.kwargs, name=op._schema.name.partition("::")[2]
            )
        plain.meta = {k: v for k, v in n.meta.items() if k != "val"}
        several = len(op._schema.returns) > 1
        values = n.meta.get("val")
        if values is not None:
            plain.meta["val"] = tuple(values[1:]) if several else values[1]
        for part in list(n.users):
            if part in tokens:
                continue
            if several:
                part.args = (plain, part.args[1] - 1)
            else:
                part.replace_all_uses_with(plain)
                graph.erase_node(part)
    # The last token first: each is made from the one before.
    for n in reversed(list(graph.nodes)):
        if n in tokens or n in tied:
            graph.erase_node(n)

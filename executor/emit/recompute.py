"""Run an op again, on the same arguments: to the bit what it was, without a second effect on the model's buffers."""

from __future__ import annotations

from executor.emit import Call
from simulator.core.recipes.recipe import Recipe
from tracer.capture.passes.batch_norm import again
from tracer.record.program import Program


def emit(program: Program, op: int, recipe: Recipe | None) -> Call:
    """The op's own call; a batch norm gets no running statistics to update, and its results do not depend on them."""
    node = program.ops[op].node
    return Call(target=node.target, args=again(node.target, node.args), kwargs=dict(node.kwargs))

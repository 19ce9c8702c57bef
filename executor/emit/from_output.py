"""Let a backward op take an activation's output in place of its input: the same call with another argument."""

from __future__ import annotations

from executor.emit import Call
from simulator.core.recipes.recipe import Recipe
from tracer.record.program import Program
from traces.errors import PlanError


def emit(program: Program, op: int, recipe: Recipe) -> Call:
    """The backward's own call, on y; a leaky relu's is told so. Raises PlanError if y is laid out otherwise than x, so
    the gradient might be, too.
    """
    node = program.ops[op].node
    value, instead = next((j, f) for b, j, f in recipe.swaps if b == op)
    before, after = {program.ops[value].node, *program.ops[value].parts}, program.ops[instead].node
    args = tuple(after if a in before else a for a in node.args)
    old = next(a for a in node.args if a in before)
    if old.meta["val"].stride() != after.meta["val"].stride():
        raise PlanError(
            f"{node.name}: {after.name} is laid out otherwise than {old.name}; please report this."
        )
    if "leaky_relu" in str(node.target):
        args = (*args[:3], True)
    return Call(target=node.target, args=args, kwargs=dict(node.kwargs))

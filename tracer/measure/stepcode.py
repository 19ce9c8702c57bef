"""The code that a training step runs of a captured model, with someone who watches every op.

A step is timed as it runs outside a trace: as generated code, an op in place where its input's memory is free, each
value released after its last use, a clock's tick after each op. What lies between two ticks is all that an op costs
there: the call from Python, the kernel, and the return of the memory that nobody needs any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from tracer.record.draft import Draft
from tracer.record.program import GraphOp, Program, inplace_twin
from tracer.torch_api import BoxedCodeGen

Tick = Callable[[], None]
Run = Callable[[Any, Callable[[], Any]], Any]
Code = Callable[[list[Any]], tuple[Sequence[Any], Sequence[Any]]]


def takeovers(draft: Draft) -> frozenset[int]:
    """The program's ops that write into their input's memory in the step with everything kept, as its schedule has it:
    nothing else reads that storage afterwards, and nothing holds it."""
    last: dict[int, int] = {}
    for i, row in enumerate(draft.rows):
        last.update(dict.fromkeys(row.reads, i))
    return frozenset(
        k
        for k, i in enumerate(draft.graph_ops)
        if (s := draft.rows[i].overwrites) >= 0 and last[s] == i and draft.storages[s].hold <= i
    )


def step_code(
    program: Program, in_place: frozenset[int], tick: Tick | None = None, run: Run | None = None
) -> tuple[Code, Code]:
    """The code of a program, of forward and of backward.

    Forward takes the values of parameters, buffers and arguments in one list, which it empties, and returns the
    model's outputs and the values that backward needs. Backward takes those and the tangents in one list, which it
    empties, and returns the gradients of the parameters and of the arguments, None where there is none.

    Args:
        in_place: the program's ops whose in-place twin runs instead.
        tick: called after each op and what it releases.
        run: called with each op and the call of it, which it makes; its result is the op's.
    """
    captured = program.captured
    twins = {program.ops[k].node: inplace_twin(program.ops[k].node.target) for k in in_place}
    forward, backward = program.ops[: program.forward_ops], program.ops[program.forward_ops :]
    inputs = [n for n in captured.placeholders if "tangent_of" not in n.meta]
    gradients = (list(captured.parameter_grads), list(captured.argument_grads))
    made = {n for op in forward for n in (op.node, *op.parts)} | set(inputs)
    wanted = [a for op in backward for n in (op.node, *op.parts) for a in n.all_input_nodes]
    wanted += [g for group in gradients for g in group if g is not None]
    crossing = [n for n in dict.fromkeys(wanted) if n in made]

    def code(given: Sequence[fx.Node], ops: Sequence[GraphOp], results: Any) -> Code:
        graph = fx.Graph()
        copies = {n: graph.placeholder(n.name) for n in given}

        def copy_of(n: fx.Node) -> fx.Node:
            if n.op == "get_attr" and n not in copies:
                copies[n] = graph.get_attr(str(n.target))
            return copies[n]

        for op in ops:
            for n in (op.node, *op.parts):
                args, kwargs = fx.node.map_arg((n.args, n.kwargs), copy_of)
                target = twins.get(n, n.target)
                watched = target if run is None or n is not op.node else _run_by(run, target)
                copies[n] = graph.call_function(watched, args, kwargs)
            if tick is not None:
                graph.call_function(tick)
        graph.output(fx.node.map_arg(results, copy_of))
        # FX calls an argument by its target and everything else by its name; if the two differed for one placeholder,
        # another value could bear the name of that argument.
        assert all(n.name == n.target for n in graph.nodes if n.op == "placeholder")
        graph.set_codegen(BoxedCodeGen())
        return fx.GraphModule(captured.graph_module, graph)

    return (
        code(inputs, forward, (list(captured.outputs), crossing)),
        code([*crossing, *captured.tangents], backward, gradients),
    )


def _run_by(run: Run, target: Any) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        return run(target, lambda: target(*args, **kwargs))

    return watched

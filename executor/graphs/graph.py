"""One graph that dynamo captured: AOTAutograd makes the joint graph of it, the Schedule of a plan cuts that in two, and
both parts run op by op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import fx, nn

from executor.graphs import hand_over
from executor.graphs.direct import direct
from executor.rewrite import Rewritten, rewrite
from simulator.core.problem import Problem
from simulator.core.schedule import build
from tracer.capture.captured import At, at, is_view
from tracer.capture.compiling import compile_joint, kind_of
from tracer.capture.joint import ARGUMENT, PARAMETER, PLACE, Input, Joint, inputs_of, joint_of
from tracer.capture.passes.batch_norm import without_statistics
from tracer.precision.policy import ambient
from tracer.record.program import Program, program_of
from tracer.step.loop import fit_tangent
from tracer.step.release import hands_over
from tracer.torch_api import (
    current_autograd_node,
    enter_autocast,
    inside_torch_func,
    is_batched,
    make_wrapper_subclass,
    preserved_versions,
)
from traces.errors import PlanError
from traces.records.plan import Action

aten = torch.ops.aten
CALL: Final = "lowtide"  # the key under which the autograd node of a call has its `Call`
# By the size of an element: the numbers to read it as, and those to add them up in, which may overflow: a wider type
# for the long ones would take forty times as long.
_WHOLE: Final = {
    1: (torch.uint8, torch.int64),
    2: (torch.int16, torch.int64),
    4: (torch.int32, torch.int32),
    8: (torch.int64, torch.int64),
}
LEFT_OUT: Final = (
    "the loss leaves out an output that the plan's loss uses, {}; plan again for a step with this loss."
)
PASSED_ON: Final = ("detach", "alias", "_to_copy", "view_as")  # by code that only hands outputs on
Decide = Callable[["Graph"], tuple[Program, Sequence[Action]]]


class NotMade(torch.Tensor):
    """The place of an output that the plan does not make: its shape and type are known, and any use of it raises."""

    why: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, why: str) -> NotMade:
        made: NotMade = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        made.why = why
        return made

    def __init__(self, like: torch.Tensor, why: str) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:
        return f"NotMade({tuple(self.shape)}: {self.why})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = next(x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls))
        if func.overloadpacket.__name__ in PASSED_ON:
            return cls(mine, mine.why)
        raise PlanError(f"{mine.why}, and {func} asked for it; use the loss alone, or plan without --allow.")


def digest(x: torch.Tensor) -> int:
    """The sum of a tensor's elements, read as whole numbers, each row as often as its place says.

    Memory that is NumPy's or another process's, too, and writes through `.data`, change without a new version.
    Counts: tensors on the CPU, where others write so. Ignores: the order within a row.
    """
    if x.device.type != "cpu":
        return 0
    x = x.detach().resolve_conj().resolve_neg()
    x = torch.view_as_real(x) if x.is_complex() else x
    whole, total = _WHOLE[x.itemsize]
    if x.ndim < 2:
        return int(x.view(whole).sum(dtype=total))
    rows = x.view(whole).sum(tuple(range(1, x.ndim)), dtype=total)
    return int((rows * torch.arange(1, len(rows) + 1)).sum())


@dataclass(eq=False, slots=True, weakref_slot=True)
class Call:
    """All that backward has to know of its forward."""

    digests: tuple[int, ...] = ()  # of the arguments that backward reads
    parameters: tuple[nn.Parameter, ...] = ()  # that get their gradients inside backward


@dataclass(eq=False)
class Graph:
    """One graph that dynamo captured: AOTAutograd compiles it by this, and it runs it.

    Attributes:
        inputs: what its placeholders stand for.
        decide: given the graph, returns the program to run and a plan's actions on it.
        kind: the type of its device.
        of_many_sizes: whether some of its sizes are inputs.
        released: whether the loop frees each gradient in backward.
        awaits: such a loop has called it, and backward has not run.
        left_out: numbers of the outputs that the plan has no gradients for.
        steps: calls so far.
        fit: how the plan fits it, as receipts say it.
        amp: the type of autocast in all of forward.
        not_made: what stands for outputs that the plan does not make, by their numbers.
        module, forward_outputs: the joint graph while it is compiled, and how many of its outputs are forward's.
    """

    inputs: list[Input]
    decide: Decide | None
    kind: str = "cpu"
    of_many_sizes: bool = False
    released: bool = False
    awaits: bool = False
    joint: Joint | None = None
    rewritten: Rewritten | None = None
    left_out: frozenset[int] = frozenset()
    steps: int = 0
    fit: str = ""
    amp: str = ""
    not_made: dict[int, NotMade] = field(default_factory=dict)
    module: fx.GraphModule | None = None
    forward_outputs: int = 0
    _statistics: list[int] = field(default_factory=list)  # places of what batch norms write
    _arguments: list[tuple[int, int]] = field(default_factory=list)  # places in forward and in backward

    # What AOTAutograd calls while it compiles

    def partition(
        self, module: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut the joint graph by the plan. Errors are those of `decide`."""
        self.module, self.forward_outputs = module, num_fwd_outputs
        assert self.decide is not None, "a graph is compiled once"
        program, actions = self.decide(self)
        assert self.joint is not None
        without_statistics(program.captured.graph_module.graph)
        self.rewritten = rewrite(program, build(Problem(program.trace()), actions))
        not_made = program.captured.not_made
        for k, place in self.joint.returned.items():
            at = self.joint.outputs[place]
            if isinstance(at, At) and at.number in not_made:
                self.not_made[k] = NotMade(
                    self.joint.captured.outputs[at.number].meta["val"], not_made[at.number]
                )
        forward, backward = _as_aot_has_them(self.rewritten, self.joint, set(not_made))
        taken = {n.name: k for k, n in enumerate(backward.graph.find_nodes(op="placeholder"))}
        holders = forward.graph.find_nodes(op="placeholder")
        saved = (n for n in holders if f"saved_{n.name}" in taken and isinstance(n.meta["val"], torch.Tensor))
        found = ((n.meta[PLACE], taken[f"saved_{n.name}"]) for n in saved)
        self._arguments = [x for x in found if self.inputs[x[0]].kind == ARGUMENT]
        return forward, backward

    def read(self) -> Program:
        """The program of the joint graph."""
        assert self.module is not None
        on_gpu = self.kind == "cuda"
        self.joint = joint_of(self.module, self.forward_outputs, self.inputs, on_gpu=on_gpu)
        return program_of(self.joint.captured)

    def forward(self, module: fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
        """Return what runs forward."""
        run = direct(module).forward
        holders = module.graph.find_nodes(op="placeholder")
        self._statistics = [k for k, n in enumerate(holders) if _only_norms_write(n)]

        def call(values: list[Any]) -> Any:
            self.steps += 1
            return run(values)

        return _marked_boxed(call)

    def backward(self, module: fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
        """Return what runs backward."""
        quick = direct(module)
        run = quick.forward
        holders = module.graph.find_nodes(op="placeholder")
        tangents = [k for k, n in enumerate(holders) if "tangent_of" in n.meta]
        places = [k for k, x in enumerate(self.inputs) if x.kind == PARAMETER]

        def call(values: list[Any]) -> Any:
            known = current_autograd_node().metadata.get(CALL, Call())
            for (_, k), before in zip(self._arguments, known.digests, strict=False):
                if digest(values[k]) != before:
                    raise PlanError(
                        "an argument was changed in place between forward and backward, and the backward of a planned "
                        "step reads it: change it after backward, or give the model a clone."
                    )
            gone = [k for k in tangents if values[k] is None]
            sizes = _sizes(holders, values) if gone and self.of_many_sizes else {}
            for k in gone:
                like = holders[k].meta["val"]
                vary = (n.node.expr.free_symbols for n in like.shape if isinstance(n, torch.SymInt))
                if known.parameters or not set().union(*vary) <= sizes.keys():
                    raise PlanError(LEFT_OUT.format("at other sizes, or in a loop that frees gradients"))
                values[k] = fit_tangent(None, at(like, sizes))
            if known.parameters:
                self.awaits = False
                return hand_over.backward(quick, known.parameters, places, values)
            return _reached(module.graph, {holders[k] for k in gone}, run(values)) if gone else run(values)

        return _marked_boxed(call)

    def _check_backward(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Raise PlanError where backward runs otherwise than it was captured."""
        if inside_torch_func() is not None or any(is_batched(g) for g in grads if g is not None):
            raise PlanError(
                "backward of a planned step cannot run for many gradients at once (is_grads_batched, vectorize, "
                "vmap): ask for one after the other, or call the model inside `with unplanned(model):`."
            )
        if (now := ambient(self.kind)).dtype and now.dtype != self.amp:
            raise PlanError(
                f"backward runs inside {now}, and not all of forward did: torch would cast what backward computes. "
                "Call backward outside of the region."
            )

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return what dynamo's code calls: the compiled graph, and around it what backward has to know."""
        places = [k for k, x in enumerate(self.inputs) if x.kind == PARAMETER]

        def call(*given: Any) -> Any:
            values, known = list(given), Call()
            parameters = tuple(values[k] for k in places)
            if self.released and hands_over(parameters):
                # Autograd must not reach the parameters themselves, which get their gradients inside backward.
                awaited, self.awaits = self.awaits, False
                if awaited:  # as where backward is given `inputs=`: autograd sees no way to the parameters
                    raise PlanError(
                        "the backward of an earlier training call did not run, so that no parameter got a gradient of "
                        "it. A plan of a loop that frees gradients needs backward(), without inputs, after each call; "
                        "if the call needs no backward, run it inside `with unplanned(model):`."
                    )
                known.parameters = parameters
                for k in places:
                    values[k] = values[k].detach().requires_grad_(values[k].requires_grad)
            with preserved_versions(tuple(values[k] for k in self._statistics)):
                outputs = list(compiled(*values))
            tensors = [(k, x) for k, x in enumerate(outputs) if isinstance(x, torch.Tensor)]
            mine = [k for k, x in tensors if type(x.grad_fn).__name__ == "CompiledFunctionBackward"]
            if not mine:
                return outputs
            node = outputs[mine[0]].grad_fn
            for k in self.left_out:
                outputs[k] = Unplanned.apply(outputs[k], outputs[mine[0]], k)
            for k, why in self.not_made.items():
                outputs[k] = why
            known.digests = tuple(digest(values[k]) for k, _ in self._arguments)
            node.metadata[CALL] = known
            node.register_prehook(self._check_backward)
            # An output that the loss does not use has no gradient, not zeros.
            node.set_materialize_grads(False)
            self.awaits = bool(known.parameters)
            return outputs

        return torch.compiler.disable(call)


def _sizes(holders: Sequence[fx.Node], values: Sequence[Any]) -> dict[Any, int]:
    """What sizes that vary are in a call, by what stands for them in the graph."""
    found: dict[Any, int] = {}
    for n, x in zip(holders, values, strict=True):
        known = n.meta["val"]
        pairs = zip(known.shape, x.shape, strict=True) if isinstance(x, torch.Tensor) else [(known, x)]
        found |= {a.node.expr: b for a, b in pairs if isinstance(a, torch.SymInt)}
    return found


def _reached(graph: fx.Graph, gone: set[fx.Node], grads: Sequence[Any]) -> list[Any]:
    """The gradients that a backward made with zeros in the places of those that are gone; None where nothing else
    comes, as of autograd itself, since an optimizer tells that from zeros. Raises PlanError if a zero may have passed
    through an infinite derivative.
    """
    there = {n for n in graph.find_nodes(op="placeholder") if "tangent_of" in n.meta} - gone
    lost = set(gone)
    for n in graph.nodes:
        if not there.isdisjoint(n.all_input_nodes):
            there.add(n)
        elif not lost.isdisjoint(n.all_input_nodes):
            lost.add(n)
    (output,) = graph.find_nodes(op="output")
    found = [None if n in lost else g for n, g in zip(output.args[0], grads, strict=True)]
    if any(isinstance(g, torch.Tensor) and bool(g.isnan().any()) for g in found):
        raise PlanError(LEFT_OUT.format("and a gradient is NaN, maybe for that reason alone"))
    return found


class Unplanned(torch.autograd.Function):
    """Passes on an output that the plan's loss does not differentiate; a loss that does must not pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise PlanError(
            f"the loss differentiates output {ctx.number} of the model, and the plan was made for a loss that does "
            "not; trace the step with this loss and plan again."
        )


def compile_graph(
    module: fx.GraphModule,
    examples: Sequence[Any],
    decide: Decide,
    left_out: Collection[int] = (),
    *,
    released: bool = False,
) -> tuple[Graph, Callable[..., Any]]:
    """Compile what dynamo captured; returns the graph (whose attributes are given), and what dynamo is to call."""
    kind = kind_of(examples)
    graph = Graph(inputs_of(module.graph, examples), decide, kind)
    graph.left_out, graph.released = frozenset(left_out), released
    if not _leaves_autocast(module.graph):
        graph.amp = ambient(kind).dtype
    graph.of_many_sizes = any(isinstance(x, torch.SymInt) for x in examples)
    compiled = compile_joint(
        module,
        examples,
        kind,
        left_out,
        fw_compiler=graph.forward,
        bw_compiler=graph.backward,
        inference_compiler=lambda gm, _: _marked_boxed(partial(direct(gm).forward)),
        partition_fn=graph.partition,
    )
    graph.module = graph.joint = graph.decide = None  # which only compiling needs
    for n in module.graph.nodes:  # whose fake values hold small real ones, by their gradient functions
        if n.op != "placeholder":
            n.meta.pop("example_value", None)
    return graph, graph.around(compiled)


def _leaves_autocast(graph: fx.Graph) -> bool:
    """Return whether ops with gradients run in a region of autocast that forward opens itself."""
    differentiates = True
    for n in graph.find_nodes(op="call_function", target=enter_autocast) and graph.nodes:
        if getattr(n.target, "__name__", "") == "_set_grad_enabled":
            differentiates = bool(n.args[0])
        if n.target is enter_autocast and differentiates:
            return True
    return False


def _marked_boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """The function with the mark by which AOTAutograd knows that it takes a list."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _only_norms_write(n: fx.Node) -> bool:
    """Return whether a placeholder is statistics that batch norms alone write, without a new version in the untouched
    step.
    """
    written = [u.args[1] for u in n.users if u.target is aten.copy_.default and u.args[0] is n]
    by_norm = (x.target is operator.getitem and "batch_norm" in str(x.args[0].target) for x in written)
    saved = any(u.op == "output" for u in n.users)  # with the version that the write gives it
    return bool(written) and not saved and all(by_norm)


def _as_aot_has_them(
    r: Rewritten, joint: Joint, not_made: Collection[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two modules with inputs and outputs as AOTAutograd expects them of a partition.

    Forward takes primals and returns its outputs, then saved tensors, then saved sizes; backward takes saved sizes,
    saved tensors and tangents.
    """
    forward, backward = r.forward, r.backward
    (old,) = forward.graph.find_nodes(op="output")
    made, saved = old.args[0]
    holders = [n for n in backward.graph.find_nodes(op="placeholder") if "tangent_of" not in n.meta]
    order = sorted(range(len(saved)), key=lambda k: _rank(holders[k]))
    returned: list[Any] = []
    sizes = {n.target: n for n in forward.graph.find_nodes(op="placeholder")}
    with forward.graph.inserting_before(old):
        for x in joint.outputs:
            value = made[x.number] if isinstance(x, At) else _size(forward.graph, x, sizes)
            if isinstance(x, At) and x.number in not_made:
                # One of the same shape that has the memory of one element.
                like = joint.captured.outputs[x.number].meta
                of = {"dtype": like["val"].dtype, "device": like["val"].device}
                one = forward.graph.call_function(aten.empty.memory_format, ([],), of)
                value = forward.graph.call_function(aten.expand.default, (one, list(like["val"].shape)))
                value.meta = dict(like)
            bare = isinstance(x, At) and x.number not in joint.captured.grad_outputs
            if isinstance(value, fx.Node) and (value in returned or (bare and is_view(value))):
                # One object cannot have and lack a gradient; a view has its base's, unless it is detached.
                twin = forward.graph.call_function(aten.detach.default, (value,))
                twin.meta = dict(value.meta)
                value = twin
            returned.append(value)
    old.args = ((*returned, *(saved[k] for k in order)),)
    _reorder(forward.graph, lambda n: n.meta[PLACE])
    (old,) = backward.graph.find_nodes(op="output")
    grads = [g for group in old.args[0] for g in group]
    old.args = (tuple(grads[x.number] if isinstance(x, At) else None for x in joint.grads),)
    # Sizes, which are the last that forward returns, come first.
    ranks = {n: (_rank(n) + 1) % 3 for n in holders}
    _reorder(backward.graph, lambda n: (ranks[n], 0) if n in ranks else (3, n.meta[PLACE]))
    for module in (forward, backward):
        # Where a kernel lays its result out otherwise than torch's own shape function said, as mse_loss_backward does.
        for n in module.graph.find_nodes(op="call_function", target=aten.view.default):
            n.target = aten.reshape.default
        module.graph.lint()
        module.recompile()
    # AOTAutograd compiles a copy of it, which would have constants of its own on the device. Nothing changes it.
    setattr(type(backward), "__deepcopy__", lambda module, _: module)  # noqa: B010  # a class of that module's own
    return forward, backward


def _size(graph: fx.Graph, x: Any, sizes: dict[Any, fx.Node]) -> Any:
    """A size that forward returns, or a number made of sizes, such as a counter of the model's; `x` if it is none."""
    if not isinstance(x, fx.Node):
        return x
    if x.op == "placeholder":
        return sizes[x.target]
    return graph.node_copy(x, lambda n: _size(graph, n, sizes))


def _rank(n: fx.Node) -> int:
    """Saved tensors come before those without a check of their version, and these before sizes."""
    if not isinstance(n.meta.get("val"), torch.Tensor):
        return 2
    return 1 if n.meta.get("saved_tensor_with_no_vc_check") else 0


def _reorder(graph: fx.Graph, key: Callable[[fx.Node], Any]) -> None:
    """Put a graph's placeholders into an order."""
    holders = graph.find_nodes(op="placeholder")
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for n in sorted(holders, key=key):
        first.prepend(n)

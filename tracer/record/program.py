"""The program of a captured graph: its ops in order, which storages each reads and makes, and their trace rows.

Aliases are not guessed from schemas: the graph runs once on fake tensors, and two values share a storage exactly if
torch says so.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tracer.capture.captured import Captured, at, number
from tracer.capture.passes.batch_norm import only_writes_statistics, results
from tracer.capture.passes.batch_norm import writes as undeclared_writes
from tracer.capture.torch_fixes.grouped import true_results
from tracer.costs.cost import Cost
from tracer.costs.roofline import result_bytes
from tracer.costs.rows import OpRow, StorageRow
from tracer.record.rows import op_row, overwritten, storage_key, storage_row, tables_of, tensors_in
from tracer.torch_api import (
    DisableAutocast,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    no_garbage,
    pytree,
    replaced,
)
from traces.errors import CaptureError
from traces.records.store import validate
from traces.records.trace import (
    ACTIVATION,
    BACKWARD,
    BUFFER,
    COLLECTIVE,
    EFFECT,
    FORWARD,
    GRADIENT,
    INPUT,
    MUTATES,
    OTHER,
    PARAMETER,
    RANDOM,
    VIEW,
    Trace,
    TraceMeta,
    fingerprint,
)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOp:
    """One op of the graph: the node that runs, and the picks (`getitem`) from its tuple, which are part of it."""

    node: fx.Node
    parts: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The captured graph as ops, with the storages that they touch.

    Storage ids: the placeholders' first (parameters, buffers, arguments, tangents), then constants, then what the
    ops create, in order. Op ids: forward first. Code around the model adds rows behind, so these ids hold in every
    trace of the model, but for backward ops, which move up by the number of rows of the loss code.
    """

    captured: Captured
    ops: tuple[GraphOp, ...]
    forward_ops: int  # how many of them are forward
    rows: tuple[OpRow, ...]
    storages: tuple[StorageRow, ...]
    storage_of: dict[fx.Node, tuple[int, ...]]  # every node, placeholders and constants too
    output_storages: tuple[int, ...]  # of the model's tensor outputs
    tangent_storages: tuple[int, ...]
    gradient_storages: tuple[int, ...]  # of parameters and arguments

    def val(self, n: fx.Node) -> torch.Tensor:
        """The fake tensor that stands for a node's value."""
        return at(n.meta["val"], self.captured.known)

    def trace(self, costs: Sequence[Cost] = (), *, model: str = "program", **header: Any) -> Trace:
        """The program alone as a trace: tangents are inputs, and there is no loss code and no optimizer."""
        ops, storages = tables_of(self.rows, self.storages, costs)
        n = self.forward_ops
        meta = TraceMeta(model=model, forward_ops=n, first_backward_graph_op=n, **header)
        return validate(Trace(meta=meta, ops=ops, storages=storages))

    def hand_over_places(self) -> tuple[int, ...]:
        """Return, for each parameter, the op after which its gradient is there and no op reads the parameter any more,
        so that it may be stepped; as many as there are ops if none of backward concerns it.
        """
        last: dict[Any, int] = {}
        for i in range(self.forward_ops, len(self.ops)):
            op = self.ops[i]
            last |= dict.fromkeys((op.node, *op.parts, *self.rows[i].reads), i)
        of = zip(self.captured.placeholders, self.captured.parameter_grads, strict=False)
        places = (max(last.get(g, -1), last.get(self.storage_of[p][0], -1)) for p, g in of)
        return tuple(i if i >= 0 else len(self.ops) for i in places)

    def fingerprint(self, *, sizes: bool = True, named_as: Sequence[str] = ()) -> str:
        """The digest of the graph that plans are matched by; `named_as`: the names that its ops are to have."""
        ops, storages = tables_of(self.rows, self.storages)
        ops = replace(ops, target=tuple(named_as)) if named_as else ops
        return fingerprint(ops, storages, sizes=sizes, eager=False)


@no_garbage()
def program_of(captured: Captured) -> Program:
    """Run the graph on fake tensors and note what it does to storages."""
    run = _Run(captured)
    # The buffers that the step overwrites.
    copies = (n.args[0] for n in captured.forward if n.target is aten.copy_.default)
    written = {a for a in copies if a.op == "placeholder"}.union(*map(undeclared_writes, captured.forward))
    touched = {s for w in written for s in run.storage_of.get(w, ())}
    with run.mode, torch.no_grad(), DisableAutocast(), true_results():
        for phase, group in ((FORWARD, captured.forward), (BACKWARD, captured.backward)):
            for n in group:
                run.op(n, phase, touched)
    storage_of, storages = run.storage_of, run.storages
    outputs = tuple(storage_of[n][0] for n in captured.outputs)
    for g, name in zip(captured.parameter_grads, captured.parameters, strict=True):
        if g is not None and storages[storage_of[g][0]].producer >= 0:
            storages[storage_of[g][0]].category = GRADIENT
            storages[storage_of[g][0]].name = f"gradient of {name}"
    grads = [g for g in (*captured.parameter_grads, *captured.argument_grads) if g is not None]
    run.mark_takeovers({*outputs, *run.tangents})
    return Program(
        captured=captured,
        ops=tuple(GraphOp(node=n, parts=tuple(parts)) for n, *parts in run.parts.values()),
        forward_ops=sum(1 for r in run.rows if r.phase == FORWARD),
        rows=tuple(run.rows),
        storages=tuple(storages),
        storage_of=storage_of,
        output_storages=outputs,
        tangent_storages=tuple(run.tangents),
        gradient_storages=tuple(dict.fromkeys(storage_of[g][0] for g in grads)),
    )


class _Run:
    """One run of a captured graph on fake tensors: the value of every node, and the rows of ops and storages."""

    def __init__(self, captured: Captured) -> None:
        nodes = captured.graph_module.graph.nodes
        vals = (n.meta.get("val") for n in reversed(nodes))  # what no op reads is of another mode
        known = next((x.fake_mode for x in vals if isinstance(x, FakeTensor)), None)
        self.mode: FakeTensorMode = known or FakeTensorMode(allow_non_fake_inputs=True)
        self.env: dict[fx.Node, Any] = {}
        self.numbers: dict[fx.Node, Any] = {}  # what nodes that compute sizes come to
        self.storage_of: dict[fx.Node, tuple[int, ...]] = {}
        self.rows: list[OpRow] = []
        self.storages: list[StorageRow] = []
        self.tangents: list[int] = []
        self._ids: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # keeps every fake storage, so that no address is used twice
        self._op_of: dict[fx.Node, int] = {}
        self.parts: dict[int, list[fx.Node]] = {}  # op -> the node that runs, and the picks from its tuple
        for n in captured.placeholders:
            desc, x = n.meta["desc"], at(n.meta["val"], captured.known)
            category = {"ParamAOTInput": PARAMETER, "BufferAOTInput": BUFFER}.get(type(desc).__name__, INPUT)
            if "tangent_of" in n.meta:
                name, category = f"gradient of output {n.meta['tangent_of']}", GRADIENT
            elif category == INPUT:
                name = f"argument {desc.idx}"
            else:
                name = desc.target
            self.env[n] = x
            s = self._id(x, storage_row(x, name, category))
            self.storage_of[n] = (s,)
            if category == GRADIENT:
                self.tangents.append(s)
        for n in captured.numbers:
            self.env[n] = self.numbers[n] = number(n.meta["val"], captured.known)
            self.storage_of[n] = ()
        for n in nodes:
            if n.op != "get_attr":
                continue
            val = n.meta.get("val")  # a fake one of the graph's own mode
            x = self.env[n] = getattr(captured.graph_module, n.target) if val is None else val
            if isinstance(x, torch.Tensor):
                with self.mode:
                    x = self.env[n] = x if isinstance(x, FakeTensor) else self.mode.from_tensor(x)
                self.storage_of[n] = (self._id(x, storage_row(x, str(n.target), OTHER)),)

    def _id(self, x: torch.Tensor, row: StorageRow) -> int:
        """The storage of a value; `row` is added if it is new."""
        key = storage_key(x)
        if key not in self._ids:
            self._ids[key] = len(self.storages)
            self.storages.append(row)
            self._alive.append(x)
        return self._ids[key]

    def op(self, n: fx.Node, phase: str, touched: set[int]) -> None:
        """Run a node. `touched`: the storages that the step overwrites."""
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda a: self.env[a])
        if n.target is operator.getitem and n.args[0] in self._op_of:
            out = self.env[n] = args[0][args[1]]
            self.storage_of[n] = tuple(dict.fromkeys(self._ids[storage_key(x)] for x in tensors_in(out)))
            i = self._op_of[n] = self._op_of[n.args[0]]
            self.parts[i].append(n)
            return
        if is_number(n):
            self.env[n] = self.numbers[n] = n.target(*args, **kwargs)
            self.storage_of[n] = ()
            return
        out = _on_fakes(n.target, args, kwargs, self.mode)
        out = self.env[n] = results(n.target, args, out)
        for x in tensors_in(out):
            if x.layout != torch.strided:
                raise CaptureError(
                    f"the op {n.target} (module {_module_of(n) or 'of the model itself'}) makes a tensor of the layout "
                    f"{x.layout}, whose size depends on data. Only dense tensors can be planned; give an embedding "
                    "sparse=False."
                )
        i, before = len(self.rows), len(self.storages)
        outs = []
        for x in tensors_in(out):
            row = storage_row(x, n.name, ACTIVATION, i)
            outs.append(self._id(x, replace(row, nbytes=result_bytes(n.target, args, x))))
        self.storage_of[n] = tuple(dict.fromkeys(outs))
        created = range(before, len(self.storages))
        reads = dict.fromkeys(s for a in n.all_input_nodes for s in self.storage_of.get(a, ()))
        written = (*undeclared_writes(n), *overwritten(n.target, n.args, n.kwargs))
        mutated = [s for a in written for s in self.storage_of.get(a, ())]
        view = not created and not mutated and bool(outs)
        self.rows.append(
            op_row(
                n.target,
                args,
                kwargs,
                out,
                list(tensors_in((args, kwargs))),
                name=n.name,
                phase=phase,
                module=_module_of(n),
                inputs=tuple(dict.fromkeys(self._op_of[a] for a in n.all_input_nodes if a in self._op_of)),
                reads=tuple(reads),
                writes=tuple(dict.fromkeys([*created, *mutated])),
                flags=_flags(n, not touched.isdisjoint(reads), view=view),
                arguments=arguments(n, self.numbers),
            )
        )
        self._op_of[n], self.parts[i] = i, [n]

    def mark_takeovers(self, outside: set[int]) -> None:
        """Note where an op's in-place twin could write into its first input, should nothing else need that any more.

        The schedule decides whether that is so. Only pointwise ops whose output has exactly the input's layout count.
        """
        storages, storage_of = self.storages, self.storage_of
        for (n, *_), row in zip(self.parts.values(), self.rows, strict=True):
            first = n.args[0] if n.args else None
            if inplace_twin(n.target) is None or not isinstance(first, fx.Node):
                continue
            a, out = self.env[first], self.env[n]
            if not isinstance(a, torch.Tensor) or not isinstance(out, torch.Tensor):
                continue
            s, t = storage_of[first][0], storage_of[n][0]
            whole = a.numel() * a.element_size() == storages[s].nbytes == storages[t].nbytes
            layout = a.dtype, a.shape, a.stride(), a.storage_offset()
            same = layout == (out.dtype, out.shape, out.stride(), 0)
            own = storages[s].producer >= 0 and s not in outside and s != t
            alone = all(s not in storage_of.get(m, ()) for m in n.all_input_nodes if m is not first)
            once = sum(x is first for x in pytree.tree_leaves((n.args, n.kwargs))) == 1
            if whole and same and own and alone and once:
                row.overwrites = s


def is_number(n: fx.Node) -> bool:
    """Return whether a node computes a size from others, which is no op of a step."""
    return n.op == "call_function" and isinstance(n.meta.get("val"), int | torch.SymInt)


def arguments(n: fx.Node, numbers: Mapping[fx.Node, int]) -> str:
    """Return what a node's op takes beside tensors: JSON of its arguments by the schema, with null for a tensor."""
    schema = getattr(n.target, "_schema", None)
    if schema is None:
        return ""
    given = dict(zip((a.name for a in schema.arguments), n.args, strict=False)) | n.kwargs
    values = [given.get(a.name, a.default_value) for a in schema.arguments]
    values = fx.node.map_arg(values, numbers.get)
    return json.dumps(values, default=str, separators=(",", ":"))


def _on_fakes(target: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """Run an op on fake tensors, with the storage sizes that the kernel makes.

    The mode remembers results by their strides and gives one with gaps (a copy of a slice) a storage that ends with
    its last element; such an op is asked again without that memory.
    """
    out = target(*args, **kwargs)
    dense = [x for x in tensors_in(out) if x.layout == torch.strided]
    if all(x.untyped_storage().nbytes() <= x.numel() * x.element_size() for x in dense):
        return out
    with replaced(mode, cache_enabled=False):
        return target(*args, **kwargs)


def _module_of(n: fx.Node) -> str:
    """The module path that the capture annotated; a sum of gradients belongs where its first summand does."""
    for _ in range(8):
        custom = n.meta.get("custom")
        if isinstance(custom, dict) and "module" in custom:
            return str(custom["module"])
        inputs = [a for a in n.all_input_nodes if a.op == "call_function"]
        if not inputs:
            return ""
        n = inputs[0]
    return ""


def _flags(n: fx.Node, reads_overwritten: bool, *, view: bool) -> int:
    target = n.target
    if not isinstance(target, OpOverload):
        return int(getattr(target, "flags", EFFECT))  # a call that a plan's rewrite put there says so itself
    flags = VIEW if view else 0
    flags |= RANDOM if is_random(n) else 0
    flags |= MUTATES if target._schema.is_mutable else 0
    flags |= COLLECTIVE if target.namespace in ("c10d", "_c10d_functional", "c10d_functional") else 0
    flags |= 0 if target._schema.returns else EFFECT
    # A batch norm in training mode reads its running statistics only to compute the new ones. Those are written by a
    # `copy_` that never runs twice, or by cuDNN's kernel, which gets none to write when it runs again
    # (`tracer.capture.passes.batch_norm.again`); so the op itself may.
    norm = only_writes_statistics(n)
    if reads_overwritten and not view and not norm and not undeclared_writes(n):
        flags |= EFFECT  # a second run would see the buffer's new value
    return flags


# Whose ops say by their tags whether they draw.
TORCH_S = frozenset({"aten", "prims", "prim", "quantized", "mkldnn", "inductor", "torchvision", "lowtide"})


def is_random(n: fx.Node) -> bool:
    """True if a node may draw random numbers: by torch's own tag, unless its dropout probability is zero; an op that is
    not torch's own may whatever its tags say."""
    target = n.target
    if target.namespace not in TORCH_S:
        return True
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for k, arg in enumerate(target._schema.arguments):
        if arg.name in ("dropout_p", "dropout"):
            value = n.args[k] if k < len(n.args) else n.kwargs.get(arg.name, arg.default_value)
            return value != 0.0
    return True


def inplace_twin(target: Any) -> Any:
    """The in-place overload of a pointwise functional op (`aten.relu.default` -> `aten.relu_.default`), or None."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    if torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    packet = getattr(aten, target._schema.name.split("::")[1] + "_", None)
    twin = getattr(packet, target._overloadname, None) if packet is not None else None
    same = twin is not None and len(twin._schema.arguments) == len(target._schema.arguments)
    return twin if same else None

"""Turn a captured graph into a program: its ops in order, which storages each reads and makes, and trace rows.

Aliases are not guessed from schemas: the graph runs once on fake tensors, and two values share a storage exactly if
torch says so.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tracer.capture.capture import Captured
from tracer.capture.cuda.gpu import results
from tracer.capture.passes.batch_norm import writes as undeclared_writes
from tracer.capture.torch_fixes.grouped import grouped_products
from tracer.costs.builder import OpRow, StorageRow, TraceBuilder
from tracer.costs.roofline import compute_dtype, op_bytes, op_flops, result_bytes
from tracer.costs.signature import of_call
from tracer.precision.policy import without_autocast
from tracer.torch_api import FakeTensor, FakeTensorMode, OpOverload, pytree
from traces.errors import CaptureError
from traces.trace import (
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
    storage_of: dict[fx.Node, tuple[int, ...]]  # for the node and each part: the storages behind its value


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

    def builder(self) -> TraceBuilder:
        """A builder that holds this program's rows and nothing else."""
        return TraceBuilder(ops=[replace(r) for r in self.rows], storages=[replace(s) for s in self.storages])

    def trace(self) -> Trace:
        """The program alone as a trace: tangents are inputs, and there is no loss code and no optimizer."""
        return self.builder().freeze(TraceMeta(model="program", forward_ops=self.forward_ops,
                                               first_backward_graph_op=self.forward_ops))  # fmt: skip

    def fingerprint(self, *, sizes: bool = True) -> str:
        """The digest of the graph that plans are matched by."""
        alone = self.trace()
        return fingerprint(alone.ops, alone.storages, sizes=sizes, eager=False)


def program_of(captured: Captured) -> Program:
    """Run the graph on fake tensors and note what it does to storages."""
    gm = captured.graph_module
    nodes = list(gm.graph.nodes)
    env: dict[fx.Node, Any] = {}
    alive: list[Any] = []  # keeps every fake storage, so that no address is used twice
    storages: list[StorageRow] = []
    ids: dict[int, int] = {}
    storage_of: dict[fx.Node, tuple[int, ...]] = {}

    def storage_id(x: torch.Tensor, make: StorageRow | None) -> int:
        key = x.untyped_storage()._cdata
        if key not in ids:
            assert make is not None
            ids[key] = len(storages)
            storages.append(make)
            alive.append(x)
        return ids[key]

    def row_of(x: torch.Tensor, name: str, category: str, producer: int = -1) -> StorageRow:
        return StorageRow(
            name=name,
            nbytes=x.untyped_storage().nbytes(),
            category=category,
            producer=producer,
            dtype=str(x.dtype).removeprefix("torch."),
            shape=tuple(int(d) for d in x.shape),
        )

    def made_by(n: fx.Node, args: Any, x: torch.Tensor, op: int) -> StorageRow:
        return replace(row_of(x, n.name, ACTIVATION, op), nbytes=result_bytes(n.target, args, x))

    mode = next(
        (n.meta["val"].fake_mode for n in nodes if isinstance(n.meta.get("val"), FakeTensor)), None
    ) or FakeTensorMode(allow_non_fake_inputs=True)
    tangents = []
    for n in captured.placeholders:
        desc, x = n.meta["desc"], n.meta["val"]
        kind = type(desc).__name__
        name = getattr(desc, "target", n.name).removeprefix("model.")
        if "tangent_of" in n.meta:
            # A tangent may be passed with any strides; a fresh one stands for it.
            x = n.meta["val"]
            row = row_of(x, f"gradient of output {n.meta['tangent_of']}", GRADIENT)
        else:
            category = {"ParamAOTInput": PARAMETER, "BufferAOTInput": BUFFER}.get(kind, INPUT)
            row = row_of(x, name if category != INPUT else f"argument {desc.idx}", category)
        env[n] = x
        s = storage_id(x, row)
        storage_of[n] = (s,)
        if "tangent_of" in n.meta:
            tangents.append(s)
    for n in nodes:
        if n.op == "get_attr":
            x = getattr(gm, n.target)
            env[n] = x
            if isinstance(x, torch.Tensor):
                with mode:
                    env[n] = x if isinstance(x, FakeTensor) else mode.from_tensor(x)
                storage_of[n] = (storage_id(env[n], row_of(env[n], str(n.target), OTHER)),)

    written = _overwritten_inputs(captured)
    graph_ops: list[GraphOp] = []
    rows: list[OpRow] = []
    op_of: dict[fx.Node, int] = {}
    with mode, torch.no_grad(), without_autocast(), grouped_products():
        for phase, group in ((FORWARD, captured.forward), (BACKWARD, captured.backward)):
            for n in group:
                args, kwargs = fx.node.map_arg((n.args, n.kwargs), lambda a: env[a])
                if n.target is operator.getitem and n.args[0] in op_of:
                    env[n] = args[0][args[1]]
                    storage_of[n] = tuple(
                        dict.fromkeys(ids[x.untyped_storage()._cdata] for x in _tensors(env[n]))
                    )
                    op_of[n] = op_of[n.args[0]]
                    continue
                out = _on_fakes(n.target, args, kwargs, mode)
                out = results(n.target, args, kwargs, out, laptop=captured.target is not None)
                env[n] = out
                _check_dense(n, out)
                i = len(rows)
                before = len(storages)
                outs = [storage_id(x, made_by(n, args, x, i)) for x in _tensors(out)]
                storage_of[n] = tuple(dict.fromkeys(outs))
                created = list(range(before, len(storages)))
                reads = list(dict.fromkeys(s for a in n.all_input_nodes for s in storage_of.get(a, ())))
                mutated = _mutated(n, storage_of)
                flags = _flags(n, written, storage_of, view=not created and not mutated and bool(outs))
                moved_in, moved_out = list(_tensors((args, kwargs))), list(_tensors(out))
                rows.append(
                    OpRow(
                        name=n.name,
                        target=str(n.target),
                        phase=phase,
                        module=_module_of(n),
                        flops=0 if flags & VIEW else op_flops(n.target, args, kwargs, out),
                        bytes_moved=0 if flags & VIEW else op_bytes(moved_in, moved_out, n.target),
                        inputs=tuple(dict.fromkeys(op_of[a] for a in n.all_input_nodes if a in op_of)),
                        reads=tuple(reads),
                        writes=tuple(dict.fromkeys(created + mutated)),
                        flags=flags,
                        dtype=compute_dtype(moved_in),
                        arguments=arguments(n),
                        signature=of_call(n.target, args, kwargs, out),
                    )
                )
                op_of[n] = i
    parts: dict[fx.Node, list[fx.Node]] = {}
    for group in (captured.forward, captured.backward):
        for n in group:
            if n.target is operator.getitem and n.args[0] in storage_of:
                root = n.args[0]
                while root.target is operator.getitem:
                    root = root.args[0]
                parts.setdefault(root, []).append(n)
    for n in op_of:
        if n.target is not operator.getitem or n.args[0] not in op_of:
            own = tuple(parts.get(n, ()))
            graph_ops.append(GraphOp(node=n, parts=own, storage_of={m: storage_of[m] for m in (n, *own)}))
    outputs = tuple(storage_of[n][0] for n in captured.outputs)
    gradients: list[int] = []
    for g, name in zip(captured.parameter_grads, captured.parameters, strict=True):
        if g is not None:
            s = storage_of[g][0]
            gradients.append(s)
            if storages[s].producer >= 0:
                storages[s].category = GRADIENT
                storages[s].name = f"gradient of {name}"
    gradients += [storage_of[g][0] for g in captured.argument_grads if g is not None]
    _mark_takeovers(graph_ops, rows, storages, storage_of, env, {*outputs, *tangents})
    return Program(
        captured=captured,
        ops=tuple(graph_ops),
        forward_ops=sum(1 for r in rows if r.phase == FORWARD),
        rows=tuple(rows),
        storages=tuple(storages),
        storage_of=storage_of,
        output_storages=outputs,
        tangent_storages=tuple(tangents),
        gradient_storages=tuple(dict.fromkeys(gradients)),
    )


def arguments(n: fx.Node) -> str:
    """What a node's op takes beside tensors: JSON of its arguments by the schema, with null for a tensor."""
    schema = getattr(n.target, "_schema", None)
    if schema is None:
        return ""
    given = dict(zip((a.name for a in schema.arguments), n.args, strict=False)) | n.kwargs
    values = [given.get(a.name, a.default_value) for a in schema.arguments]
    return json.dumps(fx.node.map_arg(values, lambda _: None), default=str, separators=(",", ":"))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))


def _on_fakes(target: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """Run an op on fake tensors, with the storage sizes that the kernel makes.

    The mode remembers results by their strides and gives one with gaps (a copy of a slice) a storage that ends with
    its last element; such an op is asked again without that memory.
    """
    out = target(*args, **kwargs)
    if all(x.untyped_storage().nbytes() <= x.numel() * x.element_size() for x in _tensors(out) if _dense(x)):
        return out
    remembers, mode.cache_enabled = mode.cache_enabled, False
    try:
        return target(*args, **kwargs)
    finally:
        mode.cache_enabled = remembers


def _dense(x: torch.Tensor) -> bool:
    return x.layout == torch.strided


def _check_dense(n: fx.Node, out: Any) -> None:
    for x in _tensors(out):
        if not _dense(x):
            raise CaptureError(
                f"the op {n.target} (module {_module_of(n) or 'of the model itself'}) makes a tensor of the layout "
                f"{x.layout}, whose size depends on data. Only dense tensors can be planned; give an embedding "
                "sparse=False."
            )


def _module_of(n: fx.Node) -> str:
    """The module path that the capture annotated; a sum of gradients belongs where its first summand does."""
    seen = 0
    while seen < 8:
        custom = n.meta.get("custom")
        if isinstance(custom, dict) and "module" in custom:
            return str(custom["module"])
        inputs = [a for a in n.all_input_nodes if a.op == "call_function"]
        if not inputs:
            return ""
        n, seen = inputs[0], seen + 1
    return ""


def _mutated(n: fx.Node, storage_of: dict[fx.Node, tuple[int, ...]]) -> list[int]:
    """Storages that the op overwrites, by its schema or undeclared."""
    schema = getattr(n.target, "_schema", None)
    if schema is None:
        return []
    out: list[int] = [s for a in undeclared_writes(n) for s in storage_of.get(a, ())]
    for k, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            value = n.args[k] if k < len(n.args) else n.kwargs.get(arg.name)
            for a in pytree.tree_leaves(value):
                out.extend(storage_of.get(a, ()))
    return out


def _overwritten_inputs(captured: Captured) -> set[fx.Node]:
    """Placeholders that the step overwrites (buffers)."""
    copied = {
        n.args[0]
        for n in captured.forward
        if n.target is aten.copy_.default and n.args[0].op == "placeholder"
    }
    return copied.union(*(undeclared_writes(n) for n in captured.forward))


def _flags(
    n: fx.Node, written: set[fx.Node], storage_of: dict[fx.Node, tuple[int, ...]], *, view: bool
) -> int:
    target = n.target
    if not isinstance(target, OpOverload):
        return EFFECT
    flags = VIEW if view else 0
    if is_random(n):
        flags |= RANDOM
    if target._schema.is_mutable:
        flags |= MUTATES
    if target.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        flags |= COLLECTIVE
    if not target._schema.returns:
        flags |= EFFECT
    touched = {s for w in written for s in storage_of.get(w, ())}
    reads = {s for a in n.all_input_nodes for s in storage_of.get(a, ())}
    if touched & reads and not view and not _ignores_statistics(n):
        flags |= EFFECT  # a second run would see the buffer's new value
    return flags


def is_random(n: fx.Node) -> bool:
    """Whether a node draws random numbers: torch's own tag, unless its dropout probability is zero."""
    target = n.target
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for k, arg in enumerate(target._schema.arguments):
        if arg.name in ("dropout_p", "dropout"):
            value = n.args[k] if k < len(n.args) else n.kwargs.get(arg.name, arg.default_value)
            return value != 0.0
    return True


def _ignores_statistics(n: fx.Node) -> bool:
    """A batch norm in training mode reads its running statistics only to compute the new ones.

    Those are written by a `copy_` that never runs twice, or by cuDNN's kernel, which gets none to write when it runs
    again (`tracer.capture.passes.batch_norm.again`); so the op itself may.
    """
    functional = n.target is aten._native_batch_norm_legit_functional.default and n.args[5] is True
    return functional or bool(undeclared_writes(n))


def _mark_takeovers(
    graph_ops: list[GraphOp],
    rows: list[OpRow],
    storages: list[StorageRow],
    storage_of: dict[fx.Node, tuple[int, ...]],
    env: dict[fx.Node, Any],
    outside: set[int],
) -> None:
    """Note where an op's in-place twin could write into its first input, should nothing else need that any more.

    The schedule decides whether that is so. Only pointwise ops whose output has exactly the input's layout count.
    """
    for op, row in zip(graph_ops, rows, strict=True):
        n = op.node
        if inplace_twin(n.target) is None or not n.args or not isinstance(n.args[0], fx.Node):
            continue
        a, out = env[n.args[0]], env[n]
        if not isinstance(a, torch.Tensor) or not isinstance(out, torch.Tensor):
            continue
        s, t = storage_of[n.args[0]][0], storage_of[n][0]
        others = [m for m in n.all_input_nodes if m is not n.args[0]]
        fits = (
            (a.dtype, a.shape, a.stride(), a.storage_offset()) == (out.dtype, out.shape, out.stride(), 0)
            and storages[s].nbytes == storages[t].nbytes
            and a.numel() * a.element_size() == storages[s].nbytes
        )
        own = storages[s].producer >= 0 and s not in outside and s != t
        alone = all(s not in storage_of.get(m, ()) for m in others)
        once = sum(1 for x in pytree.tree_leaves((n.args, n.kwargs)) if x is n.args[0]) == 1
        if fits and own and alone and once:
            row.overwrites = s


def inplace_twin(target: Any) -> Any:
    """The in-place overload of a pointwise functional op (`aten.relu.default` -> `aten.relu_.default`), or None."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    if torch.Tag.pointwise not in target.tags or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    packet = getattr(aten, target._schema.name.split("::")[1] + "_", None)
    twin = getattr(packet, target._overloadname, None) if packet is not None else None
    if twin is None or len(twin._schema.arguments) != len(target._schema.arguments):
        return None
    return twin

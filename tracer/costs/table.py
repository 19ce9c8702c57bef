"""Tables of rules: what a kind of op allocates inside, as formulas over the tensors of a call.

A table is a TOML file with one [[rule]] a kind of op; the first row that names an op decides.

    ops         names of ops: "mm" stands for every overload of aten's, "aten.mm.default" for one; * for anything, ? for
                a character
    name        of the row, if it has one
    source      where the row was read; files are those of github.com/pytorch/pytorch
    confidence  what it rests on, for readers: "source" (restated from torch's, releases 2.11 to 2.13 or the main branch
                near them), "partial" (so, with a size filled in, say a library's scratch space), "assumed" (from how
                such kernels are written elsewhere), or, left out, the allocator's events as torch's profiler shows them
    when        the row holds only if this is true; else no rule says anything of the call
    let         names for values, in order
    events      what is allocated, in order: "out" for the op's outputs (nothing for an op that writes in place), a name
                of `let` for memory that the op frees before it returns, at the end or where "-name" stands, "=name"
                for memory that it leaves in place of an output, "o0" for one of the outputs

A value is a number of bytes, several in a tuple (freed in the opposite order), or None: no rule says anything.

In formulas, a0, a1, ... and o0, o1, ... are the arguments and outputs (x.shape, x.stride, x.dtype, x.elements,
x.item_bytes, x.nbytes, x.span_bytes of a tensor), `inputs` the tensors among the arguments, those in lists too,
`results` how many tensors come out, arg(k, default) an argument that may have been left out; and what the table's
reader adds.
"""

from __future__ import annotations

import fnmatch
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final

from tracer.costs.signature import Signature, TensorSpec
from traces.records.events import OwnEvents

OUT: Final = "out"
Events = tuple[int, ...]
Formula = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of a table."""

    name: str
    ops: tuple[str, ...]
    source: str
    when: Formula | None
    let: tuple[tuple[str, Formula], ...]
    events: tuple[str, ...]

    def matches(self, target: str) -> bool:
        short = short_name(target)
        return any(fnmatch.fnmatchcase(target if "." in op else short, op) for op in self.ops)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A file of rules, and the names that its formulas may use beside a call's own."""

    path: Path
    functions: Mapping[str, Any]

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        with self.path.open("rb") as file:
            return tuple(_rule(row) for row in tomllib.load(file)["rule"])

    @cached_property
    def rule_for(self) -> Callable[[str], Rule | None]:
        """By an op's name the row that decides about it."""
        return cache(lambda target: next((rule for rule in self.rules if rule.matches(target)), None))

    def events(self, signature: Signature, **values: Any) -> Events | None:
        """What the call allocates (+bytes) and frees (-bytes), in order; None: no rule says."""
        rule = self.rule_for(signature.target)
        return None if rule is None else _events(rule, signature, {**self.functions, **values})


def formula(text: str) -> Formula:
    """A function of named values: `formula("2 * x.shape[0]")({"x": ...})`. The tables are Lowtide's own code."""
    code = compile(text, text, "eval")
    return lambda values: eval(code, {"__builtins__": {}}, values)


def _rule(row: Mapping[str, Any]) -> Rule:
    let = tuple(line.split(" = ", 1) for line in row.get("let", ()))
    return Rule(
        name=row.get("name", ""),
        ops=tuple(row["ops"]),
        source=row["source"],
        when=formula(row["when"]) if "when" in row else None,
        let=tuple((name, formula(text)) for name, text in let),
        events=tuple(row["events"]),
    )


def _events(rule: Rule, signature: Signature, names: dict[str, Any]) -> Events | None:
    values = {
        **names,
        **{f"a{k}": a for k, a in enumerate(signature.args)},
        **{f"o{k}": o for k, o in enumerate(signature.outputs)},
        "inputs": signature.inputs,
        "results": len(signature.results),
        "arg": lambda k, default, name="": signature.argument(k, name, default),
    }
    if rule.when is not None and not rule.when(values):
        return None
    for name, value in rule.let:
        values[name] = value(values)
    asked = OwnEvents()
    for event in rule.events:
        name = event.lstrip("-=")
        if event == OUT:
            asked.allocate("", *made(signature))
        elif name[0] == "o" and name[1:].isdigit():
            made_here = values.get(name)
            asked.allocate("", made_here.span_bytes if isinstance(made_here, TensorSpec) else 0)
        elif values[name] is None:
            return None
        elif event.startswith("-"):
            asked.free(name)
        else:
            sizes = values[name] if isinstance(values[name], tuple) else (values[name],)
            asked.allocate("" if event.startswith("=") else name, *sizes)
    for temporary in reversed([name for name, _ in asked.live if name]):
        asked.free(temporary)
    return tuple(asked.events)


def made(signature: Signature) -> Events:
    """Bytes of the op's outputs; an op that writes in place makes none."""
    in_place = signature.target.split(".")[-2].endswith("_")
    return () if in_place else tuple(x.span_bytes for x in signature.results if x.span_bytes)


@cache
def short_name(target: str) -> str:
    """An op's name without its overload, one of aten's without "aten": "mm", "lowtide.dropout_mask"."""
    return target.removeprefix("aten.").rpartition(".")[0]


@cache
def is_pointwise(target: str) -> bool:
    """Whether torch tags an op ("aten.mul.Tensor") as pointwise: elements of its result need one of each argument."""
    import torch

    try:
        return torch.Tag.pointwise in resolve(target).tags
    except LookupError:
        return False


def resolve(target: str) -> Any:
    """The operator of that name ("aten.mul.Tensor"). Raises LookupError if torch has none."""
    import torch

    namespace, _, rest = target.partition(".")
    name, _, overload = rest.rpartition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        raise LookupError(f"torch has no operator {target}") from None


# What formulas of every table may call


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    return ceil_div(n, multiple) * multiple


def copied(x: TensorSpec, *permutation: int) -> int:
    """Bytes of `x.permute(permutation).contiguous()`, 0 if that is no copy."""
    order = permutation or tuple(range(len(x.shape)))
    expected = 1
    for k in reversed(order):
        if x.shape[k] != 1 and x.stride[k] != expected and x.elements:
            return x.nbytes
        expected *= x.shape[k]
    return 0


def fits_blas(x: TensorSpec) -> bool:
    """Whether a matrix lies in rows or in columns, which may have gaps between them."""
    (rows, columns), (down, across) = x.shape[-2:], x.stride[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def by_name(*functions: Callable[..., Any]) -> Mapping[str, Any]:
    """What formulas of a table may call: these, and what those of every table may."""
    common = (ceil_div, round_up, copied, fits_blas, min, max, sum, len)
    return {"product": math.prod, **{f.__name__: f for f in (*common, *functions)}}

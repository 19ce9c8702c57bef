"""Turn the text of a formula into a function of named values, without running anything but arithmetic."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

from traces.errors import SpecError

ATTRIBUTES: Final = frozenset({"shape", "stride", "dtype", "elements", "item_bytes", "nbytes", "span_bytes"})
BINARY: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
COMPARISONS: Final[dict[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
}


class Formula:
    """A formula, ready to be evaluated: `Formula("2 * x.shape[0]")({"x": ...})`.

    It may hold numbers, names, the attributes of a tensor's spec, indexing, tuples, + - * // %, comparisons, and, or,
    not, if-else, and calls of functions that are among the values.

    Raises:
        SpecError: the text holds something else.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self.tree = ast.parse(text, mode="eval").body
        except SyntaxError as error:
            raise SpecError(f"formula {text!r}: {error.msg}.") from error
        self._check(self.tree)

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The result. KeyError: a name has no value."""
        return self._value(self.tree, values)

    def _check(self, node: ast.AST) -> None:
        fine = isinstance(
            node,
            (ast.Name, ast.Load, ast.Tuple, ast.IfExp, ast.BoolOp, ast.And, ast.Or, ast.Not, ast.Compare, ast.Call,
             ast.Subscript, ast.UnaryOp, ast.USub, ast.BinOp, *BINARY, *COMPARISONS),
        )  # fmt: skip
        fine = fine or (isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)))
        fine = fine or (isinstance(node, ast.Attribute) and node.attr in ATTRIBUTES)
        if isinstance(node, ast.Call):
            fine = isinstance(node.func, ast.Name) and not node.keywords
        if not fine:
            raise SpecError(f"formula {self.text!r}: {type(node).__name__} is not allowed there.")
        for child in ast.iter_child_nodes(node):
            self._check(child)

    def _value(self, node: Any, values: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return values[node.id]
        if isinstance(node, ast.Attribute):
            return getattr(self._value(node.value, values), node.attr)
        if isinstance(node, ast.Subscript):
            return self._value(node.value, values)[self._value(node.slice, values)]
        if isinstance(node, ast.Tuple):
            return tuple(self._value(x, values) for x in node.elts)
        if isinstance(node, ast.IfExp):
            return self._value(node.body if self._value(node.test, values) else node.orelse, values)
        if isinstance(node, ast.BoolOp):
            stop_at = isinstance(node.op, ast.Or)
            result: Any = None
            for x in node.values:
                result = self._value(x, values)
                if bool(result) is stop_at:
                    return result
            return result
        if isinstance(node, ast.UnaryOp):
            operand = self._value(node.operand, values)
            return not operand if isinstance(node.op, ast.Not) else -operand
        if isinstance(node, ast.BinOp):
            return BINARY[type(node.op)](self._value(node.left, values), self._value(node.right, values))
        if isinstance(node, ast.Compare):
            left = self._value(node.left, values)
            for op, right in zip(node.ops, node.comparators, strict=True):
                other = self._value(right, values)
                if not COMPARISONS[type(op)](left, other):
                    return False
                left = other
            return True
        function = values[node.func.id]
        return function(*(self._value(a, values) for a in node.args))

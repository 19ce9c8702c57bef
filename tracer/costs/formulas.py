"""Formulas as text: arithmetic over named values, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Final

from traces.errors import SpecError

ATTRIBUTES: Final = frozenset({"shape", "stride", "dtype", "elements", "item_bytes", "nbytes", "span_bytes"})
ALLOWED: Final = (
    ast.Name, ast.Load, ast.Tuple, ast.IfExp, ast.Call, ast.Subscript,
    ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod,
    ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In,
)  # fmt: skip


class Formula:
    """A formula, ready to be evaluated: `Formula("2 * x.shape[0]")({"x": ...})`.

    It may hold numbers, names, the attributes of a tensor's spec, indexing, tuples, + - * // %, comparisons, and, or,
    not, if-else, and calls of functions that are among the values. So evaluating it runs nothing but those.

    Raises:
        SpecError: the text holds something else.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text, mode="eval")
        except SyntaxError as error:
            raise SpecError(f"formula {text!r}: {error.msg}.") from error
        for node in ast.walk(tree.body):
            if not _allowed(node):
                raise SpecError(f"formula {text!r}: {type(node).__name__} is not allowed there.")
        self._code = compile(tree, text, "eval")

    def __call__(self, values: Mapping[str, Any]) -> Any:
        """The result. NameError: a name has no value."""
        return eval(self._code, {"__builtins__": {}}, values)


def _allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (bool, int, float))
    if isinstance(node, ast.Attribute):
        return node.attr in ATTRIBUTES and not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    return isinstance(node, ALLOWED)

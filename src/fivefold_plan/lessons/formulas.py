"""Formulas of papers and courses, printed as they are evaluated. Symbols: fivefold_plan/lessons/terms.py."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping

PARAMETERS: dict[str, tuple[str, ...]] = {
    "embedding": ("n_v d",),
    "positions": ("s d",),
    "attention": ("L (4 d^2 + 4 d)", "L 4 d^2"),
    "MLP": ("L (8 d^2 + 5 d)", "L 3 d f"),
    "norms": ("L 4 d + 2 d", "L 4 d + 4 d", "L 2 d + d"),
    "output layer": ("n_v d",),
}
"""Formulas of the parts of a model. That one is printed whose value is the part's; no other."""
ACTIVATIONS = (
    "10 s b h + (24 s b h + 5 a b s^2) / t",
    "10 s b h + 24 s b h / t",
    "(34 s b h + 5 a b s^2) / t",
    "34 s b h / t",
)
"""Formulas of a block on several tensor-parallel ranks (arXiv 2205.05198, equations 2 to 6)."""

_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def matching(formulas: Iterable[str], value: float, symbols: Mapping[str, float]) -> str:
    """The first formula with this value, or ""."""
    return next((text for text in formulas if math.isclose(evaluate(text, symbols), value)), "")


def evaluate(formula: str, symbols: Mapping[str, float]) -> float:
    """The value of a formula. Symbols side by side are multiplied: `n_v d + L (12 d^2 + 5 d)`."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return symbols[node.id]
        assert isinstance(node, ast.Constant), ast.dump(node)
        assert isinstance(node.value, int | float)
        return node.value

    code = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula).replace("^", "**")
    return value(ast.parse(code, mode="eval").body)

"""How papers and courses count, as data for `fivefold plan terms` (`lessons/terms.py`). No prediction depends on it.

Symbols: n_v vocabulary, d or h width, f feed-forward, L layers, a heads, s tokens of a sequence, b sequences of a
microbatch, m microbatches, p pipeline ranks, v stages per rank, t tensor ranks, c context ranks, e expert ranks, k
experts per token, N parameters that compute a token, Psi parameters whose states are kept, Psi_e those of experts, n
ranks that share them, D tokens of the run, D_1 of a step.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from fivefold.plan.setting import FIVEFOLD, PAPER, Software, States
from fivefold.precision import DTYPES, MASTER


@dataclass(frozen=True)
class Convention:
    """states: bytes per parameter. program: whose activations are counted, in 16 bits and with dropout. None: those of
    the recipe and of this program."""

    states: States | None = None
    program: Software | None = None


CONVENTIONS = {
    "paper": Convention(PAPER, replace(FIVEFOLD, attention="plain", probability_dropout=True)),
    "fivefold": Convention(),
}
"""paper: 2 + 2 + 12 bytes, weights and gradients in 16 bits, and in fp32 a copy, momentum and variance (arXiv
1910.02054); activations of a block with the scores of attention in memory (arXiv 2205.05198)."""
ADAM = ("momentum", "variance")
SUMMED = DTYPES[MASTER].bytes
"""Bytes that a sum of gradients over microbatches in fp32 adds to those of the papers."""
DROPOUT = 0.1  # its value changes no size
WIDTH = DTYPES["bf16"].bytes

MODEL = "n_v d + L (12 d^2 + 5 d)"
"""The courses' count of a plain GPT: biases of the MLP only, no positions, no norms."""
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
ATTENTION_FLOPS = ("6 L h s D_1", "12 L h s D_1")
"""Scores and values, forward and backward; half of them if a token sees earlier ones only."""
BUBBLES = {"ideal": "(p - 1) / (v m)", "step": "(p - 1) / (v m + p - 1)"}
"""Idle time, as a share of the time without it, or of the whole step."""

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
    code = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula).replace("^", "**")
    return _value(ast.parse(code, mode="eval").body, symbols)


def _value(node: ast.expr, symbols: Mapping[str, float]) -> float:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, symbols), _value(node.right, symbols))
    if isinstance(node, ast.Name):
        return symbols[node.id]
    assert isinstance(node, ast.Constant), ast.dump(node)
    assert isinstance(node.value, int | float)
    return node.value

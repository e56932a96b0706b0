"""Conventions of papers and courses as data. They say how `fivefold plan` prints its terms (`lessons/terms.py`); no
prediction and no search depends on them.

Symbols: n_v vocabulary, d or h width, f feed-forward, L layers, a heads, s tokens of a sequence, b sequences of a
microbatch, m microbatches, p pipeline ranks, v stages per rank, t tensor ranks, c context ranks, e expert ranks, k
experts per token, N parameters that compute a token, Psi parameters whose states are kept, Psi_e those of experts, n
ranks that share them, D tokens of the run, D_1 of a step.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fivefold.plan.software import FIVEFOLD, PAPER, Software, States
from fivefold.precision import DTYPES, PRECISIONS

OWN = "fivefold"
"""The convention of this program: what the recipe really has."""


def _in(mode: str) -> States:
    """Adam's states in a mode (precision/registry.py), divided as the ZeRO paper does."""
    row = PRECISIONS[mode]
    gradient = DTYPES[row.gradient].bytes
    return States(
        working=DTYPES[row.working].bytes,
        master=DTYPES[row.master].bytes if row.copies else 0.0,
        gradient=gradient,
        moments=2 * DTYPES[row.state].bytes,
        reduce=gradient,
    )


STATES: dict[str, States | None] = {
    "paper": PAPER,
    "fp32_sum": replace(PAPER, gradient=PAPER.gradient + DTYPES["fp32"].bytes),
    "bf16_pure": _in("bf16_pure"),
    "fp32": _in("fp32"),
    OWN: None,
}
"""Bytes per parameter. paper: 2 + 2 + 12, weights and gradients in 16 bits, and in fp32 a copy, momentum and variance
(arXiv 1910.02054). fp32_sum: also the sum of those gradients over microbatches, in fp32. None: those of the recipe's
mode and optimizer."""
ADAM = ("momentum", "variance")

ACTIVATIONS: dict[str, Software | None] = {
    "plain": replace(FIVEFOLD, attention="plain", probability_dropout=True),
    "flash": replace(FIVEFOLD, attention="flash"),
    OWN: None,
}
"""The program whose activations are counted, in 16 bits and with dropout (arXiv 2205.05198). plain: attention's scores
are in memory. flash: they are not. None: this program, with the recipe's dtype and dropout."""
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
ATTENTION_FLOPS = ("6 L h s D_1", "12 L h s D_1")
"""Scores and values, forward and backward; half of them if a token sees earlier ones only."""
BUBBLES = {"ideal": "(p - 1) / (v m)", "step": "(p - 1) / (v m + p - 1)"}
"""Idle time, as a share of the time without it, or of the whole step."""


@dataclass(frozen=True)
class Conventions:
    """The conventions of one command. psi: parameters to count with, instead of the recipe's. flops: the rate of a
    device in FLOP/s; None: the predicted one. bubble: None: both. sections: of `terms.SECTIONS`, those to print."""

    states: str = OWN
    activations: str = OWN
    bubble: str | None = None
    flops: float | None = None
    psi: float | None = None
    sections: tuple[str, ...] = ()


_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


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

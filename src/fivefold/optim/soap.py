"""SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioners.

L averages G G^T and R averages G^T G, for every matrix G (r, c) of a block, also for each of several in one parameter.
Every `basis_every` steps their eigenvectors are refined by one power iteration with a QR decomposition. The first step
only makes them. Embeddings, the output layer and vectors are left to AdamW.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fivefold.optim.adamw import ADAMW
from fivefold.optim.card import OptimizerState, Tensor, Update
from fivefold.optim.muon import MUON
from fivefold.sharding.parts import Shape


def soap(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    import torch

    (b1, b2), eps = u.fields["betas"], u.fields["eps"]
    left, right, ql, qr = (states[name] for name in ("left", "right", "left_basis", "right_basis"))
    mean, square = states["momentum"], states["rotated_sq"]
    if u.fresh:
        left.copy_(g @ g.mT * (1 - b2))
        right.copy_(g.mT @ g * (1 - b2))
        # The largest eigenvalue first: the iteration below turns the first columns to the largest ones.
        ql.copy_(torch.linalg.eigh(left).eigenvectors.flip(-1))
        qr.copy_(torch.linalg.eigh(right).eigenvectors.flip(-1))
        return torch.zeros_like(g)
    t = u.step - 1  # the first step left the moments alone
    mean.lerp_(g, 1 - b1)
    rotated = ql.mT @ g @ qr
    square.mul_(b2).addcmul_(rotated, rotated, value=1 - b2)
    direction = ql.mT @ (mean / (1 - b1**t)) @ qr
    direction = ql @ (direction / (square / (1 - b2**t)).sqrt_().add_(eps)) @ qr.mT
    left.lerp_(g @ g.mT, 1 - b2)
    right.lerp_(g.mT @ g, 1 - b2)
    if u.number % u.fields["basis_every"] == 0:
        ql.copy_(torch.linalg.qr(left @ ql).Q)
        qr.copy_(torch.linalg.qr(right @ qr).Q)
    return direction


def _left(shape: Shape) -> Shape:
    return (*shape[:-1], shape[-2])


def _right(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-1])


def soap_flops(shape: Shape) -> float:
    """Matmul FLOPs of an update, without the QR decompositions: three rotations there or back, two averages."""
    r, c = shape[-2:]
    return math.prod(shape[:-2]) * 8.0 * r * c * (r + c)


CARDS = (
    replace(
        MUON,
        name="soap",
        source="arXiv 2409.11321",
        rule=soap,
        fields={**ADAMW.fields, "basis_every": 10},
        states=(
            OptimizerState("momentum"),
            OptimizerState("rotated_sq"),
            OptimizerState("left", shape=_left),
            OptimizerState("right", shape=_right),
            OptimizerState("left_basis", shape=_left),
            OptimizerState("right_basis", shape=_right),
        ),
        counts=True,
        reads=5.0,
        flops=soap_flops,
        jumps="rounding chooses the eigenvectors of equal eigenvalues",
    ),
)

"""Muon (K. Jordan et al., 2024; at scale: arXiv 2502.16982): momentum whose matrices are made orthogonal.

torch.optim.Muon computes the same, of matrices that are parameters of their own. Here queries, keys and values, or
gates and what they gate, lie in one parameter, and experts are stacks of matrices. Each is made orthogonal and scaled
by itself, on the rank where it comes together. The scale gives an update AdamW's usual size (arXiv 2502.16982), so
learning rate and weight decay suit both. Embeddings, the output layer and vectors are left to AdamW.
"""

from __future__ import annotations

import math

from fivefold.optim.adamw import ADAMW
from fivefold.optim.card import OptimizerCard, OptimizerState, Tensor, Update
from fivefold.sharding.parts import Shape, is_matrix

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the Newton-Schulz iteration, steepest at zero (Jordan)."""
EPS = 1e-7
RMS = 0.2  # of AdamW's updates (arXiv 2502.16982)


def muon(g: Tensor, states: dict[str, Tensor], u: Update) -> Tensor:
    m = u.fields["momentum"]
    kept = states["momentum_buffer"].lerp_(g, 1 - m)
    found = orthogonal(g.lerp(kept, m), u.fields["ns_steps"], u.compute)
    return found.mul_(RMS * math.sqrt(max(g.shape[-2:])))


def orthogonal(g: Tensor, steps: int, dtype: object) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T of each matrix, (r, c) or (n, r, c): singular values
    between 0.7 and 1.2. The iteration computes in `dtype`; the result is fp32."""
    a, b, c = QUINTIC
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)  # in fp32: small gradients vanish in fp16
    x = x.to(dtype)  # pyright: ignore[reportCallIssue, reportArgumentType]
    for _ in range(steps):
        gram = x @ x.mT
        x = _plus(a, x, 1.0, _plus(b, gram, c, gram, gram), x)
    return (x.mT if tall else x).float()


def _plus(a: float, z: Tensor, b: float, x: Tensor, y: Tensor) -> Tensor:
    """a z + b x y. The matmul adds, without passes over memory beside it."""
    add = z.addmm if z.dim() == 2 else z.baddbmm
    return add(x, y, beta=a, alpha=b)


def muon_flops(shape: Shape) -> float:
    """Matmul FLOPs of an update: three products per iteration."""
    (short, long), matrices = sorted(shape[-2:]), math.prod(shape[:-2])
    return matrices * 5 * (4.0 * short * short * long + 2.0 * short**3)


MUON = OptimizerCard(
    "muon",
    source="Jordan et al. 2024; arXiv 2502.16982",
    rule=muon,
    fields={"momentum": 0.95, "ns_steps": 5, **ADAMW.fields},
    states=(OptimizerState("momentum_buffer"),),
    second_moment="exp_avg_sq",
    needs="matrices",
    # The matrices inside the blocks
    applies=lambda name, shape: name.startswith("blocks.") and is_matrix(name, shape),
    rest=ADAMW,
    reads=2.0,
    flops=muon_flops,
    width_power=0.5,  # an update's largest singular value is RMS sqrt(D) here, and of Adam's about D
)
CARDS = (MUON,)

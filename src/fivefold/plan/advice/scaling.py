"""Scaling laws: the loss by parameters N and tokens D, and the best N and D for C = 6 N D FLOPs. No numpy."""

from __future__ import annotations

from dataclasses import dataclass

FLOPS = 6.0
"""Of training, per parameter and token: two in forward, four in backward (Kaplan et al., arXiv 2001.08361)."""


@dataclass(frozen=True)
class Optimum:
    """The best model size and number of tokens for a budget of FLOPs."""

    parameters: float
    tokens: float


@dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta in nats per token (Hoffmann et al., arXiv 2203.15556, equation 2).

    N counts all parameters, embeddings too; of a mixture of experts those that a token uses.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    @property
    def growth(self) -> float:
        """Exponent a of the best size, N ~ C^a. That of the best number of tokens is 1 - a."""
        return self.beta / (self.alpha + self.beta)

    def optimum(self, flops: float) -> Optimum:
        """The N and D with the lowest loss for C = 6 N D (equation 4 there)."""
        scale = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        parameters = scale * (flops / FLOPS) ** self.growth
        return Optimum(parameters, flops / FLOPS / parameters)


HOFFMANN = Law(1.69, 406.4, 410.7, 0.34, 0.28)
"""Of models up to 16B on MassiveText (arXiv 2203.15556, equation 10)."""
BESIROGLU = Law(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""Fitted again to points read from the figures of the same paper (arXiv 2404.10102)."""

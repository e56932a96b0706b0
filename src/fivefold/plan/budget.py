"""The field's rules of thumb for a run's size: FLOPs, days, devices, tokens, money."""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = 86400.0


def training_flops(parameters: float, tokens: float) -> float:
    """6 N D: two for each weight and token in forward, four in backward (Kaplan et al., arXiv 2001.08361)."""
    return 6.0 * parameters * tokens


def end_to_end_seconds(
    parameters: float, tokens: float, devices: float, flops: float, recompute: bool = True
) -> float:
    """Seconds of a run at `flops` FLOP/s a device. With full recomputation forward is done twice, so 8 N D (arXiv
    2104.04473, equation 4)."""
    return (8.0 if recompute else 6.0) * parameters * tokens / (devices * flops)


def devices_for(
    parameters: float, tokens: float, seconds: float, flops: float, recompute: bool = False
) -> int:
    """Devices that finish within `seconds` at `flops` FLOP/s each."""
    work = (8.0 if recompute else 6.0) * parameters * tokens
    return math.ceil(work / (seconds * flops))


@dataclass(frozen=True)
class Optimum:
    """The model and the tokens that a budget of FLOPs is best spent on."""

    parameters: float
    tokens: float


def chinchilla(flops: float, tokens_per_parameter: float = 20.0) -> Optimum:
    """Model and data grow alike, about 20 tokens a parameter (Hoffmann et al., arXiv 2203.15556): with C = 6 N D,
    N = sqrt(C / 120)."""
    parameters = math.sqrt(flops / (6.0 * tokens_per_parameter))
    return Optimum(parameters, tokens_per_parameter * parameters)


def kaplan(flops: float) -> Optimum:
    """Most of a growing budget goes into the model: N = 1.3e9 (C / PF-day)^0.73 parameters without embeddings (Kaplan
    et al., arXiv 2001.08361, table 6 and appendix A)."""
    parameters = 1.3e9 * (flops / (1e15 * DAY)) ** 0.73
    return Optimum(parameters, flops / (6.0 * parameters))


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """Nats a token of the fit of arXiv 2203.15556, equation 10: 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28."""
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def critical_batch_tokens(loss: float) -> float:
    """Tokens of the batch at which twice the fewest steps and twice the fewest tokens meet, at a training loss in nats:
    2e8 loss^-4.76 (arXiv 2001.08361, equation 1.4; arXiv 1812.06162 has the theory)."""
    return 2e8 * loss**-4.76


def noise_scale(small: float, large: float, small_square: float, large_square: float) -> float:
    """The simple gradient noise scale in the unit of the batch sizes, from mean squared norms of the gradient at two
    batch sizes (arXiv 1812.06162, appendix A.1): trace of the covariance over the squared true gradient.

    Returns infinity where the noise hides the gradient.
    """
    gradient = (large * large_square - small * small_square) / (large - small)
    trace = (small_square - large_square) / (1.0 / small - 1.0 / large)
    return trace / gradient if gradient > 0 else math.inf


def cost(devices: float, seconds: float, price_an_hour: float) -> float:
    """What device-hours cost."""
    return devices * seconds / 3600.0 * price_an_hour

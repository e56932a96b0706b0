"""The field's rules of thumb for a run's size: FLOPs, days, devices, tokens, money."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fivefold.errors import UserError
from fivefold.recipe import count_parameters, resolve_model
from fivefold.recipe.schema import ModelSection

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


@dataclass(frozen=True)
class Batch:
    """What a batch costs beside a critical one: steps over the fewest, and tokens over the fewest, that reach a loss
    (arXiv 1812.06162, equation 2.11)."""

    steps: float
    tokens: float


def batch_cost(batch: float, critical: float) -> Batch:
    """Both in the same unit. At the critical size each is 2; a larger batch saves steps, a smaller one tokens."""
    return Batch(1.0 + critical / batch, 1.0 + batch / critical)


def noise_scale(small: float, large: float, small_square: float, large_square: float) -> float:
    """The simple gradient noise scale in the unit of the batch sizes, from mean squared norms of the gradient at two
    batch sizes (arXiv 1812.06162, appendix A.1): trace of the covariance over the squared true gradient.

    Returns infinity where the noise hides the gradient.
    """
    gradient, trace = noise_parts(small, large, small_square, large_square)
    return trace / gradient if gradient > 0 else math.inf


def noise_parts(small: float, large: float, small_square: float, large_square: float) -> tuple[float, float]:
    """Unbiased estimates of the squared true gradient and of the trace of the covariance (appendix A.1 there)."""
    gradient = (large * large_square - small * small_square) / (large - small)
    return gradient, (small_square - large_square) / (1.0 / small - 1.0 / large)


def cost(devices: float, seconds: float, price_an_hour: float) -> float:
    """What device-hours cost."""
    return devices * seconds / 3600.0 * price_an_hour


WIDTH = 128.0  # of dim over layers: GPT-3 175B's 12288 / 96, Llama 7B's 4096 / 32


def shape(parameters: float, like: ModelSection) -> ModelSection:
    """A model of about so many parameters, with vocabulary, length and kind of `like`: as wide for its depth as large
    published models are, with heads of 128 (64 where that is too coarse).

    Raises:
        UserError: `like` alone, with its vocabulary and the smallest block, is larger; or more than is known to be.
    """
    if not 1e5 <= parameters <= 1e14:
        raise UserError(f"--params {parameters:g}: must be between 1e5 and 1e14")
    found = [
        candidate
        for head in (128, 64)
        for heads in range(1, 1 + round((parameters / 12 * WIDTH) ** (1 / 3) * 2 / head))
        if (candidate := _deep(parameters, like, heads, head)) is not None
    ]
    if not found:
        smallest = count_parameters(_sized(like, 1, 1, 64))
        raise UserError(
            f"--params {parameters:g}: with a vocabulary of {like.vocab_size} the smallest {like.arch} has {smallest:,}"
        )

    def oddness(model: ModelSection) -> float:
        """How far from the usual width, and from the size that was asked for: 1% weighs as much as 10% of width."""
        wide = abs(math.log(model.dim / model.layers / WIDTH))
        return wide + 10 * abs(math.log(count_parameters(model) / parameters))

    return min(found, key=oddness)


def _deep(parameters: float, like: ModelSection, heads: int, head: int) -> ModelSection | None:
    """The depth at which a width comes nearest."""
    one, two = (count_parameters(_sized(like, layers, heads, head)) for layers in (1, 2))
    layers = 1 + round((parameters - one) / (two - one))
    return _sized(like, layers, heads, head) if layers >= 1 else None


def _sized(like: ModelSection, layers: int, heads: int, head: int) -> ModelSection:
    ratio = (like.heads // like.kv_heads) if like.kv_heads else 1
    change: dict[str, Any] = {"layers": layers, "dim": heads * head, "heads": heads, "ffn_dim": None}
    change["kv_heads"] = heads // ratio if like.kv_heads and heads % ratio == 0 else None
    if like.arch == "moe":
        change |= {"expert_ffn_dim": None, "dense_layers": min(like.dense_layers, layers - 1)}
    return resolve_model(like.model_copy(update=change), vocab_size=2)

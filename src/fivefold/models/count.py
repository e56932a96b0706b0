"""Size of a model without building it: parameters, and training FLOPs per token. No torch."""

from __future__ import annotations

import math

from fivefold.models.card import Card, card_of, resolve_model
from fivefold.models.section import ModelSection


def active_parameters(model: ModelSection) -> int:
    """Number of parameters that compute a token: all, but only the routed experts that the token goes to."""
    card = _resolved(model)
    return sum(card.active(name, math.prod(shape)) for name, shape in card.parameters.items())


def count_parameters(model: ModelSection) -> int:
    """Number of parameters; tied embeddings count once. `model.vocab_size` must be given."""
    return _resolved(model).count


def flops_per_token(model: ModelSection, pairs: float = 1.0) -> float:
    """FLOPs of forward and backward on one token: 6 per weight in a matmul, plus 12 L D T for attention (half of it if
    causal); without recomputation (PaLM, arXiv 2204.02311, appendix B). Only weights that a token uses count: a masked
    language model's head works on the masked tokens only, and a token goes to some of the routed experts. pairs: the
    share of the pairs of tokens that attention sees, if a sequence holds several documents."""
    card = _resolved(model)
    blocks, _, head = card.costs
    hidden = (1 - pairs) * sum(map(card.attention_flops, range(card.model.layers))) if pairs < 1 else 0.0
    return sum(blocks) + head - hidden


def _resolved(model: ModelSection) -> Card:
    assert model.vocab_size is not None, "the vocabulary's size must be given"
    return card_of(resolve_model(model, vocab_size=model.vocab_size))

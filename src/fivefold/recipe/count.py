"""The size of a model from its numbers alone: parameters, and the work of training on a token. No torch."""

from __future__ import annotations

from fivefold.recipe.resolve import resolve_model
from fivefold.recipe.schema import ModelSection

MASKED_SHARE = 0.15  # of bert's tokens are predicted (arXiv 1810.04805)


def active_parameters(model: ModelSection) -> int:
    """Number of parameters that compute a token: all, but of the routed experts only those that a token goes to."""
    return count_parameters(model) - _idle_experts(model)


def count_parameters(model: ModelSection) -> int:
    """Number of parameters; tied embeddings count once. `model.vocab_size` must be given."""
    v, d, _ = _sizes(model)
    blocks = _matrices(model) + model.layers * _block_vectors(model)
    gated = model.arch in ("llama", "moe")
    tied = not gated if model.tie_embeddings is None else model.tie_embeddings
    output = 0 if tied else v * d
    if gated:  # embedding, final RMSNorm
        return v * d + blocks + d + output
    if model.arch == "gpt2":  # embedding, positions, final LayerNorm
        return (v + model.seq_len) * d + blocks + 2 * d + output
    embeddings = (v + model.seq_len + 2) * d + 2 * d  # bert: words, positions, 2 token types, LayerNorm
    head = d * d + d + 2 * d + v  # dense with bias, LayerNorm, bias of the output
    return embeddings + blocks + head + output


def flops_per_token(model: ModelSection) -> float:
    """FLOPs of forward and backward on one token: 6 for each weight in a matrix product, plus attention's
    12 L D T (half of it when causal); without recomputation (PaLM, arXiv 2204.02311, appendix B). BERT's head
    works on the masked tokens only; of the routed experts only those of a token count."""
    v, d, _ = _sizes(model)
    blocks = _matrices(model) - _idle_experts(model)
    attention = 12 * model.layers * d * model.seq_len
    if model.arch == "bert":  # attention looks both ways; the head has a dense layer of its own
        return 6.0 * (blocks + MASKED_SHARE * (v * d + d * d)) + attention
    return 6.0 * (blocks + v * d) + attention / 2


def _sizes(model: ModelSection) -> tuple[int, int, int]:
    """V, D and F."""
    assert model.vocab_size is not None, "the vocabulary's size must be given"
    ffn_dim = resolve_model(model, vocab_size=model.vocab_size).ffn_dim
    assert ffn_dim is not None
    return model.vocab_size, model.dim, ffn_dim


def _matrices(model: ModelSection) -> int:
    """Weights of the blocks' matrices: query, key, value, output; gate (llama and moe), up, down; router, experts."""
    _, d, f = _sizes(model)
    kv_dim = d // model.heads * (model.kv_heads or model.heads)
    attention = 2 * d * (d + kv_dim)
    feed_forward = (3 if model.arch in ("llama", "moe") else 2) * d * f
    if model.arch != "moe":
        return model.layers * (attention + feed_forward)
    sparse, experts, _, width = _experts(model)
    mixture = d * experts + (experts + model.shared_experts) * 3 * d * width
    return model.layers * attention + (model.layers - sparse) * feed_forward + sparse * mixture


def _idle_experts(model: ModelSection) -> int:
    """Weights of the routed experts that a token does not go to."""
    if model.arch != "moe":
        return 0
    sparse, experts, per_token, width = _experts(model)
    return sparse * (experts - per_token) * 3 * model.dim * width


def _experts(model: ModelSection) -> tuple[int, int, int, int]:
    """Blocks with experts, experts, experts of a token, width of an expert."""
    filled = resolve_model(model, vocab_size=model.vocab_size or 2)
    assert filled.experts
    assert filled.experts_per_token
    assert filled.expert_ffn_dim
    return model.layers - model.dense_layers, filled.experts, filled.experts_per_token, filled.expert_ffn_dim


def _block_vectors(model: ModelSection) -> int:
    """A block's norms and biases: two RMSNorms without biases (llama), else two LayerNorms and all biases."""
    _, d, f = _sizes(model)
    if model.arch in ("llama", "moe"):
        return 2 * d
    return 2 * 2 * d + (3 * d + d) + (f + d)  # norms; qkv, attention output; up, down

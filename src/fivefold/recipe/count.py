"""The size of a model from its numbers alone: parameters, and the work of training on a token. No torch."""

from __future__ import annotations

from fivefold.recipe.resolve import resolve_model
from fivefold.recipe.schema import ModelSection

MASKED_SHARE = 0.15  # of bert's tokens are masked, and so have a target


def count_parameters(model: ModelSection) -> int:
    """Number of parameters; tied embeddings count once. `model.vocab_size` must be given."""
    v, d, _ = _sizes(model)
    blocks = model.layers * (_block_matrices(model) + _block_vectors(model))
    tied = model.arch != "llama" if model.tie_embeddings is None else model.tie_embeddings
    output = 0 if tied else v * d
    if model.arch == "llama":  # embedding, final RMSNorm
        return v * d + blocks + d + output
    if model.arch == "gpt2":  # embedding, positions, final LayerNorm
        return (v + model.seq_len) * d + blocks + 2 * d + output
    embeddings = (v + model.seq_len + 2) * d + 2 * d  # bert: words, positions, 2 token types, LayerNorm
    head = d * d + d + 2 * d + v  # dense with bias, LayerNorm, bias of the output
    return embeddings + blocks + head + output


def flops_per_token(model: ModelSection) -> float:
    """FLOPs of forward and backward on one token: 6 for each weight in a matrix product, plus attention's
    12 L D T (half of it when causal); without recomputation (PaLM, arXiv 2204.02311, appendix B). BERT's head
    works on the masked tokens only."""
    v, d, _ = _sizes(model)
    blocks = model.layers * _block_matrices(model)
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


def _block_matrices(model: ModelSection) -> int:
    """Weights of a block's matrices: query, key, value, output; gate (llama), up, down."""
    _, d, f = _sizes(model)
    kv_dim = d // model.heads * (model.kv_heads or model.heads)
    return 2 * d * (d + kv_dim) + (3 if model.arch == "llama" else 2) * d * f


def _block_vectors(model: ModelSection) -> int:
    """A block's norms and biases: two RMSNorms without biases (llama), else two LayerNorms and all biases."""
    _, d, f = _sizes(model)
    if model.arch == "llama":
        return 2 * d
    return 2 * 2 * d + (3 * d + d) + (f + d)  # norms; qkv, attention output; up, down

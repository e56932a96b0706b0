"""The key-value cache: keys and values of earlier tokens, kept for later ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.kernels import elementwise
from fivefold.kernels.blockwise_attention import attention
from fivefold.models.section import ModelSection


def cached_attention(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor | None, sin: Tensor | None, cache: LayerCache
) -> Tensor:
    """Attention of T new tokens, which follow those in the cache and are added to it.

    qkv (B, T, (H + 2K) d); cos, sin (T, d/2) of the new positions, or None. Returns (B, T, H d).
    """
    B, T, width = qkv.shape
    all_BTNd = qkv.view(B, T, heads + 2 * kv_heads, width // (heads + 2 * kv_heads))
    q_BTHd, k_BTKd, v_BTKd = all_BTNd.split([heads, kv_heads, kv_heads], dim=2)
    if cos is not None and sin is not None:
        q_BTHd, k_BTKd = elementwise.rope(q_BTHd, cos, sin), elementwise.rope(k_BTKd, cos, sin)
    k_BSKd, v_BSKd = cache.append(k_BTKd, v_BTKd)
    # A single new token sees all earlier ones, so there is nothing to mask.
    return attention(q_BTHd, k_BSKd, v_BSKd, causal=T > 1).flatten(2)


class LayerCache:
    """Keys and values of one block, in buffers (B, capacity, K, d). The first `length` rows are valid."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, k_BTKd: Tensor, v_BTKd: Tensor) -> tuple[Tensor, Tensor]:
        """Adds T tokens; returns views of all keys and values so far, (B, length, K, d)."""
        start, stop = self.length, self.length + k_BTKd.shape[1]
        assert stop <= self.k.shape[1], f"cache of {self.k.shape[1]} tokens asked to hold {stop}"
        self.k[:, start:stop] = k_BTKd
        self.v[:, start:stop] = v_BTKd
        self.length = stop
        return self.k[:, :stop], self.v[:, :stop]

    def rows(self, rows: Sequence[int], capacity: int) -> LayerCache:
        _, _, K, d = self.k.shape
        copy = LayerCache((len(rows), capacity, K, d), self.k.dtype, self.k.device)
        copy.append(self.k[rows, : self.length], self.v[rows, : self.length])
        return copy


class Cache:
    """One `LayerCache` per block, passed to a model with each piece of text: the prompt, then token by token."""

    def __init__(
        self,
        model: ModelSection,
        *,
        batch: int = 1,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity or model.seq_len
        shape = (batch, self.capacity, model.kv_heads or model.heads, model.head_width)
        self.layers = [LayerCache(shape, dtype, device) for _ in range(model.layers)]

    def rows(self, rows: Sequence[int], capacity: int) -> Cache:
        """A new cache of `capacity` tokens that begins with these rows of this one, some perhaps several times."""
        copy = Cache.__new__(Cache)
        copy.capacity = capacity
        copy.layers = [layer.rows(rows, capacity) for layer in self.layers]
        return copy

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return self.layers[0].length

    def clear(self) -> None:
        """Forgets all tokens; the memory stays."""
        for layer in self.layers:
            layer.length = 0

    def __getitem__(self, index: int) -> LayerCache:
        return self.layers[index]

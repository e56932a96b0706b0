"""The sublayers that architectures share: attention, SwiGLU, GELU.

Shapes: B batch, T tokens, D model width, H query heads, K key heads, d width of a head, F feed-forward width.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fivefold import kernels
from fivefold.kernels.documents import Documents
from fivefold.models.cache import LayerCache, cached_attention
from fivefold.models.layers import AttentionCore, Linear, Sublayer
from fivefold.models.section import ModelSection


class Attention(Sublayer):
    """Self-attention. Rows of `qkv.weight`: H query heads, then K key heads, then K value heads."""

    entry = "qkv"

    def __init__(self, model: ModelSection, bias: bool, causal: bool = True) -> None:
        super().__init__()
        heads, kv_heads, d = model.heads, model.kv_heads or model.heads, model.head_width
        self.qkv = Linear(model.dim, (heads + 2 * kv_heads) * d, bias=bias)
        self.core = AttentionCore(heads, kv_heads, causal)
        self.out = Linear(heads * d, model.dim, bias=bias)

    def forward(
        self,
        x_BTD: Tensor,
        *tables: Tensor,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """tables: cosine and sine of the rotary angles (T, d/2), or nothing."""
        qkv = self.qkv(x_BTD)  # (B, T, (H + 2K) d)
        if cache is None:
            return self.finish(qkv, *tables, documents=documents)
        cos, sin = tables or (None, None)
        return self.out(
            cached_attention(self.prepare(qkv), self.core.heads, self.core.kv_heads, cos, sin, cache)
        )

    def finish(self, product: Tensor, *tables: Tensor, documents: Documents | None = None) -> Tensor:
        """Queries, keys and values (B, T, (H + 2K) d) -> (B, T, D)."""
        return self.out(self.core(self.prepare(product), *tables, documents=documents))

    def prepare(self, qkv: Tensor) -> Tensor:
        """Changes queries and keys before attention, such as by a norm of each head."""
        return qkv


class SwiGLU(Sublayer):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202). Rows of `gate_up.weight`: F of the gate, then F of up."""

    entry = "gate_up"

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_up = Linear(dim, 2 * width, bias=False)
        self.down = Linear(width, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.finish(self.gate_up(x_BTD))

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """Gate and up (B, T, 2F) -> (B, T, D)."""
        return self.down(kernels.swiglu(product))


class GELU(Sublayer):
    """down(gelu(up(x))), with biases. approximate: "tanh" or "none" (exact)."""

    entry = "up"

    def __init__(self, dim: int, width: int, approximate: Literal["tanh", "none"]) -> None:
        super().__init__()
        self.approximate: Literal["tanh", "none"] = approximate
        self.up = Linear(dim, width)
        self.down = Linear(width, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.finish(self.up(x_BTD))

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """(B, T, F) -> (B, T, D)."""
        return self.down(kernels.gelu(product, self.approximate))

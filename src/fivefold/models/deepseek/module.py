"""DeepSeek-V3: multi-head latent attention (arXiv 2405.04434) and a mixture of experts with shared experts, routed
within groups and balanced by a bias (arXiv 2412.19437; see models/mixture.py). Without multi-token prediction.

Shapes: B batch, T tokens, D model width, H heads, d width of a query head.
"""

from __future__ import annotations

from torch import Tensor

from fivefold.kernels.documents import Documents
from fivefold.kernels.elementwise import latent_heads
from fivefold.models.deepseek.card import widths_of
from fivefold.models.layers import (
    AttentionCore,
    LayerCache,
    Linear,
    RegionInput,
    RMSNorm,
    Sublayer,
    cached_attention,
)
from fivefold.models.llama import module as llama
from fivefold.models.moe import module as moe
from fivefold.models.section import ModelSection

EPS = 1e-6
"""Of the latents' norms, whatever the model's `norm_eps` is (as DeepSeek's own code and transformers have it)."""


class LatentAttention(Sublayer):
    """Attention whose queries, keys and values are made from two narrow vectors of each token.

    A head's query and key have a part without positions and a part that is rotated. All heads share that of the key.
    The core gets value heads that are padded to the width of the others, so that it is the same for all architectures.
    The cache of generation holds these heads, not the latent vectors. YaRN's factor on the scores, which are those of
    both parts, is on the queries.
    """

    def __init__(self, model: ModelSection, bias: bool) -> None:
        super().__init__()
        assert not bias, "refused by the card"
        H, w = model.heads, widths_of(model)
        self.sections, self.value = (w.query_rank, w.kv_rank, w.rope), w.value
        self.scale = model.rope_amplitude**2
        self.latents = Linear(model.dim, w.latents, bias=False)
        self.norm_q = RMSNorm(w.query_rank, EPS) if w.query_rank else None
        self.norm_kv = RMSNorm(w.kv_rank, EPS)
        self.up_q = Linear(w.query_rank or model.dim, H * w.query, bias=False)
        self.up_kv = Linear(w.kv_rank, H * w.key_value, bias=False)
        self.shared_key = RegionInput()
        self.core = AttentionCore(H, H)
        self.out = Linear(H * w.value, model.dim, bias=False)

    def forward(
        self,
        x_BTD: Tensor,
        *tables: Tensor,
        cache: LayerCache | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """tables: cosine and sine of the rotary angles (T, rope_dim / 2)."""
        latents = self.latents(x_BTD)
        if cache is None:
            return self.finish(latents, x_BTD, *tables, documents=documents)
        H, qkv = self.core.heads, self.prepare(latents, x_BTD, *tables)
        return self.project(cached_attention(qkv, H, H, None, None, cache))

    def finish(self, product: Tensor, *tables: Tensor, documents: Documents | None = None) -> Tensor:
        """Latent vectors of queries and of keys and values, and the shared part of the key; the sublayer's input, and
        the tables -> (B, T, D)."""
        return self.project(self.core(self.prepare(product, *tables), documents=documents))

    def prepare(self, latents: Tensor, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of all heads, rotated: (B, T, 3 H d)."""
        query, key_value, key = latents.split(self.sections, dim=-1)
        q_BTHd = self.up_q(x_BTD if self.norm_q is None else self.norm_q(query)).unflatten(
            -1, (self.core.heads, -1)
        )
        kv_BTHn = self.up_kv(self.norm_kv(key_value)).unflatten(-1, (self.core.heads, -1))
        return latent_heads(q_BTHd, kv_BTHn, self.shared_key(key), cos, sin, self.value, self.scale)

    def project(self, attended: Tensor) -> Tensor:
        """(B, T, H d) -> (B, T, D), without the padding of the values."""
        return self.out(attended.unflatten(-1, (self.core.heads, -1))[..., : self.value].flatten(-2))


class Block(llama.Block):
    attention_type = LatentAttention


class Model(moe.Model):
    """A model with `LatentAttention`, whose first `dense_layers` have no experts."""

    block_type = Block
    amplitude = 1.0  # it is in `LatentAttention.scale`

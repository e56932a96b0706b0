"""Layers that the models share: linear layer, norms, rotary table, logits or loss; attention, SwiGLU, GELU.

Every module runs in the dtype of its parameters. Norms, rotary tables and losses compute in fp32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fivefold.kernels import cross_entropy, elementwise, matmul, native
from fivefold.kernels.blockwise_attention import PLAIN, Documents, Scores, attention, heads_of, qkv_attention
from fivefold.kernels.fused_attention import OneRank, Sees, attended
from fivefold.kernels.gpu import registry
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.models.card import card_of
from fivefold.models.section import ModelSection


class Linear(nn.Linear):
    """`torch.nn.Linear` (same parameters, same names) through the project's own kernel. rounded: how it rounds
    factors."""

    rounded: RoundedMatmuls | None = None

    def reset_parameters(self) -> None:
        """Does nothing: `init_weights` sets the values (on "meta", torch's own method imports its compiler: 1 s)."""

    def forward(self, input: Tensor) -> Tensor:
        return matmul.linear(input, self.weight, self.bias, self.rounded)


class Embedding(nn.Embedding):
    """`torch.nn.Embedding`, whose values `init_weights` sets."""

    def reset_parameters(self) -> None:
        """Does nothing, as in `Linear`."""


class Positions(Embedding):
    """Learned positions: (T) -> (T, D), or (B, T) -> (B, T, D). With sequence parallelism a rank looks up its piece."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dim, in fp32 inside (arXiv 1910.07467)."""

    bias = None

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return elementwise.norm(x, self.weight, None, self.eps)


class UnitRMSNorm(RMSNorm):
    """x / rms(x) * (1 + delta), as in Gemma. Its parameter starts at 0. In bf16 the sum is rounded, as the weight of
    any other norm is; transformers does not round it. Gradients of 8 blocks in bf16 were 2.3% from those in fp32, and
    2.0% without this rounding."""

    def __init__(self, dim: int, eps: float) -> None:
        nn.Module.__init__(self)
        self.eps = eps
        self.delta = nn.Parameter(torch.zeros(dim))

    @property
    def weight(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 1 + self.delta


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` (same parameters, same names), in fp32 inside (arXiv 1607.06450)."""

    def forward(self, input: Tensor) -> Tensor:
        return elementwise.norm(input, self.weight, self.bias, self.eps)


class AddNorm(nn.Module):
    """A norm that first adds a branch to the residual stream, in the same pass over memory."""

    weight: Any
    bias: Any
    eps: float

    def forward(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (x + branch, its norm)."""
        return elementwise.add_norm(x, branch, self.weight, self.bias, self.eps)

    def alone(self, x: Tensor) -> Tensor:
        """The norm of x."""
        return elementwise.norm(x, self.weight, self.bias, self.eps)


class AddRMSNorm(AddNorm, RMSNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class AddUnitRMSNorm(AddNorm, UnitRMSNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class AddLayerNorm(AddNorm, LayerNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


class WideRMSNorm(nn.Module):
    """RMSNorms of several vectors per token, each over all of its features. The weight has a section for each vector.

    Tensor parallelism cuts the features. It replaces this module by one that sums the squares over ranks, with one
    message for all vectors.
    """

    def __init__(self, sizes: Sequence[int], eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(sum(sizes)))

    def forward(self, *vectors: Tensor) -> tuple[Tensor, ...]:
        weights = self.weight.split([x.shape[-1] for x in vectors])
        return tuple(
            elementwise.norm(x, weight, None, self.eps) for x, weight in zip(vectors, weights, strict=True)
        )


class Sublayer(nn.Module, ABC):
    """Attention or feed-forward, in two halves: a first matmul, and `finish`, which computes the rest up to the
    sublayer's output. `parallel/recompute.py` keeps the first matmul's result and recomputes the second half. entry:
    the name of the first matmul, if nothing else reads the sublayer's input."""

    entry: str = ""

    @abstractmethod
    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """The first matmul's result, and every block's arguments besides x -> the sublayer's output (B, T, D)."""


class Core(nn.Module):
    """What of a block looks beyond a token, between projections. No parameters.

    Context parallelism replaces it by another module; tensor parallelism lowers its head counts.
    """

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads


class AttentionCore(Core):
    """Attention between projections: (B, T, (H + 2K) d) -> (B, T, H d). recompute: backward computes scores and softmax
    again. With a cap or a sink, `OneRank` computes it by tiles or flash attention, and keeps no scores."""

    recompute = False

    def __init__(self, heads: int, kv_heads: int, causal: bool = True) -> None:
        super().__init__(heads, kv_heads)
        self.causal = causal

    def forward(
        self,
        qkv: Tensor,
        cos_Td: Tensor | None = None,
        sin_Td: Tensor | None = None,
        documents: Documents | None = None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        return self.fused(qkv, cos_Td, sin_Td, Sees(documents, scores))

    def fused(self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, sees: Sees) -> Tensor:
        """`forward`; what cores over ranks replace."""
        heads = self.heads, self.kv_heads
        if not sees.scores.plain:
            return attended(qkv, cos, sin, OneRank(*heads, self.causal), sees)
        return qkv_attention(qkv, *heads, cos, sin, self.causal, self.recompute, *sees)


class RegionInput(nn.Identity):
    """Identity: an activation enters the part of a sublayer that computes with some of the heads only, beside the
    linear layers there. No parameters.

    Tensor parallelism replaces it by a module that makes the activation whole and sums its gradients.
    """


class RegionOutput(nn.Identity):
    """Identity: an activation leaves the part of a sublayer that computes with some of the features only. No
    parameters. Tensor parallelism replaces it by a module that sums the activation over ranks, in place."""


class Output(nn.Module):
    """Hidden states and the output layer's weight -> logits or loss. No parameters.

    Without targets: logits (B, T, V) in fp32. With targets: the mean cross-entropy over targets other than -100,
    computed in chunks, so that the logits never exist as a whole.

    Tensor parallelism replaces it by a module that works on a part of the vocabulary. z_loss: the factor of the squared
    log-sum-exp in the training loss. drawing: while it is set, targets are numbers of tokens, and the loss is that of
    labels which the model draws for them (`cross_entropy.drawn`), without z_loss. cap: c, if logits x become
    c tanh(x / c); 0: they stay.
    """

    z_loss: float = 0.0
    cap: float = 0.0
    drawing: cross_entropy.Keys | None = None

    def forward(
        self, x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor | None, bias_V: Tensor | None = None
    ) -> Tensor:
        if targets_BT is None:
            return self.capped(matmul.linear(x_BTD, weight_VD, bias_V).float())
        given = x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten(), bias_V, self.z_factor
        if self.in_triton(x_BTD):
            from fivefold.kernels.gpu import loss  # with Triton, which takes half a second

            return loss.linear_cross_entropy(*given)
        return matmul.linear_cross_entropy(*given, self.drawing, self.cap)

    def capped(self, logits: Tensor) -> Tensor:
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def in_triton(self, x: Tensor) -> bool:
        """True if a kernel computes the loss without logits in memory. It has no caps, and draws no labels."""
        return self.drawing is None and not self.cap and native.in_triton(registry.LOSS, x)

    @property
    def z_factor(self) -> float:
        """The factor of the squared log-sum-exp in this pass."""
        return self.z_loss if self.training and self.drawing is None else 0.0


def rope_table(
    positions_T: Tensor, model: ModelSection, width: int = 0, amplitude: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of a model's rotary angles at these positions: two (T, d/2), fp32. width: d, of a head's
    part that rotates. amplitude: of the rotated vectors. 0: the model's.

    Angle of position t and pair i: t times `rope_frequencies`. It is computed in every forward, which costs
    microseconds. `module.to(bfloat16)` would round a stored table, which would also have to follow every change of
    device.
    """
    angles = torch.outer(positions_T.float(), rope_frequencies(model, positions_T.device, width))
    amplitude = amplitude or model.rope_amplitude
    if amplitude == 1:
        return angles.cos(), angles.sin()
    return angles.cos() * amplitude, angles.sin() * amplitude


def rope_frequencies(model: ModelSection, device: torch.device, width: int = 0) -> Tensor:
    """The frequency of each pair i: theta ** (-2 i / d) (arXiv 2104.09864), (d/2), fp32.

    For a longer context than `rope_context` tokens, frequencies with fewer than `rope_low` turns in the old one are
    divided by `rope_factor`; those with more than `rope_high` stay. Between the two limits the share is linear, with
    "llama3" (arXiv 2407.21783) in the number of turns, with "yarn" (arXiv 2309.00071) in the number of the pair.
    """
    d, theta, old = width or model.rotary_width, model.rope_theta, model.rope_context / (2 * math.pi)
    exponents = torch.arange(0, d, 2, dtype=torch.float32, device=device) / d
    frequencies = 1.0 / theta**exponents
    if model.rope_factor == 1:
        return frequencies
    if model.rope_scaling == "linear":
        return frequencies / model.rope_factor
    if model.rope_scaling == "llama3":
        kept = (frequencies * old - model.rope_low) / (model.rope_high - model.rope_low)
    else:  # the pair with n turns has the number d/2 x log_theta(old / n); limits are whole numbers
        first, last = (
            d // 2 * math.log(model.rope_context / (2 * math.pi * n), theta)
            for n in (model.rope_high, model.rope_low)
        )
        if model.rope_truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, d - 1)
        kept = 1 - (torch.arange(d // 2, device=device) - first) / (last - first or 0.001)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / model.rope_factor)


def cached_attention(
    qkv: Tensor, heads: int, kv_heads: int, cos: Tensor | None, sin: Tensor | None, cache: LayerCache,
    scores: Scores = PLAIN,
) -> Tensor:  # fmt: skip
    """Attention of T new tokens, which follow those in the cache and are added to it.

    qkv (B, T, (H + 2K) d); cos, sin (T, d/2) of the new positions, or None. Returns (B, T, H d).
    """
    q_BTHd, k_BTKd, v_BTKd = heads_of(qkv, heads, kv_heads, cos, sin)
    k_BSKd, v_BSKd = cache.append(k_BTKd, v_BTKd)
    # A single new token sees all earlier ones: without a window there is nothing to mask.
    causal = qkv.shape[1] > 1 or scores.window > 0
    return attention(q_BTHd, k_BSKd, v_BSKd, causal, scores=scores).flatten(2)


class Attention(Sublayer):
    """Self-attention. Rows of `qkv.weight`: H query heads, then K key heads, then K value heads. number: of the block,
    which says what its queries see and how they rotate. The card says what it has: biases of `qkv` and of `out`; a sink
    for each head (`Scores`); gates, by which a sigmoid of the block's input multiplies the output of each head (arXiv
    2505.06708), with H heads more as the last rows of `qkv.weight`."""

    entry = "qkv"

    def __init__(self, model: ModelSection, bias: bool, number: int = 0, causal: bool = True) -> None:
        super().__init__()
        self.window, self.rotates = model.window(number), model.rotates(number)
        self.soft_cap = model.score_cap
        heads, kv_heads, d = model.heads, model.kv_heads or model.heads, model.head_width
        card = card_of(model)
        bias, self.gated = bias or card.qkv_biased, card.gated_attention
        self.sink_bias = nn.Parameter(torch.zeros(heads)) if card.sinks else None
        self.qkv = Linear(model.dim, (heads + 2 * kv_heads + heads * self.gated) * d, bias=bias)
        self.core = AttentionCore(heads, kv_heads, causal)
        self.out = Linear(heads * d, model.dim, bias=bias and card.out_biased)

    def forward(
        self, x_BTD: Tensor, *tables: Tensor, cache: LayerCache | None = None, **options: Any
    ) -> Tensor:
        """tables: cosine and sine of the rotary angles (T, d/2), or nothing; then those of blocks with a window, if
        these have their own. options: of `finish`."""
        product = self.qkv(x_BTD)  # (B, T, (H + 2K) d), or with gates (B, T, (2H + 2K) d)
        if cache is None:
            return self.finish(product, *tables, **options)
        cos, sin = self.angles(tables) or (None, None)
        heads, (qkv, *gates) = (self.core.heads, self.core.kv_heads), self.divided(product)
        qkv = self.prepare(qkv, *self.added_values(tables))
        return self.project(cached_attention(qkv, *heads, cos, sin, cache, self.scores), *gates)

    @property
    def scores(self) -> Scores:
        """What the block changes about scores."""
        return Scores(self.window, self.soft_cap, self.sink_bias)

    def finish(self, product: Tensor, *tables: Tensor, documents: Documents | None = None) -> Tensor:
        """Queries, keys and values (B, T, (H + 2K) d), and gates if there are -> (B, T, D)."""
        angles, (qkv, *gates) = self.angles(tables), self.divided(product)
        qkv = self.prepare(qkv, *self.added_values(tables))
        attended = self.core(qkv, *angles, documents=documents, scores=self.scores)
        return self.project(attended, *gates)

    def divided(self, product: Tensor) -> tuple[Tensor, ...]:
        """The first matmul's result as queries, keys and values, and the logits of gates if there are."""
        if not self.gated:
            return (product,)
        heads, kv_heads = self.core.heads, self.core.kv_heads
        d = product.shape[-1] // (2 * heads + 2 * kv_heads)
        return product.split([(heads + 2 * kv_heads) * d, heads * d], -1)

    def project(self, attended: Tensor, gates: Tensor | None = None) -> Tensor:
        """The outputs of heads (B, T, H d), through their gates -> (B, T, D)."""
        return self.out(attended if gates is None else elementwise.gated(attended, gates))

    def angles(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The tables by which this block rotates."""
        if not self.rotates:
            return ()
        return tables[2:] if self.window and len(tables) > 2 else tables[:2]

    def added_values(self, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of a block's arguments the value embedding of its tokens, if it has one, for `prepare`."""
        return ()

    def prepare(self, qkv: Tensor) -> Tensor:
        """Changes queries and keys before attention, such as by a norm of each head."""
        return qkv


class SwiGLU(Sublayer):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202). Rows of `gate_up.weight`: F of the gate, then F of up. geglu: the
    gate is GELU, by its tanh form."""

    entry = "gate_up"
    geglu = False

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_up = Linear(dim, 2 * width, bias=False)
        self.down = Linear(width, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.finish(self.gate_up(x_BTD))

    def finish(self, product: Tensor, *tables: Tensor) -> Tensor:
        """Gate and up (B, T, 2F) -> (B, T, D)."""
        return self.down(elementwise.geglu(product) if self.geglu else elementwise.swiglu(product))


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
        return self.down(elementwise.gelu(product, self.approximate))


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


class StateCache:
    """Of a block with linear attention: the state of its heads, and the last tokens of its convolution; None without
    tokens before. `length` tokens have passed."""

    def __init__(self) -> None:
        self.length, self.held = 0, list[Tensor]()

    @property
    def before(self) -> tuple[Tensor | None, Tensor | None]:
        """State and last tokens; None before the first token."""
        state, tail = self.held if self.length else (None, None)
        return state, tail

    def put(self, tokens: int, state: Tensor, tail: Tensor) -> None:
        self.length, self.held = self.length + tokens, [state, tail]

    def rows(self, rows: Sequence[int], capacity: int) -> StateCache:
        copy = StateCache()
        copy.length, copy.held = self.length, [one[rows] for one in self.held]
        return copy


class Cache:
    """One `LayerCache` or `StateCache` per block, passed to a model with each piece of text: the prompt, then token by
    token."""

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
        self.layers = [
            StateCache() if model.linear(number) else LayerCache(shape, dtype, device)
            for number in range(model.layers)
        ]

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

    def __getitem__(self, index: int) -> LayerCache | StateCache:
        return self.layers[index]

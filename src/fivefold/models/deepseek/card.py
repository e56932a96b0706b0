"""DeepSeek-V3 as data: see module.py for the papers. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from fivefold.models import work
from fivefold.models.card import Contradiction, ScoreRows, cached
from fivefold.models.moe import card as moe
from fivefold.models.operations import Matmul, Operation, Program, Saved, Sizes
from fivefold.models.section import ModelSection
from fivefold.models.tables import linear, rms_norm, under
from fivefold.sharding.parts import Cut, Sections, Shape
from fivefold.sharding.sequence import some_queries


class Widths(NamedTuple):
    """Widths of latent attention: of the two latent vectors (0: queries have none), and of the parts of a head."""

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int

    @property
    def latents(self) -> int:
        """Width of the latent vectors and of the part of the key that all heads share."""
        return self.query_rank + self.kv_rank + self.rope

    @property
    def query(self) -> int:
        """Width of a query head."""
        return self.nope + self.rope

    @property
    def key_value(self) -> int:
        """Width of what a head gets from its token's latent vector: a part of the key, and the value."""
        return self.nope + self.value


def widths_of(model: ModelSection) -> Widths:
    """The widths of a resolved model."""
    given = model.query_rank, model.kv_rank, model.nope_dim, model.rope_dim, model.value_dim
    return Widths(*(width or 0 for width in given))


class Card(moe.Card):
    summary = "moe with multi-head latent attention, one shared expert, and routers that a bias balances"
    words = moe.Card.words | {
        "query_rank": "D / 2",
        "kv_rank": "D / 4",
        "nope_dim": "D / H",
        "rope_dim": "half of `nope_dim`, made even",
        "value_dim": "`nope_dim`",
    }
    widths = (*moe.Card.widths, "query_rank", "kv_rank")
    grouped_queries = free_heads = attention_biases = False
    latent_attention = multi_token = True
    shared, score, balance = 1, "sigmoid", "bias"
    eps = 1e-6

    def defaults(self) -> dict[str, Any]:
        model = self.model
        nope = model.nope_dim or max(1, model.dim // model.heads)
        return super().defaults() | {
            "query_rank": max(1, model.dim // 2),
            "kv_rank": max(1, model.dim // 4),
            "nope_dim": nope,
            "rope_dim": 2 * max(1, nope // 4),
            "value_dim": nope,
        }

    def resized(self, layers: int) -> dict[str, Any]:
        names = ("query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
        return super().resized(layers) | {name: None for name in names if getattr(self.model, name)}

    def rules(self) -> Iterator[Contradiction]:
        yield from super().rules()
        model, unset = self.model, self.defaults()
        query = (model.nope_dim or unset["nope_dim"]) + (model.rope_dim or unset["rope_dim"])
        if (model.rope_dim or 0) % 2:
            yield (
                {"model.rope_dim"},
                f"model.rope_dim = {model.rope_dim} must be even: RoPE rotates pairs. "
                f"Nearest valid: {(model.rope_dim or 0) - 1}",
            )
        if model.value_dim and model.value_dim > query:
            yield (
                {"model.value_dim", "model.nope_dim", "model.rope_dim"},
                f"model.value_dim = {model.value_dim} must be at most nope_dim + rope_dim = {query}. "
                f"Nearest valid: {query}",
            )

    def attention(self) -> dict[str, Shape]:
        """Rows of `latents`: the queries' latent vector, that of keys and values, the shared part of the key. Rows of
        `up_q` and `up_kv` go head by head."""
        D, H, w = self.model.dim, self.model.heads, widths_of(self.model)
        return (
            linear("latents", D, w.latents, bias=False)
            | (under("norm_q", rms_norm(w.query_rank)) if w.query_rank else {})
            | under("norm_kv", rms_norm(w.kv_rank))
            | linear("up_q", w.query_rank or D, H * w.query, bias=False)
            | linear("up_kv", w.kv_rank, H * w.key_value, bias=False)
            | linear("out", H * w.value, D, bias=False)
        )

    def cut(self, name: str, shape: Shape) -> Cut | None:
        if name in ("attention.up_q.weight", "attention.up_kv.weight"):
            return Cut("column", 0, shape[:1])
        return super().cut(name, shape)

    @cached
    def sections(self) -> Mapping[str, Sections]:
        """Also of `latents`: two matrices, as in DeepSeek's files. The part of the key that all heads share belongs to
        the matrix of keys and values."""
        w = widths_of(self.model)
        latents = Sections(0, (w.query_rank, w.kv_rank + w.rope))
        names = (name for name in self.parameters if name.endswith(".latents.weight") and w.query_rank)
        return {**super().sections, **dict.fromkeys(names, latents)}

    def score_rows(self) -> Mapping[str, ScoreRows]:
        """All heads share the part of the key that rotates, so that of the query takes the whole factor."""
        H, w = self.model.heads, widths_of(self.model)
        query, key = ((w.nope, 0.5), (w.rope, 1.0)), ((w.nope, 0.5), (w.value, 0.0))
        return {"attention.up_q": ((H, query),), "attention.up_kv": ((H, key),)}

    def attention_flops(self, number: int) -> float:
        w = widths_of(self.model)
        return 3.0 * self.model.heads * (w.query + w.value) * self.model.seq_len

    def attention_operations(self, s: Sizes, program: Program, number: int) -> list[Operation]:
        """The latent vectors are whole on every tensor-parallel rank, of the tokens that it has outside of regions. A
        region begins behind their norms, so it is entered with narrow activations."""
        w, e, N, H = widths_of(s.model), s.e, s.N, s.model.heads / s.tp
        blocks = program.attention == "blocks"
        value = s.q if program.pads_values else H * w.value
        qkv = s.qkv - s.q + value
        written = N * (H * (w.query + w.key_value) + qkv) * e
        moved = written + 2 * N * (H + 1) * w.rope * e * (work.ROTATED - 1) * program.eager
        cut = 0.0 if value == H * w.value else N * (value + H * w.value) * e  # values lose their padding
        held = [Saved("attention output", N * H * w.value * e, "inner")]
        exchanged = s.cp > 1 and not some_queries(s.cp, s.cp_method) and program.compiles  # see `work.core`
        if cut and not exchanged and (not blocks or some_queries(s.cp, s.cp_method)):
            held.append(Saved("padded output", N * value * e, "inner"))
        out = work.region_last(
            "attention out", s, program, H * w.value, "inner" if program.joined else "out", saved=tuple(held)
        )
        return [
            *self._latents(s, program),
            work.region_first(
                "query up", s, program, H * w.query, w.query_rank or s.model.dim, part="latent"
            ),
            work.region_first("key-value up", s, program, H * w.key_value, w.kv_rank, part="latent"),
            Operation(
                "heads",
                forward=moved,
                backward=moved,
                kernels=1 if program.fused else 24 if program.eager else 8,
                sent_forward=s.whole(w.rope),
                sent_backward=s.sum(w.rope),
                saved=() if blocks else (Saved("qkv", N * qkv * e, "latent"),),
                part="latent",
                workspace=written,
            ),
            *work.core(s, program, self.causal, rotary=False, value=value),
            replace(out, forward=out.forward + cut, backward=out.backward + cut),
        ]

    def _latents(self, s: Sizes, program: Program) -> list[Operation]:
        """The latent vectors and their norms. Queries without a latent vector enter the region with the block's normed
        input, which the first matmul keeps, too."""
        w, e, n, blocks = widths_of(s.model), s.e, s.n, program.attention == "blocks"
        normed = n * (w.query_rank + w.kv_rank) * e
        rows = n if s.sp_regather else s.N  # kept in the region
        norms = 1 + (w.query_rank > 0)
        forward, backward, kernels = (2, 3, norms) if program.fused else (14, 24, 6 * norms)
        kept = [Saved("normed latents", normed * rows / n, "latent"), Saved("rms", 4 * norms * n, "latent")]
        if program.eager:
            kept.append(Saved("latents in fp32", normed / e * work.IN_FP32, "latent"))
        if not w.query_rank and rows > n:
            kept.append(Saved("input of all ranks", rows * s.model.dim * e, "latent"))
        if blocks:  # each norm copies its part of the latents
            kept.append(Saved("copied latents", normed, "latent"))
        return [
            Operation(
                "latents",
                Matmul(n, w.latents, s.model.dim),
                saved=(
                    Saved("latents", n * w.latents * e, "copied" if blocks or program.eager else "product"),
                ),
                workspace=n * w.latents * e,
            ),
            Operation(
                "latent norms",
                forward=forward * normed,
                backward=backward * normed,
                kernels=kernels,
                saved=tuple(kept),
                part="latent",
                workspace=n * w.latents * e + normed,
                rate="norm",
            ),
        ]

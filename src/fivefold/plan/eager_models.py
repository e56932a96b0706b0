"""The models of `models/` as what they do with memory: a stage's forward, which leaves its backward on a tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fivefold.layout import Layout
from fivefold.plan import eager as one
from fivefold.plan import eager_context as context
from fivefold.plan import eager_parallel as many
from fivefold.plan.eager import Work
from fivefold.plan.eager_mixture import mixture
from fivefold.plan.operations import is_mixed
from fivefold.plan.tape import Value


class Model:
    """One rank's part. scaled: the loss's gradient is not 1."""

    def __init__(self, layout: Layout, scaled: bool):
        self.layout, self.scaled = layout, scaled

    def stage(self, w: Work, x: Value | None, blocks: Sequence[int], first: bool, last: bool) -> Value:
        """x: from the stage before."""
        if first:
            x = self.begin(w)
        assert x is not None
        model, w.context = w.s.model, []
        T = model.seq_len / w.s.cp
        _positions = w.new(8 * T) if w.s.cp == 1 else None
        if model.arch in ("llama", "moe"):
            angles = T * (model.dim // model.heads) / 2 * 4
            w.context = [w.new(angles).becomes("activations") for _ in range(2)]
        for number in blocks:
            x = w.around(w, f"block {number}", x, lambda x, n=number: self._block(w, x, is_mixed(model, n)))
        return self.end(w, x) if last else x

    def _block(self, w: Work, x: Value, mixed: bool) -> Value:
        arch = w.s.model.arch
        block = self.gpt2 if arch == "gpt2" else self.bert if arch == "bert" else self.llama
        if self.layout.recompute == "full":
            return w.tape.checkpoint(lambda x: block(w, x, mixed), x)
        return block(w, x, mixed)

    # Blocks ------------------------------------------------------------------------------------------------------

    def llama(self, w: Work, x: Value, mixed: bool) -> Value:
        attended = self.attention(w, one.rms_norm(w, x, "norm1"))
        x, normed = one.add_rms_norm(w, x, one.dropout(w, attended), "norm2")
        mlp = (
            (lambda normed: mixture(w, self, normed))
            if mixed
            else (lambda normed: self.feed_forward(w, normed))
        )
        return one.add(w, x, one.dropout(w, mlp(normed)))

    def gpt2(self, w: Work, x: Value, mixed: bool) -> Value:
        attended = self.attention(w, one.layer_norm(w, x, "norm1"))
        x = one.add(w, x, one.dropout(w, attended))
        return one.add(w, x, one.dropout(w, self.feed_forward(w, one.layer_norm(w, x, "norm2"))))

    def bert(self, w: Work, x: Value, mixed: bool) -> Value:
        x = one.layer_norm(w, one.add(w, x, one.dropout(w, self.attention(w, x))), "norm1")
        return one.layer_norm(w, one.add(w, x, one.dropout(w, self.feed_forward(w, x))), "norm2")

    def attention(self, w: Work, x: Value) -> Value:
        s = w.s
        heads, kv_heads = s.model.heads / s.tp, (s.model.kv_heads or s.model.heads) / s.tp

        def finish(qkv: Value) -> Value:
            return self.row(w, core(qkv), "out", True)

        def core(qkv: Value) -> Value:
            if s.cp == 1:
                return one.qkv_attention(w, qkv, heads, kv_heads, s.model.seq_len)
            if s.cp_method == "ulysses":
                return context.ulysses(w, qkv, heads, kv_heads)
            return context.ring_attention(w, qkv, heads, kv_heads)

        qkv = self.column(w, x, "qkv", s.qkv, True)
        return self.second_half(w, finish, qkv)

    def feed_forward(self, w: Work, x: Value, wide: float = 0.0) -> Value:
        """wide: of experts that every token uses, which are whole on every rank; 0: F / tp."""
        s = w.s
        gated, features = s.model.arch in ("llama", "moe"), wide or (s.model.ffn_dim or 0) / s.tp

        def finish(product: Value) -> Value:
            inner = one.swiglu(w, product) if gated else one.gelu(w, product)
            return one.linear(w, inner, "down", s.model.dim) if wide else self.row(w, inner, "down", False)

        features *= 2 if gated else 1
        product = one.linear(w, x, "up", features) if wide else self.column(w, x, "up", features, False)
        return self.second_half(w, finish, product)

    def second_half(self, w: Work, finish: Callable[[Value], Value], product: Value) -> Value:
        """What follows a sublayer's first product: computed again under "selective"."""
        return w.tape.checkpoint(finish, product) if self.layout.recompute == "selective" else finish(product)

    def column(self, w: Work, x: Value, name: str, features: float, ordered: bool) -> Value:
        bias = w.s.model.arch in ("gpt2", "bert")
        if w.s.tp == 1:
            return one.linear(w, x, name, features, bias)
        return many.column_linear(w, x, name, features, ordered, bias)

    def row(self, w: Work, x: Value, name: str, ordered: bool) -> Value:
        bias = w.s.model.arch in ("gpt2", "bert")
        if w.s.tp == 1:
            return one.linear(w, x, name, w.s.model.dim, bias)
        return many.row_linear(w, x, name, ordered, bias)

    # Both ends ---------------------------------------------------------------------------------------------------

    def begin(self, w: Work) -> Value:
        s, model = w.s, w.s.model
        rows = (model.vocab_size or 0) / s.tp
        x = (
            many.vocabulary_embedding(w, rows, "vocabulary")
            if s.tp > 1
            else one.embedding(w, rows, "vocabulary")
        )
        if model.arch in ("gpt2", "bert"):
            x = one.add_positions(w, x)
        if model.arch == "bert":
            x = one.layer_norm(w, x, "embed norm")
        return one.dropout(w, x)

    def end(self, w: Work, x: Value) -> Value:
        model, sp = w.s.model, w.s.sp
        if model.arch == "bert":
            if sp:
                x, sp = many.whole_first(w, x), False
            x = one.select(w, x, w.s.targets)
            x = one.layer_norm(w, one.gelu(w, one.linear(w, x, "transform", model.dim, True)), "norm")
        else:
            x = one.rms_norm(w, x, "norm") if model.arch != "gpt2" else one.layer_norm(w, x, "norm")
        name = "vocabulary" if model.tie_embeddings else "head"
        columns = (model.vocab_size or 0) / w.s.tp
        if w.s.tp > 1:
            return many.vocabulary_output(w, x, w.s.targets, columns, name, sp)
        return one.linear_cross_entropy(w, x, w.s.targets, columns, name, self.scaled)

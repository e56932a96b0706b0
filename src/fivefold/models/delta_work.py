"""Linear attention by the gated delta rule as data, for the cards: names and shapes of its parameters, their cuts, its
operations for one microbatch on a rank. No torch. Legend: as in work.py; K key heads and H value heads of linear
attention, C tokens of a chunk."""

from __future__ import annotations

from dataclasses import replace
from operator import mul
from typing import NamedTuple

from fivefold.kernels.sizes import DELTA_CHUNK
from fivefold.models.operations import Matmul, Operation, Program, Saved, Sizes
from fivefold.models.section import ModelSection
from fivefold.models.work import IN_FP32, output_gate, region_first, region_last
from fivefold.sharding.parts import Cut, Shape
from fivefold.sharding.units import HEADS

# By what it is of, in fp32: of features that are convolved, of pairs of a chunk's tokens, of the keys and the values of
# value heads, of states at the ends of chunks.
PASSES = (20.0, 11.0, 12.0, 12.0, 5.0)
"""Passes over memory of convolution and rule in forward, as PyTorch's operations. Backward has twice as many."""
JOINED = 3
"""So many of them are one where a compiler joins them."""
HELD = (4.4, 7.0, 9.4, 4.8, 1.4)
"""Copies that backward holds at once, with what it has computed again. Least squares of traced peaks of eleven sizes,
within 2% but for sequences of one chunk."""


class Widths(NamedTuple):
    """Sizes of linear attention: value heads, key heads, width of a key head, of a value head, of the convolution."""

    heads: int
    key_heads: int
    key: int
    value: int
    conv: int

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of the first matrix: queries, keys, values, logits of beta, steps of the decay, gates."""
        keys, values = self.key_heads * self.key, self.heads * self.value
        return keys, keys, values, self.heads, self.heads, values

    @property
    def mixed(self) -> int:
        """Features that the convolution mixes."""
        return sum(self.sections[:3])


def widths_of(model: ModelSection) -> Widths:
    """The widths of a resolved model."""
    heads, key_heads = model.linear_heads or 0, model.linear_key_heads or 0
    return Widths(heads, key_heads, model.linear_key_dim or 0, model.linear_value_dim or 0, model.linear_conv)


def attention(model: ModelSection) -> dict[str, Shape]:
    """Parameters of linear attention, in the order of `models.delta.DeltaAttention`."""
    w, D = widths_of(model), model.dim
    return {
        "conv_vectors": (w.mixed, w.conv),
        "a_log": (w.heads,),
        "dt": (w.heads,),
        "in_proj.weight": (sum(w.sections), D),
        "norm.weight": (w.value,),
        "out.weight": (D, w.heads * w.value),
    }


def cut_of(name: str, model: ModelSection) -> Cut | None:
    """The cut of a parameter that only linear attention has. Each rank has some of the heads."""
    w = widths_of(model)
    sections = {
        "attention.conv_vectors": w.sections[:3],
        "attention.a_log": (w.heads,),
        "attention.dt": (w.heads,),
        "attention.in_proj.weight": w.sections,
    }
    return Cut("column", 0, sections[name]) if name in sections else None


def flops(model: ModelSection) -> float:
    """FLOPs per token, forward and backward, of the convolution and of the rule token by token: the state decays, is
    read by the key, written, and read by the query. What chunks compute besides is no work of the model."""
    w = widths_of(model)
    return 3.0 * (2 * w.mixed * w.conv + 6 * w.heads * w.key * w.value)


def operations(s: Sizes, program: Program) -> list[Operation]:
    """Linear attention. Ranks of the context axis exchange tokens for heads, before the convolution and behind the
    rule; backward computes both again from what has arrived."""
    w, e, N = widths_of(s.model), s.e, s.N
    features, mixed, values = (sum(some) / s.tp for some in (w.sections, w.sections[:5], w.sections[5:]))
    (there, there_back), (home, home_back) = s.sends(HEADS, N * mixed), s.sends(HEADS, N * values)
    exchanged = (Saved("heads of all tokens", N * mixed * e, "inner"),) * bool(there)
    output, H = N * values * e, w.heads / s.tp
    forward, backward, kernels = (2, 3, 1) if program.fused else (14, 24, 6)
    in_fp32 = (Saved("heads in fp32", output / e * (IN_FP32 - e), "inner"),) * program.eager
    chunks = _rule(s, program)
    chunks[0] = replace(chunks[0], sent_forward=there, sent_backward=there_back, saved=exchanged)
    chunks[-1] = replace(chunks[-1], sent_forward=home, sent_backward=home_back)
    return [
        region_first(
            "in_proj", s, program, features, saved=(Saved("in_proj", N * features * e, "product"),)
        ),
        *chunks,
        Operation(
            "norm of heads",
            forward=forward * output,
            backward=backward * output,
            kernels=kernels,
            saved=(Saved("heads", output, "inner"), Saved("rms", 4 * N * H, "inner"), *in_fp32),
            part="inner",
            workspace=2 * output,
            rate="norm",
        ),
        output_gate(s, program, values),
        region_last(
            "attention out", s, program, values, "inner" if program.joined else "out",
            saved=(Saved("attention output", output, "inner"),),
        ),
    ]  # fmt: skip


def _rule(s: Sizes, program: Program) -> list[Operation]:
    """Convolution and rule: batched matmuls of chunks in fp32, and what is between them, in passes over memory."""
    w, C = widths_of(s.model), min(DELTA_CHUNK, s.model.seq_len)
    H, K, d, v = w.heads / s.tp, w.key_heads / s.tp, w.key, w.value
    sizes, n = (w.mixed / s.tp, H * C, H * d, H * v, H * d * v / C), s.N / C
    moved, held = (4 * s.N * sum(map(mul, times, sizes)) for times in (PASSES, HELD))
    moved /= JOINED if program.joined else 1
    products = {
        "pairs of a chunk": Matmul(C, C, d, 2 * n * K),
        "triangular systems": Matmul(C, d + v, C, n * H / 2),
        "reads of states": Matmul(C, v, d, 2 * n * H),
        "values of a chunk": Matmul(C, v, C, n * H),
        "writes of states": Matmul(d, v, C, n * H),
    }
    ops = [
        Operation(name, replace(product, weight=False, sensitive=True, wide=True), part="inner", again=True)
        for name, product in products.items()
    ]
    ops[0] = replace(ops[0], forward=moved, backward=2 * moved, workspace=held)
    return ops

"""The operations of each layer for one microbatch on a rank, for the cards. No torch.

Legend: N tokens of a rank's microbatch (B T / cp), n tokens outside tensor-parallel regions (N / tp under sequence
parallelism), D model, H heads, K key-value heads, d head, F feed-forward, V vocabulary, e bytes per element.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fivefold.kernels import sizes
from fivefold.models.operations import Matmul, Message, Operation, Part, Program, Role, Saved, Sizes
from fivefold.schedules import ring_attention
from fivefold.sharding.sequence import RING, some_queries
from fivefold.sharding.units import (
    HEADS,
    KEYS,
    LOSS_STATISTICS,
    STATISTICS,
    SUM,
    TARGETS,
    Collective,
)

ENTRIES = ("qkv", "in_proj", "up")
"""First matmuls whose input is a norm's output and nothing else reads (`Sublayer.entry`)."""
IN_FP32 = 2 * 4
"""Bytes per element that an eager RMSNorm keeps instead of its input: that and the normed one, in fp32."""
ROTATED = 12
"""Passes over memory of an eager rotation, in its input's dtype: each copy, product and sum in fp32 is one."""


CAPPED = 11
"""Numbers per logit that a cap reads and writes (`kernels.cross_entropy.cap_`)."""
EAGER_SCORES = (8, 14)
"""Passes over scores in fp32, forward and backward, of attention by tiles where no kernel joins them: a window in a
ring on GPUs (kernels/partial_attention.py)."""


def block(
    s: Sizes, program: Program, attended: list[Operation], mlp: list[Operation], biased: bool = False
) -> list[Operation]:
    """A block around its two sublayers: norms and the residual stream, in the order of a pre-norm block. biased: as in
    `norm`."""
    mask = dropout_mask(s, program)
    return [
        norm("norm1", s, program, "input", attended[0], biased),
        *attended,
        add("add1", s, program, mask),
        norm("norm2", s, program, "attended" if program.joined else "stream", mlp[0], biased),
        *mlp,
        add("add2", s, program, mask),
    ]


def post_norm_block(
    s: Sizes, program: Program, attended: list[Operation], mlp: list[Operation]
) -> list[Operation]:
    """A block with norms of the sublayers' outputs. The residual stream itself is the sublayers' input."""
    mask, stream = dropout_mask(s, program), s.n * s.model.dim * s.e
    first, second = attended[0], mlp[0]
    kept = Saved("attention input", stream, "input")
    others = Saved("attention input of other ranks", kept_input(first, s) - stream, "stream")
    return [
        replace(first, saved=(kept, others, *first.saved)),
        *attended[1:],
        norm("norm1", s, program, "attended" if program.joined else "stream"),
        add("add1", s, program, mask),
        replace(second, saved=(Saved("mlp input", kept_input(second, s), "stream"), *second.saved)),
        *normed_behind("norm2", s, program, mlp[1:]),
        add("add2", s, program, mask),
    ]


def normed_behind(name: str, s: Sizes, program: Program, mlp: list[Operation]) -> list[Operation]:
    """A feed-forward layer, or its end, with a norm of its output."""
    *others, last = mlp
    joined = program.joined
    return [
        *others,
        replace(last, part="gate" if joined else last.part),
        norm(name, s, program, "fed" if joined else "stream"),
    ]


def sandwich_block(
    s: Sizes, program: Program, attended: list[Operation], mlp: list[Operation]
) -> list[Operation]:
    """A block with norms of the sublayers' inputs and of their outputs."""
    after = norm("norm1 after", s, program, "attended" if program.joined else "stream")
    ops = block(s, program, [*attended, after], normed_behind("norm2 after", s, program, mlp))
    if not program.joined:
        return ops
    # The second norm's input is made again from the block's, and attention's.
    return [replace(op, saved=op.saved[1:]) if op.name == "norm2" else op for op in ops]


def kept_input(first: Operation, s: Sizes) -> float:
    """Bytes that a sublayer's first operation keeps of its input: of whole sequences, if it gathers them once."""
    gathered = any(message.axis == "tp" for message in first.sent_forward)
    return (s.N if gathered and not s.sp_regather else s.n) * s.model.dim * s.e


def begin(s: Sizes, program: Program) -> list[Operation]:
    """Operations before the blocks: the embedding."""
    D, e = s.model.dim, s.e
    sent, back = s.leave()
    mask = dropout_mask(s, program)
    masks = (Saved("embedding mask", mask, "stream"),) if mask else ()
    moved = 3 * s.N * D * e
    return [
        Operation(
            "embedding",
            forward=moved,
            backward=2 * moved,
            kernels=2,
            sent_forward=sent,
            sent_backward=back,
            saved=masks,
            rate="embedding",
        )
    ]


def end(s: Sizes, program: Program, rows: float, whole: bool, biased: bool = False) -> list[Operation]:
    """Operations after the blocks: last norm, output layer, loss. rows: of logits. whole: True if it works on whole
    sequences under sequence parallelism. biased: as in `norm`."""
    D, V, e, n = s.model.dim, s.model.vocab_size or 0, s.e, s.n
    columns = V / s.tp
    chunks = program.loss == "chunks"
    # bytes per logit: moved in forward, moved in backward, kept, workspace
    table = {
        "chunks": (3 * e if program.loss_on_gpu else 4, 0, 0, 0),
        "fused": (2 * e, 2 * e, e, 0),
        "plain": (24, 14, 4, 4 + e),
    }
    forward, backward, kept, workspace = table[program.loss]
    (into, back), statistics = s.enter(), (Message("all_reduce", "tp", 3 * 4 * rows),) if s.tp > 1 else ()
    saved, besides = [Saved("output input", n * D * e, "stream")], workspace * rows * columns
    if chunks:  # forward makes the gradients and keeps them for backward, instead of its input
        cut, weight = s.loss_chunks(program, rows), D * columns
        # So nothing is gathered twice. Ranks that share sequences count their targets together.
        into, back = s.whole(), (Message(SUM[s.sp and not whole], "tp", rows * D * e),) if s.tp > 1 else ()
        told, _ = s.sends(STATISTICS, s.tp * LOSS_STATISTICS * rows, calls=cut)
        statistics = (*told, *s.sends(TARGETS, 1)[0])
        saved = [
            Saved("gradient of the output's input", (rows + (n if s.sp else 0)) * D * e, "stream"),
            Saved("gradient of the output's weight", weight * (e if cut == 1 else 4), "stream"),
        ]
        besides, cast = rows / cut * columns * e + rows * D * e, weight * e if cut > 1 else 0.0
        besides = max(besides, cast) if program.loss_on_gpu else besides + cast
        if s.model.logit_cap:  # five passes, of which one writes the derivative and one reads it
            forward, besides = forward + CAPPED * e, besides + rows / cut * columns * e
    elif s.way.whole_logits and s.tp > 1:
        columns = V
        besides, statistics = workspace * rows * V, (Message("all_gather", "tp", rows * V * e),)
    if kept:
        saved.append(Saved("logits", kept * rows * columns, "stream"))
    return [
        norm("norm", s, program, "stream", biased=biased),
        Operation(
            "output",
            Matmul(rows, V / s.tp, D, sensitive=True),
            sent_forward=into,
            sent_backward=back,
            saved=tuple(saved),
        ),
        Operation(
            "loss",
            forward=forward * rows * columns,
            backward=backward * rows * columns,
            kernels=2 if program.fused else 8,
            sent_forward=statistics,
            workspace=besides,
            rate="loss",
        ),
    ]


def dropout_mask(s: Sizes, program: Program) -> float:
    """Bytes of a dropout mask: one byte per element, or numbers to multiply by."""
    size = s.e if program.masks == "numbers" else 1
    return s.n * s.model.dim * size if s.model.dropout else 0.0


def norm(
    name: str, s: Sizes, program: Program, role: Role, reader: Operation | None = None, biased: bool = False
) -> Operation:
    """reader: the operation that keeps the norm's output. biased: LayerNorm, one operation of PyTorch's in any dtype;
    else RMSNorm, several in fp32."""
    D, e, n = s.model.dim, s.e, s.n
    forward, backward, kernels = (2, 3, 1) if program.fused or biased else (14, 24, 6)
    saved = [Saved(f"{name} input", n * D * e, role)]
    if program.eager and not biased:
        saved.append(Saved(f"{name} in fp32", n * D * (IN_FP32 - e), "stream"))
    part: Part = ""
    if reader:
        kept = kept_input(reader, s)
        part = "norm" if reader.name in ENTRIES and kept == n * D * e else "normed"
        saved.append(Saved(f"{name} output", kept / e * s.kept(program.narrow_factors), part))
    moved = forward * n * D * e, backward * n * D * e
    return Operation(name, None, 0.0, *moved, kernels, saved=tuple(saved), part=part, rate="norm")


def add(name: str, s: Sizes, program: Program, mask: float) -> Operation:
    """Bias, dropout and the residual stream."""
    D, e, n = s.model.dim, s.e, s.n
    passes = 1.0 if program.fused else 1.0 + 2.0 * bool(mask)
    saved = (Saved(f"{name} mask", mask, "stream"),) if mask else ()
    forward = 3 * n * D * e * passes + mask
    backward = 3 * n * D * e + (2 * n * D * e + mask if mask else 0.0)
    return Operation(name, None, 0.0, forward, backward, 1, saved=saved, random=mask, rate="norm")


class OwnScores(NamedTuple):
    """What a model changes about the scores of attention besides a window (`kernels.blockwise_attention.Scores`)."""

    sinks: bool = False
    capped: bool = False


PLAIN = OwnScores()


def attention(
    s: Sizes,
    program: Program,
    causal: bool,
    rotary: bool,
    biased: bool,
    window: int = 0,
    own: OwnScores = PLAIN,
    gates: float = 0.0,
) -> list[Operation]:
    """Attention with one matmul for queries, keys and values. window: keys that a query sees; 0: all. gates: features
    of the gates of its output, which come of that matmul, too."""
    features, copied = s.qkv + gates, program.attention == "blocks" and not gates
    kept = Saved("qkv", s.N * features * s.e, "copied" if copied else "product")
    output = Saved("attention output", s.N * s.q * s.e, "inner")
    return [
        region_first("qkv", s, program, features, None, biased, (kept,), projections=3),
        *core(s, program, causal, rotary, s.q, window, own),
        *([output_gate(s, program, gates)] if gates else []),
        region_last(
            "attention out", s, program, s.q, "inner" if program.joined else "out", biased, (output,)
        ),
    ]


def output_gate(s: Sizes, program: Program, features: float) -> Operation:
    """The gate of the outputs of heads. It keeps them; the matmul behind it keeps the result."""
    size = s.N * features * s.e
    passes = (3, 5, 1) if program.fused else (9, 22, 4)
    kept = Saved("ungated output", size, "inner")
    return Operation(
        "output gate", None, 0.0, passes[0] * size, passes[1] * size, passes[2], saved=(kept,), part="inner",
        workspace=5 * size, rate="gate",
    )  # fmt: skip


def region_first(
    name: str,
    s: Sizes,
    program: Program,
    features: float,
    width: int | None = None,
    biased: bool = False,
    saved: tuple[Saved, ...] = (),
    part: Part = "",
    ordered: bool = True,
    projections: int = 1,
) -> Operation:
    """A matmul at the beginning of a tensor-parallel region, from vectors of `width` features (None: D) to this rank's
    `features`, which are of so many projections. Its backward holds the gradient of the whole input, and that input if
    it is gathered again. ordered: attention's, which needs the tokens in order."""
    inputs, (sent, back) = width or s.model.dim, s.enter(width, projections)
    gathered = s.N * inputs * s.e * ((s.tp > 1) + s.sp_regather)
    op = Operation(
        name,
        Matmul(s.N, features, inputs),
        backward=s.N * features * s.e * biased,  # read for the gradient of the bias
        sent_forward=sent,
        sent_backward=back,
        saved=saved,
        part=part,
        workspace=s.N * features * s.e + gathered,
    )
    return s.by_chunk(op, program, ordered)


def region_last(
    name: str,
    s: Sizes,
    program: Program,
    features: float,
    part: Part,
    biased: bool = False,
    saved: tuple[Saved, ...] = (),
    ordered: bool = True,
) -> Operation:
    """The matmul at the end of a tensor-parallel region, from this rank's features. ordered: as in `region_first`."""
    sent, back = s.leave()
    op = Operation(
        name,
        Matmul(s.N, s.model.dim, features),
        backward=s.N * s.model.dim * s.e * biased,
        sent_forward=sent,
        sent_backward=back,
        saved=saved,
        part=part,
    )
    return s.by_chunk(op, program, ordered)


def core(
    s: Sizes,
    program: Program,
    causal: bool,
    rotary: bool,
    value: float,
    window: int = 0,
    own: OwnScores = PLAIN,
) -> list[Operation]:
    """Attention between its projections. value: features of the value heads on this rank, for all query heads; fewer
    than those of queries if value heads are narrower and the program does not pad them. window, own: as in
    `attention`."""
    e, N, T, q = s.e, s.N, s.model.seq_len, s.q
    qkv = q + (s.qkv - q) / 2 * (1 + value / q)
    share = 0.5 if causal else 1.0  # of the scores that the mask does not hide
    seen = s.near if window else s.seen
    forward, backward = (_ring(s, N * (qkv - q) * e, causal, way, window) for way in (False, True))
    if s.cp > 1 and s.cp_method == "ulysses":  # tokens are exchanged for heads, and back
        (there, there_back), (home, home_back) = (s.sends(HEADS, N * x) for x in (qkv, value))
        forward, backward = (*there, *home), (*there_back, *home_back)
    elif s.cp > 1 and s.cp_method == "all_gather":
        forward, sums = s.sends(KEYS, N * (qkv - q) * s.cp)
        backward = (*forward, *sums)
    turned = 2 * N * (qkv - (qkv - q) / 2) * e if rotary else 0.0
    turned *= 1.0 if program.fused else ROTATED if program.eager else 3.0
    if program.attention == "plain":
        return _plain_attention(s, program, share)
    queries, keys = (2 * N * e * tokens for tokens in seen.copied)
    copied = queries * q + keys * (qkv - q)
    copied_again = copied + 2 * queries * value  # with the output and its gradient
    tiles = own.capped or (window and s.cp > 1 and s.cp_method == RING)
    if tiles and program.attention == "flash":
        scores = 4 * N * T * share * seen.share * s.model.heads / s.tp  # bytes in fp32
        copied, copied_again = copied + EAGER_SCORES[0] * scores, copied_again + EAGER_SCORES[1] * scores
    # The output is weighted by what the sink leaves, and in backward multiplied by its gradient
    if own.sinks:
        copied, copied_again = copied + 2 * N * value * (e + 4), copied_again + 2 * N * value * 4
    saved, besides = _kept_by_attention(s, program, share, window, own)
    if s.cp > 1 and s.cp_method == "ulysses" and program.compiles:  # ours, on GPUs
        saved = (*saved, Saved("attention output before its exchange", N * value * e, "inner"))
    if s.cp > 1 and s.cp_method == "all_gather":
        besides += N * (qkv - q) * s.cp * (e + 4)  # all keys and values, and fp32 sums of gradients
    clip = program.qk_clip
    return [
        Operation(
            "attention",
            attention=2.0 * N * T * (q + value) * share * seen.share,
            forward=turned + copied + clip * N * (s.qkv + q) / 2 * e,  # queries and keys are read once more
            backward=turned + copied_again,
            kernels=(1 if not rotary or program.fused else 20 if program.eager else 5)
            + (4 if program.fused else 6) * clip,
            sent_forward=forward,
            sent_backward=backward,
            saved=saved,
            part="core",
            workspace=N * (qkv + value) * e + besides,
            tokens=seen.tokens,
        )
    ]


def _ring(s: Sizes, keys: float, causal: bool, backward: bool, window: int) -> tuple[Message, ...]:
    """The message of ring attention. keys: bytes of a rank's keys and values."""
    if s.cp == 1:
        return ()
    reach = ring_attention.reach_of(s.cp, s.model.seq_len, window)
    turns = len(ring_attention.slowest(s.cp, causal, backward, reach))
    return (Message("ring", "cp", keys * turns, hidden=True, reach=reach),) if turns else ()


def query_key_norms(
    s: Sizes, program: Program, attended: list[Operation], vectors: float, sums: Collective | None = None
) -> list[Operation]:
    """Attention with norms of its queries and keys behind the first matmul. vectors: number of normed vectors per token
    on a rank. sums: the message of ranks that share these vectors. Attention by blocks copies what the norms give; any
    other keeps it, beside the matmul's result. Eager norms copy that result to fp32; with messages they keep it."""
    e, N, rows = s.e, s.N, (s.qkv + s.q) / 2  # features of queries and keys
    sent, back = s.sends(sums, N * vectors) if sums else ((), ())
    forward, backward, kernels = (2, 3, 2) if program.fused else (14, 24, 12)
    if sent and program.fused:  # a message cuts each pass; where nothing is compiled each norm is PyTorch's
        forward, backward, kernels = (3, 5, 4) if program.compiles else (14, 24, 12)
    joined = 2 * N * s.qkv * e  # queries, keys and values are put side by side again
    kept = N * e * (rows if program.attention == "blocks" or program.eager else s.qkv)
    if program.eager and not sent:
        kept = N * rows * IN_FP32
    norms = Operation(
        "norms of queries and keys",
        forward=forward * N * rows * e + joined,
        backward=backward * N * rows * e + joined,
        kernels=kernels + 1,
        sent_forward=sent,
        sent_backward=back,
        saved=(Saved("queries and keys", kept, "inner"), Saved("rms", 4 * N * vectors, "inner")),
        part="inner",
        workspace=2 * N * s.qkv * e,
        rate="norm",
    )
    return [attended[0], norms, *attended[1:]]


def _kept_by_attention(
    s: Sizes, program: Program, causal: float, window: int, own: OwnScores
) -> tuple[tuple[Saved, ...], float]:
    """(tensors that fused attention keeps besides its output, bytes that its backward holds besides gradients).
    Attention by blocks multiplies some queries at a time with all keys they see (kernels/blockwise_attention.py). It
    keeps queries, keys and values in the order of heads, and up to KEEP tokens the probabilities. Ranks with some
    queries, caps and sinks keep no probabilities."""
    H, T = s.model.heads / s.tp, s.model.seq_len
    some = some_queries(s.cp, s.cp_method)
    statistics = Saved("log-sum-exp", s.N * H * 4, "inner")
    if program.attention == "flash":
        return (statistics,), 0.0
    blocks = sizes.query_blocks(T // s.cp if some else T, causal < 1, int(s.e), window)
    each = s.B * H / (1 if some else s.cp) * s.e  # bytes of a query's probability of one key, over heads
    largest = each * max((stop - start) * seen for start, stop, seen in blocks)
    copies = Saved("queries, keys, values", s.N * s.qkv * s.e, "inner")
    if some or any(own):
        return (copies, statistics), 2 * largest
    if not sizes.keeps_probabilities(T):
        return (copies,), 2 * largest
    every = each * sum((stop - start) * seen for start, stop, seen in blocks)
    return (copies, Saved("probabilities", every, "core", once=largest)), largest


def _plain_attention(s: Sizes, program: Program, causal: float) -> list[Operation]:
    """Scores, softmax and the matmul with the values, each in memory. The fused masked softmax reads the scores that
    the mask does not hide, and writes all."""
    e, T, H, d = s.e, s.model.seq_len, s.model.heads / s.tp, s.model.head_width
    scores = s.B * H * T * T / s.cp
    drop = program.probability_dropout and s.model.dropout > 0
    probabilities = [Saved("probabilities", scores * e, "core")]
    if drop:
        probabilities += [Saved("mask", scores, "core"), Saved("dropped probabilities", scores * e, "core")]
    product = Matmul(T / s.cp, T, d, s.B * H, weight=False)
    softmax = (1 + causal) * scores * e
    dropout = (2 * e + 1) * scores if drop else 0.0
    # The bias of queries, keys and values is a pass of its own, and the heads' outputs are put side by side; in
    # backward the three gradients are put into one.
    moved = 2 * s.N * (s.qkv + s.q) * e
    return [
        Operation("bias and order of heads", None, 0.0, moved, moved, 2),
        Operation("scores", product, part="core"),
        Operation(
            "softmax",
            forward=softmax + dropout,
            backward=(1 + 2 * causal) * scores * e + dropout,
            kernels=1 + drop,
            saved=tuple(probabilities),
            part="core",
            workspace=2 * scores * e,
            random=scores if drop else 0.0,
        ),
        Operation("values", Matmul(T / s.cp, d, T, s.B * H, weight=False), part="core"),
    ]


def feed_forward(s: Sizes, program: Program, gated: bool, biased: bool) -> list[Operation]:
    F, e, N = (s.model.ffn_dim or 0) / s.tp, s.e, s.N
    wide = 2 * F if gated else F
    kept = Saved("up", N * wide * s.kept(gated and program.narrow_gates), "product")
    return [
        region_first("up", s, program, wide, None, biased, (kept,), ordered=False, projections=1 + gated),
        activation("", program, N * F * e, N * wide * e, gated, s.kept(program.narrow_factors) / e),
        region_last("down", s, program, F, "down", biased, ordered=False),
    ]


def activation(
    prefix: str, program: Program, size: float, workspace: float, gated: bool = True, part: float = 1.0
) -> Operation:
    """GELU, one operation of PyTorch's; or SwiGLU's gate, two. Eager, the silu between these is kept, too. size: bytes
    of the result. part: of these that are kept. workspace: of both its inputs' gradients; that of the result takes the
    place of the result."""
    forward, backward, kernels = (2, 3, 1) if not gated else (3, 5, 1) if program.fused else (5, 13, 2)
    kept: list[Saved] = [Saved(f"{prefix}activation", part * size, "gate")]
    if gated and program.eager:
        kept.append(Saved(f"{prefix}silu", size, "gate"))
    kind, moved = "gate" if gated else "gelu", (forward * size, backward * size)
    name, saved = f"{prefix}{kind}", tuple(kept)
    return Operation(name, None, 0.0, *moved, kernels, (), (), saved, "gate", workspace, rate=kind)

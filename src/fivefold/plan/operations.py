"""What a rank computes for one microbatch, operation by operation: products with their shapes, bytes moved, bytes sent,
bytes kept for backward. Everything the planner knows about a model's work is here.

Legend: N tokens of a rank's microbatch (B T / cp), n tokens outside tensor-parallel regions (N / tp under sequence
parallelism), D model, H heads, K key-value heads, d head, F feed-forward, V vocabulary, e bytes an element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fivefold.plan.software import Software
from fivefold.recipe.count import MASKED_SHARE
from fivefold.recipe.schema import ModelSection

MIN_ROWS = 128  # of logits at once, however many bytes they take
Role = Literal["input", "stream", "product", "core", "inner"]
KEPT: dict[str, dict[str, set[Role]]] = {
    "none": {"core": {"input", "stream", "product", "core", "inner"}},
    "selective": {
        "core": {"input", "stream", "product", "inner"},
        "sublayer": {"input", "stream", "product"},
        "operations": {"input", "product"},
    },
    "full": {"core": {"input"}},
}
"""Roles of the tensors that a mode of recomputation keeps, by what "selective" means to the software."""


@dataclass(frozen=True)
class Saved:
    """A tensor kept from forward until backward. role: a block's "input"; on its residual "stream"; the "product" of a
    sublayer's first matrix; within attention's "core"; or other, "inner"."""

    name: str
    size: float
    role: Role


@dataclass(frozen=True)
class Matmul:
    """`count` products (m, k) x (k, n). weight: the second factor is a parameter."""

    m: float
    n: float
    k: float
    count: float = 1
    weight: bool = True


@dataclass(frozen=True)
class Message:
    """A collective of `size` bytes on an axis: of the whole tensor, that is of the larger of input and output. "ring":
    keys and values that go round, `size` if all of them go all the way. hidden: it runs beside the operation. calls:
    into how many it is cut."""

    what: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring"]
    axis: str
    size: float
    hidden: bool = False
    calls: int = 1


@dataclass(frozen=True)
class Operation:
    """One step of forward, and its backward.

    attention: FLOPs of fused attention in forward. forward, backward: bytes moved by element-wise work. kernels: how
    many are started in forward. part: what recomputes it ("core" and "inner" as in `Saved`; "out": the matrix behind
    these, of which only the messages are repeated; "": only "full"; "never": nothing). workspace: bytes that its
    backward holds besides what is saved. random: numbers drawn in forward, for dropout.
    """

    name: str
    matmul: Matmul | None = None
    attention: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    kernels: int = 1
    sent_forward: tuple[Message, ...] = ()
    sent_backward: tuple[Message, ...] = ()
    saved: tuple[Saved, ...] = ()
    part: Literal["", "core", "inner", "out", "never"] = ""
    workspace: float = 0.0
    random: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """A model's share on one rank for one microbatch of B sequences. load: rows that this rank's experts get, by the
    even share."""

    model: ModelSection
    B: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    e: float = 2
    cp_method: str = "ring"
    load: float = 1.0

    @property
    def N(self) -> float:
        return self.B * self.model.seq_len / self.cp

    @property
    def n(self) -> float:
        return self.N / self.tp if self.sp else self.N

    @property
    def targets(self) -> float:
        """Rows of logits: all tokens; of BERT's exactly so many of each sequence (data/batches.py), which lie unevenly
        where it is divided."""
        T = self.model.seq_len
        return self.B * max(1, round(MASKED_SHARE * T)) / self.cp if self.model.arch == "bert" else self.N

    def chunks(self, software: Software) -> int:
        """Into how many parts the logits are cut (kernels/loss.py, `rows_at_once`)."""
        rows = max(MIN_ROWS, software.chunk_bytes // ((self.model.vocab_size or 1) / self.tp * self.e))
        return max(1, math.ceil(self.targets / rows))

    @property
    def qkv(self) -> float:
        """Features of queries, keys and values on this rank."""
        K = self.model.kv_heads or self.model.heads
        return (self.model.dim + 2 * self.model.dim // self.model.heads * K) / self.tp

    def enter(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Messages in forward and backward where a tensor-parallel region begins. In backward under `sp` the kept piece
        is gathered again, beside the product that gives the input's gradient."""
        whole = self.N * self.model.dim * self.e
        if self.tp == 1:
            return (), ()
        if self.sp:
            gather = Message("all_gather", "tp", whole)
            again = Message("all_gather", "tp", whole, hidden=True)
            return (gather,), (again, Message("reduce_scatter", "tp", whole))
        return (), (Message("all_reduce", "tp", whole),)

    def leave(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """The same where it ends."""
        whole = self.N * self.model.dim * self.e
        if self.tp == 1:
            return (), ()
        if self.sp:
            return (Message("reduce_scatter", "tp", whole),), (Message("all_gather", "tp", whole),)
        return (Message("all_reduce", "tp", whole),), ()


def is_mixed(model: ModelSection, number: int) -> bool:
    """Whether a block has experts."""
    return model.arch == "moe" and number >= model.dense_layers


def block(s: Sizes, software: Software, mixed: bool = False) -> list[Operation]:
    """The operations of one block, in forward's order. mixed: it has experts."""
    mask = s.n * s.model.dim if s.model.dropout else 0.0
    attended = [
        _norm("norm1", s, software, "input"),
        *_attention(s, software),
        _add("add1", s, software, mask),
        _norm("norm2", s, software, "stream"),
    ]
    mlp = _experts(s) if mixed else _feed_forward(s, software)
    return [*attended, *mlp, _add("add2", s, software, mask)]


@dataclass(frozen=True)
class Work:
    """All operations for a microbatch: of a block by whether it has experts, before the blocks, behind them."""

    block: dict[bool, list[Operation]]
    begin: list[Operation]
    end: list[Operation]


def work(s: Sizes, software: Software) -> Work:
    """Of a model's share on one rank."""
    kinds = {is_mixed(s.model, number) for number in (0, s.model.layers - 1)}
    blocks = {mixed: block(s, software, mixed) for mixed in kinds}
    return Work(blocks, begin(s, software), end(s, software))


def begin(s: Sizes, software: Software) -> list[Operation]:
    """Before the blocks: rows of the embedding."""
    D, e, n = s.model.dim, s.e, s.n
    sent: tuple[Message, ...] = ()
    if s.tp > 1:
        sent = (Message("reduce_scatter" if s.sp else "all_reduce", "tp", s.N * D * e),)
    back = (Message("all_gather", "tp", s.N * D * e),) if s.tp > 1 and s.sp else ()
    masks = (Saved("embedding mask", n * D, "stream"),) if s.model.dropout else ()
    moved = 3 * s.N * D * e
    return [
        Operation(
            "embedding", None, 0.0, moved, 2 * moved, 2, sent_forward=sent, sent_backward=back, saved=masks
        )
    ]


def end(s: Sizes, software: Software) -> list[Operation]:
    """Behind the blocks: last norm, output layer, loss. BERT's head has its own matrix and norm, of masked tokens."""
    D, V, e, n = s.model.dim, s.model.vocab_size or 0, s.e, s.n
    rows, columns = s.targets, V / s.tp
    chunks = software.loss == "chunks"
    # bytes moved and kept for a logit: forward, backward, kept, workspace
    table = {"chunks": (4, 0, 0, 0), "fused": (2 * e, 2 * e, e, 0), "plain": (24, 14, 4, 4 + e)}
    forward, backward, kept, workspace = table[software.loss]
    at_once = min(rows * columns * e, max(software.chunk_bytes, MIN_ROWS * columns * e))
    into, back, statistics = _loss_messages(s, software)
    saved = [Saved("output input", n * D * e, "stream")]
    if chunks:
        saved.append(Saved("output gradient", n * D * e, "stream"))
    if kept:
        saved.append(Saved("logits", kept * rows * columns, "stream"))
    return [
        _norm("norm", s, software, "stream", keep_output=False),
        Operation(
            "output", Matmul(rows, columns, D), sent_forward=into, sent_backward=back, saved=tuple(saved)
        ),
        Operation(
            "loss",
            forward=forward * rows * columns,
            backward=backward * rows * columns,
            kernels=2 if software.fused else 8,
            sent_forward=statistics,
            workspace=(at_once + D * columns * 4) if chunks else workspace * rows * columns,
        ),
    ]


def _loss_messages(
    s: Sizes, software: Software
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """Of the output layer in forward and in backward, and of the loss. Here (parallel/vocabulary.py) the gradients are
    made in forward, so nothing is gathered twice; under context parallelism the ranks count their targets together."""
    if software.loss != "chunks":
        return *s.enter(), (Message("all_reduce", "tp", 3 * 4 * s.targets),) if s.tp > 1 else ()
    whole, head = s.N * s.model.dim * s.e, s.targets * s.model.dim * s.e
    total = (Message("all_reduce", "cp", 8),) if s.cp > 1 else ()
    if s.tp == 1:
        return (), (), total
    statistics = (Message("all_gather", "tp", s.tp * 3 * 4 * s.targets, calls=s.chunks(software)), *total)
    gather = (Message("all_gather", "tp", whole),) if s.sp else ()
    if s.sp and s.model.arch != "bert":
        return gather, (Message("reduce_scatter", "tp", whole),), statistics
    return gather, (Message("all_reduce", "tp", head),), statistics


def kept(operations: Iterable[Operation], recompute: str, software: Software) -> float:
    """Bytes kept from forward until backward."""
    table = KEPT[recompute]
    roles = table.get(software.selective, table["core"])
    return sum(saved.size for op in operations for saved in op.saved if saved.role in roles)


def _norm(name: str, s: Sizes, software: Software, role: Role, keep_output: bool = True) -> Operation:
    D, e, n = s.model.dim, s.e, s.n
    forward, backward, kernels = (2, 3, 1) if software.fused else (14, 24, 6)
    saved = [Saved(f"{name} input", n * D * e, role)]
    if keep_output:
        saved.append(Saved(f"{name} output", n * D * e, "stream"))
    return Operation(name, None, 0.0, forward * n * D * e, backward * n * D * e, kernels, saved=tuple(saved))


def _bias(model: ModelSection, features: float, rows: float, e: float) -> float:
    """Bytes read for the gradient of a bias."""
    return rows * features * e if model.arch in ("gpt2", "bert") else 0.0


def _add(name: str, s: Sizes, software: Software, mask: float) -> Operation:
    """Bias, dropout and the residual stream."""
    D, e, n = s.model.dim, s.e, s.n
    passes = 1.0 if software.fused else 1.0 + 2.0 * bool(mask)
    saved = (Saved(f"{name} mask", mask, "stream"),) if mask else ()
    forward = 3 * n * D * e * passes + mask
    backward = 3 * n * D * e + (2 * n * D * e + mask if mask else 0.0)
    return Operation(name, None, 0.0, forward, backward, 1, saved=saved, random=mask)


def _attention(s: Sizes, software: Software) -> list[Operation]:
    D, e, N, T, qkv = s.model.dim, s.e, s.N, s.model.seq_len, s.qkv
    H = s.model.heads / s.tp
    into, back = s.enter()
    out, out_back = s.leave()
    causal = 1.0 if s.model.arch == "bert" else 0.5
    product = Operation(
        "qkv",
        Matmul(N, qkv, D),
        backward=_bias(s.model, qkv, N, e),
        sent_forward=into,
        sent_backward=back,
        saved=(Saved("qkv", N * qkv * e, "product"),),
    )
    ring = N * (qkv - D / s.tp) * e * (s.cp - 1)
    forward: tuple[Message, ...] = (Message("ring", "cp", ring, hidden=True),) if s.cp > 1 else ()
    backward: tuple[Message, ...] = (Message("ring", "cp", 2 * ring, hidden=True),) if s.cp > 1 else ()
    if s.cp > 1 and s.cp_method == "ulysses":  # tokens are exchanged for heads, and back
        forward = backward = tuple(Message("all_to_all", "cp", N * x * e) for x in (qkv, D / s.tp))
    rotary = 2 * N * (qkv - (qkv - D / s.tp) / 2) * e if s.model.arch not in ("gpt2", "bert") else 0.0
    rotary *= 1.0 if software.fused else 3.0
    if software.attention == "flash":
        core = [
            Operation(
                "attention",
                attention=4.0 * N * T * (D / s.tp) * causal,
                forward=rotary,
                backward=rotary,
                kernels=1 if not rotary or software.fused else 5,
                sent_forward=forward,
                sent_backward=backward,
                saved=(Saved("log-sum-exp", N * H * 4, "inner"),),
                part="core",
                workspace=N * (qkv + D / s.tp) * e,
            )
        ]
    else:
        core = _plain_attention(s, software, causal)
    return [
        product,
        *core,
        Operation(
            "attention out",
            Matmul(N, D, D / s.tp),
            backward=_bias(s.model, D, N, e),
            sent_forward=out,
            sent_backward=out_back,
            saved=(Saved("attention output", N * D / s.tp * e, "inner"),),
            part="out",
        ),
    ]


def _plain_attention(s: Sizes, software: Software, causal: float) -> list[Operation]:
    """Scores, softmax and their product with the values, each in memory. The fused masked softmax reads what the mask
    leaves and writes all."""
    e, T, H, d = s.e, s.model.seq_len, s.model.heads / s.tp, s.model.dim / s.model.heads
    scores = s.B * H * T * T / s.cp
    drop = software.probability_dropout and s.model.dropout > 0
    probabilities = [Saved("probabilities", scores * e, "core")]
    if drop:
        probabilities += [Saved("mask", scores, "core"), Saved("dropped probabilities", scores * e, "core")]
    product = Matmul(T / s.cp, T, d, s.B * H, weight=False)
    softmax = (1 + causal) * scores * e
    dropout = (2 * e + 1) * scores if drop else 0.0
    # The bias of queries, keys and values is a pass of its own, and the heads' outputs are put side by side; in
    # backward the three gradients are put into one.
    moved = 2 * s.N * (s.qkv + s.model.dim / s.tp) * e
    return [
        Operation("bias and order of heads", None, 0.0, moved, moved, 2),
        Operation("scores", product, part="core"),
        Operation(
            "softmax",
            None,
            0.0,
            softmax + dropout,
            (1 + 2 * causal) * scores * e + dropout,
            1 + drop,
            saved=tuple(probabilities),
            part="core",
            workspace=2 * scores * e,
            random=scores if drop else 0.0,
        ),
        Operation("values", Matmul(T / s.cp, d, T, s.B * H, weight=False), part="core"),
    ]


def _feed_forward(s: Sizes, software: Software) -> list[Operation]:
    D, F, e, N = s.model.dim, (s.model.ffn_dim or 0) / s.tp, s.e, s.N
    gated = s.model.arch not in ("gpt2", "bert")
    into, back = s.enter()
    out, out_back = s.leave()
    wide = 2 * F if gated else F
    # gelu: reads, writes; with the gate: reads two, writes one. Unfused, the gate is two operations and more.
    forward, backward = (3, 5) if gated else (2, 3)
    if not software.fused:
        forward, backward = (5, 13) if gated else (4, 6)
    return [
        Operation(
            "up",
            Matmul(N, wide, D),
            backward=_bias(s.model, wide, N, e),
            sent_forward=into,
            sent_backward=back,
            saved=(Saved("up", N * wide * e, "product"),),
        ),
        Operation(
            "gate" if gated else "gelu",
            None,
            0.0,
            forward * N * F * e,
            backward * N * F * e,
            1 if software.fused else 2,
            saved=(Saved("activation", N * F * e, "inner"),),
            part="inner",
            workspace=N * (wide + F) * e,
        ),
        Operation(
            "down",
            Matmul(N, D, F),
            backward=_bias(s.model, D, N, e),
            sent_forward=out,
            sent_backward=out_back,
            part="out",
        ),
    ]


def _experts(s: Sizes) -> list[Operation]:
    """The routed feed-forward: tokens go to their experts and come back. Experts are whole on every tensor-parallel
    rank, which sends those tokens that it has outside tensor-parallel regions."""
    model, D, e, N = s.model, s.model.dim, s.e, s.n
    E, k, F = model.experts or 1, model.experts_per_token or 1, model.expert_ffn_dim or model.ffn_dim or 0
    routed, received, here = N * k, N * k * (s.load if s.ep > 1 else 1.0), E / s.ep
    exchange = (Message("all_to_all", "ep", max(routed, received) * D * e),) if s.ep > 1 else ()
    counts = (Message("all_to_all", "ep", 8 * E),) if s.ep > 1 else ()  # int64, of each expert
    rows = received / here  # of each expert
    router = Operation("router", Matmul(N, E, D), 0.0, 8 * N * E * 4, 8 * N * E * 4, 8)
    ops = [
        router,
        Operation(
            "dispatch",
            None,
            0.0,
            2 * routed * D * e,
            2 * routed * D * e,
            4,
            sent_forward=(*counts, *exchange),
            sent_backward=exchange,
            saved=(Saved("routed", received * D * e, "stream"),),
        ),
        Operation(
            "experts up", Matmul(rows, 2 * F, D, here), saved=(Saved("up", received * 2 * F * e, "product"),)
        ),
        Operation(
            "gate",
            None,
            0.0,
            3 * received * F * e,
            5 * received * F * e,
            saved=(Saved("activation", received * F * e, "inner"),),
            part="inner",
            workspace=3 * received * F * e,
        ),
        Operation("experts down", Matmul(rows, D, F, here)),
        Operation(
            "combine",
            None,
            0.0,
            3 * routed * D * e,
            3 * routed * D * e,
            4,
            sent_forward=exchange,
            sent_backward=exchange,
            saved=(Saved("experts' output", routed * D * e, "stream"),),
        ),
    ]
    if model.shared_experts:
        wide = model.shared_experts * F
        ops += [
            Operation(
                "shared up", Matmul(N, 2 * wide, D), saved=(Saved("shared up", N * 2 * wide * e, "product"),)
            ),
            Operation(
                "shared gate",
                None,
                0.0,
                3 * N * wide * e,
                5 * N * wide * e,
                saved=(Saved("shared activation", N * wide * e, "inner"),),
                part="inner",
            ),
            Operation("shared down", Matmul(N, D, wide)),
        ]
    return [*ops, *_balance(s)]


def _balance(s: Sizes) -> list[Operation]:
    """Ranks that have parts of a sequence add up what each expert got: for the router's own terms of the loss, which
    are what computes it again."""
    axes = [axis for axis, divided in (("cp", s.cp > 1), ("tp", s.sp)) if divided]
    total = tuple(Message("all_reduce", axis, 8 * (s.model.experts or 1)) for axis in axes)
    model = s.model
    learns = (model.balance == "aux" and model.aux_loss_weight > 0) or model.z_loss_weight > 0
    return (
        [Operation("balance", kernels=0, sent_forward=total, part="" if learns else "never")] if total else []
    )

"""An operation of a model as the planner sees it: a matmul with its shape, bytes moved, bytes sent, bytes kept for
backward. No torch. The cards list operations (models/work.py), the planner prices and counts them.

Legend: N tokens of a rank's microbatch (B T / cp), n tokens outside tensor-parallel regions (N / tp under sequence
parallelism), D model, H heads, K key-value heads, d head, F feed-forward, V vocabulary, e bytes per element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self, TypeVar

from fivefold.kernels import sizes
from fivefold.models.section import ModelSection
from fivefold.sharding.units import AGAIN, ROWS, SUM, WHOLE, Collective, What

T = TypeVar("T")
Role = Literal[
    "input",
    "stream",
    "norm",
    "normed",
    "product",
    "copied",
    "latent",
    "core",
    "inner",
    "gate",
    "attended",
    "fed",
]
Part = Literal["", "norm", "normed", "latent", "core", "inner", "out", "gate", "down", "never"]
Rate = Literal["copy", "embedding", "norm", "gate", "gelu", "loss"]
Library = Literal["flash", "cudnn"]
"""Of fused attention: FlashAttention-2, or cuDNN's, which is faster on Hopper."""
Kind = tuple[bool, bool]
"""Of a block: whether it is of the second kind (`Card.second`), and whether it is eager: not compiled, by a program
that compiles others."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor kept from forward to backward. role: "input": a block's input. "stream": on its residual stream. "norm":
    the result of the norm before a sublayer, which one matmul reads; "normed": which others read. "product": that of a
    sublayer's first matmul. "copied": such a result that is kept only if its copies are not. "latent": made of latent
    vectors before attention's core. "core": within it. "inner": any other of attention. "gate": the result of the gate.
    "attended", "fed": made of the result of attention's, of the feed-forward's last matmul, in compiled code. once:
    bytes of it that exist at once if it is recomputed; None: all."""

    name: str
    size: float
    role: Role
    once: float | None = None


@dataclass(frozen=True, slots=True)
class Matmul:
    """`count` matmuls (m, k) x (k, n). weight: True if the second factor is a parameter. sensitive: its
    factors are never rounded. grouped: of experts, which multiply rounded factors in the working dtype. chunks: of the
    m rows, multiplied one after the other in forward and for the input's gradient (schedules/chunks.py). wide: in fp32,
    whatever the mode."""

    m: float
    n: float
    k: float
    count: float = 1
    weight: bool = True
    sensitive: bool = False
    grouped: bool = False
    chunks: int = 1
    wide: bool = False

    def rounded(self, kept: bool, both: bool = False) -> tuple[float, float, float]:
        """Elements that its three products round, in some modes: both factors of each. kept: but the weight. both: the
        output's gradient once for its two products."""
        x, w, y = self.count * self.m * self.k, self.count * self.k * self.n, self.count * self.m * self.n
        w *= not kept
        again = y * (not both or self.chunks > 1)
        return (x + w, y + w, again + x) if self.weight and not self.sensitive else (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Message:
    """A collective on an axis. size: bytes of the larger of input and output. "ring": keys and values that travel round
    a ring; `size` is for whole ones in each of its messages. reach: see `ring_attention.turns`. hidden: it overlaps
    with the operation. calls: number of calls it is cut into. chunked: each overlaps with other chunks
    (schedules/chunks.py): of a product; "rows": to experts, of their work; "results": of these, on the way back."""

    what: What | Literal["ring"]
    axis: str
    size: float
    hidden: bool = False
    calls: int = 1
    chunked: Literal["", "product", "rows", "results"] = ""
    reach: int | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of forward, and its backward.

    attention: FLOPs of fused attention in forward. forward, backward: bytes moved by element-wise work. kernels: number
    of kernels in forward. part: where it stands, which says what recomputes it (models/recomputation.py). "norm",
    "normed", "latent", "core", "inner" and "gate" are as in `Saved`; "out" and "down" are the matmuls behind attention
    and gate; "" is any other; "never": backward does not need it. workspace: bytes that its backward (for the loss: its
    forward) holds besides saved tensors. random: numbers drawn in forward, for dropout. rate: the measured operation
    whose element-wise work it resembles. beside: the operations that hide its hidden messages; none: itself. behind:
    those that do behind them, in chunks. tokens: of the sequences that fused attention goes over; None: they are whole.
    again: backward computes its forward again in every mode of recomputation.
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
    part: Part = ""
    workspace: float = 0.0
    random: float = 0.0
    rate: Rate = "copy"
    beside: tuple[Operation, ...] = ()
    behind: tuple[Operation, ...] = ()
    tokens: float | None = None
    again: bool = False


Sent = tuple[Message, ...]


class TensorWay(NamedTuple):
    """How a training program sends activations between tensor-parallel ranks under sequence parallelism.

    pieces: a message travels in so many pieces beside products that write where the result belongs and share the
    device, so nothing is copied and they reach the whole product's rate (user buffers of Transformer Engine); 0: as
    the layout says. each: every projection of a region gathers its input for itself. copied: what is gathered and
    scattered is copied once more, because the collective works on the first dim and sequences are another.
    whole_logits: each rank gathers the logits of the whole vocabulary.
    """

    pieces: int = 0
    each: bool = False
    copied: bool = False
    whole_logits: bool = False


OWN_WAY = TensorWay()


@dataclass(frozen=True)
class Program:
    """A training program's way of computing a model: properties that operations depend on besides model and layout.

    attention: "flash" keeps no probabilities; "plain" does; "blocks", ours on CPUs, keeps them for short sequences.
    masks: dropout keeps "bytes", or "numbers" in the compute dtype. probability_dropout: attention's probabilities have
    dropout, too. selective: the region that "selective" recomputes (models/recomputation.py). fused: consecutive
    element-wise operations are one pass over memory. compiles: they are in the blocks that `Layout.compiles` says; in
    others autograd keeps what each of PyTorch's operations reads. loss: logits exist in "chunks"; or whole, in the
    compute dtype ("fused": the gradient replaces them) or with fp32 copies ("plain"). chunk_bytes: logits that exist at
    once, if in chunks. loss_on_gpu: such a chunk is read from memory for its statistics and again for its gradient, and
    the matmul itself adds to the weight's gradient in fp32. pads_values: value heads that are narrower than key heads
    are padded to their width. rows_beside: experts' rows travel beside the shared expert. batch_first: activations are
    (B, T, D), so pieces of several sequences are put in order by copies. tensor: its way of tensor parallelism.
    library: of fused attention. narrow_factors: what is kept for a weight's gradient alone is kept as its matmul rounds
    it; narrow_gates: so is the gate's input. narrow_experts: experts multiply rounded factors at the rate of 8 bits.
    early_weights: experts' results have their router's weights before the last matmul, so backward does not need them.
    late_experts: a schedule that defers weight gradients defers those of experts, too.
    once_per_node: a row crosses to a node once, however many of its experts are there; a group of experts is a node.
    qk_clip: the largest queries and keys are found in each forward, and agreed on in each step (step/qk_clip.py).
    """

    attention: Literal["flash", "blocks", "plain"] = "flash"
    masks: Literal["bytes", "numbers"] = "bytes"
    probability_dropout: bool = False
    selective: Literal["core", "operations", "latent"] = "core"
    fused: bool = True
    compiles: bool = False
    loss: Literal["chunks", "fused", "plain"] = "chunks"
    chunk_bytes: float = sizes.logits_bytes("cuda")
    loss_on_gpu: bool = True
    pads_values: bool = True
    rows_beside: bool = False
    tensor: TensorWay = OWN_WAY
    library: Library = "flash"
    batch_first: bool = False
    narrow_factors: bool = False
    narrow_gates: bool = False
    narrow_experts: bool = False
    early_weights: bool = False
    late_experts: bool = False
    once_per_node: bool = False
    qk_clip: bool = False

    @property
    def joined(self) -> bool:
        """True if a compiler joins element-wise operations with the copies before them."""
        return self.compiles and self.fused

    @property
    def eager(self) -> bool:
        """True for code of a program that compiles, where it does not."""
        return self.compiles and not self.fused

    def of(self, eager: bool) -> Self:
        """The program in a block that it compiles, or in one that it does not."""
        return replace(self, fused=False) if eager and self.compiles else self


class Seen(NamedTuple):
    """What attention computes of sequences with several documents. share: of the scores of whole sequences. tokens:
    length of the sequences that its kernel goes over, if they are not whole. copied: queries and keys that it copies,
    relative to a rank's tokens, to have those of all sequences in a row."""

    share: float = 1.0
    tokens: float | None = None
    copied: tuple[float, float] = (0.0, 0.0)


WHOLE_SEQUENCES = Seen()


@dataclass(frozen=True)
class Sizes:
    """A model's share on one rank for one microbatch of B sequences. load: rows of this rank's experts relative to an
    even split. chunks: of these rows, whose messages overlap. narrow: bytes per element of a factor that is rounded for
    a matmul; 0: none is. seen: by attention, of sequences with several documents; near: within a window. tp_chunks: of
    the tokens, in linear layers with sp. dispatched: bytes of a row of D features on its way to experts; 0: D e. way:
    of the program, to send between tensor-parallel ranks."""

    model: ModelSection
    B: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    e: float = 2
    cp_method: str = "ring"
    load: float = 1.0
    sp_regather: bool = False
    chunks: int = 1
    narrow: float = 0.0
    seen: Seen = WHOLE_SEQUENCES
    near: Seen = WHOLE_SEQUENCES
    tp_chunks: int = 1
    dispatched: float = 0.0
    way: TensorWay = OWN_WAY

    @property
    def N(self) -> float:
        return self.B * self.model.seq_len / self.cp

    @property
    def n(self) -> float:
        return self.N / self.tp if self.sp else self.N

    def kept(self, narrow: bool) -> float:
        """Bytes per element of what is kept for backward. narrow: as matmuls round it, if they do."""
        return self.narrow if narrow and self.narrow else self.e

    def loss_chunks(self, program: Program, rows: float) -> int:
        """Number of chunks that the loss cuts these rows of logits into."""
        columns = (self.model.vocab_size or 1) / self.tp
        return sizes.loss_chunks(rows, columns, self.model.dim, self.e, program.chunk_bytes)

    @property
    def qkv(self) -> float:
        """Number of query, key and value features on this rank."""
        K = self.model.kv_heads or self.model.heads
        return self.model.head_width * (self.model.heads + 2 * K) / self.tp

    @property
    def q(self) -> float:
        """Number of query features on this rank."""
        return self.model.head_width * self.model.heads / self.tp

    def enter(
        self, width: int | None = None, projections: int = 1
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Messages in forward and backward at the entry of a tensor-parallel region with so many `projections`, for
        `width` features (None: D). With `sp_regather`, the kept piece is gathered again in backward, overlapped with
        the matmul for the input's gradient."""
        again = self._message(AGAIN[self.sp_regather], width, hidden=True)
        number = projections if self.way.each else 1
        return number * self.whole(width), number * (*again, *self.sum(width))

    def leave(self) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Messages in forward and backward at the exit of a tensor-parallel region."""
        return self.sum(), self.whole()

    def whole(self, width: int | None = None) -> tuple[Message, ...]:
        """The message that makes an activation of `width` features (None: D) whole (`sharding/units.py`)."""
        return self._message(WHOLE[self.sp], width)

    def sum(self, width: int | None = None) -> tuple[Message, ...]:
        """The message that sums partial activations."""
        return self._message(SUM[self.sp], width)

    def by_chunk(self, op: Operation, program: Program, ordered: bool) -> Operation:
        """The matmul at the beginning or the end of a tensor-parallel region, in chunks, with the copies of
        `parallel.autograd.TensorAxis`. ordered: it takes or gives tokens in their order. Backward at the end holds one
        of the copies besides."""
        n, m = self.tp_chunks, op.matmul
        if not self.sp or self.tp == 1 or not m:
            return op
        if self.way.copied:
            op = replace(op, forward=op.forward + self._copied(op.sent_forward))
            op = replace(op, backward=op.backward + self._copied(op.sent_backward))
        if self.way.pieces:
            return _in_chunks(op, n)
        enters, several = op.sent_forward[0].what == WHOLE[True], program.batch_first and self.B > 1
        wide, inner = (m.k, m.n) if enters else (m.n, m.k)  # features of the messages, and within the region
        gathered = scattered = wide * (several and ordered)
        again = enters and self.sp_regather
        if n > 1:
            piece, apart = wide / self.tp, not program.joined  # or what adds to the residual reads chunks
            gathered = inner + wide * (not again) + piece * several
            scattered = inner * ordered + piece * apart
        moved = [gathered, scattered] if enters else [scattered, gathered]
        moved[1] += wide * again * (several if ordered else n > 1)
        forward, backward = (2 * m.m * size * self.e for size in moved)
        op = replace(op, forward=op.forward + forward, backward=op.backward + backward)
        if n == 1:
            return replace(op, kernels=op.kernels + (forward > 0))
        held = 0.0 if enters else m.m * max(wide, inner) * self.e
        op = _in_chunks(replace(op, kernels=n + 1, workspace=op.workspace + held), n)
        return replace(op, matmul=replace(m, chunks=n))

    def _copied(self, sent: tuple[Message, ...]) -> float:
        """Bytes moved by copies of what these messages gather or scatter."""
        return 2 * sum(one.size for one in sent if one.axis == "tp")

    def _message(self, what: What | None, width: int | None, hidden: bool = False) -> tuple[Message, ...]:
        if not what or self.tp == 1:
            return ()
        return (Message(what, "tp", self.N * (width or self.model.dim) * self.e, hidden),)

    def sends(
        self, collective: Collective, numbers: float, calls: int = 1
    ) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Messages of a collective in forward and backward. numbers: how many the larger of input and output has."""
        axis, size = collective.axis, numbers * (collective.number or self.e)
        ways = (collective.forward, collective.backward) if getattr(self, axis) > 1 else (None, None)
        forward, backward = ((Message(what, axis, size, calls=calls),) if what else () for what in ways)
        return forward, backward

    def rows_sent(self, rows: float) -> tuple[tuple[Sent, Sent], tuple[Sent, Sent]]:
        """Messages of rows to experts and home, in forward and in backward (gradients of results go to experts)."""
        home = there = self.sends(ROWS, rows * self.model.dim, self.chunks)
        if self.dispatched:
            there = self.sends(replace(ROWS, number=1), rows * self.dispatched, self.chunks)
        forward, backward = zip(there, home, strict=True)
        return forward, backward


def _in_chunks(op: Operation, n: int) -> Operation:
    """The operation with messages in n chunks, but for those that are hidden."""
    forward, backward = (
        tuple(one if one.hidden else replace(one, calls=n, chunked="product") for one in sent)
        for sent in (op.sent_forward, op.sent_backward)
    )
    return replace(op, sent_forward=forward, sent_backward=backward)


def travel(
    forward: tuple[tuple[Message, ...], tuple[Message, ...]],
    backward: tuple[tuple[Message, ...], tuple[Message, ...]],
    shared: tuple[Operation, ...],
    experts: tuple[Operation, ...],
    chunks: int,
    combine: Operation,
) -> tuple[list[Operation], Operation]:
    """The wait for rows that travel beside the shared experts, and `combine` with the messages of results, or in chunks
    with all messages. forward, backward: to experts and home."""
    (there, home), (gradients, rows) = forward, backward
    if chunks > 1:
        sent, back = (
            (*(replace(m, chunked="rows") for m in to), *(replace(m, chunked="results") for m in results))
            for to, results in (forward, backward)
        )
        return [], replace(combine, sent_forward=sent, sent_backward=back, beside=shared, behind=experts)
    there, rows = (tuple(replace(m, hidden=bool(shared)) for m in way) for way in (there, rows))
    wait = Operation("arrival", kernels=0, sent_forward=there, sent_backward=rows, beside=shared)
    return [wait] * bool(there), replace(combine, sent_forward=home, sent_backward=gradients)


class ByKind(dict[Kind, T]):
    """Something of each kind of block, made when it is first asked for."""

    def __init__(self, make: Callable[[Kind], T]):
        super().__init__()
        self.make = make

    def __missing__(self, kind: Kind) -> T:
        made = self[kind] = self.make(kind)
        return made


@dataclass(frozen=True)
class Work:
    """All operations for a microbatch: of each kind of block, before the blocks, after them."""

    block: ByKind[list[Operation]]
    begin: list[Operation]
    end: list[Operation]

    @property
    def head(self) -> list[Operation]:
        """The end up to its first loss. Behind it are those of further tokens."""
        return self.end[: 1 + next(at for at, op in enumerate(self.end) if op.name == "loss")]

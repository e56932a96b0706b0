"""An architecture as data, and names, shapes and cuts of the layers that architectures share. No torch.

The rest of the program asks a model's card, never the architecture's name.

Sizes: D model, d head, K key-value heads, F feed-forward, T sequence, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from fivefold.errors import UserError
from fivefold.models import MASKED_SHARE, Objective, delta_work, file_of, predicted, work
from fivefold.models.mixture_work import mixture
from fivefold.models.operations import ByKind, Matmul, Operation, Program, Saved, Sizes, Work
from fivefold.models.section import ModelSection
from fivefold.models.tables import ahead, under
from fivefold.sharding.parts import OUTPUT, TIED, Cut, Sections, Shape, is_matrix, matching, sections_by

if TYPE_CHECKING:
    cached = property  # the Protocol `Model` has properties
else:
    cached = cached_property

Contradiction = tuple[set[str], str]
"""Recipe keys that disagree, and the rule between them."""


ScoreRows = Sequence[tuple[int, Sequence[tuple[int, float]]]]
"""Rows of a weight, in order: (heads, for each of them sections of (rows, power)). Scores grow by a factor where each
row grows by that power of it."""


class Card(ABC):
    """The card of a `[model]` section. Properties that depend on sizes need a resolved one. It is a `Model` of
    `sharding/parts.py`."""

    summary: str
    """The architecture in a few words, for `fivefold check --explain`."""
    words: ClassVar[dict[str, str]] = {"kv_heads": "equal to `heads`"}
    """Values of `defaults` that depend on other fields, in words."""
    widths: tuple[str, ...] = ("heads", "kv_heads", "ffn_dim")
    """Fields that grow with `dim`."""
    objective: Objective = "causal"
    causal = True
    """True if a token sees only itself and earlier ones, False if it sees all."""
    rotary = False
    """True if positions rotate queries and keys (RoPE), False if they are learned."""
    grouped_queries = False
    """True if several query heads may share keys and values."""
    gated = False
    """True if the feed-forward layers are SwiGLU, False if GELU."""
    biased = False
    """True if linear layers and norms have biases: LayerNorm, else RMSNorm."""
    post_norm = False
    """True if norms are behind the sublayers instead of before them."""
    sandwich_norm = False
    """True if norms are before the sublayers and behind them."""
    unit_norms = False
    """True if scales of RMSNorms are added to 1."""
    free_heads = False
    """True if the width of a head need not be D / H."""
    attention_biases = False
    """True if the projections of attention may have biases though other layers have none."""
    qkv_biased = False
    """True if the projections of queries, keys and values always have biases."""
    out_biased = True
    """False if the output projection of attention has no bias, whatever the others have."""
    unrotated = False
    """True if some blocks may have no positions."""
    partly_rotated = False
    """True if a part of each head may have no positions."""
    local_rotation = False
    """True if blocks with a window may rotate in their own way."""
    windows = False
    """True if queries may see a window of keys only."""
    patterned = False
    """True if some blocks may attend to whole sequences and others in another way."""
    linear_attention = False
    """True if some blocks have linear attention (models/delta.py)."""
    gated_attention = False
    """True if the outputs of attention's heads have gates."""
    gated_shared = False
    """True if the result of shared experts has a gate."""
    normed_heads = False
    """True if each query head and each key head has an RMSNorm."""
    normed_scores = False
    """True if queries and keys have norms, so that the size of their weights does not change attention's scores."""
    scaled_scores = False
    """True if scores may be divided by another root than that of a head's width."""
    capped = False
    """True if attention's scores and the logits may have caps."""
    sinks = False
    """True if each head of attention has a sink: a learned score beside those of its keys, whose value is 0."""
    latent_attention = False
    """True if queries, keys and values are made from narrow latent vectors (MLA)."""
    has_experts = False
    """True if some blocks have a mixture of experts as feed-forward."""
    multi_token = False
    """True if blocks behind the last one may predict further tokens (models/ahead.py)."""
    extras = False
    """True if its blocks may have value embeddings and skips."""
    pipelined = True
    """False if blocks need the tokens, or what other blocks than the one before them computed."""
    whole_sequences: tuple[str, ...] = ()
    """Modules at the model's end that compute with whole sequences under sequence parallelism, in their order, as
    prefixes of names (`norm.`). The sequence is gathered before the first of them; the output layer follows them."""

    stack = "blocks"
    """Name of the modules that repeat. Parameters of the one with number N are called `blocks.N....`."""
    beginning: tuple[str, ...] = ("embed",)
    """What names of parameters before the blocks begin with."""
    regional: tuple[str, ...] = ()
    """Endings of parameters that are whole on every rank but compute with this rank's heads or features only, such as
    the norm of a head. Under tensor parallelism their gradients are partial sums."""

    def __init__(self, model: ModelSection) -> None:
        self.model, self.further = model, model.mtp_depth
        self.tied = bool(model.tie_embeddings) or self.further > 0
        """True if the model's end computes with the embedding's weight, too: as output layer, or with the tokens of
        multi-token prediction."""

    @cached
    def parameters(self) -> dict[str, Shape]:
        """The table, built at first use: deep models have thousands of rows."""
        return self.table()

    @property
    def buffers(self) -> dict[str, Shape]:
        """Names and shapes of the tensors that checkpoints keep beside the parameters, and no optimizer changes."""
        return {}

    @cached
    def frozen(self) -> frozenset[str]:
        """The parameters that are not trained."""
        return matching(self.model.freeze, self.parameters) if self.model.freeze else frozenset()

    @cached
    def rounded(self) -> frozenset[str]:
        """The matrices that modes of 8 bits round: those of the blocks' linear layers and experts, not of routers."""
        named = ((n, shape) for n, shape in self.parameters.items() if n.startswith(f"{self.stack}."))
        return frozenset(name for name, shape in named if is_matrix(name, shape) and ".router." not in name)

    @cached
    def mixed(self) -> tuple[bool, ...]:
        """`is_mixed` of every block."""
        return tuple(map(self.is_mixed, range(self.model.blocks)))

    @cached
    def second(self) -> tuple[bool, ...]:
        """Of every block, whether it is of the second kind. There are at most two kinds, which differ in `kinds`. Where
        all are alike, it is whether they have experts."""
        kinds = sorted(set(self.kinds))
        assert len(kinds) <= 2, "no architecture has more of these facts than one"
        return self.mixed if len(kinds) < 2 else tuple(kind == kinds[1] for kind in self.kinds)

    @cached
    def kinds(self) -> tuple[tuple[bool, bool, bool], ...]:
        """Of every block, whether it has experts, attends to whole sequences, and has no positions."""
        rotates, linear = self.model.rotates, self.model.linear
        return tuple(
            (self.mixed[n], not self.window(n) and not linear(n), not rotates(n))
            for n in range(self.model.blocks)
        )

    @property
    def whole_heads(self) -> dict[str, int]:
        """Numbers of heads, by their fields, that ranks of the tensor and of the context axis divide, whatever
        `cp_method` says."""
        return {"linear_key_heads": self.model.linear_key_heads or 1} if self.linear_attention else {}

    def window(self, number: int) -> int:
        """The keys that a query sees in a block, if they are fewer than a sequence; 0: all."""
        window = self.model.window(number)
        return window if window < self.model.seq_len else 0

    @cached
    def narrow(self) -> int:
        """The window of the blocks that have one; 0: none has."""
        return max(map(self.window, range(self.model.blocks)), default=0)

    def words_of(self, number: int) -> str:
        """A block in a few words."""
        words = " with experts" * self.is_mixed(number) + " with a window" * (self.window(number) > 0)
        words += " with linear attention" * self.model.linear(number)
        return f"a block{words}" + " without positions" * (not self.model.rotates(number))

    @cached
    def count(self) -> int:
        """Number of parameters. One block of each kind is counted, so that a sweep over sizes stays fast."""
        rest = type(self)(self.model.model_copy(update={"layers": 0})).table()
        total, known = sum(map(math.prod, rest.values())), dict[tuple[bool, bool], int]()
        for number in range(self.model.layers):
            kind = self.is_mixed(number), self.model.linear(number)
            if kind not in known:
                known[kind] = sum(map(math.prod, self.block(number).values()))
            total += known[kind]
        return total

    @abstractmethod
    def defaults(self) -> dict[str, Any]:
        """Default values of optional fields, except the vocabulary's size. The model may be unresolved."""

    def resized(self, layers: int) -> dict[str, Any]:
        """Fields to change for a model of this kind with another width and this many blocks, besides `dim` and heads:
        those that follow from them are unset."""
        return {"ffn_dim": None}

    def rules(self) -> Iterator[Contradiction]:
        """Yields every broken rule that is specific to this architecture. The model may be unresolved."""
        yield from ()

    def score_rows(self) -> Mapping[str, ScoreRows]:
        """The linear layers of a block that make queries and keys, for QK-clip (step/qk_clip.py)."""
        d, H, K = self.model.head_width, self.model.heads, self.model.kv_heads or self.model.heads
        gates = ((H, ((d, 0.0),)),) * self.gated_attention
        return {"attention.qkv": ((H, ((d, 0.5),)), (K, ((d, 0.5),)), (K, ((d, 0.0),)), *gates)}

    @property
    def score_maxima(self) -> tuple[int, int]:
        """Blocks, and heads of keys in each: QK-clip has two numbers of each."""
        return self.model.blocks, self.model.kv_heads or self.model.heads

    @property
    def per_token(self) -> int:
        """The experts that compute a token; 0 if there are none."""
        return 0

    def expert_features(self) -> tuple[str, int]:
        """The field that sets the number of features of each expert, and their number; 0 without experts or unset."""
        return "", 0

    @abstractmethod
    def table(self) -> dict[str, Shape]:
        """Names and shapes of the parameters, in the module's order. Names `embed...` belong to the model's beginning,
        `blocks.N....` to a block, all others to its end."""

    @abstractmethod
    def block(self, number: int) -> dict[str, Shape]:
        """Names and shapes of a block's parameters."""

    @cached
    def cuts(self) -> dict[str, Cut]:
        """The cut of each parameter that tensor or expert parallelism cuts. The others are whole on every rank."""
        found = {}
        for name, shape in self.parameters.items():
            local = name.split(".", 2)[-1] if name.startswith("blocks.") else name
            if cut := self.cut(local, shape):
                found[name] = cut
        return found

    @cached
    def sections(self) -> Mapping[str, Sections]:
        """Of the parameters that consist of several matrices, or vectors. Matrices are apart by their meaning, such as
        queries, keys and values, also where a published file joins them (GPT-2, Phi-3)."""
        return sections_by(self.cuts)

    def cut(self, name: str, shape: Shape) -> Cut | None:
        """The cut of a parameter; None: it is whole on every rank. name: without "blocks.N."."""
        return cut_of(name, shape, self.model)

    @cached
    def costs(self) -> tuple[list[float], float, float]:
        """FLOPs per token, forward and backward, of each block, of what comes before them and of what comes after."""
        model = self.model
        blocks, head = [self.attention_flops(number) for number in range(model.blocks)], 0.0
        for name, shape in self.parameters.items():
            matmul = 6.0 * self.active(name, math.prod(shape)) if is_matrix(name, shape) else 0.0
            if name.startswith("blocks."):
                blocks[int(name.split(".")[1])] += matmul
            elif not name.startswith("embed") or (name == TIED and model.tie_embeddings):
                head += matmul * (1 + self.further)
        embedding = 12.0 * model.dim  # no matmul: a row is read, and its gradient is added
        return blocks, embedding, head * (MASKED_SHARE if self.objective == "mlm" else 1.0)

    def attention_flops(self, number: int) -> float:
        """FLOPs per token, forward and backward, of scores and values in a block."""
        model, T = self.model, self.model.seq_len
        if model.linear(number):
            return delta_work.flops(model)
        window = self.window(number) or T
        keys = window - window**2 / (2 * T) if self.causal else T  # that a query sees, on average
        return 12.0 * model.head_width * model.heads * keys

    def is_mixed(self, number: int) -> bool:
        """True if a block has experts."""
        return False

    def mixed_blocks(self) -> int:
        """Number of blocks with experts."""
        return sum(self.mixed)

    @property
    def load_sums(self) -> tuple[int, int]:
        """Shape of the sums over all ranks, once per step: for each block with experts the slots of each expert,
        dropped slots, load-balance term, z term, number of passes (`models.mixture.RouterStats`)."""
        return self.mixed_blocks(), (self.model.experts or 0) + 4

    def work(self, s: Sizes, program: Program) -> Work:
        """All operations of the model on one rank. s: sizes of the card's model."""
        first = self.second.index
        blocks = ByKind(lambda kind: self.block_operations(s, program.of(kind[1]), first(kind[0])))
        # Each sequence has as many rows of logits as predicted tokens. If sequences are cut, the rows are spread
        # unevenly; the average is used.
        rows = s.B * predicted(self.objective, s.model.seq_len) / s.cp
        begin, eager = work.begin(s, program), program.of(eager=True)
        end = work.end(s, eager, rows, bool(self.whole_sequences), self.biased)
        for depth in range(1, self.further + 1):
            some = [*begin, *ahead_operations(s, program), *end[1:3]]
            end = [*end, *(replace(op, name=f"{op.name} {depth}") for op in some)]
        return Work(blocks, begin, end)

    def block_operations(self, s: Sizes, program: Program, number: int = 0) -> list[Operation]:
        """Operations of a block, in forward order."""
        linear = self.model.linear(number)
        attended = (
            delta_work.operations(s, program) if linear else self.attention_operations(s, program, number)
        )
        mlp = self.feed_forward_operations(s, program, number)
        if self.sandwich_norm:
            return work.sandwich_block(s, program, attended, mlp)
        return work.block(s, program, attended, mlp, self.biased)

    def feed_forward_operations(self, s: Sizes, program: Program, number: int) -> list[Operation]:
        if self.is_mixed(number):
            return mixture(s, program, self.gated_shared)
        return work.feed_forward(s, program, self.gated, self.biased)

    def attention_operations(self, s: Sizes, program: Program, number: int) -> list[Operation]:
        """Operations of a block's attention."""
        biased = self.biased or self.qkv_biased or self.model.attention_bias
        rotary = self.rotary and self.model.rotates(number)
        gates, own = s.q * self.gated_attention, work.OwnScores(self.sinks, self.model.score_cap > 0)
        return work.attention(s, program, self.causal, rotary, biased, self.window(number), own, gates)

    def active(self, name: str, size: int) -> int:
        """Number of a parameter's elements that compute a token: for experts, those that the token is routed to."""
        if ".experts." in name:
            return size // (self.model.experts or 1) * (self.model.experts_per_token or 0)
        return size

    def blocks(self) -> dict[str, Shape]:
        """The parameters of all blocks."""
        found: dict[str, Shape] = {}
        for number in range(self.model.blocks):
            found |= under(f"blocks.{number}", self.block(number))
            if number >= self.model.layers:
                found |= under(f"blocks.{number}.ahead", ahead(self.model.dim))
        return found

    def output(self) -> dict[str, Shape]:
        """The output layer's weight, if it has its own."""
        model = self.model
        return {} if model.tie_embeddings else {OUTPUT: (model.vocab_size or 0, model.dim)}


@lru_cache(maxsize=256)
def card_of(model: ModelSection) -> Card:
    """The card of a model."""
    return file_of(model.arch, "card").Card(model)


def resolve_model(model: ModelSection, *, vocab_size: int) -> ModelSection:
    """The model section with every open field filled in. Raises UserError: `model.vocab_size` is smaller than
    `vocab_size`."""
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise UserError(
            f"model.vocab_size = {model.vocab_size} is smaller than the tokenizer's {vocab_size} tokens; "
            "increase it or leave it unset"
        )
    filled = card_of(model).defaults() | {"vocab_size": round_up(vocab_size, 64)}
    return model.model_copy(update={name: v for name, v in filled.items() if getattr(model, name) is None})


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def active_parameters(model: ModelSection) -> int:
    """Number of parameters that compute a token in generation: all but those of multi-token prediction, and only the
    routed experts that the token goes to."""
    card = _resolved(model.model_copy(update={"mtp_depth": 0}))
    return sum(card.active(name, math.prod(shape)) for name, shape in card.parameters.items())


def count_parameters(model: ModelSection) -> int:
    """Number of parameters; tied embeddings count once. `model.vocab_size` must be given."""
    return _resolved(model).count


def flops_per_token(model: ModelSection, pairs: Callable[[int], float] | None = None) -> float:
    """FLOPs of forward and backward on one token: 6 per weight in a matmul, plus 12 L D T for attention (half of it if
    causal); without recomputation (PaLM, arXiv 2204.02311, appendix B). Only weights that a token uses count: a masked
    language model's head works on the masked tokens only, and a token goes to some of the routed experts. pairs: if a
    sequence holds several documents, the share of the pairs of tokens that attention sees within a window (0: none)."""
    card = _resolved(model)
    blocks, _, head = card.costs
    if pairs is None:
        return sum(blocks) + head
    T, hidden = card.model.seq_len, 0.0
    attends = [number for number in range(card.model.blocks) if not card.model.linear(number)]
    for window, count in Counter(map(card.window, attends)).items():
        number = next(n for n in attends if card.window(n) == window)
        whole = (2 * T - window + 1) * window / (T * (T + 1)) if window else 1.0
        hidden += count * card.attention_flops(number) * (1 - min(1.0, pairs(window) / whole))
    return sum(blocks) + head - hidden


def _resolved(model: ModelSection) -> Card:
    assert model.vocab_size is not None, "the vocabulary's size must be given"
    return card_of(resolve_model(model, vocab_size=model.vocab_size))


def copied(name: str) -> str:
    """The parameter of a dense block that experts may be copies of; "": it is none of theirs."""
    return f"{name.replace('.mlp.experts.', '.mlp.')}.weight" if ".mlp.experts." in name else ""


def ahead_operations(s: Sizes, program: Program) -> list[Operation]:
    """What a block of multi-token prediction does besides (models/ahead.py). Full recomputation keeps both inputs only:
    the embedded tokens, and one that counts as the block's own."""
    D, e, n = s.model.dim, s.e, s.n
    joined = Saved("joined", 2 * n * D * s.kept(program.narrow_factors), "normed")
    return [
        work.norm("token norm", s, program, "input"),
        work.norm("hidden norm", s, program, "normed"),
        Operation("join", forward=4 * n * D * e, backward=4 * n * D * e),
        Operation("project", Matmul(n, D, 2 * D), saved=(joined,), workspace=2 * n * D * e),
        work.norm("norm", s, program, "normed"),
    ]


def cut_of(name: str, shape: Shape, model: ModelSection) -> Cut | None:
    """The cut of a parameter of these layers under tensor and expert parallelism; None: it is whole on every rank.

    name: without "blocks.N.".
    """
    d, H, K = model.head_width, model.heads, model.kv_heads or model.heads
    match name:
        case "embed.weight" | "head.weight" | "head_bias":
            return Cut("vocab", 0, shape[:1])
        case "attention.qkv.weight" | "attention.qkv.bias":
            gates = (d * H,) * (shape[0] > d * (H + 2 * K))
            return Cut("column", 0, (d * H, d * K, d * K, *gates))
        case "attention.sink_bias":
            return Cut("column", 0, shape)
        case "mlp.gate_up.weight":
            return Cut("column", 0, (shape[0] // 2,) * 2)
        case "mlp.experts.gate_up" | "mlp.experts.gate_up_bias":
            columns = Cut("column", 1, (shape[1] // 2,) * 2, whole_tokens=True)
            return Cut("expert", 0, shape[:1], within=columns)
        case "mlp.experts.down":
            return Cut("expert", 0, shape[:1], within=Cut("row", 2, shape[2:], whole_tokens=True))
        case "mlp.shared.gate_up.weight":
            return Cut("column", 0, (shape[0] // 2,) * 2, whole_tokens=True)
        case "mlp.shared.down.weight":
            return Cut("row", 1, shape[1:], whole_tokens=True)
        case "mlp.up.weight" | "mlp.up.bias":
            return Cut("column", 0, shape[:1])
        case "attention.out.weight" | "mlp.down.weight":
            return Cut("row", 1, shape[1:])
    return delta_work.cut_of(name, model) if model.linear_heads else None

"""An architecture as data, and names, shapes and cuts of the layers that architectures share. No torch.

The rest of the program asks a model's card, never the architecture's name.

Sizes: D model, d head, K key-value heads, F feed-forward, T sequence, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from fivefold.errors import UserError
from fivefold.models import MASKED_SHARE, Objective, file_of, predicted, work
from fivefold.models.operations import ByKind, Operation, Program, Sizes, Work
from fivefold.models.section import ModelSection
from fivefold.sharding.parts import TIED, Cut, Shape, matching

if TYPE_CHECKING:
    cached = property  # the Protocol `Model` has properties
else:
    cached = cached_property

Contradiction = tuple[set[str], str]
"""Recipe keys that disagree, and the rule between them."""


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
    free_heads = False
    """True if the width of a head need not be D / H."""
    attention_biases = False
    """True if the projections of attention may have biases though other layers have none."""
    latent_attention = False
    """True if queries, keys and values are made from narrow latent vectors (MLA)."""
    has_experts = False
    """True if some blocks have a mixture of experts as feed-forward."""
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
        self.model = model
        self.tied = bool(model.tie_embeddings)
        """True if the output layer shares the embedding's weight."""

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
        return frozenset(name for name, shape in named if len(shape) > 1 and ".router." not in name)

    @cached
    def mixed(self) -> tuple[bool, ...]:
        """`is_mixed` of every block."""
        return tuple(map(self.is_mixed, range(self.model.layers)))

    @cached
    def count(self) -> int:
        """Number of parameters. One block of each kind is counted, so that a sweep over sizes stays fast."""
        layers, mixed = self.model.layers, self.mixed_blocks()
        rest = type(self)(self.model.model_copy(update={"layers": 0})).table()
        total = sum(map(math.prod, rest.values()))
        for kind, blocks in ((False, layers - mixed), (True, mixed)):
            if blocks:
                one = next(number for number in range(layers) if self.is_mixed(number) is kind)
                total += blocks * sum(map(math.prod, self.block(one).values()))
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

    def cut(self, name: str, shape: Shape) -> Cut | None:
        """The cut of a parameter; None: it is whole on every rank. name: without "blocks.N."."""
        return cut_of(name, shape, self.model)

    @cached
    def costs(self) -> tuple[list[float], float, float]:
        """FLOPs per token, forward and backward, of each block, of what comes before them and of what comes after."""
        model = self.model
        blocks, head = [self.attention_flops(number) for number in range(model.layers)], 0.0
        for name, shape in self.parameters.items():
            matmul = 6.0 * self.active(name, math.prod(shape)) if len(shape) > 1 else 0.0
            if name.startswith("blocks."):
                blocks[int(name.split(".")[1])] += matmul
            elif not name.startswith("embed") or (name == TIED and self.tied):
                head += matmul
        embedding = 12.0 * model.dim  # no matmul: a row is read, and its gradient is added
        return blocks, embedding, head * (MASKED_SHARE if self.objective == "mlm" else 1.0)

    def attention_flops(self, number: int) -> float:
        """FLOPs per token, forward and backward, of scores and values in a block."""
        model = self.model
        return 6.0 * model.head_width * model.heads * model.seq_len * (1 if self.causal else 2)

    def is_mixed(self, number: int) -> bool:
        """True if a block has experts."""
        return False

    def mixed_blocks(self) -> int:
        """Number of blocks with experts."""
        return sum(map(self.is_mixed, range(self.model.layers))) if self.has_experts else 0

    @property
    def load_sums(self) -> tuple[int, int]:
        """Shape of the sums over all ranks, once per step: for each block with experts the slots of each expert,
        dropped slots, load-balance term, z term, number of passes (`models.mixture.RouterStats`)."""
        return self.mixed_blocks(), (self.model.experts or 0) + 4

    def work(self, s: Sizes, program: Program) -> Work:
        """All operations of the model on one rank. s: sizes of the card's model."""
        blocks = ByKind(lambda kind: self.block_operations(s, program.of(kind[1]), kind[0]))
        # Each sequence has as many rows of logits as predicted tokens. If sequences are cut, the rows are spread
        # unevenly; the average is used.
        rows = s.B * predicted(self.objective, s.model.seq_len) / s.cp
        end = work.end(s, program.of(eager=True), rows, bool(self.whole_sequences), self.biased)
        return Work(blocks, work.begin(s, program), end)

    def block_operations(self, s: Sizes, program: Program, mixed: bool = False) -> list[Operation]:
        """Operations of one block, in forward order. mixed: True if the block has experts."""
        attended = self.attention_operations(s, program)
        mlp = work.mixture(s, program) if mixed else work.feed_forward(s, program, self.gated, self.biased)
        return work.block(s, program, attended, mlp, self.biased)

    def attention_operations(self, s: Sizes, program: Program) -> list[Operation]:
        """Operations of a block's attention."""
        biased = self.biased or self.model.attention_bias
        return work.attention(s, program, self.causal, self.rotary, biased)

    def active(self, name: str, size: int) -> int:
        """Number of a parameter's elements that compute a token: for experts, those that the token is routed to."""
        if ".experts." in name:
            return size // (self.model.experts or 1) * (self.model.experts_per_token or 0)
        return size

    def blocks(self) -> dict[str, Shape]:
        """The parameters of all blocks."""
        found: dict[str, Shape] = {}
        for number in range(self.model.layers):
            found |= under(f"blocks.{number}", self.block(number))
        return found

    def output(self) -> dict[str, Shape]:
        """The output layer's weight, if it has its own."""
        return {} if self.tied else {"head.weight": (self.model.vocab_size or 0, self.model.dim)}


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
    """Number of parameters that compute a token: all, but only the routed experts that the token goes to."""
    card = _resolved(model)
    return sum(card.active(name, math.prod(shape)) for name, shape in card.parameters.items())


def count_parameters(model: ModelSection) -> int:
    """Number of parameters; tied embeddings count once. `model.vocab_size` must be given."""
    return _resolved(model).count


def flops_per_token(model: ModelSection, pairs: float = 1.0) -> float:
    """FLOPs of forward and backward on one token: 6 per weight in a matmul, plus 12 L D T for attention (half of it if
    causal); without recomputation (PaLM, arXiv 2204.02311, appendix B). Only weights that a token uses count: a masked
    language model's head works on the masked tokens only, and a token goes to some of the routed experts. pairs: the
    share of the pairs of tokens that attention sees, if a sequence holds several documents."""
    card = _resolved(model)
    blocks, _, head = card.costs
    hidden = (1 - pairs) * sum(map(card.attention_flops, range(card.model.layers))) if pairs < 1 else 0.0
    return sum(blocks) + head - hidden


def _resolved(model: ModelSection) -> Card:
    assert model.vocab_size is not None, "the vocabulary's size must be given"
    return card_of(resolve_model(model, vocab_size=model.vocab_size))


def under(prefix: str, table: dict[str, Shape]) -> dict[str, Shape]:
    """Prefixes the names, for the parameters of a module called `prefix`."""
    return {f"{prefix}.{name}": shape for name, shape in table.items()}


def rms_norm(D: int) -> dict[str, Shape]:
    return {"weight": (D,)}


def layer_norm(D: int) -> dict[str, Shape]:
    return {"weight": (D,), "bias": (D,)}


def block(
    norm: dict[str, Shape], attention: dict[str, Shape], mlp: dict[str, Shape], post_norm: bool = False
) -> dict[str, Shape]:
    """Parameters of a block: two sublayers, each with a norm before it (post_norm: behind it)."""
    table: dict[str, Shape] = {}
    for half in ({"norm1": norm, "attention": attention}, {"norm2": norm, "mlp": mlp}):
        for name in reversed(half) if post_norm else half:
            table |= under(name, half[name])
    return table


def attention(model: ModelSection, bias: bool) -> dict[str, Shape]:
    """Parameters of attention. Rows of `qkv`: query heads, key heads, value heads."""
    D, d, H, K = model.dim, model.head_width, model.heads, model.kv_heads or model.heads
    return linear("qkv", D, d * (H + 2 * K), bias) | linear("out", d * H, D, bias)


def swiglu(D: int, F: int) -> dict[str, Shape]:
    """Parameters of SwiGLU. Rows of `gate_up`: the gate, then up."""
    return linear("gate_up", D, 2 * F, bias=False) | linear("down", F, D, bias=False)


def gelu(D: int, F: int) -> dict[str, Shape]:
    return linear("up", D, F, bias=True) | linear("down", F, D, bias=True)


def linear(name: str, inputs: int, outputs: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (outputs, inputs)}
    return weight | {f"{name}.bias": (outputs,)} if bias else weight


def cut_of(name: str, shape: Shape, model: ModelSection) -> Cut | None:
    """The cut of a parameter of these layers under tensor and expert parallelism; None: it is whole on every rank.

    name: without "blocks.N.".
    """
    d, H, K = model.head_width, model.heads, model.kv_heads or model.heads
    match name:
        case "embed.weight" | "head.weight" | "head_bias":
            return Cut("vocab", 0, shape[:1])
        case "attention.qkv.weight" | "attention.qkv.bias":
            return Cut("column", 0, (d * H, d * K, d * K))
        case "mlp.gate_up.weight":
            return Cut("column", 0, (shape[0] // 2,) * 2)
        case "mlp.experts.gate_up":
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
    return None

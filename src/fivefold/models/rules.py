"""Rules between the fields of `[model]` that hold in every layout. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fivefold.models import ARCHITECTURES, file_of, mup
from fivefold.models.card import Contradiction, card_of
from fivefold.models.section import FACTS, ModelSection, phases
from fivefold.sharding.layout import divisors

PLAIN = ModelSection()
MOST_WINDOWS = 2
"""Of a ramp. With the last window and whole sequences, to train and to validate, they make 8 forms of a block; after as
many PyTorch's compiler gives up."""


def model_rules(model: ModelSection, tp: int = 1) -> Iterator[Contradiction]:
    """Yields every rule that a model breaks; its single fields are valid. tp: proposed numbers of heads suit it."""
    card = card_of(model)
    width = model.head_width
    odd = card.rotary and width % 2 and not card.latent_attention  # its heads have widths of their own
    if model.head_dim and odd:
        yield (
            {"model.head_dim"},
            f"model.head_dim = {width} must be even: RoPE rotates pairs. Nearest valid: {max(2, width - 1)}",
        )
    elif not (model.head_dim or card.latent_attention) and (model.dim % model.heads or odd):
        message = f"model.dim / model.heads = {width} must be even: RoPE rotates pairs"
        if model.dim % model.heads:
            message = f"model.dim = {model.dim} must be divisible by model.heads = {model.heads}"
        fits = [  # numbers of heads with which the model can be built
            heads
            for heads in divisors(model.dim)
            if not (card.rotary and model.dim // heads % 2)
            and heads % (model.kv_heads or 1) == 0
            and (model.kv_heads or heads) % tp == 0
        ]
        if fits:
            message += f". Nearest valid: model.heads = {_closest(model.heads, fits)}"
        yield {"model.dim", "model.heads"}, message
    if model.kv_heads and model.heads % model.kv_heads:
        yield (
            {"model.kv_heads", "model.heads"},
            f"model.kv_heads = {model.kv_heads} must divide model.heads = {model.heads}. "
            f"Nearest valid: model.kv_heads = {_closest(model.kv_heads, divisors(model.heads))}",
        )
    if not card.grouped_queries and model.kv_heads and model.kv_heads != model.heads:
        yield (
            {"model.kv_heads", "model.heads"},
            f"model.kv_heads = {model.kv_heads}: {model.arch} needs kv_heads = heads "
            f"(only {having('grouped_queries')} allow fewer)",
        )
    for name, fact in FACTS.items():
        if not getattr(card, fact) and getattr(model, name) != getattr(PLAIN, name):
            yield {f"model.{name}", "model.arch"}, f"model.{name}: {lacks(model, fact)}"
    if model.zero_init and (card.post_norm or card.sandwich_norm):
        yield (
            {"model.zero_init", "model.arch"},
            f"model.zero_init = true: {model.arch} norms what a projection gives, and the norm of zeros has gradients "
            "of any size. Nearest valid: leave zero_init out",
        )
    yield from rotary_rules(model)
    yield from window_rules(model)
    if card.multi_token:
        yield from _multi_token(model)
    yield from mup.rules(model)
    yield from card.rules()


def rotary_rules(model: ModelSection) -> Iterator[Contradiction]:
    """Rules between the fields of rotary positions."""
    for name in ("rope_scaling", "rope_low", "rope_high", "rope_context", "rope_mscale", "rope_truncate"):
        if model.rope_factor == 1 and getattr(model, name) != getattr(PLAIN, name):
            yield (
                {f"model.{name}", "model.rope_factor"},
                f"model.{name} = {getattr(model, name)} has no effect: model.rope_factor = 1 scales nothing. "
                f"Nearest valid: leave {name} out, or set model.rope_factor above 1",
            )
    for name in ("rope_low", "rope_high"):
        value, plain = getattr(model, name), getattr(PLAIN, name)
        if model.rope_factor > 1 and model.rope_scaling == "linear" and value != plain:
            yield (
                {f"model.{name}", "model.rope_scaling"},
                f'model.{name} = {value} has no effect: model.rope_scaling = "linear" stretches all wavelengths. '
                f"Nearest valid: leave {name} out",
            )
    if model.rope_factor > 1 and model.rope_low >= model.rope_high:
        yield (
            {"model.rope_low", "model.rope_high"},
            f"model.rope_low = {model.rope_low} must be below model.rope_high = {model.rope_high}",
        )
    for name in ("rope_mscale", "rope_truncate"):
        value = getattr(model, name)
        if model.rope_factor > 1 and model.rope_scaling != "yarn" and value != getattr(PLAIN, name):
            yield (
                {f"model.{name}", "model.rope_scaling"},
                f'model.{name} = {value} needs model.rope_scaling = "yarn", not "{model.rope_scaling}"',
            )
    if model.rotary_dim and (model.rotary_dim % 2 or model.rotary_dim > model.head_width):
        yield (
            {"model.rotary_dim"},
            f"model.rotary_dim = {model.rotary_dim} must be even and at most the width of a head, {model.head_width}. "
            f"Nearest valid: {max(2, min(model.rotary_dim, model.head_width) // 2 * 2)}",
        )


def window_rules(model: ModelSection) -> Iterator[Contradiction]:
    """Rules between the fields of windows."""
    if model.sliding_window and model.full_every == 1:
        yield (
            {"model.full_every", "model.sliding_window"},
            "model.full_every = 1: every block sees the whole sequence, and none has model.sliding_window = "
            f"{model.sliding_window}. Nearest valid: leave both out, or full_every = 2",
        )
    windows = [window for window, _ in phases(model.window_ramp)]
    if model.sliding_window and (
        max(windows, default=0) >= model.sliding_window or len(windows) > MOST_WINDOWS
    ):
        yield (
            {"model.window_ramp", "model.sliding_window"},
            f'model.window_ramp = "{model.window_ramp}" must have windows below model.sliding_window = '
            f"{model.sliding_window}, at most {MOST_WINDOWS}: each compiles the blocks again. Nearest valid: "
            f'"{max(1, model.sliding_window // 2)}:{phases(model.window_ramp)[0][1]}"',
        )
    for name in ("full_every", "rope_local_theta", "window_ramp"):
        if (
            (value := getattr(model, name))
            and not model.sliding_window
            and not card_of(model).linear_attention
        ):
            shown = value if isinstance(value, str) else f"{value:g}"
            yield (
                {f"model.{name}", "model.sliding_window"},
                f"model.{name} = {shown} has no effect: without model.sliding_window all blocks see whole sequences. "
                f"Nearest valid: leave {name} out",
            )


def _multi_token(model: ModelSection) -> Iterator[Contradiction]:
    """Rules of multi-token prediction."""
    if model.mtp_depth >= model.seq_len - 1:
        yield (
            {"model.mtp_depth", "model.seq_len"},
            f"model.mtp_depth = {model.mtp_depth} leaves no target in sequences of model.seq_len = {model.seq_len} "
            f"tokens. Nearest valid: {model.seq_len - 2}",
        )
    if not model.mtp_depth and model.mtp_weight != PLAIN.mtp_weight:
        yield (
            {"model.mtp_weight", "model.mtp_depth"},
            f"model.mtp_weight = {model.mtp_weight} has no effect: model.mtp_depth = 0 predicts no further token. "
            "Nearest valid: leave mtp_weight out, or set model.mtp_depth = 1",
        )


WORDS = {
    "local_rotation": "rotary positions of their own in windows",
    "unrotated": "blocks without positions",
    "partly_rotated": "heads that rotate in part",
    "windows": "sliding windows",
    "patterned": "two kinds of attention that alternate",
    "linear_attention": "linear attention",
    "scaled_scores": "scores divided by another root than that of a head's width",
    "capped": "caps on scores and logits",
    "rotary": "rotary positions",
    "has_experts": "experts",
    "free_heads": "heads of their own width",
    "attention_biases": "biases that only attention has",
    "latent_attention": "latent attention",
    "multi_token": "modules for multi-token prediction",
    "extras": "techniques of speedruns",
}
"""Facts of cards in words."""


def lacks(model: ModelSection, fact: str, use: str = "") -> str:
    """The error text for a field that needs a fact: `llama has no experts (model.arch: only moe has them)`."""
    others = having(fact)
    verb = "have" if " " in others else "has"
    return f"{model.arch} has no {WORDS[fact]}{use and f' {use}'} (model.arch: only {others} {verb} them)"


def meaning(name: str, text: str) -> str:
    """The docstring of a field of `[model]`, with the architectures that have it and their defaults."""
    cards = {arch: file_of(arch, "card").Card for arch in ARCHITECTURES}
    if name == "arch":
        return f"Architecture: {', '.join(f'`{arch}` ({card.summary})' for arch, card in cards.items())}."
    if name == "kv_heads":
        text += (
            f" Only {_marked(arch for arch, card in cards.items() if card.grouped_queries)} can have fewer."
        )
    if name in FACTS:
        cards = {arch: card for arch, card in cards.items() if getattr(card, FACTS[name])}
        text += f" Only {_marked(cards)}."
    unset: dict[str, list[str]] = {}
    for arch, card in cards.items():
        defaults = card(PLAIN).defaults()
        if name in defaults:
            words = card.words.get(name) or str(defaults[name]).lower().replace("e-0", "e-")
            unset.setdefault(words, []).append(arch)
    if len(unset) == 1:
        return f"{text} Unset: {next(iter(unset))}."
    each = "; ".join(f"{words} for {_marked(archs)}" for words, archs in unset.items())
    return f"{text} Unset: {each}." if each else text


def _marked(archs: Iterable[str]) -> str:
    return _listed(f"`{arch}`" for arch in archs)


def having(fact: str, word: str = "and") -> str:
    """The architectures whose cards have this property: `llama, moe and qwen3`."""
    return _listed([arch for arch in ARCHITECTURES if getattr(file_of(arch, "card").Card, fact)], word)


def _listed(names: Iterable[str], word: str = "and") -> str:
    """`a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def _closest(number: int, choices: Sequence[int]) -> int:
    return min(choices, key=lambda choice: (abs(choice - number), choice))


FREE = {
    "freeze",
    "dropout",
    "init_std",
    "zero_init",
    "window_ramp",
    "depth",
    "base_dim",
    "base_layers",
    "capacity_factor",
    "aux_loss_weight",
    "balance_rate",
    "balance_scope",
    "z_loss_weight",
    "mtp_weight",
}
"""Fields that only say how a run trains."""
EXTENDED = {name for name in ModelSection.model_fields if name.startswith("rope_") and name != "rope_dim"}
"""Fields that may change on purpose, for longer contexts."""


def upcycled(theirs: ModelSection, mine: ModelSection) -> ModelSection:
    """Their model with the experts of mine, if theirs is dense: each a copy of its feed-forward layer (sparse
    upcycling, arXiv 2212.05055). Shapes of weights say whether that is possible."""
    if card_of(theirs).has_experts or not card_of(mine).has_experts:
        return theirs
    names = ("arch", *(name for name, fact in FACTS.items() if fact == "has_experts"))
    return theirs.model_copy(update={name: getattr(mine, name) for name in names})


def differences(mine: ModelSection, theirs: ModelSection) -> tuple[list[str], str]:
    """Fields that differ on purpose, and the first that must not differ ("": none does). Both models are resolved."""
    changed = []
    for name in ModelSection.model_fields:
        same = getattr(mine, name) == getattr(theirs, name)
        if same or name in FREE or (name == "seq_len" and card_of(mine).rotary):
            continue
        if name not in EXTENDED:
            return changed, name
        changed.append(name)
    return changed, ""

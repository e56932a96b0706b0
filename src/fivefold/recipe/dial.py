"""One dial (`model.depth`): what it sets of a recipe, and where each value comes from.

As with nanochat's `--depth` (github.com/karpathy/nanochat), a whole run follows from the number of blocks: width,
heads, tokens, batch, learning rate. Each value follows from those above it in the table, also where these were set by
hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from fivefold.models.card import card_of, resolve_model
from fivefold.optim import lowest_rate
from fivefold.recipe.schema import Sections, TrainSection
from fivefold.sharding.layout import divisors

R = TypeVar("R", bound=Sections)
KEY = "model.depth"
ASPECT, HEAD, PER_PARAMETER = 64, 64, 20
BASE_DIM, BASE_LAYERS, BASE_STD = 256, 4, 0.05
BASE_TOKENS, BASE_BATCH, BASE_RATE = 600 * 4096, 4096, 2.7e-3
"""Tokens of a run, tokens of its batch, and the learning rate that is best there."""
GROWTH, FALL = 0.383, -0.32
"""Powers of a run's tokens: of the batch, of the learning rate."""
SHORTEST = 0.1
"""Runs of a smaller share of BASE_TOKENS, mostly trials, have no smaller batch and no higher rate."""


def _heads(recipe: Sections) -> int:
    D = recipe.model.dim
    return min((h for h in divisors(D) if D // h % 2 == 0 or D % 2), key=lambda h: abs(h - D / HEAD))


def _tokens(recipe: Sections) -> int:
    """Without embeddings: the vocabulary's size may be unknown, and small models are mostly vocabulary."""
    card = card_of(resolve_model(recipe.model.model_copy(update={"vocab_size": 2}), vocab_size=2))
    return PER_PARAMETER * sum(card.active(name, math.prod(shape)) for name, shape in card.blocks().items())


def _batch(recipe: Sections) -> int:
    """A number of steps leaves it as it is."""
    length = max((recipe.train.tokens or _tokens(recipe)) / BASE_TOKENS, SHORTEST)
    return 2 ** max(0, round(math.log2(BASE_BATCH * length**GROWTH / recipe.model.seq_len)))


def _rate(recipe: Sections) -> float:
    batch = recipe.train.global_batch_size * recipe.model.seq_len
    length = (recipe.train.tokens or batch * (recipe.train.steps or 1)) / BASE_TOKENS
    return float(f"{BASE_RATE * math.sqrt(batch / BASE_BATCH) * max(length, SHORTEST) ** FALL:.3g}")


class Setting(NamedTuple):
    """A field that the dial sets. value: given the recipe with the fields above it. source: where it comes from."""

    key: str
    value: Callable[[Sections], Any]
    source: str


def _open(recipe: Sections) -> None:
    """Leaves a field unset, so that its value is derived from other fields."""


SETTINGS = (
    Setting("model.layers", lambda r: r.model.depth, "the depth"),
    Setting("model.dim", lambda r: ASPECT * (r.model.depth or 1), f"{ASPECT} x depth, nanochat's aspect ratio"),
    Setting("model.heads", _heads, f"heads of {HEAD} features, GPT-2's, or about as many"),
    Setting("model.kv_heads", _open, "the architecture's"),
    Setting("model.head_dim", _open, "the width over the heads"),
    Setting("model.ffn_dim", _open, "the architecture's"),
    Setting("model.expert_ffn_dim", _open, "the architecture's"),
    Setting("model.base_dim", lambda r: BASE_DIM, "the width on which rate and initial weights were tuned"),
    Setting("model.base_layers", lambda r: BASE_LAYERS, "the blocks of that model"),
    Setting("model.init_std", lambda r: BASE_STD, "quickstart's (benchmarks/results/quickstart_tuning.md)"),
    Setting("train.tokens", _tokens, f"{PER_PARAMETER} per parameter of the blocks (Chinchilla, arXiv 2203.15556)"),
    Setting("train.global_batch_size", _batch,
            f"quickstart's {BASE_BATCH:,} tokens, growing as the run's tokens to the power of {GROWTH} (arXiv "
            "2505.13738), to the nearest power of 2"),
    Setting("train.microbatch_size", _open, "what divides the batch"),
    Setting("optim.lr", _rate,
            f"{BASE_RATE:g} on the base model (benchmarks/dial.py), times the root of the batch's growth (nanochat), "
            f"times the run's tokens to the power of {FALL} (arXiv 2409.19913)"),
    Setting("optim.min_lr", _open, "a tenth of the rate"),
)  # fmt: skip
KEYS = (*(setting.key for setting in SETTINGS), "train.steps")
"""The fields that the dial sets. A number of steps takes the place of tokens."""


def dialled(recipe: R, given: Collection[str]) -> R:
    """The recipe with what the dial sets of the fields that are not given. Without a depth it is the same."""
    if recipe.model.depth is None:
        return recipe
    if "train.steps" in given:
        given = {*given, "train.tokens"}
    elif "train.tokens" not in given:
        recipe = _with(recipe, "train.steps", None)
    for key, value, _ in SETTINGS:
        if key not in given:
            recipe = _with(recipe, key, value(recipe))
    return recipe


def follows(recipe: Sections, steps_for: Callable[[TrainSection, int], int]) -> set[str]:
    """The fields that have what this depth sets, also where resolving has filled them in: another depth sets them anew.
    The size of a microbatch follows the batch, whatever it is. steps_for: `rules.texts.steps_for`."""
    found, train, model = set[str](), recipe.train, recipe.model
    sequences = -(-_tokens(recipe) // model.seq_len)
    if train.steps == steps_for(train, sequences):  # tokens have become steps
        recipe = _with(_with(recipe, "train.steps", None), "train.tokens", _tokens(recipe))
        found.add("train.steps")
    for key, value, _ in SETTINGS:
        section, _, name = key.partition(".")
        now, alone = attrgetter(key)(recipe), value(recipe)
        if value is _open and section == "model":
            unset = model.model_copy(update={name: None})
            alone = getattr(resolve_model(unset, vocab_size=model.vocab_size or 2), name)
        elif key == "optim.min_lr":
            alone = lowest_rate(recipe.optim.lr)
        elif key == "train.microbatch_size" and "train.global_batch_size" in found:
            alone = now
        if now is None or now == alone:
            found.add(key)
    return found


def _with(recipe: R, key: str, value: Any) -> R:
    section, _, name = key.partition(".")
    changed = getattr(recipe, section).model_copy(update={name: value})
    return recipe.model_copy(update={section: changed})


def origin(recipe: Sections, key: str) -> str:
    """Where the dial's value of a field comes from; "" if the recipe has another, or no dial."""
    found = (one for one in SETTINGS if one.key == key and recipe.model.depth is not None)
    return next((one.source for one in found if one.value(recipe) == attrgetter(key)(recipe)), "")

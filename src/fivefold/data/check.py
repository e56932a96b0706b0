"""Checks a recipe's data in a fraction of a second, before anything is tokenized."""

from __future__ import annotations

import re
from importlib.util import find_spec

from fivefold.data import tokenfiles
from fivefold.data.batches import epochs, objective_of, require_enough, steps_of
from fivefold.data.prepare import cache_key, check_tokenizer
from fivefold.data.probe import require_ids, require_readable
from fivefold.data.sources import find
from fivefold.data.tasks import needs_datasets
from fivefold.data.tokens import read_manifest
from fivefold.errors import UserError
from fivefold.files import cache_folder
from fivefold.recipe import Recipe
from fivefold.recipe.warnings import warning_of_passes

WARNING = "warning: "
HASHED_AT_ONCE = 256 << 20  # bytes; the tokens of a larger source are estimated
BYTES_PER_TOKEN = {"bytes": 1.0, "chars": 1.0}


def check(recipe: Recipe) -> list[str]:
    """Facts about the data as lines of text: files, size, tokens (exact if already tokenized), passes. Warnings begin
    with WARNING.

    Raises UserError for faults that show without reading everything: missing files, unknown kinds, truncated token
    files, an unknown tokenizer or one with more tokens than the model, a missing text field, text that is not UTF-8 (in
    the first 16 MiB), a missing library, a set that is certainly too small.
    """
    if recipe.data.source.startswith("tokens:"):
        shards = [
            tokenfiles.read_header(p, recipe.data.token_dtype)
            for p in tokenfiles.find_files(recipe.data.source)
        ]
        train, val = tokenfiles.split(shards, recipe.data.val_fraction)
        require_enough(recipe, len(train), None if val is None else len(val))
        facts = [f"data: {len(shards)} token file(s), {sum(s.tokens for s in shards):,} tokens"]
        return [*facts, *_passes(recipe, len(train), exact=True)]
    mask = objective_of(recipe) == "mlm"
    check_tokenizer(recipe.data, mask)
    source = find(recipe.data.source)
    if source.hub:
        if not find_spec("datasets"):
            raise UserError(needs_datasets(source.hub[0]))
        return [f"data: {recipe.data.source}, streamed from the hub (not checked before training)"]
    if source.size == 0 and all(f.size == 0 for f in source.files):
        raise UserError(f"data.source: {recipe.data.source} holds no text: {len(source.files)} empty file(s)")
    require_ids(recipe, source, mask)
    facts = [f"data: {len(source.files):,} file(s), {source.size / 1e6:,.1f} MB"]
    root = cache_folder(recipe.data.cache) / "data"
    if source.size <= HASHED_AT_ONCE and root.is_dir():
        manifest = read_manifest(root / cache_key(source, recipe.data, mask, root, lambda *_: None))
        if manifest is not None:
            tokens = manifest["tokens"]
            require_enough(recipe, tokens["train"], tokens["val"] if recipe.data.val_fraction else None)
            facts.append(
                f"tokens: {tokens['train']:,} for training, {tokens['val']:,} for validation (in the cache)"
            )
            return [*facts, *_passes(recipe, tokens["train"], exact=True)]
    require_readable(recipe, source)
    most = source.size + len(source.files)  # at most one token per byte, and one end token per file
    if all(f.kind != "parquet" for f in source.files):  # parquet is compressed, so its text may be larger
        lenient = recipe.data.model_copy(update={"max_epochs": 0})  # the passes are only estimated here
        require_enough(recipe.model_copy(update={"data": lenient}), most, None)
    likely = int(most * (1 - recipe.data.val_fraction) / bytes_per_token(recipe.data.tokenizer))
    facts.append(f"tokens: about {likely:,} for training (not tokenized yet)")
    return [*facts, *_passes(recipe, likely, exact=False)]


def bytes_per_token(tokenizer: str) -> float:
    """Roughly the bytes of text per token. For BPE it is a guess: bpe:4096 measured 3.7 on Python source."""
    if tokenizer in BYTES_PER_TOKEN:
        return BYTES_PER_TOKEN[tokenizer]
    size = re.fullmatch(r"bpe:(\d+)", tokenizer)
    return 3.5 if size and int(size[1]) < 16384 else 4.2


def _passes(recipe: Recipe, train_tokens: int, exact: bool) -> list[str]:
    if steps_of(recipe) is None:
        return []
    count = epochs(recipe, train_tokens)
    facts = [f"passes over the training set: {'' if exact else 'about '}{count:.2f}"]
    return facts + [f"{WARNING}{warning}" for warning in warning_of_passes(count)]

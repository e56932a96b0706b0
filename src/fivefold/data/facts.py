"""Checks a recipe's data in a fraction of a second, before anything is tokenized."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from typing import NamedTuple

from fivefold.data import mixture, preparation, tokenfiles
from fivefold.data.batches import items_in, objective_of, steps_of
from fivefold.data.mixture import Amount
from fivefold.data.one_source import cache_key, check_tokenizer
from fivefold.data.probe import require_ids, require_readable
from fivefold.data.sources import find
from fivefold.data.tasks import needs_datasets
from fivefold.data.tokens import read_manifest
from fivefold.errors import UserError, several
from fivefold.files import cache_folder
from fivefold.recipe import Recipe
from fivefold.recipe.warnings import warning_of_passes

WARNING = "warning: "
HASHED_AT_ONCE = 256 << 20  # bytes; the tokens of a larger source are estimated
BYTES_PER_TOKEN = {"bytes": 1.0, "chars": 1.0}


class Found(NamedTuple):
    """What is known of a source. fact: in words. amount: how much there is of it; None: not known before training.
    most: the most tokens that it can have, if they are estimated; None: they are exact, or there is no bound."""

    fact: str
    amount: Amount | None = None
    exact: bool = False
    most: int | None = None


def check(recipe: Recipe) -> list[str]:
    """Facts about the data as lines of text: files, size, tokens (exact if already tokenized), passes. Warnings begin
    with WARNING.

    Raises UserError for faults that show without reading everything: missing files, unknown kinds, truncated token
    files, an unknown tokenizer or one with more tokens than the model, a missing text field, text that is not UTF-8 (in
    the first 16 MiB), a missing library, a set that is certainly too small.
    """
    tokenizer = preparation.shared_tokenizer(recipe, HASHED_AT_ONCE)
    found: dict[str, Found] = {}
    for name, one in preparation.each(recipe).items():
        with preparation.said_of("data.sources", name) if name else nullcontext():
            found[name] = _found(one, tokenizer)
    facts = [line for name, one in found.items() for line in _lines(name, one)]
    for entry, one in zip(recipe.data.validation, preparation.each_validation(recipe).values(), strict=True):
        name = entry.name
        with preparation.said_of("data.validation", name):
            preparation.require_whole(entry)
            own = _found(one, tokenizer)
        if own.amount is not None and (own.exact or own.most is not None):
            most = own.amount if own.exact else _amount(recipe, own.most or 0, None)
            mixture.require_sequence(recipe, name, most.tokens, most.items)
        facts.append(f"validation {_lines(name, own)[0]}")
    amounts = {name: one.amount for name, one in found.items() if one.amount is not None}
    if len(amounts) < len(found):
        return facts
    if recipe.data.weigh_by == "documents" and not all(amount.documents for amount in amounts.values()):
        return [*facts, "passes over each source: known when their documents are counted"]
    exact = all(one.exact for one in found.values())
    if exact:
        mixture.require_enough(recipe, amounts)
    elif all(one.exact or one.most is not None for one in found.values()):
        lenient = recipe.model_copy(update={"data": mixture.without_limits(recipe.data)})
        most = {
            name: amount if found[name].exact else _amount(recipe, found[name].most or 0, None)
            for name, amount in amounts.items()
        }
        mixture.require_enough(lenient, most)  # the passes are only estimated here
    return [*facts, *_passes(recipe, amounts, exact)]


def _lines(name: str, found: Found) -> list[str]:
    lines = found.fact.split("\n")
    return [f"{name}: {line}" for line in lines] if name else [f"data: {lines[0]}", *lines[1:]]


def _amount(recipe: Recipe, tokens: int, held_out: int | None, documents: int | None = None) -> Amount:
    return Amount(tokens, items_in(recipe, tokens), held_out, documents)


def _found(recipe: Recipe, tokenizer: str) -> Found:
    """What is known of the only source of a recipe. tokenizer: the one that several sources share."""
    if recipe.data.source.startswith("tokens:"):
        shards = [
            tokenfiles.read_header(p, recipe.data.token_dtype)
            for p in tokenfiles.find_files(recipe.data.source)
        ]
        train, val = tokenfiles.split(shards, recipe.data.val_fraction)
        amount = _amount(recipe, len(train), None if val is None else len(val))
        about = "about " * any(s.path.suffix == ".parquet" for s in shards)  # an empty row counts as one
        fact = f"{several(len(shards), 'token file')}, {about}{sum(s.tokens for s in shards):,} tokens"
        return Found(fact, amount, exact=not about)
    mask = objective_of(recipe) == "mlm"
    check_tokenizer(recipe.data, mask)
    source = find(recipe.data.source)
    if source.hub:
        if not find_spec("datasets"):
            raise UserError(needs_datasets(source.hub.name))
        return Found(f"{recipe.data.source}, streamed from the hub (not checked before training)")
    if source.size == 0 and all(f.size == 0 for f in source.files):
        raise UserError(f"data.source: {recipe.data.source} holds no text; empty files: {len(source.files)}")
    require_ids(recipe, source, mask)
    fact = f"{several(len(source.files), 'file')}, {source.size / 1e6:,.1f} MB"
    if source.left_out:
        fact += f"\nnote: {source.left_out}"
    if recipe.data.stream:
        return Found(f"{fact}\ntokenized while training, in windows of {recipe.data.stream_window:,} tokens")
    root = cache_folder(recipe.data.cache) / "data"
    if source.size <= HASHED_AT_ONCE and root.is_dir():
        data = recipe.data.model_copy(update={"tokenizer": tokenizer})
        manifest = read_manifest(root / cache_key(source, data, mask, root, lambda *_: None))
        if manifest is not None:
            tokens = manifest["tokens"]
            held_out = tokens["val"] if recipe.data.val_fraction else None
            amount = _amount(recipe, tokens["train"], held_out, manifest["documents"]["train"])
            fact += (
                f"\ntokens: {tokens['train']:,} for training, {tokens['val']:,} for validation (in the cache)"
            )
            return Found(fact, amount, exact=True)
    require_readable(recipe, source)
    most = source.size + len(source.files)  # at most one token per byte, and one end token per file
    likely = int(most * (1 - recipe.data.val_fraction) / bytes_per_token(recipe.data.tokenizer))
    fact += f"\ntokens: about {likely:,} for training (not tokenized yet)"
    bounded = not any(f.kind == "parquet" or f.packed or f.url for f in source.files)  # else it may be larger
    return Found(fact, _amount(recipe, likely, None), most=most if bounded else None)


def bytes_per_token(tokenizer: str) -> float:
    """Roughly the bytes of text per token. For BPE it is a guess: bpe:4096 measured 3.7 on Python source."""
    if tokenizer in BYTES_PER_TOKEN:
        return BYTES_PER_TOKEN[tokenizer]
    size = re.fullmatch(r"bpe:(\d+)", tokenizer)
    return 3.5 if size and int(size[1]) < 16384 else 4.2


def _passes(recipe: Recipe, amounts: Mapping[str, Amount], exact: bool) -> list[str]:
    if steps_of(recipe) is None:
        return []
    about = "" if exact else "about "
    seen = mixture.seen(recipe, amounts, steps_of(recipe) or 0)
    warnings = [
        f"{WARNING}{name and f'{name}: '}{said}"
        for name, row in seen.items()
        for said in warning_of_passes(row.epochs)
    ]
    if not recipe.data.sources:
        return [f"passes over the training set: {about}{seen[''].epochs:.2f}", *warnings]
    return [
        f"{name}: {about}{100 * row.share:.1f}% of the run, {row.epochs:.2f} passes"
        for name, row in seen.items()
    ] + warnings

"""What is known of a recipe's data in a fraction of a second: faults, sizes, and the tokens if they are cached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from fivefold.data import mixture, preparation, token_source
from fivefold.data.batches import Batches, items_in, objective_of, steps_of
from fivefold.data.build import is_named, require_good
from fivefold.data.chat import special_of
from fivefold.data.kinds import TOKEN_KINDS, hub, kind_of
from fivefold.data.kinds.kind import TOKENS, Bad, Fields
from fivefold.data.mixture import Amount, amounts, order_of
from fivefold.data.one_source import cache_key, check_tokenizer, require_vocabulary
from fivefold.data.packing import DataSet, cut_of
from fivefold.data.sources import FileSplit, Source, find
from fivefold.data.stream import Stream
from fivefold.data.tokenizer import load_tokenizer
from fivefold.data.tokens import open_tokens, read_manifest
from fivefold.errors import UserError, several
from fivefold.files import cache_folder, expanded
from fivefold.kernels.tiling import Sample
from fivefold.recipe import Recipe, place
from fivefold.recipe.warnings import warning_of_passes

WARNING = "warning: "
HASHED_AT_ONCE = 256 << 20  # bytes; the tokens of a larger source are estimated
PROBED = 16 << 20  # bytes that are read in all: about 0.1 s
LEAST = 1 << 16  # bytes that are read of each file
ROWS = 64  # rows read of a file whose bytes cannot be counted, and sequences of a sample
ENOUGH = 100  # bytes of text per token with which BPE finds as many tokens as it may
MOST_HASHED = 64 << 20  # bytes of a source that are hashed again, to see whether it has changed: 0.04 s
MOST_PACKED = 1 << 24  # tokens whose best-fit packing is computed to know it
BYTES_PER_TOKEN = {"bytes": 1.0, "chars": 1.0}


class Found(NamedTuple):
    """What is known of a source. fact: in words. amount: how much there is of it; None: not known before training.
    bound: no more than this; `amount` where it is exact, None if nothing bounds it."""

    fact: str
    amount: Amount | None = None
    bound: Amount | None = None

    @property
    def exact(self) -> bool:
        return self.amount is not None and self.amount is self.bound


def check(recipe: Recipe) -> list[str]:
    """Facts about the data as lines of text: files, size, tokens (exact if already tokenized), passes. Warnings begin
    with WARNING.

    Raises UserError for faults that show without reading everything: missing files, unknown kinds, truncated token
    files, an unknown tokenizer or one with more tokens than the model, a missing text field, text that is not UTF-8 (in
    the first 16 MiB), a missing library, a set that is certainly too small.
    """
    tokenizer = preparation.shared_tokenizer(recipe, HASHED_AT_ONCE)
    found: dict[str, Found] = {}
    for key, one in preparation.sources_of(recipe).items():
        with preparation.named(key):
            found[key.partition(", ")[2]] = _found(one, tokenizer)
    facts = [line for name, one in found.items() for line in _lines(name, one)]
    for key, one in preparation.validation_of(recipe).items():
        name = key.partition(", ")[2]
        with preparation.named(key):
            own = _found(one, tokenizer)
        if own.bound is not None:
            mixture.require_sequence(recipe, name, own.bound.tokens, own.bound.items)
        facts.append(f"validation {_lines(name, own)[0]}")
    amounts = {name: one.amount for name, one in found.items() if one.amount is not None}
    if len(amounts) < len(found):
        return facts
    if recipe.data.weigh_by == "documents" and not all(amount.documents for amount in amounts.values()):
        return [*facts, "passes over each source: known when their documents are counted"]
    exact = all(one.exact for one in found.values())
    bounds = {name: one.bound for name, one in found.items() if one.bound is not None}
    if len(bounds) == len(found):  # passes that are only estimated are held to no limit here
        lenient = recipe.model_copy(update={"data": mixture.without_limits(recipe.data)})
        mixture.require_enough(recipe if exact else lenient, bounds)
    return [*facts, *_passes(recipe, amounts, exact)]


def _lines(name: str, found: Found) -> list[str]:
    lines = found.fact.split("\n")
    return [f"{name}: {line}" for line in lines] if name else [f"data: {lines[0]}", *lines[1:]]


def _amount(recipe: Recipe, tokens: int, held_out: int | None, documents: int | None = None) -> Amount:
    return Amount(tokens, items_in(recipe, tokens), held_out, documents)


def _found(recipe: Recipe, tokenizer: str) -> Found:
    """What is known of the only source of a recipe. tokenizer: the one that several sources share."""
    mask = objective_of(recipe) == "mlm"
    if not recipe.data.source.startswith(TOKENS):
        check_tokenizer(recipe.data, mask)
    source = find(recipe.data.source)
    if source.ids:
        shards = token_source.headers(source, recipe)
        train, val = token_source.split(shards, recipe.data.val_fraction)
        amount = _amount(recipe, len(train), None if val is None else len(val))
        about = "about " * any(TOKEN_KINDS[file.kind].copied for file in source.files)
        fact = f"{several(len(shards), 'token file')}, {about}{sum(s.tokens for s in shards):,} tokens"
        return Found(fact, amount, None if about else amount)
    if source.hub:
        hub.require_library(source.spec)
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
            return Found(fact, amount, amount)
    require_readable(recipe, source)
    most = source.size + len(source.files)  # at most one token per byte, and one end token per file
    likely = int(most * (1 - recipe.data.val_fraction) / bytes_per_token(recipe.data.tokenizer))
    fact += f"\ntokens: about {likely:,} for training (not tokenized yet)"
    # what is compressed, by itself or inside, may hold more than its bytes
    bounded = not any(f.packed or f.url or not kind_of(f).packs for f in source.files)
    bound = _amount(recipe, most, None) if bounded else None
    return Found(fact, _amount(recipe, likely, None), bound)


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


def require_readable(recipe: Recipe, source: Source) -> None:
    """Raises UserError if a document in the beginning of the source cannot be read and none may be bad."""
    data, files = recipe.data, source.files
    if data.max_bad_fraction:
        return
    each = max(LEAST, PROBED // max(1, len(files)))
    whole = source.size <= PROBED
    for number, file in enumerate(files[: PROBED // LEAST] if not whole else files):
        if file.url:  # `check` uses no network but to list them
            continue
        by_bytes = kind_of(file).by_bytes
        plain = by_bytes and file.plain
        fields = Fields(data.text_key, bool(data.chat_template))
        for count, (document, behind) in enumerate(FileSplit(files).read(number, fields), 1):
            require_good(files, [document] if isinstance(document, Bad) else [], 0)
            far = by_bytes and behind >= each
            if (far and not whole) if plain else (far or count >= ROWS):
                break


def require_ids(recipe: Recipe, source: Source, mask: bool) -> None:
    """Raises UserError if the model certainly has fewer ids than the tokenizer."""
    data = recipe.data
    special = (2 if mask else 1) + len(special_of(data.chat_template))
    if data.tokenizer == "bytes":
        require_vocabulary(recipe, 256 + special)
    elif data.tokenizer.startswith("bpe:"):
        size = int(data.tokenizer.removeprefix("bpe:"))
        if source.size > ENOUGH * size:
            require_vocabulary(recipe, size)
    elif not is_named(data.tokenizer):
        tokenizer = load_tokenizer(expanded("data.tokenizer", data.tokenizer), mask)
        if data.chat_template:
            from fivefold.data.chat import open_template  # Jinja takes a moment to import

            tokenizer = open_template(data.chat_template, data.tokenizer, tokenizer).tokenizer
        require_vocabulary(recipe, tokenizer.vocab_size)


def sample(recipe: Recipe, data: DataSet) -> Sample | None:
    """Sequences from all parts of a run, evenly spaced; None: they are tokenized while it goes on, or a source has not
    even one."""
    tokens = list(data.sources.values())
    if any(isinstance(one, Stream) for one in tokens):
        return None
    cuts = [cut_of(recipe, data, one) for one in tokens]
    if min(one.count for one in cuts) < 1:
        return None
    train, steps = recipe.train, steps_of(recipe)
    batches = Batches(
        cuts, recipe.model.seq_len, train.global_batch_size, train.seed,
        objective_of(recipe), data.mask_id, data.vocab_size, order=order_of(recipe, amounts(recipe, data)),
    )  # fmt: skip
    places = place(train, steps) if steps else batches.sequences
    return Sample(batches.first(np.linspace(0, places - 1, min(ROWS, places)).astype(np.int64)))


class _Work(Exception):
    """Something would have to be read or tokenized first."""


def known(recipe: Recipe) -> DataSet | None:
    """The training data of `data.source`, if they are tokenized. None also if much would have to be read to know it,
    and for several sources, streams and sources elsewhere."""
    data = recipe.data
    if data.sources or data.stream or "://" in data.source or data.source.startswith(hub.PREFIX):
        return None
    with suppress(_Work, UserError, OSError):
        source = find(data.source)
        return _known_files(recipe, source) if source.ids else _known_text(recipe, source)
    return None


def _known_files(recipe: Recipe, source: Source) -> DataSet:
    data = recipe.data
    if data.packing == "best_fit":
        raise _Work("a packing is kept by the hash of all tokens")
    if any(TOKEN_KINDS[file.kind].copied for file in source.files):
        raise _Work("its ids are copied")
    shards = token_source.headers(source, recipe)
    mask_id = (recipe.model.vocab_size or 1) - 1
    return DataSet.of_one(
        token_source.split(shards, data.val_fraction)[0], None, None, mask_id + 1, mask_id, {}
    )


def _known_text(recipe: Recipe, source: Source) -> DataSet | None:
    data, mask = recipe.data, objective_of(recipe) == "mlm"
    root = cache_folder(data.cache) / "data"
    folder = root / cache_key(source, data, mask, root, _refuse)
    if (manifest := read_manifest(folder)) is None:
        return None
    tokenizer = load_tokenizer(folder / "tokenizer.json", mask)
    tokens = open_tokens(folder, manifest, "train")
    if data.packing == "best_fit" and len(tokens) > MOST_PACKED:
        raise _Work("packing")
    return DataSet.of_one(tokens, None, tokenizer, tokenizer.vocab_size, tokenizer.mask_id, {})


def _refuse(stage: str, done: int, total: int | None) -> None:
    if total is None or total > MOST_HASHED:
        raise _Work(stage)

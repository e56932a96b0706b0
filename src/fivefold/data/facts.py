"""What is known of a recipe's data in a fraction of a second: faults, sizes, and the tokens if they are cached."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from fivefold.data import dataset, preparation
from fivefold.data.batches import Batches, items_in, objective_of
from fivefold.data.build import require_good
from fivefold.data.chat import open_template, special_of
from fivefold.data.dataset import Amount, DataSet, Part, amounts, cut_of, order_of
from fivefold.data.kinds import TOKEN_KINDS, hub, kind_of
from fivefold.data.kinds.kind import TOKENS, Bad, Fields
from fivefold.data.one_source import check_tokenizer, headers, lookup, require_vocabulary, root_of, split
from fivefold.data.sources import FileSplit, Source, find
from fivefold.data.stream import Stream
from fivefold.data.tokenizer import load_tokenizer
from fivefold.data.tokens import open_tokens
from fivefold.errors import UserError, several
from fivefold.files import expanded
from fivefold.kernels.tiling import Sample
from fivefold.recipe import Recipe, place, run_steps

WARNING = "warning: "
MOST_EPOCHS = 4
"""Passes over the same text up to which each is worth about as much as new text (arXiv 2305.16264)."""
HASHED_AT_ONCE = 256 << 20  # bytes; the tokens of a larger source are estimated
PROBED = 16 << 20  # bytes that are read in all: about 0.1 s
LEAST = 1 << 16  # bytes that are read of each file
ROWS = 64  # rows read of a file whose bytes cannot be counted, and sequences of a sample
ENOUGH = 100  # bytes of text per token with which BPE finds as many tokens as it may
MOST_HASHED = 64 << 20  # bytes of a source that are hashed again, to see whether it has changed: 0.04 s
MOST_PACKED = 1 << 24  # tokens whose best-fit packing is computed to know it


class Found(NamedTuple):
    """What is known of a source. fact: in words. amount: how much there is of it; None: not known before training.
    bound: no more than this; `amount` where it is exact, None if nothing bounds it."""

    fact: str
    amount: Amount | None = None
    bound: Amount | None = None


def check(recipe: Recipe) -> list[str]:
    """Facts about the data as lines of text: files, size, tokens (exact if already tokenized), passes. Warnings begin
    with WARNING.

    Raises UserError for faults that show without reading everything: missing files, unknown kinds, truncated token
    files, an unknown tokenizer or one with more tokens than the model, a missing text field, text that is not UTF-8 (in
    the first 16 MiB), a missing library, a set that is certainly too small.
    """
    tokenizer = preparation.shared_tokenizer(recipe, HASHED_AT_ONCE)
    sources: dict[str, Found] = {}
    for key, alone in preparation.sources_of(recipe).items():
        with preparation.named(key):
            sources[key.partition(", ")[2]] = _found(alone, tokenizer)
    facts = [line for name, source in sources.items() for line in _lines(name, source)]
    for key, alone in preparation.validation_of(recipe).items():
        name = key.partition(", ")[2]
        with preparation.named(key):
            held_out = _found(alone, tokenizer)
        if held_out.bound is not None:
            dataset.require_sequence(recipe, name, held_out.bound.tokens, held_out.bound.items)
        first, *rest = _lines(name, held_out)
        facts += [f"validation {first}", *(line for line in rest if line.startswith(WARNING))]
    amounts = {name: source.amount for name, source in sources.items() if source.amount is not None}
    if len(amounts) < len(sources):
        return facts
    if recipe.data.weigh_by == "documents" and not all(amount.documents for amount in amounts.values()):
        return [*facts, "passes over each source: known when their documents are counted"]
    bounds = {name: source.bound for name, source in sources.items() if source.bound is not None}
    exact = all(source.amount is source.bound for source in sources.values())
    if len(bounds) == len(sources):  # passes that are only estimated are held to no limit here
        dataset.require_enough(recipe, bounds, limited=exact)
    if run_steps(recipe) is None:
        return facts
    about = "" if exact else "about "
    seen = dataset.seen(recipe, amounts, run_steps(recipe) or 0)
    if recipe.data.sources:
        facts += [
            f"{name}: {about}{100 * row.share:.1f}% of the run, {row.epochs:.2f} passes"
            for name, row in seen.items()
        ]
    else:
        facts.append(f"passes over the training set: {about}{seen[''].epochs:.2f}")
    return facts + [
        f"{WARNING}{name and f'{name}: '}{row.epochs:,.1f} passes over the same text: beyond {MOST_EPOCHS} a model "
        "learns less and less from another one (arXiv 2305.16264). Use more text or fewer steps"
        for name, row in seen.items()
        if round(row.epochs, 1) > MOST_EPOCHS
    ]


def _lines(name: str, found: Found) -> list[str]:
    lines = found.fact.split("\n")
    return (
        [line if line.startswith(WARNING) else f"{name}: {line}" for line in lines]
        if name
        else [f"data: {lines[0]}", *lines[1:]]
    )


def _amount(recipe: Recipe, tokens: int, held_out: int | None, documents: int | None = None) -> Amount:
    return Amount(tokens, items_in(recipe, tokens), held_out, documents)


def _found(recipe: Recipe, tokenizer: str) -> Found:
    """What is known of the only source of a recipe. tokenizer: the one that several sources share."""
    mask = objective_of(recipe) == "mlm"
    if not recipe.data.source.startswith(TOKENS):
        check_tokenizer(recipe.data, mask)
    source = find(recipe.data.source)
    if source.ids:
        return _found_ids(recipe, source)
    if source.hub:
        hub.require_library(hub.parse(source.spec))
        return Found(f"{recipe.data.source}, streamed from the hub (not checked before training)")
    if source.size == 0 and all(f.size == 0 for f in source.files):
        raise UserError(f"data.source: {recipe.data.source} holds no text; empty files: {len(source.files)}")
    _require_ids(recipe, source.size)
    spec = recipe.data.tokenizer
    size = re.fullmatch(r"bpe:(\d+)", spec)
    fact = f"{several(len(source.files), 'file')}, {source.size / 1e6:,.1f} MB"
    if source.left_out:
        fact += f"\nnote: {source.left_out}"
    if recipe.data.stream:
        return Found(f"{fact}\ntokenized while training, in windows of {recipe.data.stream_window:,} tokens")
    if source.size <= HASHED_AT_ONCE and root_of(recipe.data).is_dir():
        data = recipe.data.model_copy(update={"tokenizer": tokenizer})
        folder, manifest = lookup(source, data, mask, lambda *_: None)
        if manifest is not None:
            tokens = manifest["tokens"]
            held_out = tokens["val"] if recipe.data.val_fraction else None
            amount = _amount(recipe, tokens["train"], held_out, manifest["documents"]["train"])
            fact += (
                f"\ntokens: {tokens['train']:,} for training, {tokens['val']:,} for validation (in the cache)"
            )
            return Found(fact, amount, amount)
        if folder.is_dir():
            fact += f"\n{WARNING}{folder} is damaged, so the text will be tokenized anew"
    require_readable(recipe, source)
    most = source.size + len(source.files)  # at most one token per byte, and one end token per file
    # bytes per token: for BPE a guess; bpe:4096 measured 3.7 on Python source
    each = 1.0 if spec in ("bytes", "chars") else 3.5 if size and int(size[1]) < 16384 else 4.2
    likely = int(most * (1 - recipe.data.val_fraction) / each)
    fact += f"\ntokens: about {likely:,} for training (not tokenized yet)"
    # what is compressed, by itself or inside, may hold more than its bytes
    bounded = not any(f.packed or f.url or not kind_of(f).packs for f in source.files)
    bound = _amount(recipe, most, None) if bounded else None
    return Found(fact, _amount(recipe, likely, None), bound)


def _found_ids(recipe: Recipe, source: Source) -> Found:
    shards = headers(source, recipe)
    train, val = split(shards, recipe.data.val_fraction)
    amount = _amount(recipe, len(train), None if val is None else len(val))
    about = "about " * any(TOKEN_KINDS[file.kind].copied for file in source.files)
    fact = f"{several(len(shards), 'token file')}, {about}{sum(s.tokens for s in shards):,} tokens"
    if about:  # what is copied gets its end tokens then
        return Found(fact, amount)
    if warning := dataset.unseparated(recipe, train, recipe.data.end_token):
        fact += f"\n{WARNING}{warning}"
    return Found(fact, amount, amount)


def without_data(recipe: Recipe) -> list[str]:
    """Warnings that need no data. Raises UserError: the model certainly has fewer ids than the tokenizer."""
    if any(one.data.source.startswith(TOKENS) for one in preparation.sources_of(recipe).values()):
        return []
    try:
        check_tokenizer(recipe.data, objective_of(recipe) == "mlm")
    except UserError as error:  # the file may be where the run will be
        return [str(error)]
    _require_ids(recipe)
    return []


def _require_ids(recipe: Recipe, size: int = 0) -> None:
    """Raises UserError: the model certainly has fewer ids than the tokenizer, if the text has `size` bytes."""
    mask, spec = objective_of(recipe) == "mlm", recipe.data.tokenizer
    least, learned = (
        256 + (2 if mask else 1) + len(special_of(recipe.data.chat_template)),
        spec.startswith("bpe:"),
    )
    if learned and size > ENOUGH * int(spec[4:]):
        least = int(spec[4:])
    elif not learned and spec not in ("bytes", "chars"):
        loaded = load_tokenizer(expanded("data.tokenizer", spec), mask)
        if recipe.data.chat_template:
            loaded = open_template(recipe.data.chat_template, spec, loaded).tokenizer
        least = loaded.vocab_size
    if spec != "chars":
        require_vocabulary(recipe, least)


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
        fields = Fields(data.text_key, bool(data.chat_template))
        for count, (document, behind) in enumerate(FileSplit(files).read(number, fields), 1):
            require_good(files, [document] if isinstance(document, Bad) else [], 0)
            far = by_bytes and behind >= each
            if (far and not whole) if by_bytes and file.plain else (far or count >= ROWS):
                break


def sample(recipe: Recipe, data: DataSet) -> Sample | None:
    """Sequences from all parts of a run, evenly spaced; None: they are tokenized while it goes on, or a source has not
    even one."""
    tokens = list(data.sources.values())
    if any(isinstance(source, Stream) for source in tokens):
        return None
    cuts = [cut_of(recipe, data, source) for source in tokens]
    if min(cut.count for cut in cuts) < 1:
        return None
    train, steps = recipe.train, run_steps(recipe)
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
    data, mask = recipe.data, objective_of(recipe) == "mlm"
    if data.sources or data.stream or "://" in data.source or data.source.startswith(hub.PREFIX):
        return None
    with suppress(_Work, UserError, OSError):
        source = find(data.source)
        if source.ids:
            # A packing is kept by the hash of all tokens, and ids that are copied would have to be read.
            if data.packing == "best_fit" or any(TOKEN_KINDS[file.kind].copied for file in source.files):
                return None
            train, _ = split(headers(source, recipe), data.val_fraction)
            mask_id = (recipe.model.vocab_size or 1) - 1
            return DataSet((Part("", train, None, {}),), None, mask_id + 1, mask_id, {})
        folder, manifest = lookup(source, data, mask, _refuse)
        if manifest is not None:
            tokenizer = load_tokenizer(folder / "tokenizer.json", mask)
            train = open_tokens(folder, manifest, "train")
            if data.packing != "best_fit" or len(train) <= MOST_PACKED:
                part = Part("", train, None, {})
                return DataSet((part,), tokenizer, tokenizer.vocab_size, tokenizer.mask_id, {})
    return None


def _refuse(stage: str, done: int, total: int | None) -> None:
    if total is None or total > MOST_HASHED:
        raise _Work(stage)

"""Prepares the data of a run: one source or several, and validation sets, with one tokenizer.

A source of a mixture is anything that `data.source` can be. Each is prepared by itself and has its own place in the
cache.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.data.batches import objective_of
from fivefold.data.build import Work, learn
from fivefold.data.kinds import megatron
from fivefold.data.kinds.kind import TOKENS
from fivefold.data.mixture import amounts, require_enough, require_sequence, weights_of
from fivefold.data.one_source import cache_key, check_tokenizer, prepare_source
from fivefold.data.packing import DataSet, cut_of, end_of
from fivefold.data.sources import find
from fivefold.data.stream import Stream
from fivefold.data.token_source import require_one_split
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.tokens import Tell, Tokens
from fivefold.errors import UserError
from fivefold.files import cache_folder, locked, make_folder, writable
from fivefold.host import cores
from fivefold.recipe import Recipe
from fivefold.recipe.entries import SourceEntry, ValidationEntry

ONE = "data.source"
"""The key of the only source."""
ALONE = {"sources": (), "stages": (), "validation": (), "weigh_by": "tokens"}
"""What a recipe with one source has."""
TOKENIZERS = 2
"""Of tokenizers that several sources share: raise it when the same sources would give another one."""


def prepare(recipe: Recipe, progress: Tell | None = None, workers: int | None = None) -> DataSet:
    """The data set of a recipe. It is tokenized first, unless the cache has this content with these settings.

    Several processes may call it at once. One works, the others wait and read its result. The result does not depend on
    `workers` (threads; None: one per core). progress(stage, done, total) is called with bytes.

    Raises:
        UserError: a fault of a source, with file and offset; or there is not enough data for the run.
    """
    if recipe.data.sources or recipe.data.validation:
        data = _prepare_all(recipe, progress, workers)
    else:
        data = prepare_source(recipe, progress, workers)
    require_enough(recipe, amounts(recipe, data))
    for part in data.validation:
        require_sequence(recipe, part.name, len(part.train), cut_of(recipe, data, part.train).count)
    return data


def _prepare_all(recipe: Recipe, progress: Tell | None, workers: int | None) -> DataSet:
    """Sources and validation sets, each by itself, with one tokenizer."""
    began, section, shared = time.perf_counter(), recipe.data, recipe
    learned = is_learned(section.tokenizer)
    if learned and (section.sources or section.tokenizer == "chars"):
        shared = _with(recipe, tokenizer=_learned(recipe, progress, workers))
    found = {key: _alone(key, one, progress, workers) for key, one in sources_of(shared).items()}
    first = next(iter(found.values()))
    tokenizer = first.tokenizer
    if learned and not section.sources and tokenizer is not None:
        shared = _with(shared, tokenizer=_keep(recipe, tokenizer.to_json(), lambda: tokenizer))
    validated = {key: _alone(key, one, progress, workers) for key, one in validation_of(shared).items()}
    everything = found | validated
    text = next((one for one in everything.values() if one.tokenizer is not None), None)
    vocab_size = _common_vocabulary(recipe, everything)
    masked = any(one.mask_id is not None for one in everything.values())
    mask_id = text.mask_id if text is not None else vocab_size - 1 if masked else None
    parts, validation = (
        tuple(one.parts[0]._replace(name=key.partition(", ")[2]) for key, one in sets.items())
        for sets in (found, validated)
    )
    info = first.info
    if section.sources:
        info = {
            "source": f"{len(parts)} sources",
            "fingerprint": [[part.name, part.info["fingerprint"]] for part in parts],
            "cached": all(part.info["cached"] for part in parts),
            "sources": {part.name: part.info for part in parts},
        }
    if validation:
        info = info | {"validation": {part.name: part.info for part in validation}}
    info = info | {"seconds": round(time.perf_counter() - began, 3)}
    return DataSet(parts, text.tokenizer if text else None, vocab_size, mask_id, info, validation)


def _with(recipe: Recipe, **data: Any) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})


def _alone(key: str, recipe: Recipe, progress: Tell | None, workers: int | None) -> DataSet:
    """A source by itself. Its own ids say how many there are; `_common_vocabulary` compares."""
    model = recipe.model.model_copy(update={"vocab_size": None})
    with named(key):
        return prepare_source(recipe.model_copy(update={"model": model}), progress, workers)


def sources_of(recipe: Recipe) -> dict[str, Recipe]:
    """A recipe per source, of which it is the only one, by its key: "data.sources, NAME", or ONE."""
    entries = {f"data.sources, {entry.name}": _of_entry(recipe, entry) for entry in recipe.data.sources}
    return entries or {ONE: _with(recipe, **ALONE)}


def validation_of(recipe: Recipe) -> dict[str, Recipe]:
    """A recipe per validation set of its own, by its key. Nothing of it is held out.

    Raises:
        UserError: only a part of one is for validation by its name.
    """
    found = {}
    for entry in recipe.data.validation:
        key = f"data.validation, {entry.name}"
        found[key] = _of_entry(recipe, entry, val_fraction=0.0, stream=False)
        if entry.source.startswith(TOKENS):
            with named(key):
                require_one_split(find(entry.source))
    return found


def _of_entry(recipe: Recipe, entry: SourceEntry | ValidationEntry, **data: Any) -> Recipe:
    text_key = entry.text_key or recipe.data.text_key
    return _with(recipe, **ALONE, source=entry.source, text_key=text_key, **data)


@contextmanager
def named(key: str) -> Iterator[None]:
    """Names one of several sources in its errors."""
    try:
        yield
    except UserError as error:
        raise (error if key == ONE else UserError(f"{key}: {error}")) from None


def _common_vocabulary(recipe: Recipe, found: Mapping[str, DataSet]) -> int:
    """The number of ids of all sources.

    Raises:
        UserError: a source was made with another tokenizer, or model.vocab_size is too small.
    """
    spec, limit = recipe.data.tokenizer, recipe.model.vocab_size
    size = max(one.vocab_size for one in found.values())
    texts = [one.vocab_size for one in found.values() if one.tokenizer is not None]
    for said, one in found.items() if texts else ():
        if one.tokenizer is not None:
            continue
        if is_learned(spec):
            raise UserError(
                f"{said}: {one.info['source']} holds tokens, and data.tokenizer = {spec!r} is learned from the text of "
                "the others. Set data.tokenizer to the tokenizer.json that made these tokens"
            )
        end, own = recipe.data.end_token, next(o.tokenizer for o in found.values() if o.tokenizer is not None)
        if end not in (None, own.end_id):
            raise UserError(
                f"data.end_token = {end}: documents of text end with {own.end_id}, and a mixture has one such token. "
                "Leave it unset"
            )
        if one.vocab_size > max(texts):
            raise UserError(
                f"{said}: {one.info['source']} has the id {one.vocab_size - 1:,}, and data.tokenizer = {spec!r} has "
                f"{max(texts):,} ids. These tokens were made with another tokenizer: set data.tokenizer to its "
                "tokenizer.json"
            )
    if limit is not None and size > limit:
        raise UserError(
            f"model.vocab_size = {limit} is smaller than the vocabulary of the data: {size:,} ids. Leave it unset, or "
            "set at least that"
        )
    return limit or size if not texts else size


def shared_tokenizer(recipe: Recipe, most: int) -> str:
    """What `data.tokenizer` is for each source: the recipe's, or the path of the one that was learned from all of them.
    If that does not exist yet, or more than `most` bytes would have to be read to find it, the recipe's."""
    section = recipe.data
    shared = is_learned(section.tokenizer) and (
        section.sources or (section.validation and section.tokenizer == "chars")
    )
    if not shared or not (cache_folder(section.cache) / "data").is_dir():
        return section.tokenizer
    every = [*sources_of(recipe).values(), *validation_of(recipe).values()]
    texts = [source for one in every if not (source := find(one.data.source)).ids]
    if any(source.hub for source in texts) or sum(source.size for source in texts) > most:
        return section.tokenizer
    return _learned(recipe, None, None, make=False)


def is_learned(spec: str) -> bool:
    """True if a tokenizer is learned from the text."""
    return spec == "chars" or spec.startswith("bpe:")


def _learned(recipe: Recipe, progress: Tell | None, workers: int | None, make: bool = True) -> str:
    """The path of the tokenizer.json that is learned from all sources, each by its share."""
    tell = progress or (lambda stage, done, total: None)
    section, mask = recipe.data, objective_of(recipe) == "mlm"
    check_tokenizer(section, mask)
    recipes = sources_of(recipe)
    if section.tokenizer == "chars":  # characters that only validation has need an id, too
        recipes |= validation_of(recipe)
    texts = [
        (name, one.data, source) for name, one in recipes.items() if not (source := find(one.data.source)).ids
    ]
    if not texts:  # no tokenizer is needed
        return section.tokenizer
    shares = _shares_of_sample(recipe, {name: source.size for name, _, source in texts})
    root = cache_folder(section.cache) / "data"
    with writable(root):
        keys = [cache_key(source, one, mask, root, tell) for _, one, source in texts]
    told = json.dumps([TOKENIZERS, section.tokenizer, mask, keys, list(shares.values())])
    if not make and not _kept(recipe, told).is_file():
        return section.tokenizer

    def learned() -> Tokenizer:
        parts = [(Work.of(source, one), shares[name]) for name, one, source in texts]
        return learn(section, mask, parts, workers or cores(), tell)

    return _keep(recipe, told, learned)


def _kept(recipe: Recipe, told: str) -> Path:
    root = cache_folder(recipe.data.cache) / "data"
    return root / f"tokenizer-{hashlib.sha256(told.encode()).hexdigest()[:32]}" / "tokenizer.json"


def _keep(recipe: Recipe, told: str, make: Callable[[], Tokenizer]) -> str:
    """The path of a tokenizer.json in the cache, which is made if it is not there. told: what determines it."""
    path = _kept(recipe, told)
    folder = path.parent
    if not path.is_file():
        with writable(folder.parent), locked(folder.with_suffix(".lock")):
            if not path.is_file():
                make_folder(folder)
                make().save(path)
    return str(path)


def _shares_of_sample(recipe: Recipe, sizes: Mapping[str, int]) -> dict[str, float]:
    """Each source's share of the text that a tokenizer is learned from: its weight over the run, else its bytes."""
    found = {name: float(size) for name, size in sizes.items()}
    if any(entry.weight is not None for entry in recipe.data.sources):
        stages = list(weights_of(recipe, [1.0] * len(recipe.data.sources)))
        for number, entry in enumerate(recipe.data.sources):
            if (name := f"data.sources, {entry.name}") in found:
                found[name] = math.fsum(share * weights[number] for share, weights in stages)
    total = math.fsum(found.values())
    return {name: value / total if total else 1 / len(found) for name, value in found.items()}


def finished(data: DataSet, recipe: Recipe, tell: Tell) -> DataSet:
    """The data set with all tokens of its streams.

    Raises:
        UserError: a stream keeps only some of them.
    """
    if not recipe.data.stream:
        return data
    if recipe.data.stream_gib:
        raise UserError(
            f"data.stream_gib = {recipe.data.stream_gib}: the tokens of such a stream are not kept, so they cannot be "
            "made ahead. Nearest valid: stream_gib = 0"
        )
    parts = []
    for part in data.parts:
        if isinstance(part.train, Stream):
            train, count = part.train.whole(tell)
            part = part._replace(train=train, info=part.info | {"tokens": count})
        parts.append(part)
    news = (
        {"sources": {part.name: part.info for part in parts}}
        if data.mixed
        else {"tokens": parts[0].info["tokens"]}
    )
    return replace(data, parts=tuple(parts), info=data.info | news)


def write_megatron(data: DataSet, recipe: Recipe, name: Path) -> list[Path]:
    """Writes NAME_train and NAME_val, as .bin and .idx; of a mixture those of each source, behind whose name they are
    called: NAME_web_train. Returns the paths of the .bin.

    Raises:
        UserError: the data are conversations; these files cannot say what counts in the loss.
    """
    if data.train.flags is not None:
        raise UserError(
            "--megatron: files of Megatron-LM cannot say which tokens of a conversation count in the loss. Nearest "
            'valid: data.chat_template = ""'
        )
    make_folder(name.parent)
    paths = []
    for source in data.parts:
        for split, tokens in (("train", source.train), ("val", source.val)):
            if isinstance(tokens, Tokens):
                words = filter(None, (name.name, source.name, split))
                paths.append(name.with_name(f"{'_'.join(words)}.bin"))
                megatron.write(paths[-1], tokens, data.vocab_size, end_of(recipe, data))
    return paths

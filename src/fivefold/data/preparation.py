"""Prepares the data of a run: one source or several, and validation sets, with one tokenizer.

A source of a mixture is anything that `data.source` can be. Each is prepared by itself and has its own place in the
cache.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.data.batches import objective_of
from fivefold.data.build import Work, is_learned, learn
from fivefold.data.dataset import (
    DataSet,
    amounts,
    cut_of,
    end_of,
    require_enough,
    require_sequence,
    weights_of,
)
from fivefold.data.kinds.kind import TOKENS
from fivefold.data.kinds.token_files import write_indexed
from fivefold.data.one_source import VALIDATION, check_ids, check_tokenizer, lookup, prepare_source, root_of
from fivefold.data.sources import find
from fivefold.data.stream import Stream
from fivefold.data.tokens import Tell, Tokens, has_tokenizer, seal_tokenizer
from fivefold.errors import UserError
from fivefold.files import locked, make_folder, writable
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
    `workers` (threads; None: one per core). progress(stage, done, total) is called with bytes. Raises UserError: a
    fault of a source, with file and offset; or there is not enough data for the run."""
    alone = not (recipe.data.sources or recipe.data.validation)
    data = (prepare_source if alone else _prepare_all)(recipe, progress, workers)
    for part in (*data.parts, *data.validation):
        if isinstance(part.train, Tokens):
            check_ids(recipe, data.vocab_size, part.train)
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
    sources = {key: _alone(key, alone, progress, workers) for key, alone in sources_of(shared).items()}
    first = next(iter(sources.values()))
    if learned and not section.sources and first.tokenizer is not None:
        shared = _with(shared, tokenizer=str(Path(first.info["folder"]) / "tokenizer.json"))
    validated = {key: _alone(key, alone, progress, workers) for key, alone in validation_of(shared).items()}
    sets = sources | validated
    tokenizer = next((data.tokenizer for data in sets.values() if data.tokenizer is not None), None)
    vocab_size = _common_vocabulary(recipe, sets)
    masked = any(data.mask_id is not None for data in sets.values())
    mask_id = tokenizer.mask_id if tokenizer is not None else vocab_size - 1 if masked else None
    parts, validation = (
        tuple(data.parts[0]._replace(name=key.partition(", ")[2]) for key, data in some.items())
        for some in (sources, validated)
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
    return DataSet(parts, tokenizer, vocab_size, mask_id, info, validation)


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
    """A recipe per validation set of its own, by its key. Nothing of it is held out. Raises UserError: only a part of
    one is for validation by its name."""
    recipes = {}
    for entry in recipe.data.validation:
        key = f"data.validation, {entry.name}"
        recipes[key] = _of_entry(recipe, entry, val_fraction=0.0, stream=False)
        if not entry.source.startswith(TOKENS):
            continue
        with named(key):
            paths = [file.path for file in find(entry.source).files]
            held_out = [path for path in paths if VALIDATION.search(path.stem)]
            if held_out and len(held_out) < len(paths):
                other = next(path for path in paths if path not in held_out)
                raise UserError(
                    f"data.source = {entry.source!r}: all of a validation set is validated on, and {other.name} does "
                    f"not look like it, beside {held_out[0].name}. Nearest valid: {f'tokens:{held_out[0]}'!r}"
                )
    return recipes


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


def _common_vocabulary(recipe: Recipe, sets: Mapping[str, DataSet]) -> int:
    """The number of ids of all sources. Raises UserError: a source was made with another tokenizer, or model.vocab_size
    is too small."""
    spec, limit, end = recipe.data.tokenizer, recipe.model.vocab_size, recipe.data.end_token
    size = max(data.vocab_size for data in sets.values())
    texts = [data for data in sets.values() if data.tokenizer is not None]
    for key, data in sets.items() if texts else ():
        if data.tokenizer is not None:
            continue
        if is_learned(spec):
            raise UserError(
                f"{key}: {data.info['source']} holds tokens, and data.tokenizer = {spec!r} is learned from the text of "
                "the others. Set data.tokenizer to the tokenizer.json that made these tokens"
            )
        if end not in (None, end_of(recipe, texts[0])):
            raise UserError(
                f"data.end_token = {end}: documents of text end with {end_of(recipe, texts[0])}, and a mixture has one "
                "such token. Leave it unset"
            )
        if data.vocab_size > texts[0].vocab_size:
            raise UserError(
                f"{key}: {data.info['source']} has the id {data.vocab_size - 1:,}, and data.tokenizer = {spec!r} has "
                f"{texts[0].vocab_size:,} ids. These tokens were made with another tokenizer: set data.tokenizer to "
                "its tokenizer.json"
            )
    if limit is not None and size > limit:
        raise UserError(
            f"model.vocab_size = {limit} is smaller than the vocabulary of the data: {size:,} ids. Leave it unset, or "
            "set at least that"
        )
    return size if texts else limit or size


def shared_tokenizer(recipe: Recipe, most: int) -> str:
    """What `data.tokenizer` is for each source: the recipe's, or the path of the one that was learned from all of them.
    If that does not exist yet, or more than `most` bytes would have to be read to find it, the recipe's."""
    section = recipe.data
    shared = is_learned(section.tokenizer) and (
        section.sources or (section.validation and section.tokenizer == "chars")
    )
    if not shared or not root_of(section).is_dir():
        return section.tokenizer
    every = [*sources_of(recipe).values(), *validation_of(recipe).values()]
    texts = [source for alone in every if not (source := find(alone.data.source)).ids]
    if any(source.hub for source in texts) or sum(source.size for source in texts) > most:
        return section.tokenizer
    return _learned(recipe, None, None, make=False)


def _learned(recipe: Recipe, progress: Tell | None, workers: int | None, make: bool = True) -> str:
    """The path of the tokenizer.json in the cache that is learned from all sources, each by its share."""
    tell = progress or (lambda stage, done, total: None)
    section, mask, root = recipe.data, objective_of(recipe) == "mlm", root_of(recipe.data)
    check_tokenizer(section, mask)
    recipes = sources_of(recipe)
    if section.tokenizer == "chars":  # characters that only validation has need an id, too
        recipes |= validation_of(recipe)
    texts = [
        (name, alone.data, source)
        for name, alone in recipes.items()
        if not (source := find(alone.data.source)).ids
    ]
    if not texts:  # no tokenizer is needed
        return section.tokenizer
    # Each source's share of the sample is its weight over the run, else its bytes.
    shares = {name: float(source.size) for name, _, source in texts}
    if any(entry.weight is not None for entry in section.sources):
        stages = list(weights_of(recipe, [1.0] * len(section.sources)))
        for number, entry in enumerate(section.sources):
            if (name := f"data.sources, {entry.name}") in shares:
                shares[name] = math.fsum(share * weights[number] for share, weights in stages)
    total = math.fsum(shares.values())
    shares = {name: value / total if total else 1 / len(shares) for name, value in shares.items()}
    with writable(root):
        keys = [lookup(source, data, mask, tell)[0].name for _, data, source in texts]
        told = json.dumps([TOKENIZERS, section.tokenizer, mask, keys, list(shares.values())])
        folder = root / f"tokenizer-{hashlib.sha256(told.encode()).hexdigest()[:32]}"
        path = folder / "tokenizer.json"
        if not has_tokenizer(folder):
            if not make:
                return section.tokenizer
            with locked(folder.with_suffix(".lock")):
                if not has_tokenizer(folder):  # another process may just have made it
                    parts = [(Work.of(source, data), shares[name]) for name, data, source in texts]
                    make_folder(folder)
                    learn(section, mask, parts, workers or cores(), tell).save(path)
                    seal_tokenizer(folder)
    return str(path)


def finished(data: DataSet, recipe: Recipe, tell: Tell) -> DataSet:
    """The data set with all tokens of its streams. Raises UserError: a stream keeps only some of them."""
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
    news = {"tokens": parts[0].info["tokens"]}
    if data.mixed:
        news = {"sources": {part.name: part.info for part in parts}}
    return replace(data, parts=tuple(parts), info=data.info | news)


def write_megatron(data: DataSet, recipe: Recipe, name: Path) -> list[Path]:
    """Writes NAME_train and NAME_val, as .bin and .idx; of a mixture those of each source, behind whose name they are
    called: NAME_web_train. Returns the paths of the .bin. Raises UserError: the data are conversations; these files
    cannot say what counts in the loss."""
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
                write_indexed(paths[-1], tokens, data.vocab_size, end_of(recipe, data))
    return paths

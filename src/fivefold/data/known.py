"""The documents in the sequences of a run, as far as they are tokenized already."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from fivefold.data.batches import Batches, objective_of, steps_of
from fivefold.data.cut import cut_of
from fivefold.data.dataset import DataSet
from fivefold.data.megatron import index_of
from fivefold.data.mixture import amounts, order_of
from fivefold.data.one_source import cache_key
from fivefold.data.sources import find
from fivefold.data.stream import Stream
from fivefold.data.tokenfiles import find_files, read_header, split
from fivefold.data.tokenizer import load_tokenizer
from fivefold.data.tokens import open_tokens, read_manifest
from fivefold.errors import UserError
from fivefold.files import cache_folder
from fivefold.kernels.tiling import Sample
from fivefold.recipe import Recipe, place

ROWS = 64
"""Sequences of a sample."""
MOST_HASHED = 64 << 20
"""Bytes of a source that are hashed again, to see whether it has changed: 0.04 s."""
MOST_PACKED = 1 << 24
"""Tokens whose best-fit packing is computed to know it."""


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
    if data.sources or data.stream or "://" in data.source or data.source.startswith("hf:"):
        return None
    with suppress(_Work, UserError, OSError):
        return _files(recipe) if data.source.startswith("tokens:") else _text(recipe)
    return None


def _files(recipe: Recipe) -> DataSet:
    data, paths = recipe.data, find_files(recipe.data.source)
    if data.packing == "best_fit":
        raise _Work("a packing is kept by the hash of all tokens")
    if any(path.suffix == ".parquet" for path in paths):
        raise _Work("its ids are copied")
    shards = [read_header(path, data.token_dtype) for path in paths]
    for n, index in enumerate(map(index_of, paths)):
        if index.is_file():
            shards[n] = shards[n]._replace(index=(index, ""))
    mask_id = (recipe.model.vocab_size or 1) - 1
    return DataSet(split(shards, data.val_fraction)[0], None, None, mask_id + 1, mask_id, {})


def _text(recipe: Recipe) -> DataSet | None:
    data, mask = recipe.data, objective_of(recipe) == "mlm"
    root = cache_folder(data.cache) / "data"
    folder = root / cache_key(find(data.source), data, mask, root, _refuse)
    if (manifest := read_manifest(folder)) is None:
        return None
    tokenizer = load_tokenizer(folder / "tokenizer.json", mask)
    tokens = open_tokens(folder, manifest, "train")
    if data.packing == "best_fit" and len(tokens) > MOST_PACKED:
        raise _Work("packing")
    return DataSet(tokens, None, tokenizer, tokenizer.vocab_size, tokenizer.mask_id, {})


def _refuse(stage: str, done: int, total: int | None) -> None:
    if total is None or total > MOST_HASHED:
        raise _Work(stage)

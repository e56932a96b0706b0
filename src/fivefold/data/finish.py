"""What `fivefold tokenize` does beside preparing a data set: goes to the end of a stream, writes for Megatron-LM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fivefold.data import megatron
from fivefold.data.build import Progress
from fivefold.data.stream import Stream, read_progress
from fivefold.data.tokens import DataSet, Shard, Tokens
from fivefold.errors import UserError
from fivefold.files import make_folder
from fivefold.recipe import Recipe


def finished(data: DataSet, recipe: Recipe, tell: Progress) -> DataSet:
    """The data set with all tokens of a stream.

    Raises:
        UserError: the stream keeps only some of them.
    """
    if not isinstance(data.train, Stream):
        return data
    if recipe.data.stream_gib:
        raise UserError(
            f"data.stream_gib = {recipe.data.stream_gib}: the tokens of such a stream are not kept, so they cannot be "
            "made ahead. Nearest valid: stream_gib = 0"
        )
    data.train.finish(tell)
    now = read_progress(data.train.folder)
    assert now is not None
    assert now.total is not None
    starts = range(0, now.total, now.shard)
    paths = [data.train.folder / f"train-{i:05d}.bin" for i in range(len(starts))]
    shards = [
        Shard(p, now.dtype, 0, min(now.shard, now.total - s)) for p, s in zip(paths, starts, strict=True)
    ]
    info = data.info | {"tokens": {"train": now.total, "val": now.val}}
    return replace(data, train=Tokens(shards), info=info)


def write_megatron(data: DataSet, name: Path) -> list[Path]:
    """Writes NAME_train and NAME_val, as .bin and .idx. Returns the paths of the .bin."""
    make_folder(name.parent)
    end = data.tokenizer.end_id if data.tokenizer else None
    paths = []
    for split, tokens in (("train", data.train), ("val", data.val)):
        if isinstance(tokens, Tokens):
            paths.append(name.with_name(f"{name.name}_{split}.bin"))
            megatron.write(paths[-1], tokens, data.vocab_size, end)
    return paths

"""What `fivefold tokenize` does beside preparing a data set: goes to the end of a stream, writes for Megatron-LM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.data import megatron
from fivefold.data.build import Progress
from fivefold.data.cut import end_of
from fivefold.data.dataset import DataSet, Part
from fivefold.data.stream import Stream, read_progress
from fivefold.data.tokens import Shard, Tokens
from fivefold.errors import UserError
from fivefold.files import make_folder
from fivefold.recipe import Recipe


def finished(data: DataSet, recipe: Recipe, tell: Progress) -> DataSet:
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
    if data.parts:
        found = [part._replace(**_whole(part.train, part.info, tell)) for part in data.parts]
        info = data.info | {"sources": {part.name: part.info for part in found}}
        return replace(data, train=found[0].train, parts=tuple(found), info=info)
    return replace(data, **_whole(data.train, data.info, tell))


def _whole(tokens: Tokens | Stream, info: dict[str, Any], tell: Progress) -> dict[str, Any]:
    """The fields `train` and `info` of a source when it is tokenized."""
    if isinstance(tokens, Tokens):
        return {"train": tokens, "info": info}
    tokens.finish(tell)
    now = read_progress(tokens.folder)
    assert now is not None
    assert now.total is not None
    starts = range(0, now.total, now.shard)
    paths = [tokens.folder / f"train-{i:05d}.bin" for i in range(len(starts))]
    shards = [
        Shard(p, now.dtype, 0, min(now.shard, now.total - s)) for p, s in zip(paths, starts, strict=True)
    ]
    return {"train": Tokens(shards), "info": info | {"tokens": {"train": now.total, "val": now.val}}}


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
    for source in data.parts or (Part("", data.train, data.val, {}),):
        for split, tokens in (("train", source.train), ("val", source.val)):
            if isinstance(tokens, Tokens):
                words = filter(None, (name.name, source.name, split))
                paths.append(name.with_name(f"{'_'.join(words)}.bin"))
                megatron.write(paths[-1], tokens, data.vocab_size, end_of(recipe, data))
    return paths

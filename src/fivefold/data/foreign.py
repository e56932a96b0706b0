"""Folders in formats of other libraries. Parts of them look like texts or ids, so they are named before one is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fivefold.errors import UserError
from fivefold.files import read_json

DATASETS = ("state.json", "dataset_dict.json")
INDEX = "index.json"


def refuse(folders: Iterable[Path]) -> None:
    """Raises UserError: one of the folders was written by `datasets` (save_to_disk), litdata or mosaicml-streaming."""
    for folder in folders:
        for name in (*DATASETS, INDEX):
            if (folder / name).is_file() and (known := _known(folder, name)):
                raise UserError(f"data.source: {folder} {known}")


def _known(folder: Path, name: str) -> str:
    try:
        found = read_json(folder / name)
    except (UserError, OSError):
        return ""
    if name in DATASETS and ("splits" in found or "_data_files" in found):
        one = ", one split at a time" if "splits" in found else ""
        return (
            "was written by save_to_disk of `datasets`, and only that library reads its .arrow files. Write them as "
            f"parquet{one}: datasets.load_from_disk({str(folder)!r}).to_parquet('FILE.parquet'), and use FILE.parquet"
        )
    config, shards = found.get("config"), found.get("shards")
    if isinstance(found.get("chunks"), list) and isinstance(config, dict) and "data_format" in config:
        return (
            "is a data set of litdata, whose chunks have headers of their own. Read it with litdata, write its ids as "
            "one numpy array (numpy.save('FILE.npy', ids)), and use tokens:FILE.npy"
        )
    if isinstance(shards, list) and any(isinstance(one, dict) and "raw_data" in one for one in shards):
        return (
            "is a data set of mosaicml-streaming. Read it with that library, write its texts as lines of JSON "
            "(FILE.jsonl), and use that; or ids as one numpy array, as tokens:FILE.npy. Uncompressed shards of "
            f"JSONWriter are such lines already: use {folder}/shard.*.json"
        )
    return ""

"""The kinds of sources. A kind is one file of this folder with one class, and one line here."""

from __future__ import annotations

import os
from pathlib import Path

from fivefold.data.kinds.csv import Csv
from fivefold.data.kinds.hub import HubRows
from fivefold.data.kinds.json import Json, JsonLines
from fivefold.data.kinds.kind import PACKED, Bad, File, Kind, TokenKind
from fivefold.data.kinds.parquet import Parquet
from fivefold.data.kinds.text import Text
from fivefold.data.kinds.token_files import Bin, InputIds, Megatron, Npy
from fivefold.data.kinds.warc import Warc
from fivefold.data.kinds.wiki import Wiki

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Text(),
        Json(),
        Csv(),
        JsonLines(),
        Parquet(),
        Warc(),
        Wiki(),
        HubRows(),
    )
}
TOKEN_KINDS: dict[str, TokenKind] = {kind.name: kind for kind in (Megatron(), Bin(), Npy(), InputIds())}
SUFFIXES = {suffix: kind for kind in KINDS.values() for suffix in kind.suffixes}
TOKEN_SUFFIXES = tuple(dict.fromkeys(kind.suffix for kind in TOKEN_KINDS.values()))


def kind_of(file: File) -> Kind:
    return KINDS[file.kind]


def named(name: str) -> tuple[Kind, str] | None:
    """Kind and compression by the name of a file: JsonLines and ".gz" of a.jsonl.gz. None: it is not known."""
    stem, packed = os.path.splitext(name.lower())
    if packed not in PACKED:
        stem, packed = name.lower(), ""
    kind = SUFFIXES.get(os.path.splitext(stem)[1])
    return None if kind is None or (packed and not kind.packs) else (kind, packed)


def token_kind(path: Path) -> TokenKind | None:
    """The kind of a file of ids; None: it is not known."""
    return next((kind for kind in TOKEN_KINDS.values() if kind.has(path)), None)


def describe_bad(files: list[File], bad: Bad) -> str:
    """Place and reason as text: 'FILE: line 3 (byte 120): not JSON: ...'."""
    file = files[bad.file]
    return f"{file.where}: {kind_of(file).place(file, bad)}: {bad.reason}"

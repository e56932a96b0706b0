"""The kinds of sources. A kind is one file of this folder with one class, and one line here."""

from __future__ import annotations

import os
from collections.abc import Iterator

from fivefold.data.kinds.csv import Csv
from fivefold.data.kinds.hub import HubRows
from fivefold.data.kinds.json import Json
from fivefold.data.kinds.jsonl import JsonLines
from fivefold.data.kinds.kind import (
    Bad,
    Block,
    Document,
    Fields,
    File,
    FileSpan,
    Kind,
    Row,
    Task,
    read_row,
    unreadable,
)
from fivefold.data.kinds.opening import PACKED
from fivefold.data.kinds.parquet import Parquet
from fivefold.data.kinds.text import Text

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Text(),
        Json(),
        Csv(),
        JsonLines(),
        Parquet(),
        HubRows(),
    )
}
SUFFIXES = {suffix: kind for kind in KINDS.values() for suffix in kind.suffixes}


def kind_of(file: File) -> Kind:
    return KINDS[file.kind]


def named(name: str) -> tuple[Kind, str] | None:
    """Kind and compression by the name of a file: JsonLines and ".gz" of a.jsonl.gz. None: it is not known."""
    stem, packed = os.path.splitext(name.lower())
    if packed not in PACKED:
        stem, packed = name.lower(), ""
    kind = SUFFIXES.get(os.path.splitext(stem)[1])
    return None if kind is None or (packed and not kind.packs) else (kind, packed)


def from_start(file: File) -> bool:
    """It is read once, from its start on, by one process: no part of it can be found without what is before."""
    return bool(file.packed or file.url or kind_of(file).from_start)


def read_span(files: list[File], span: FileSpan, fields: Fields) -> Iterator[Document | Bad]:
    """The documents of a span. An unreadable one comes as `Bad`, and reading continues."""
    file = files[span.file]
    try:
        yield from kind_of(file).read(file, span, fields)
    except OSError as error:
        yield Bad(span.file, span.start, unreadable(error))


def read_task(task: Task, files: list[File], fields: Fields) -> Iterator[Document | Bad]:
    """The documents of a task."""
    for item in task:
        if isinstance(item, FileSpan):
            yield from read_span(files, item, fields)
        elif isinstance(item, Row):
            yield read_row(item, fields)
        elif item.reason:
            yield Bad(item.file, item.place, item.reason)
        else:
            yield from kind_of(files[item.file]).read_block(item, fields)


def describe_bad(files: list[File], bad: Bad) -> str:
    """Place and reason as text: 'FILE: line 3 (byte 120): not JSON: ...'."""
    file = files[bad.file]
    return f"{file.where}: {kind_of(file).place(file, bad)}: {bad.reason}"

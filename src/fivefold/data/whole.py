"""Whole documents and JSON lines of one file, for evaluation. No torch.

Training cuts files into spans (`tasks.py`) and keeps tokens only. An evaluation also needs the raw text, whose bytes it
counts, and says where an error stands by the number of its line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO

from fivefold.data.sources import nearest
from fivefold.errors import UserError, did_you_mean, shortened
from fivefold.files import BROKEN, open_file, parse_json

MOST_TEXT = 1 << 30
"""Bytes of a text file, which is held in memory as a whole."""
MOST_LINE = 64 << 20
"""Bytes of a line of JSON."""


def documents(path: Path, text_key: str = "text") -> Iterator[str]:
    """The documents of a file: the text under `text_key` of each line of a .jsonl; all of any other file.

    Raises:
        UserError: the file cannot be read, is not UTF-8 or JSON, or a line has no such text.
    """
    if path.suffix.lower() == ".jsonl":
        for number, row in json_lines(path):
            text = row.get(text_key)
            if not isinstance(text, str):
                what = "is not text" if text_key in row else f"is missing{did_you_mean(text_key, row)}"
                raise UserError(f"{path}, line {number}: the field '{text_key}' {what}")
            yield text
        return
    with _opened(path) as file:
        raw = file.read(MOST_TEXT + 1)
    if len(raw) > MOST_TEXT:
        raise UserError(f"{path} has more than {MOST_TEXT:,} bytes, the most that one document may have")
    try:
        yield raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: byte 0x{raw[error.start]:02x} at {error.start:,}") from None


def require_readable(path: Path) -> None:
    """Raises UserError if a file cannot be opened."""
    with _opened(path):
        pass


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line of a file that is not blank.

    Raises:
        UserError: the file cannot be read, or a line is not a JSON object.
    """
    with _opened(path) as file:
        number = 0
        while line := file.readline(MOST_LINE + 1):
            number += 1
            if len(line) > MOST_LINE:
                raise UserError(f"{path}, line {number}: more than {MOST_LINE:,} bytes")
            if not line.strip():
                continue
            try:
                row = parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except BROKEN as error:
                why = f"{error.msg} (character {error.pos})" if isinstance(error, JSONDecodeError) else error
                raise UserError(f"{path}, line {number}: not JSON: {shortened(str(why), 200)}") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: a JSON {type(row).__name__} instead of an object")
            yield number, row


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_file(path) as file:
            yield file
    except FileNotFoundError:
        raise UserError(f"no such file: '{path}'; {nearest(path)}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None

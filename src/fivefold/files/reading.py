"""Bounded reads of files that others may have made."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fivefold.errors import UserError, shortened
from fivefold.files.guarded import inside

MOST_JSON = 16 << 20
"""Bytes of a JSON file. Objects in memory take about 20 times as much."""
MOST_INDEX = 64 << 20
"""Bytes of an index of weights: about 100 for each tensor of each expert."""
MOST_TRACE = 256 << 20
"""Bytes of a step's timeline."""
LONGEST_NUMBER = 40
"""Digits of a whole number in a JSON file."""
BROKEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What code raises that finds other JSON than it expects."""


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file to read bytes. It never waits, as a pipe would let it, and a device is refused.

    Raises:
        UserError: it is no regular file, or a link leads it out of a guarded folder.
        OSError: it cannot be opened.
    """
    descriptor = os.open(inside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        inside(path, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is not a regular file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        UserError: it is no regular file, or larger.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{path} has more than {most:,} bytes, the most that is read")
    return content


def read_text(path: Path, most: int, name: str = "") -> str:
    """The UTF-8 text of a regular file of at most `most` bytes. name: begins the messages, such as a field's.

    Raises:
        UserError: it cannot be read, or is no such text.
    """
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}{path}: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise UserError(f"{name}{path}: cannot be read: {error.strerror}") from None


def read_json(path: Path, most: int = MOST_JSON) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: it is not a regular file, too large, not JSON, or not an object.
        OSError: it cannot be read.
    """
    try:
        content = parse_json(read_bytes(path, most))
    except UserError:
        raise
    except BROKEN as error:
        raise UserError(f"{path}: not JSON: {shortened(str(error), 200)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object, but {_kind(content)}")
    return content


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, without numbers of more than LONGEST_NUMBER digits, which would not fit into a float.

    Raises:
        ValueError, RecursionError: it is not JSON, has such numbers, or is nested too deeply.
    """
    return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a whole number of {len(digits):,} digits; at most {LONGEST_NUMBER}")
    return int(digits)


def _kind(content: object) -> str:
    return {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(
        type(content), "a number"
    )


@contextlib.contextmanager
def understood(path: Path) -> Iterator[None]:
    """Inside the block, JSON that has other fields than expected is a UserError that names the file."""
    try:
        yield
    except UserError:
        raise
    except BROKEN as error:
        what = f"{type(error).__name__}: {shortened(str(error), 200)}"
        raise UserError(f"{path} is damaged, or was not written by Fivefold ({what})") from None

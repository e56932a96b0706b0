"""Bounded reads of files that others may have made, and folders that no link leads out of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shortened

MOST_JSON = 16 << 20
"""Bytes of a JSON file. Objects in memory take about 20 times as much."""
MOST_INDEX = 64 << 20
"""Bytes of an index of weights: about 100 for each tensor of each expert."""
MOST_TRACE = 256 << 20
"""Bytes of a step's timeline."""
LONGEST_NUMBER = 40
"""Digits of a whole number in a JSON file."""
DIGITS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))
"""Makes zeros of all digits, and spaces of everything else."""
DEEPEST = 100
"""Levels of lists and objects within each other in JSON and TOML."""
BRACKETS = bytes.maketrans(b"{}", b"[]")
NO_BRACKETS = bytes({*range(256)} - {*b'[]{}"'})
BROKEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What code raises that finds other JSON than it expects."""


def open_file(path: Path) -> BufferedReader:
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
    """The UTF-8 text of a regular file of at most `most` bytes. name: begins the messages, such as a field's. Raises
    UserError: it cannot be read, or is no such text."""
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
        words = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
        raise UserError(f"{path}: not a JSON object, but {words.get(type(content), 'a number')}")
    return content


def read_facts(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if it is missing or broken."""
    try:
        return read_json(path)
    except (OSError, UserError):
        return {}


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, without numbers of more than LONGEST_NUMBER digits, which would not fit into a float.

    Raises:
        ValueError, RecursionError: it is not JSON, has such numbers, or is nested too deeply.
    """
    refuse_depth(text)

    def whole(digits: str) -> int:
        if len(digits) > LONGEST_NUMBER:
            raise ValueError(f"a whole number of {len(digits):,} digits; at most {LONGEST_NUMBER}")
        return int(digits)

    # If no run of digits is that long, the built-in parser is safe, and takes 0.4 of the time for lists of numbers
    if (
        isinstance(text, bytes)
        and b"\0" not in text
        and b"0" * (LONGEST_NUMBER + 1) not in text.translate(DIGITS)
    ):
        return json.loads(text)
    return json.loads(text, parse_int=whole)


def parse_toml(text: str) -> dict[str, Any]:
    """`tomllib.loads`. Raises ValueError, RecursionError: it is not TOML, or is nested too deeply."""
    refuse_depth(text)
    return tomllib.loads(text)


def refuse_depth(text: str | bytes) -> None:
    """Raises RecursionError: lists and objects lie more than DEEPEST levels within each other. Parsers call themselves
    at each level, and not all of them know where to stop."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if raw.count(b"[") + raw.count(b"{") <= DEEPEST:
        return
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a text
    left, levels = re.sub(rb'"[^"]*"?', b"", plain.translate(BRACKETS, NO_BRACKETS)), 0
    while levels <= DEEPEST and (without := left.replace(b"[]", b"")) != left:  # the innermost level
        left, levels = without, levels + 1
    if levels + left.count(b"[") > DEEPEST:  # what is left was not closed
        raise RecursionError(f"lists and objects are nested more than {DEEPEST} levels deep")


def sha256(path: Path, advance: Callable[[int], object] = lambda size: None) -> str:
    """The hash of a regular file. advance: is told the bytes of each part. Raises as `open_file`."""
    digest, chunk = hashlib.sha256(), memoryview(bytearray(1 << 20))  # so many bytes stay in a core's cache
    with open_file(path) as file:
        while size := file.readinto(chunk):
            digest.update(chunk[:size])
            advance(size)
    return digest.hexdigest()


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


UNOPENED = (".wandb", "wandb")
"""Folders that the tracker's library keeps in a run folder, with links that lead out. Nothing of ours opens them."""
_guarded: dict[Path, tuple[Path, ...]] = {}
"""Guarded folders, and where files in them may lie."""


def guard(folder: Path, *, look: bool = True) -> None:
    """From now on, nothing in this folder is opened, written or removed through a link that leads out of it.

    A run folder or a model may come from anybody, and a link in it would let them choose which file we overwrite. The
    folder itself may be a link. A snapshot of a Hugging Face cache may link to the blobs beside it.

    look: goes through the folder now, without what is `UNOPENED` in it, and refuses such links, and whatever is neither
    a file nor a folder (a pipe would block who opens it). Raises UserError: the folder has one."""
    home = Path(os.path.abspath(folder))  # as `inside` looks it up
    real = Path(os.path.realpath(home))
    blobs = (real.parent.parent / "blobs",) if real.parent.name == "snapshots" else ()
    _guarded[home] = (real, *blobs)
    waiting = [home] if look and home.is_dir() else []
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():
                    inside(path)
                elif entry.is_dir(follow_symlinks=False):
                    waiting += [path] * (entry.name not in UNOPENED)
                elif not entry.is_file(follow_symlinks=False):
                    raise UserError(f"{path} is neither a file nor a folder. Remove it")


def inside(path: Path, opened: int | None = None) -> Path:
    """Returns `path`, after a check that no link leads it out of a guarded folder. opened: the descriptor of the file
    that was found there: then its place counts, so nobody can have put a link there after the check. Raises UserError:
    one does, or the path has a NUL."""
    if "\0" in str(path):
        raise UserError(f"{path} cannot be a file: its name has a NUL")
    if not _guarded:
        return path
    absolute = Path(os.path.abspath(path))
    for home in absolute.parents:  # few, where a process may have guarded hundreds of folders
        if allowed := _guarded.get(home):
            real = Path(os.path.realpath(path))
            with contextlib.suppress(OSError):  # where the system does not say where an open file lies
                if opened is not None:
                    place = os.readlink(f"/proc/self/fd/{opened}")
                    removed = not os.fstat(opened).st_nlink
                    real = Path(place.removesuffix(" (deleted)") if removed else place)
            if not any(place == real or place in real.parents for place in allowed):
                raise UserError(
                    f"{path} leads out of {home}, to {real}. Links in run folders and models are not followed: put "
                    "the file itself there"
                )
    return path

"""The manifest of a checkpoint: which files it has, which tensors, and where each piece lies in its tensor.

docs/checkpoint-format.md describes the file. Everything that it says is checked here, once, when it is read: hash,
types, ranges, names, and that the pieces make up each tensor exactly once. So whoever uses a manifest has no doubts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fivefold.errors import UserError, system_error
from fivefold.files import open_file

FORMAT = 3
"""1 and 2 have no hash of the manifest itself, and no dtypes. 1 has no pieces: each file holds whole tensors."""
MANIFEST = "manifest.json"
KINDS = ("model", "optimizer")
MOST_BYTES = 4 << 30
"""Of a manifest that is read. 4096 ranks with 1000 tensors each have about 1 GiB."""
MOST_DIMS = 16
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors' name of each dtype that a checkpoint may hold, and torch's."""

Box = tuple[tuple[int, int], ...]
_BEGIN = b'{"sha256": "'
_HASH = slice(len(_BEGIN), len(_BEGIN) + 64)
_ZEROS = b"0" * 64
_HEX = re.compile("[0-9a-f]{64}")
_STEP = re.compile(r"step-(\d{8,18})")


class Damaged(UserError):
    """A checkpoint is incomplete, or was changed after it was written."""


@dataclass(frozen=True)
class File:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Stored:
    """A piece of a tensor: the elements of `box`, under `key` in a safetensors file."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class Entry:
    """A tensor. dtype: safetensors' name. buffer: it may hold infinities."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Stored, ...]
    buffer: bool = False


@dataclass(frozen=True)
class Manifest:
    """tensors: by kind ("model", "optimizer") and name."""

    meta: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, dict[str, Entry]]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def step_of(name: str) -> int | None:
    """The step of a folder that is called exactly as `folder_name` calls it; None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and folder_name(int(found[1])) == name else None


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def key_of(name: str, shape: Sequence[int], box: Sequence[Sequence[int]]) -> str:
    """The key of a piece in its file: the tensor's name, with the box if it is not all of the tensor. So a file says by
    itself what it holds, and pieces cannot be exchanged in the manifest alone."""
    if all(start == 0 and stop == size for (start, stop), size in zip(box, shape, strict=True)):
        return name
    return f"{name}[{','.join(f'{start}:{stop}' for start, stop in box)}]"


def to_bytes(manifest: Manifest) -> bytes:
    """The content of the file. Its first entry is the hash of the whole file, with zeros in the place of the hash."""
    body = {
        "format": FORMAT,
        "meta": manifest.meta,
        "files": {name: {"sha256": f.sha256, "bytes": f.bytes} for name, f in manifest.files.items()},
        "tensors": {
            kind: {
                name: {
                    "shape": entry.shape,
                    "dtype": entry.dtype,
                    **({"buffer": True} if entry.buffer else {}),
                    "pieces": [{"file": p.file, "key": p.key, "box": p.box} for p in entry.pieces],
                }
                for name, entry in tensors.items()
            }
            for kind, tensors in manifest.tensors.items()
        },
    }
    text = _BEGIN + _ZEROS + b'", ' + json.dumps(body)[1:].encode() + b"\n"
    return text.replace(_ZEROS, hashlib.sha256(text).hexdigest().encode(), 1)


def read(folder: Path) -> tuple[Manifest, bytes]:
    """The manifest in a folder, and its bytes.

    Raises:
        Damaged: it is missing, or says anything that a manifest cannot say.
        UserError: it cannot be read, or is of another format.
    """
    path = folder / MANIFEST
    try:
        with open_file(path) as file:
            content = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        if folder.exists() or step_of(folder.name) is not None:
            raise Damaged(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
        raise UserError(f"{folder} is not a checkpoint: there is no such folder") from None
    except OSError as error:
        raise unreadable(path, error) from None
    manifest = parse(content, path)
    step = step_of(folder.name)
    if step is not None and manifest.meta.get("step") != step:
        said = manifest.meta.get("step", "missing")
        raise Damaged(f"{path} is damaged: meta.step is {said}, but the folder is called {folder.name}")
    return manifest, content


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a file that is there and cannot be read. Only what a disk has lost is damage. Whoever may not read
    a checkpoint, or has too many open files, cannot tell whether it is valid."""
    said = f"{path} cannot be read: {error.strerror}"
    return Damaged(said) if error.errno == errno.EIO else system_error(said, error)


def parse(content: bytes, path: Path) -> Manifest:
    """Raises:
    Damaged: it is not a manifest.
    UserError: it is of another format.
    """
    parser = _Parser(path)
    if content.startswith(_BEGIN):
        said = content[_HASH].decode("ascii", "replace")
        blank = content[: _HASH.start] + _ZEROS + content[_HASH.stop :]
        if hashlib.sha256(blank).hexdigest() != said:
            parser.fail("its content does not match its own hash")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        parser.fail(f"not JSON: {str(error)[:200]}")
    return parser.manifest(found, hashed=content.startswith(_BEGIN))


class _Parser:
    """Checks a manifest's JSON and makes the objects of it."""

    def __init__(self, path: Path):
        self.path = path

    def fail(self, why: str) -> NoReturn:
        raise Damaged(f"{self.path} is damaged: {why}")

    def manifest(self, found: Any, hashed: bool) -> Manifest:
        whole = self.object("the manifest", found)
        version = whole.get("format")
        if type(version) is int and version > 0 and version != FORMAT:
            raise UserError(f"{self.path} is of format {version}, and this version reads {FORMAT}")
        if type(version) is not int or version < 1 or not hashed:
            self.fail(f"it has {'a' if hashed else 'no'} hash of its own, and format is {version!r:.40}")
        meta = self.object("meta", whole.get("meta"))
        for name in ("step", "updates", "skipped", "tokens"):
            if name in meta:
                self.whole(f"meta.{name}", meta.get(name))
        files = {n: self.file(n, f) for n, f in self.object("files", whole.get("files")).items()}
        kinds = self.object("tensors", whole.get("tensors"))
        if set(kinds) != set(KINDS):
            self.fail(f"tensors must have the parts {', '.join(KINDS)}, not {sorted(kinds)!s:.80}")
        tensors = {
            kind: {
                name: self.entry(kind, name, entry, files)
                for name, entry in self.object(f"tensors.{kind}", kinds[kind]).items()
            }
            for kind in KINDS
        }
        return Manifest(meta, files, tensors)

    def file(self, name: str, found: Any) -> File:
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            self.fail(f"it names {name!r:.80}, a file outside its folder")
        file, what = self.object(f"files.{name:.80}", found), f"files.{name:.80}"
        digest = file.get("sha256")
        if not isinstance(digest, str) or not _HEX.fullmatch(digest):
            self.fail(f"{what}.sha256 must be 64 hexadecimal digits")
        return File(digest, self.whole(f"{what}.bytes", file.get("bytes")))

    def entry(self, kind: str, name: str, found: Any, files: Mapping[str, File]) -> Entry:
        what = f"{kind} tensor {name!r:.120}"
        entry = self.object(what, found)
        shape = tuple(self.whole(f"{what}: shape", size) for size in self.list(what, entry.get("shape")))
        if len(shape) > MOST_DIMS:
            self.fail(f"{what} has {len(shape)} dimensions, at most {MOST_DIMS} are possible")
        dtype = entry.get("dtype")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self.fail(f"{what} has the dtype {dtype!r:.40}, not one of {', '.join(DTYPES)}")
        buffer = entry.get("buffer", False)
        if type(buffer) is not bool or (buffer and kind != "model"):
            self.fail(f"{what} has buffer = {buffer!r:.40}")
        pieces = tuple(
            self.piece(what, kind, name, shape, piece, files)
            for piece in self.list(what, entry.get("pieces"))
        )
        self.once(what, shape, [piece.box for piece in pieces])
        return Entry(shape, dtype, pieces, buffer)

    def piece(
        self, what: str, kind: str, name: str, shape: tuple[int, ...], found: Any, files: Mapping[str, File]
    ) -> Stored:
        piece = self.object(what, found)
        file, key = piece.get("file"), piece.get("key")
        if not isinstance(file, str) or file not in files or not file.startswith(f"{kind}-"):
            self.fail(f"{what} refers to {file!r:.80}, which is not among its files of {kind}s")
        spans = [self.list(what, span) for span in self.list(what, piece.get("box"))]
        box = tuple(
            (self.whole(what, span[0]), self.whole(what, span[1])) for span in spans if len(span) == 2
        )
        inside = [a <= b <= size for (a, b), size in zip(box, shape, strict=False)]
        if not len(spans) == len(box) == len(shape) or not all(inside):
            self.fail(f"{what}, shape {list(shape)}, has a piece at {piece.get('box')!s:.80}")
        wanted = key_of(name, shape, box)
        if key != wanted:
            self.fail(f"{what} has a piece with the key {key!r:.120} instead of {wanted!r:.120}")
        assert isinstance(key, str)
        return Stored(file, key, box)

    def once(self, what: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
        """Fails unless the boxes hold each element of the shape once."""
        held = sum(math.prod(stop - start for start, stop in box) for box in boxes)
        if held != math.prod(shape):
            self.fail(
                f"the pieces of {what}, shape {list(shape)}, hold {held} of its {math.prod(shape)} elements: the "
                "checkpoint is incomplete"
            )
        if not shape:
            if len(boxes) != 1:
                self.fail(f"{what} has {len(boxes)} pieces")
            return
        ordered = sorted(boxes)
        for number, box in enumerate(ordered):
            for other in ordered[number + 1 :]:
                if other[0][0] >= box[0][1]:
                    break  # it and all later ones begin below
                if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                    self.fail(f"{what} has pieces that overlap")

    def object(self, what: str, found: Any) -> dict[str, Any]:
        if not isinstance(found, dict):
            self.fail(f"{what} must be an object")
        return found

    def list(self, what: str, found: Any) -> list[Any]:
        if not isinstance(found, list):
            self.fail(f"{what} must have lists of numbers and pieces")
        return found

    def whole(self, what: str, found: Any) -> int:
        if type(found) is not int or not 0 <= found < 2**62:
            self.fail(f"{what} must be a whole number >= 0, not {found!r:.40}")
        return found


def join(parts: Iterable[Mapping[str, Any]], meta: Mapping[str, Any]) -> Manifest:
    """The manifest of a checkpoint, from what each rank says that it wrote."""
    files: dict[str, File] = {}
    shapes: dict[tuple[str, str], tuple[tuple[int, ...], str, bool]] = {}
    pieces: dict[tuple[str, str], list[Stored]] = {}
    for part in parts:
        files |= {name: File(**file) for name, file in part["files"].items()}
        for kind, name, shape, dtype, file, box, buffer in part["tensors"]:
            place = tuple((start, stop) for start, stop in box)
            shapes[kind, name] = tuple(shape), dtype, buffer
            pieces.setdefault((kind, name), []).append(Stored(file, key_of(name, shape, place), place))
    tensors: dict[str, dict[str, Entry]] = {kind: {} for kind in KINDS}
    for (kind, name), (shape, dtype, buffer) in shapes.items():
        tensors[kind][name] = Entry(shape, dtype, tuple(pieces[kind, name]), buffer)
    return Manifest(dict(meta), files, tensors)

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
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import FailFast, Field, TypeAdapter, ValidationError

from fivefold.errors import UserError, system_error
from fivefold.files import open_file, parse_json

FORMAT = 4
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

Whole = Annotated[int, Field(strict=True, ge=0, lt=2**62)]
Box = Annotated[tuple[tuple[Whole, Whole], ...], FailFast()]
if TYPE_CHECKING:  # a type checker reads no tables
    Dtype = Kind = str
else:
    Dtype, Kind = Literal[tuple(DTYPES)], Literal[KINDS]
_BEGIN = b'{"sha256": "'
_HASH = slice(len(_BEGIN), len(_BEGIN) + 64)
_ZEROS = b"0" * 64
_STEP = re.compile(r"step-(\d{8,18})")


class Damaged(UserError):
    """A checkpoint is incomplete, or was changed after it was written."""


@dataclass(frozen=True)
class File:
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: Whole


@dataclass(frozen=True)
class Stored:
    """A piece of a tensor: the elements of `box`, under `key` in a safetensors file."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class Entry:
    """A tensor. dtype: safetensors' name. buffer: it may hold infinities."""

    shape: Annotated[tuple[Whole, ...], Field(max_length=MOST_DIMS), FailFast()]
    dtype: Dtype
    pieces: Annotated[tuple[Stored, ...], FailFast()]
    buffer: Annotated[bool, Field(strict=True)] = False


@dataclass(frozen=True)
class Manifest:
    """tensors: by kind ("model", "optimizer") and name."""

    meta: dict[str, Any]
    files: dict[str, File]
    tensors: dict[Kind, dict[str, Entry]]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


_MANIFEST = TypeAdapter(Manifest)
_OBJECT, _FILE = TypeAdapter(dict[str, Any]), TypeAdapter(File)
_ENTRY, _COUNT = TypeAdapter(Entry), TypeAdapter(Whole)


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
    body = {"format": FORMAT, **_MANIFEST.dump_python(manifest, exclude_defaults=True)}
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
    try:
        hashed = content.startswith(_BEGIN)
        blank = content[: _HASH.start] + _ZEROS + content[_HASH.stop :]
        if hashed and hashlib.sha256(blank).hexdigest().encode() != content[_HASH]:
            raise ValueError("its content does not match its own hash")
        table = parse_json(content)
        version = table.get("format") if isinstance(table, dict) else None
        if type(version) is not int or version < 1 or (version == FORMAT and not hashed):
            raise ValueError(
                f"it has {'a' if hashed else 'no'} hash of its own, and format is {version!r:.40}"
            )
        if version == FORMAT:
            return checked(_typed(table))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {str(error)[:400]}") from None
    raise UserError(f"{path} is of format {version}, and this version reads {FORMAT}")


def _typed(table: dict[str, Any]) -> Manifest:
    """The manifest of a JSON object. Part by part, so that the first wrong one ends it: pydantic goes on behind an
    error, and a file of an attacker may have millions. Raises ValueError."""
    meta, files, tensors = (_valid(_OBJECT, name, table.get(name)) for name in ("meta", "files", "tensors"))
    for name in ("step", "updates", "skipped", "tokens"):
        if name in meta:
            _valid(_COUNT, f"meta.{name}", meta[name])
    if set(tensors) != set(KINDS):
        raise ValueError(f"tensors must have the parts {', '.join(KINDS)}, not {sorted(tensors)!s:.80}")
    return Manifest(
        meta,
        {name: _valid(_FILE, f"files.{name:.80}", file) for name, file in files.items()},
        {
            kind: {
                name: _valid(_ENTRY, f"tensors.{kind}.{name:.120}", entry)
                for name, entry in _valid(_OBJECT, f"tensors.{kind}", tensors[kind]).items()
            }
            for kind in KINDS
        },
    )


def _valid(kind: TypeAdapter[Any], place: str, value: Any) -> Any:
    """The value, of its type. Raises ValueError, which names the place."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, (place, *wrong["loc"])))
        raise ValueError(f"{place:.200}: {wrong['msg']}, not {wrong['input']!r:.40}") from None


def checked(manifest: Manifest) -> Manifest:
    """The manifest, whose parts have the right types. Raises ValueError unless they fit each other."""
    for name in manifest.files:
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            raise ValueError(f"it names {name!r:.80}, a file outside its folder")
    for kind, tensors in manifest.tensors.items():
        for name, entry in tensors.items():
            what = f"{kind} tensor {name!r:.120}, shape {list(entry.shape)},"
            if entry.buffer and kind != "model":
                raise ValueError(f"{what} has buffer = true")
            for piece in entry.pieces:
                if piece.file not in manifest.files or not piece.file.startswith(f"{kind}-"):
                    raise ValueError(
                        f"{what} is in {piece.file!r:.80}, which is not among its files of {kind}s"
                    )
                inside = [a <= b <= size for (a, b), size in zip(piece.box, entry.shape, strict=False)]
                if len(piece.box) != len(entry.shape) or not all(inside):
                    raise ValueError(f"{what} has a piece at {piece.box!s:.80}")
                wanted = key_of(name, entry.shape, piece.box)
                if piece.key != wanted:
                    raise ValueError(
                        f"{what} has a piece with the key {piece.key!r:.120} instead of {wanted!r:.120}"
                    )
            once(what, entry.shape, [piece.box for piece in entry.pieces])
    return manifest


def once(what: str, shape: Sequence[int], boxes: Iterable[Box]) -> None:
    """Raises ValueError unless these boxes, which lie inside of a tensor, hold each of its elements once."""
    boxes = sorted(boxes)
    held = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    wanted = math.prod(shape)
    if held != wanted:
        raise ValueError(
            f"the pieces of {what} hold {held} of its {wanted} elements: the checkpoint is incomplete"
        )
    if not shape:
        return  # one number, in one piece
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if other[0][0] >= box[0][1]:
                break  # it and all later ones begin below
            if all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)):
                raise ValueError(f"{what} has pieces that overlap")


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

"""A checkpoint on disk: safetensors shards and a JSON manifest with the hash of every file.

Every rank writes the pieces of tensors that it owns. The manifest says where each piece lies in its tensor. So a
checkpoint knows no layout, and a reader can ask for any box of any tensor.

A folder is written (`write.py`) under a temporary name, flushed to disk and renamed, so a folder called step-... is
complete. Every file is checked against the manifest before it is read. A truncated or changed file is an error that
names it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fivefold.errors import UserError
from fivefold.files import remove

FORMAT = 2
MANIFEST = "manifest.json"
KINDS = ("model", "optimizer")

Box = tuple[tuple[int, int], ...]


@dataclass
class Checkpoint:
    """model: {parameter name: tensor}; optimizer: {moment.parameter name: tensor}; meta: step, tokens, ..."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


class Reader:
    """Reads any part of any tensor of a checkpoint. Each file is checked against the manifest before its first use."""

    def __init__(self, folder: Path):
        self.folder, self.manifest = folder, read_manifest(folder)
        self.meta: dict[str, Any] = self.manifest["meta"]
        self._checked: set[str] = set()

    def names(self, kind: str) -> list[str]:
        return list(self.manifest["tensors"][kind])

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """The shape of a tensor. Raises KeyError if the checkpoint lacks it."""
        return tuple(self.manifest["tensors"][kind][name]["shape"])

    def read(self, kind: str, name: str, box: Box | None = None) -> Tensor:
        """The elements of a tensor in a box (None: all).

        Raises:
            KeyError: the checkpoint has no such tensor.
            UserError: a file is missing, truncated or changed, or no file has some of the elements.
        """
        shape = self.shape(kind, name)
        box = all_of(shape) if box is None else box
        sizes, out, filled = [stop - start for start, stop in box], None, 0
        for piece, common in self._pieces(kind, name, box):
            found = self._slice(piece, _within(common, piece["box"]))
            if common == tuple(box):
                return found
            out = torch.empty(sizes, dtype=found.dtype) if out is None else out
            out[tuple(_within(common, box))] = found
            filled += found.numel()
        if filled != math.prod(sizes):
            raise UserError(
                f"{self.folder / MANIFEST}: the pieces of {kind} tensor '{name}', shape {list(shape)}, hold {filled} "
                f"of the {math.prod(sizes)} elements in {[list(span) for span in box]}: the checkpoint is incomplete"
            )
        return torch.empty(sizes) if out is None else out  # None: an empty box

    @property
    def files(self) -> list[str]:
        """Names of all files except the manifest."""
        return list(self.manifest["files"])

    def files_of(self, kind: str, name: str, box: Box | None = None) -> set[str]:
        """The files that a read opens."""
        box = all_of(self.shape(kind, name)) if box is None else box
        return {piece["file"] for piece, _ in self._pieces(kind, name, box)}

    def check(self, file: str) -> None:
        """Compares a file with the manifest, once.

        Raises:
            UserError: it is missing, truncated or changed, or the manifest has no hash of it.
        """
        if file not in self.manifest["files"]:
            raise UserError(
                f"{self.folder / MANIFEST}: tensors refer to '{file}', which is not among its files"
            )
        if file not in self._checked:
            _verify(self.folder / file, self.manifest["files"][file])
            self._checked.add(file)

    def trust(self, files: Iterable[str]) -> None:
        """Marks files as checked, because another process that reads the same disk has checked them."""
        self._checked.update(files)

    def _pieces(self, kind: str, name: str, box: Box) -> Iterator[tuple[dict[str, Any], Box]]:
        """The pieces that overlap a box, each with its overlap."""
        for piece in self.manifest["tensors"][kind][name]["pieces"]:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, piece["box"], strict=True))
            if all(start < stop for start, stop in common):
                yield piece, common

    def _slice(self, piece: dict[str, Any], where: list[slice]) -> Tensor:
        self.check(piece["file"])
        with safe_open(self.folder / piece["file"], framework="pt") as file:
            return file.get_slice(piece["key"])[tuple(where)] if where else file.get_tensor(piece["key"])


def all_of(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def _within(inner: Sequence[tuple[int, int]], outer: Sequence[Sequence[int]]) -> list[slice]:
    """The slices of `outer` that `inner` covers."""
    return [slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer, strict=True)]


def load(folder: Path, kinds: Sequence[str] = KINDS) -> Checkpoint:
    """Reads the whole tensors of `kinds` ("model", "optimizer").

    Raises:
        UserError: a file is missing, truncated or changed, or the format is not known.
    """
    reader = Reader(folder)
    checkpoint = Checkpoint({}, {}, reader.meta)
    for kind in kinds:
        target = checkpoint.model if kind == "model" else checkpoint.optimizer
        target.update({name: reader.read(kind, name) for name in reader.names(kind)})
    return checkpoint


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: {"format", "meta", "files": {name: {"sha256", "bytes"}}, "tensors": {kind:
    {name: {"shape", "pieces": [{"file", "key", "box"}]}}}}.

    Raises:
        UserError: it is missing, not JSON, or of an unknown format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    known = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    if not known or not all(isinstance(manifest.get(key), dict) for key in ("files", "meta", "tensors")):
        raise UserError(f"{path}: not a manifest of format {FORMAT}, the one that this version reads")
    if any(Path(name).name != name for name in manifest["files"]):
        raise UserError(f"{path}: it names a file outside its folder")
    return manifest


def latest(run: Path) -> Path:
    """The newest checkpoint of a run.

    Raises:
        UserError: the run has none.
    """
    found = checkpoints(run)
    if not found:
        raise UserError(f"{run} has no checkpoint yet: {run / 'checkpoints'} holds none")
    return found[-1]


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step-*") if (p / MANIFEST).is_file())


def folder_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def prune(run: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints, and incomplete ones of killed processes."""
    for old in (*checkpoints(run)[:-keep], *(run / "checkpoints").glob(".step-*")):
        remove(old)


def _verify(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing, though the manifest names it")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise UserError(f"{path} is damaged: {size} bytes, the manifest says {expected['bytes']}")
    try:
        found = sha256(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if found != expected["sha256"]:
        raise UserError(f"{path} is damaged: its content does not match the hash in the manifest")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

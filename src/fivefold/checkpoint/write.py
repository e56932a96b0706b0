"""Writing a checkpoint: every rank the pieces that it owns, together whole or not at all (see `store.py`)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fivefold.checkpoint.store import FORMAT, KINDS, MANIFEST, Box, all_of, sha256
from fivefold.comm import ALONE, Axis, all_or_none
from fivefold.errors import UserError
from fivefold.files import flush, make_folder, remove, rename, write

MAX_SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class Piece:
    """A rectangular part of tensor `name`: the elements [start, stop) along each dim of its shape."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    box: Box

    @property
    def whole(self) -> bool:
        return all(span == (0, size) for span, size in zip(self.box, self.shape, strict=True))


def whole_pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Each tensor as one piece."""
    return [Piece(n, t, tuple(t.shape), all_of(t.shape)) for n, t in tensors.items()]


def save(
    folder: Path,
    model: Iterable[Piece],
    optimizer: Iterable[Piece],
    meta: Mapping[str, Any],
    *,
    axis: Axis = ALONE,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes a checkpoint and returns its folder. It replaces an older one of the same name.

    Every rank of the axis calls it with its own pieces, which make up each tensor exactly once. The ranks share the
    disk.

    Raises:
        UserError: the disk is full or the folder cannot be written. Nothing incomplete is left.
    """
    temporary, first = folder.with_name(f".{folder.name}.writing"), axis.index == 0
    try:
        with all_or_none(axis), _explained(folder):
            if first:
                _clear(temporary)
        with all_or_none(axis), _explained(folder):
            _write_part(temporary, axis.index, (model, optimizer), max_shard_bytes)
        with all_or_none(axis), _explained(folder):
            if first:
                _finish(temporary, folder, axis.size, meta)
    finally:
        if first:
            remove(temporary)
    return folder


def save_whole(
    folder: Path,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None,
    meta: Mapping[str, Any],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """`save` from one process that has every tensor whole."""
    pieces = whole_pieces(model), whole_pieces(optimizer or {})
    return save(folder, *pieces, meta, max_shard_bytes=max_shard_bytes)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the checkpoint {folder}: {error}") from error


def _clear(temporary: Path) -> None:
    remove(temporary)  # of a process that was killed
    make_folder(temporary)


def _write_part(
    folder: Path, rank: int, kinds: tuple[Iterable[Piece], Iterable[Piece]], max_bytes: int
) -> None:
    """Writes one rank's files and a list of their content."""
    listed: dict[str, Any] = {"files": {}, "tensors": []}
    for kind, pieces in zip(KINDS, kinds, strict=True):
        for index, shard in enumerate(_shards(pieces, max_bytes), 1):
            name = f"{kind}-{rank:05d}-{index:05d}.safetensors"
            save_file({k: p.tensor.detach().cpu().contiguous() for k, p in shard.items()}, folder / name)
            size, digest = (folder / name).stat().st_size, sha256(folder / name)
            listed["files"][name] = {"sha256": digest, "bytes": size}
            listed["tensors"] += [[kind, p.name, p.shape, name, key, p.box] for key, p in shard.items()]
            flush(folder / name)
    write(folder / f"part-{rank:05d}.json", json.dumps(listed))


def _finish(temporary: Path, folder: Path, ranks: int, meta: Mapping[str, Any]) -> None:
    """Joins the lists of all ranks into the manifest, checks that nothing is missing, and gives the folder its name."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "meta": dict(meta),
        "files": {},
        "tensors": {k: {} for k in KINDS},
    }
    for rank in range(ranks):
        part = temporary / f"part-{rank:05d}.json"
        listed = json.loads(part.read_text(encoding="utf-8"))
        remove(part)
        manifest["files"] |= listed["files"]
        for kind, name, shape, file, key, box in listed["tensors"]:
            entry = manifest["tensors"][kind].setdefault(name, {"shape": shape, "pieces": []})
            entry["pieces"].append({"file": file, "key": key, "box": box})
    for kind in KINDS:
        for name, entry in manifest["tensors"][kind].items():
            held = sum(math.prod(stop - start for start, stop in piece["box"]) for piece in entry["pieces"])
            assert held == math.prod(entry["shape"]), f"{name}: {held} elements written of {entry['shape']}"
    write(temporary / MANIFEST, json.dumps(manifest) + "\n")
    flush(temporary / MANIFEST)
    flush(temporary)
    remove(folder)
    rename(temporary, folder)


def _shards(pieces: Iterable[Piece], max_bytes: int) -> list[dict[str, Piece]]:
    """Pieces by their key in a file. The key is the tensor's name if the piece is the whole tensor."""
    shards: list[dict[str, Piece]] = []
    size = 0
    for number, piece in enumerate(pieces):
        if not shards or size + piece.tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][piece.name if piece.whole else f"{piece.name}#{number}"] = piece
        size += piece.tensor.nbytes
    return shards

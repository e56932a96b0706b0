"""Writing a checkpoint: every rank the pieces that it owns, together whole or not at all (see `store.py`)."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fivefold.checkpoint.store import FORMAT, KINDS, MANIFEST, Box, all_of, sha256
from fivefold.errors import UserError

MAX_SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class Piece:
    """A rectangular part of a tensor: of tensor `name` of that shape, the elements [start, stop) along each dim."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    box: Box

    @property
    def whole(self) -> bool:
        return all(span == (0, size) for span, size in zip(self.box, self.shape, strict=True))


def whole_pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Tensors that are whole, each as one piece."""
    return [Piece(n, t, tuple(t.shape), all_of(t.shape)) for n, t in tensors.items()]


def save(
    folder: Path,
    model: Iterable[Piece],
    optimizer: Iterable[Piece],
    meta: Mapping[str, Any],
    *,
    rank: int = 0,
    ranks: int = 1,
    agree: Callable[[bool], bool] = lambda fine: fine,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes a checkpoint and returns its folder. An older one of the same name is replaced.

    Every rank calls it with its own pieces, which together make up each tensor exactly once; they share the disk.
    agree: whether all ranks were fine, given whether this one was; it also waits for them.

    Raises:
        UserError: the disk is full or the folder cannot be written; nothing half-written is left.
    """
    temporary = folder.with_name(f".{folder.name}.writing")
    try:
        _together(agree, lambda: _clear(temporary) if rank == 0 else None)
        _together(agree, lambda: _write_part(temporary, rank, (model, optimizer), max_shard_bytes))
        _together(agree, lambda: _finish(temporary, folder, ranks, meta) if rank == 0 else None)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the checkpoint {folder}: {error}") from error
    finally:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
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


def _together(agree: Callable[[bool], bool], work: Callable[[], None]) -> None:
    """Does this rank's work and waits for the others'; raises on every rank when it failed on one."""
    try:
        work()
    except BaseException:
        agree(False)
        raise
    if not agree(True):
        raise OSError("another rank could not write its part")


def _clear(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)


def _write_part(
    folder: Path, rank: int, kinds: tuple[Iterable[Piece], Iterable[Piece]], max_bytes: int
) -> None:
    """One rank's files, and a list of what is in them."""
    listed: dict[str, Any] = {"files": {}, "tensors": []}
    for kind, pieces in zip(KINDS, kinds, strict=True):
        for index, shard in enumerate(_shards(pieces, max_bytes), 1):
            name = f"{kind}-{rank:05d}-{index:05d}.safetensors"
            save_file({k: p.tensor.detach().cpu().contiguous() for k, p in shard.items()}, folder / name)
            size, digest = (folder / name).stat().st_size, sha256(folder / name)
            listed["files"][name] = {"sha256": digest, "bytes": size}
            listed["tensors"] += [[kind, p.name, p.shape, name, key, p.box] for key, p in shard.items()]
            _flush(folder / name)
    (folder / f"part-{rank:05d}.json").write_text(json.dumps(listed), encoding="utf-8")


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
        part.unlink()
        manifest["files"] |= listed["files"]
        for kind, name, shape, file, key, box in listed["tensors"]:
            entry = manifest["tensors"][kind].setdefault(name, {"shape": shape, "pieces": []})
            entry["pieces"].append({"file": file, "key": key, "box": box})
    for kind in KINDS:
        for name, entry in manifest["tensors"][kind].items():
            held = sum(math.prod(stop - start for start, stop in piece["box"]) for piece in entry["pieces"])
            assert held == math.prod(entry["shape"]), f"{name}: {held} elements written of {entry['shape']}"
    (temporary / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    _flush(temporary / MANIFEST)
    _flush(temporary)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.replace(folder)
    _flush(folder.parent)


def _shards(pieces: Iterable[Piece], max_bytes: int) -> list[dict[str, Piece]]:
    """Pieces by the key they get in their file: the tensor's name where the piece is all of it."""
    shards: list[dict[str, Piece]] = []
    size = 0
    for number, piece in enumerate(pieces):
        if not shards or size + piece.tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][piece.name if piece.whole else f"{piece.name}#{number}"] = piece
        size += piece.tensor.nbytes
    return shards


def _flush(path: Path) -> None:
    """Forces a file or folder to the disk, so that a power cut after the rename loses nothing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A checkpoint on disk: safetensors shards and a JSON manifest with the hash of every file.

A folder is written under a temporary name, flushed to the disk and renamed: a folder called step-... is whole. What
is read is checked against the manifest first: a truncated or changed file is an error that names it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fivefold.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
MAX_SHARD_BYTES = 2 << 30
KINDS = ("model", "optimizer")


@dataclass
class Checkpoint:
    """model: {parameter name: tensor}; optimizer: {moment.parameter name: tensor}; meta: step, tokens, ..."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


def save(
    folder: Path,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None,
    meta: Mapping[str, Any],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes a checkpoint and returns its folder. An older one of the same name is replaced.

    Raises:
        UserError: the disk is full or the folder cannot be written; nothing half-written is left.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of a process of the same number that was killed
        temporary.mkdir(parents=True)
        files = {}
        for kind, tensors in zip(KINDS, (model, optimizer or {}), strict=True):
            for index, shard in enumerate(_shards(tensors, max_shard_bytes), 1):
                name = f"{kind}-{index:05d}.safetensors"
                save_file({k: t.detach().cpu().contiguous() for k, t in shard.items()}, temporary / name)
                files[name] = {
                    "sha256": _sha256(temporary / name),
                    "bytes": (temporary / name).stat().st_size,
                }
        manifest = {"format": FORMAT, "meta": dict(meta), "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.replace(folder)
        _flush(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the checkpoint {folder}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load(folder: Path, kinds: Sequence[str] = KINDS) -> Checkpoint:
    """Reads the tensors of `kinds` ("model", "optimizer") after checking their files against the manifest.

    Raises:
        UserError: a file is missing, truncated or changed, or the format is not known.
    """
    manifest = read_manifest(folder)
    files = {n: f for n, f in manifest["files"].items() if n.split("-")[0] in kinds}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: _verify(folder / name, files[name]), files))
    checkpoint = Checkpoint({}, {}, manifest["meta"])
    for name in files:
        target = checkpoint.model if name.startswith("model") else checkpoint.optimizer
        target.update(load_file(folder / name))
    return checkpoint


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: {"format", "meta", "files": {name: {"sha256", "bytes"}}}.

    Raises:
        UserError: it is missing, not JSON, or of a format this version does not know.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    known = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    if not known or not isinstance(manifest.get("files"), dict) or not isinstance(manifest.get("meta"), dict):
        raise UserError(f"{path}: not a manifest of format {FORMAT}, the one that this version reads")
    if any(Path(name).name != name for name in manifest["files"]):
        raise UserError(f"{path}: names a file outside its folder")
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
    """Removes all but the newest `keep` checkpoints, and what a killed process left half-written."""
    for old in (*checkpoints(run)[:-keep], *(run / "checkpoints").glob(".step-*")):
        shutil.rmtree(old, ignore_errors=True)


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not shards or size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _verify(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing, though the manifest names it")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise UserError(f"{path} is damaged: {size} bytes, the manifest says {expected['bytes']}")
    if _sha256(path) != expected["sha256"]:
        raise UserError(f"{path} is damaged: its content is not what the manifest's hash says")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Forces a file or folder to the disk, so that a power cut after the rename loses nothing."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

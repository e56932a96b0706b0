"""Token shards: files of raw little-endian ids, and the manifest that says what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.data.tokens import Shard, Tokens
from fivefold.files import write_atomically

FORMAT = 1  # raised whenever the same source and settings would give other shards
SHARD_TOKENS = 1 << 27
NAMES = ("train", "val")


class ShardWriter:
    """Writes one split as train-00000.bin, train-00001.bin, ... of SHARD_TOKENS each (the last has fewer)."""

    def __init__(self, folder: Path, name: str, dtype: str, shard_tokens: int = SHARD_TOKENS):
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.counts: list[int] = []
        self._file = None

    def write(self, ids: np.ndarray) -> None:
        while len(ids):
            if self._file is None or self.counts[-1] == self.shard_tokens:
                self.close()
                self._file = open(self.folder / self._name(len(self.counts)), "wb")  # noqa: SIM115
                self.counts.append(0)
            taken = ids[: self.shard_tokens - self.counts[-1]]
            self._file.write(np.ascontiguousarray(taken, self.dtype).data)
            self.counts[-1] += len(taken)
            ids = ids[len(taken) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def entries(self) -> list[dict[str, Any]]:
        """For the manifest: file and tokens of each shard."""
        return [{"file": self._name(i), "tokens": count} for i, count in enumerate(self.counts)]

    def _name(self, index: int) -> str:
        return f"{self.name}-{index:05d}.bin"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a complete folder; None if there is none, or a shard is missing or has another size."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
        item = np.dtype(manifest["dtype"]).itemsize
        for entry in manifest["shards"]["train"] + manifest["shards"]["val"]:
            if (folder / entry["file"]).stat().st_size != entry["tokens"] * item:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return manifest if manifest["format"] == FORMAT else None


def open_tokens(folder: Path, manifest: dict[str, Any], split: str) -> Tokens:
    entries = manifest["shards"][split]
    return Tokens([Shard(folder / e["file"], manifest["dtype"], 0, e["tokens"]) for e in entries])

"""Reads the weights of a Hugging Face folder. Only safetensors and JSON are read, never pickle."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.checkpoint.manifest import Box
from fivefold.errors import UserError
from fivefold.files import MOST_INDEX, MOST_JSON, open_file, read_json
from fivefold.models.card import card_of
from fivefold.models.hf import INDEX, WEIGHTS, made_from_hf
from fivefold.models.section import ModelSection


class HfWeights:
    """Reads any part of our weights from a Hugging Face folder. Files are mapped into memory, and fused matrices are
    put together one at a time."""

    def __init__(self, folder: Path, model: ModelSection):
        """Raises UserError: the weights are not those of config.json, whose model is `model`."""
        self.folder = folder
        card = card_of(model)
        self._made = made_from_hf(read_weights(folder), model)
        self._shapes = card.parameters | card.buffers

    def names(self) -> list[str]:
        return list(self._made)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, box: Box) -> Tensor:
        tensor = self._made[name]()[tuple(slice(*span) for span in box)]
        if why := store.odd_numbers(tensor):
            raise UserError(f"{self.folder}: weight {name} {why}")
        return tensor


def hf_fingerprint(folder: Path) -> str:
    """A hash of config.json and of all bytes of the weights."""
    digest = hashlib.sha256()
    for file in ["config.json", *weight_files(folder)]:
        digest.update(store.sha256(folder / file).encode())
    return digest.hexdigest()


def weight_files(source: Path) -> list[str]:
    """model.safetensors, or the files that its index names."""
    if (source / INDEX).is_file():
        weight_map = read_config(source / INDEX, MOST_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise UserError(f"{source / INDEX}: weight_map is missing or is not a table of file names")
        files = sorted(set(weight_map.values()))
        for file in files:
            if Path(file).name != file:  # a file elsewhere on this machine is not part of the model
                raise UserError(f"{source / INDEX}: {file!r} is not the name of a file beside it")
    elif (source / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        raise UserError(_no_weights(source))
    return files


def read_weights(source: Path) -> dict[str, Tensor]:
    """All tensors of a folder, mapped into memory."""
    weights: dict[str, Tensor] = {}
    for file in weight_files(source):
        try:
            with open_file(source / file) as opened:
                same = Path(f"/proc/self/fd/{opened.fileno()}")  # whatever has its name by now
                weights.update(load_file(same if same.exists() else source / file))
        except FileNotFoundError:
            raise UserError(f"{source / file} is missing, though {INDEX} names it") from None
        except SafetensorError as error:
            raise UserError(f"{source / file} is not a complete safetensors file: {error}") from None
    return weights


def _no_weights(source: Path) -> str:
    pickles = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in source.glob(pattern))
    if not pickles:
        return f"{source} has neither {WEIGHTS} nor {INDEX}"
    return (
        f"{source / pickles[0]}: pickle files are refused, because opening one can run any code. Use the "
        f"model's safetensors files ({WEIGHTS}). If it has none and you trust it, load it with transformers on a "
        "disposable machine and write it with save_pretrained(FOLDER)"
    )


def read_config(path: Path, most: int = MOST_JSON) -> dict[str, Any]:
    try:
        return read_json(path, most)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None

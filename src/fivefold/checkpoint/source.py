"""Weights to start from: a checkpoint or a Hugging Face folder, read part by part. Checkpoints may leave frozen weights
to such a source (`checkpoint.frozen = false`). Only safetensors and JSON are read, never pickle."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.checkpoint.manifest import MANIFEST, Box, Damaged
from fivefold.data.tokenizer import Tokenizer, load_tokenizer
from fivefold.errors import UserError
from fivefold.files import MOST_INDEX, MOST_JSON, guard, open_file, read_json
from fivefold.models.card import card_of
from fivefold.models.hf import INDEX, WEIGHTS, made_from_hf
from fivefold.models.section import ModelSection
from fivefold.recipe.initial import hf_model
from fivefold.sharding.parts import Shape

FROZEN = "frozen"
"""A key of a checkpoint's meta: true if it has frozen weights, in the dtype in which they compute."""
ELSEWHERE = "weights_elsewhere"
"""The key of a checkpoint's meta: where its frozen weights are (`Elsewhere`)."""
TOKENIZER = "the tokenizer's fingerprint"
"""The key of a checkpoint's meta: which tokenizer.json the run folder has. Imported runs have none."""


class Source:
    """Weights by name. folder: of the run, or a Hugging Face folder. checkpoint: of the run; None for Hugging Face's.

    Files of a Hugging Face folder are mapped into memory, and fused matrices are put together one at a time.
    """

    def __init__(self, folder: Path, checkpoint: Path | None):
        """Raises UserError: a checkpoint's manifest is damaged, or the weights are not those of config.json."""
        self.folder, self.checkpoint = folder, checkpoint
        self.reader = store.Reader(checkpoint) if checkpoint is not None else None
        if self.reader is None:
            model = ModelSection(**hf_model(folder))
            self._made = made_from_hf(read_weights(folder), model)
            self._shapes = card_of(model).parameters | card_of(model).buffers

    def names(self) -> list[str]:
        return self.reader.names("model") if self.reader else list(self._made)

    def shape(self, name: str) -> Shape:
        return self.reader.shape("model", name) if self.reader else self._shapes[name]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The elements of a weight in a box (None: all). Raises UserError: they are damaged, or not finite."""
        if self.reader:
            return self.reader.read("model", name, box)
        tensor = self._made[name]()
        if box is not None:
            tensor = tensor[tuple(slice(*span) for span in box)]
        if why := store.odd_numbers(tensor):
            raise UserError(f"{self.folder}: weight {name} {why}")
        return tensor

    def fingerprint(self) -> str:
        return fingerprint(self.folder, self.checkpoint)


def fingerprint(folder: Path, checkpoint: Path | None) -> str:
    """A hash of all weights. A manifest has the hash of each file of its checkpoint. Of a Hugging Face folder
    config.json and all bytes of the weights count."""
    if checkpoint is not None:
        return store.sha256(checkpoint / MANIFEST)
    digest = hashlib.sha256()
    for file in ["config.json", *weight_files(folder)]:
        digest.update(store.sha256(folder / file).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Elsewhere:
    """The weights that a checkpoint leaves to a source. names: {a parameter's name: its name there}."""

    where: str
    checkpoint: str
    fingerprint: str
    names: Mapping[str, str]

    @classmethod
    def of(cls, checkpoint: Path, meta: Mapping[str, Any]) -> Elsewhere | None:
        """None: the checkpoint has all its weights.

        Raises:
            Damaged: the entry is none.
        """
        if meta.get(ELSEWHERE) is None:
            return None
        try:
            return TypeAdapter(cls).validate_python(meta[ELSEWHERE])
        except ValidationError:
            path = checkpoint / MANIFEST
            raise Damaged(f"{path} is damaged: {ELSEWHERE} must say where weights are") from None

    def open(self) -> Source:
        """Whoever wrote the checkpoint has chosen the folder, so nothing there is used before its hash is right.

        Raises:
            UserError: the source is gone, or has other weights.
        """
        folder, checkpoint = Path(self.where), Path(self.checkpoint) if self.checkpoint else None
        here = checkpoint or folder
        if not here.is_dir():
            raise UserError(
                f"{here} is gone: the frozen weights of this run are there (checkpoint.frozen = false). Put it back"
            )
        guard(folder, look=False)
        try:
            found = fingerprint(folder, checkpoint)
        except OSError as error:
            raise UserError(f"{here}: cannot be read: {error.strerror}") from None
        if found != self.fingerprint:
            raise UserError(
                f"{here} has other weights than those that this run's frozen weights were. Put it back"
            )
        source = Source(folder, checkpoint)
        if unknown := sorted(set(self.names.values()) - set(source.names())):
            raise UserError(f"{here} has no weight {unknown[0]!r:.120}, which the checkpoint names")
        return source


def tokenizer_of(run: Path, checkpoint: Path) -> Tokenizer | None:
    """The tokenizer in a run folder; None: the run has none. Raises UserError: it is damaged, not that of the
    checkpoint, or has no end token (NoSuchToken)."""
    path, said = run / "tokenizer.json", store.Reader(checkpoint).meta.get(TOKENIZER)
    if not path.is_file() and said is None:
        return None
    if not path.is_file():
        raise UserError(f"{path} is missing: the run was trained with a tokenizer. Restore the file")
    found = load_tokenizer(path)
    if said not in (None, found.fingerprint):
        raise UserError(f"{path} has other tokens than those of {checkpoint}. Restore the file")
    return found


def weights_of(checkpoint: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint, also those that it leaves to a source, in one dtype where some are
    frozen: the widest of any.

    Raises:
        UserError: a file is damaged or missing.
    """
    found = store.load(checkpoint, kinds=("model",))
    left = Elsewhere.of(checkpoint, found.meta)
    if left is not None:
        source = left.open()
        if source.reader is not None:
            source.reader.check(*source.reader.files)
        found.model |= {name: source.read(there) for name, there in left.names.items()}
    real = {t.dtype for t in found.model.values() if t.is_floating_point()}
    if len(real) < 2 or not found.meta.get(FROZEN):
        return found.model
    widest = max(real, key=lambda dtype: dtype.itemsize)
    return {name: t.to(widest) if t.is_floating_point() else t for name, t in found.model.items()}


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

"""Weights to start from: a checkpoint or a Hugging Face folder, read part by part. Checkpoints may leave frozen weights
to such a source (`checkpoint.frozen = false`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fivefold.checkpoint import store
from fivefold.checkpoint.hf_weights import HfWeights, hf_fingerprint
from fivefold.checkpoint.manifest import MANIFEST, Box, Damaged
from fivefold.data.tokenizer import Tokenizer, load_tokenizer
from fivefold.errors import UserError
from fivefold.files import guard
from fivefold.models.section import ModelSection
from fivefold.recipe.initial import hf_model
from fivefold.spread.parts import Shape

FROZEN = "frozen"
"""A key of a checkpoint's meta: true if it has frozen weights, in the dtype in which they compute."""
ELSEWHERE = "weights_elsewhere"
"""The key of a checkpoint's meta: where its frozen weights are (`Elsewhere`)."""
TOKENIZER = "the tokenizer's fingerprint"
"""The key of a checkpoint's meta: which tokenizer.json the run folder has. Imported runs have none."""


class Source:
    """Weights by name. folder: of the run, or a Hugging Face folder. checkpoint: of the run."""

    def __init__(self, folder: Path, checkpoint: Path | None):
        self.folder, self.checkpoint = folder, checkpoint
        self.reader = store.Reader(checkpoint) if checkpoint is not None else None
        self.hf = HfWeights(folder, ModelSection(**hf_model(folder))) if checkpoint is None else None

    def names(self) -> list[str]:
        return self.reader.names("model") if self.reader else self._hf.names()

    def shape(self, name: str) -> Shape:
        return self.reader.shape("model", name) if self.reader else self._hf.shape(name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        box = store.all_of(self.shape(name)) if box is None else box
        return self.reader.read("model", name, box) if self.reader else self._hf.read(name, box)

    def fingerprint(self) -> str:
        return fingerprint(self.folder, self.checkpoint)

    @property
    def _hf(self) -> HfWeights:
        assert self.hf is not None
        return self.hf


def fingerprint(folder: Path, checkpoint: Path | None) -> str:
    """A hash of all weights. A manifest has the hash of each file of its checkpoint."""
    return hf_fingerprint(folder) if checkpoint is None else store.sha256(checkpoint / MANIFEST)


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
        found = meta.get(ELSEWHERE)
        if found is None:
            return None
        table = found if isinstance(found, dict) else {}
        where, at, digest = (table.get(key) for key in ("where", "checkpoint", "fingerprint"))
        names: Any = table.get("names")
        pairs = names.items() if isinstance(names, dict) else [(None, None)]
        right = all(isinstance(text, str) for pair in pairs for text in pair)
        if not (right and isinstance(where, str) and isinstance(at, str) and isinstance(digest, str)):
            raise Damaged(f"{checkpoint / MANIFEST} is damaged: {ELSEWHERE} must say where weights are")
        return cls(where, at, digest, names)

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

"""All of a checkpoint at once, for tests that compare it. The program reads what a rank needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from fivefold.checkpoint.manifest import KINDS
from fivefold.checkpoint.store import Reader, threads


@dataclass
class Checkpoint:
    """model: {parameter name: tensor}; optimizer: {moment.parameter name: tensor}; meta: step, tokens, ..."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


def load(folder: Path, kinds: Sequence[str] = KINDS) -> Checkpoint:
    """Reads the whole tensors of `kinds` ("model", "optimizer").

    Raises:
        UserError: a file is missing, truncated or changed, or the format is not known.
    """
    reader = Reader(folder)
    checkpoint = Checkpoint({}, {}, reader.meta)
    reader.check(*(file for file in reader.files if file.startswith(tuple(kinds))), threads=threads())
    for kind in kinds:
        target = checkpoint.model if kind == "model" else checkpoint.optimizer
        target.update({name: reader.read(kind, name) for name in reader.names(kind)})
    return checkpoint

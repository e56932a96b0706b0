"""torchtitan's weights as those of Hugging Face: names and order of rows (`TITAN` of an architecture's hf.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fivefold.checkpoint.dcp.read import tensors
from fivefold.errors import UserError
from fivefold.models import EXCHANGED, file_of
from fivefold.models.section import ModelSection
from fivefold.models.weights import Weight


def from_titan(folder: Path, model: ModelSection) -> dict[str, Weight]:
    """The tensors of a DCP folder, each read when it is needed. What torchtitan's model does not have keeps its name.
    Raises UserError: the folder is damaged, lacks a weight, or has two for one."""
    found, given = tensors(folder)[0], dict[str, Weight]()
    for theirs, (names, heads) in _names(model).items():
        same = [found.pop(name) for n in names for name in (n, f"model.{n}") if name in found]
        if any(other.chunks != same[0].chunks for other in same):
            raise UserError(f"{folder} has two tensors for one weight, such as {names[0]}")
        if same:
            given[theirs] = _turned(same[0], heads, (-1, 2))
        elif not (model.tie_embeddings and theirs in file_of(model.arch, "hf").TIED):
            raise UserError(f"{folder}: the weight {names[-1]} is missing")
    return given | found


def to_titan(weights: Mapping[str, Weight], model: ModelSection) -> dict[tuple[str, ...], Weight]:
    """Weights of Hugging Face by all names that torchtitan has had for each, of a tied one also those of the other.
    Raises UserError: it has none."""
    table, given = _names(model), dict[tuple[str, ...], Weight]()
    for name, first in file_of(model.arch, "hf").TIED.items():
        if name not in weights:
            table[first] = table[first][0] + table[name][0], 0
    for name, weight in weights.items():
        if name not in table:
            raise UserError(f"this model cannot be exported as DCP: torchtitan has no name for {name}")
        names, heads = table[name]
        given[names] = _turned(weight, heads, (2, -1))
    return given


def _names(model: ModelSection) -> dict[str, tuple[tuple[str, ...], int]]:
    if (names := getattr(file_of(model.arch, "hf"), "TITAN", None)) is None:
        known = ", ".join(arch for arch in EXCHANGED if hasattr(file_of(arch, "hf"), "TITAN"))
        raise UserError(f"DCP is read and written for {known}, not for {model.arch}")
    return names(model)


def _turned(weight: Weight, heads: int, rows: tuple[int, int]) -> Weight:
    """The same with the rows of each head, as a matrix of this shape, transposed. heads 0: as it is."""

    def turned() -> Tensor:
        tensor = weight.read()
        return tensor.view(heads, *rows, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)

    return Weight(weight.shape, weight.dtype, turned) if heads else weight

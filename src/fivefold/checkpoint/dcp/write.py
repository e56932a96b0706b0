"""Writes DCP folders as PyTorch does on one rank, one weight at a time."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.checkpoint import metadata as of
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fivefold import files
from fivefold.checkpoint.dcp.read import METADATA
from fivefold.models.weights import Weight


def save(folder: Path, weights: Mapping[tuple[str, ...], Weight]) -> None:
    """Writes weights by their names, each in a file of its own and once, whatever the number of its names. Raises what
    reading a weight raises."""
    listed, places = {}, {}
    for number, (names, weight) in enumerate(weights.items()):
        tensor, path = weight.read().contiguous(), folder / f"__0_{number}.distcp"
        if tensor.untyped_storage().nbytes() != tensor.nbytes:  # torch.save writes all of the storage
            tensor = tensor.clone()
        with files.stream(path) as file:
            torch.save(tensor, file)
            lies = _StorageInfo(path.name, 0, file.tell())
        whole = of.ChunkStorageMetadata(torch.Size([0] * tensor.ndim), tensor.shape)
        properties = of.TensorProperties.create_from_tensor(tensor)
        listed |= dict.fromkeys(names, of.TensorStorageMetadata(properties, tensor.shape, [whole]))
        places |= {of.MetadataIndex(name, whole.offsets): lies for name in names}
    tree = {name: (name,) for name in listed}
    files.write(folder / METADATA, pickle.dumps(of.Metadata(listed, tree, places, version="1.0.0")))

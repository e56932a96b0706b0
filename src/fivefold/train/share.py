"""A rank's share of the batches: its rows of each global batch and its columns of them, in microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.data import NOT_COUNTED, Batches, DataSet, Prefetch
from fivefold.data.batches import objective_of
from fivefold.errors import UserError
from fivefold.parallel.context import take
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Microbatch
from fivefold.recipe import Recipe, batch_size, sequences_before
from fivefold.train.job import BatchSource, Job


@contextmanager
def reader(job: Job, mesh: Mesh, start: int) -> Iterator[Callable[[], tuple[list[Microbatch], float]]]:
    """Reads this rank's share of each global batch ahead, in microbatches."""
    recipe, batches, train = job.recipe, job.batches, job.recipe.train
    if batches is None:
        assert job.data is not None
        batches = batches_of(recipe, job.data, job.data.train, train.global_batch_size, shuffle=True)
    elif train.batch_ramp:
        raise UserError("train.batch_ramp needs the data of a recipe: your own batches have their size")

    def fetch(i: int) -> list[Microbatch]:
        return share_of(batches, i, batch_size(train, i), train.microbatch_size or 1, mesh)

    with Prefetch(fetch, start, recipe.train.steps) as prefetch:
        yield prefetch.next


def validation_set(job: Job, mesh: Mesh) -> tuple[list[Microbatch], Tensor | None]:
    """This rank's share of the validation sequences, and the bytes per token id if known."""
    recipe, size = job.recipe, job.recipe.train.val_sequences
    batches, token_bytes = job.val_batches, None
    if batches is None:
        assert job.data is not None
        assert job.data.val is not None
        batches = batches_of(recipe, job.data, job.data.val, size, shuffle=False)
        size = min(size, batches.sequences)
        if job.data.tokenizer is not None and objective_of(recipe) == "causal":
            token_bytes = torch.as_tensor(job.data.tokenizer.token_bytes, device=mesh.device)
    rows, equal = recipe.train.microbatch_size or 1, mesh.layout.divided
    dp = mesh.axis("dp")  # a launch that is one site of several validates by itself
    alone = (dp.index, dp.size) if mesh.apart else None
    return share_of(batches, 0, size, rows, mesh, equal, alone), token_bytes


def batches_of(recipe: Recipe, data: DataSet, tokens: Any, size: int, shuffle: bool) -> Batches:
    assert recipe.model.vocab_size is not None
    objective = objective_of(recipe)
    seq_len, train = recipe.model.seq_len, recipe.train
    begins = partial(sequences_before, train) if shuffle else None
    return Batches(
        tokens, seq_len, size, train.seed, objective, data.mask_id, data.vocab_size, shuffle, begins
    )


def share_of(
    batches: BatchSource,
    i: int,
    size: int,
    microbatch: int,
    mesh: Mesh,
    equal: bool = False,
    share: tuple[int, int] | None = None,
) -> list[Microbatch]:
    """This rank's rows of global batch i, of `size` rows, and its columns of them, in microbatches on its device.

    equal: all ranks get equally many microbatches, all of them full, filled up with rows that do not count. Where ranks
    compute a model together, one that has nothing to do still has to take part. share: (index, number of shares) of the
    rows, if the mesh does not say it.
    """
    dp = mesh.axis("dp")
    index, ranks = share or (mesh.site * dp.size + dp.index, mesh.sites * dp.size)
    start, stop = size * index // ranks, size * (index + 1) // ranks
    parts = [range(row, min(row + microbatch, stop)) for row in range(start, stop, microbatch)]
    if equal:
        most = -(-size // ranks)  # rows of a rank
        parts += [range(0)] * (-(-most // microbatch) - len(parts))
    found = []
    for rows in parts:
        inputs, targets = (take(_tensor(x, mesh.device), mesh) for x in batches.batch(i, rows or range(1)))
        found.append(_fill(inputs, targets, len(rows), microbatch) if equal else (inputs, targets))
    return found


def _fill(inputs: Tensor, targets: Tensor, real: int, rows: int) -> Microbatch:
    """Pads at most `rows` sequences, `real` of them counted, to `rows` sequences. The others do not count."""
    both = [torch.cat([x, x[:1].expand(rows - len(x), -1)]) for x in (inputs, targets)]
    both[1][real:] = NOT_COUNTED
    return both[0], both[1]


def _tensor(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(array).to(device, torch.int64, non_blocking=True)

"""A rank's share of the batches: its microbatches of each global batch, and its columns of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn

from fivefold.comm.progress import progress
from fivefold.data import NOT_COUNTED, Batch, Batches, DataSet, Prefetch, Tokens
from fivefold.data.batches import objective_of
from fivefold.data.dataset import amounts, cut_of, order_of
from fivefold.data.facts import sample
from fivefold.data.stream import Stream
from fivefold.errors import UserError
from fivefold.kernels.elementwise import to_device
from fivefold.kernels.tiling import Sample
from fivefold.models.ahead import Further
from fivefold.models.base import LanguageModel
from fivefold.parallel.mesh import Mesh, Microbatch, Share, divided
from fivefold.recipe import LeftOut, Recipe, batch_size, place
from fivefold.sharding import layout
from fivefold.step.validation import ValidationSet
from fivefold.train.job import BatchSource, Job

STREAMS = "streams"  # a key of a checkpoint's meta


@contextmanager
def reader(
    job: Job, mesh: Mesh, start: int, left_out: LeftOut = ()
) -> Iterator[Callable[[], tuple[list[Microbatch], float]]]:
    """Reads this rank's share of each global batch ahead, in microbatches. left_out: see `State`."""
    batches = training_batches(job, left_out)
    first = mesh.axis("run").index == 0
    waits = streams(job)
    for stream in waits:
        stream.waiting = partial(print, file=sys.stderr, flush=True) if first else None
        stream.given_up = False
    copies = Copies(mesh.device)
    with Prefetch(lambda i: copies.begin(batches, i, mesh), start, job.recipe.train.steps) as prefetch:

        def next_batch() -> tuple[list[Microbatch], float]:
            # Other ranks may wait for one that waits for tokens, but not for ever
            with progress.phase("waiting for tokenized text") if waits else nullcontext():
                (share, copied), waited = prefetch.next()
            return copies.wait(share, copied), waited

        try:
            yield next_batch
        finally:
            for stream in waits:  # else the end of the thread would wait for tokens, too
                stream.given_up = True


class Copies:
    """Copies batches to a GPU on a stream of its own, so that the thread that reads ahead does not wait for the steps
    that are queued, nor a step for copies of later ones. On CPUs nothing is copied."""

    def __init__(self, device: torch.device):
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # for what the user's batches read

    def begin(self, read: Callable[..., Share], *arguments: Any) -> tuple[Share, torch.cuda.Event | None]:
        """The share that `read` returns, and the event with which its copies end."""
        if self._stream is None:
            return read(*arguments), None
        with torch.cuda.stream(self._stream):
            share, copied = read(*arguments), torch.cuda.Event()
            copied.record(self._stream)
        return share, copied

    def wait(self, share: Share, copied: torch.cuda.Event | None) -> Share:
        """Lets the stream of the step wait for a share. Its memory is of the other stream, and is kept for this one."""
        if copied is not None:
            step = torch.cuda.current_stream()
            step.wait_event(copied)
            for one in share:
                of = () if one.documents is None else (one.documents.first, one.documents.cumulative)
                places = () if one.positions is None else (one.positions,)
                for tensor in (one.inputs, one.targets, *of, *places, *(one.further or ())[:3]):
                    tensor.record_stream(step)
        return share


def streams(job: Job) -> list[Stream]:
    """The sources of the recipe that are tokenized while the run goes on."""
    sources = [] if job.data is None else job.data.sources.values()
    return [tokens for tokens in sources if isinstance(tokens, Stream)]


@contextmanager
def streaming(job: Job) -> Iterator[None]:
    """Ends the processes that tokenize for this run when it ends."""
    try:
        yield
    finally:
        for stream in streams(job):
            stream.stop()


def stream_states(job: Job, step: int, left_out: LeftOut) -> dict[str, Any]:
    """Where each stream has to be tokenized from for the steps behind this one, for a checkpoint."""
    recipe, data = job.recipe, job.data
    if data is None or not streams(job):
        return {}
    uses = order_of(recipe, amounts(recipe, data)).before(place(recipe.train, step, left_out))
    sources = zip(data.sources.values(), uses, strict=True)
    return {STREAMS: [tokens.state(use) for tokens, use in sources if isinstance(tokens, Stream)]}


def training_batches(job: Job, left_out: LeftOut = ()) -> Callable[[int, Mesh], Share]:
    """A function of a step (0, 1, ...) and the mesh: this rank's share of the global batch, in microbatches."""
    train, batches = job.recipe.train, source_of(job, left_out)
    if job.batches is not None and train.batch_ramp:
        raise UserError("train.batch_ramp needs the data of a recipe: your own batches have their size")

    def share(i: int, mesh: Mesh) -> Share:
        size = batch_size(train, i) if train.batch_ramp else train.global_batch_size
        number = place(train, i, left_out) // size if left_out and job.batches is not None else i
        return share_of(batches, number, size, train.microbatch_size or 1, mesh)

    return share


def source_of(job: Job, left_out: LeftOut = ()) -> BatchSource:
    """The training batches: the user's own, or the recipe's."""
    if job.batches is not None:
        return job.batches
    assert job.data is not None
    return batches_of(job.recipe, job.data, left_out, job.module)


def validation_sets(job: Job, mesh: Mesh) -> list[ValidationSet]:
    """This rank's share of each validation set."""
    recipe, size, data = job.recipe, job.recipe.train.val_sequences, job.data
    dp, rows = mesh.axis("dp"), recipe.train.microbatch_size or 1
    # A launch that is one replica group of several validates by itself
    alone = (dp.index, dp.size) if mesh.apart else None
    if job.val_batches is not None:
        microbatches = rows_of(job.val_batches, size, rows, mesh, mesh.divided, alone)
        return [ValidationSet("", True, microbatches, None)]
    if data is None or not data.validation_sets:
        return []
    token_bytes = None
    if data.tokenizer is not None and objective_of(recipe) == "causal":
        token_bytes = torch.as_tensor(data.tokenizer.token_bytes, device=mesh.device)
    headlines, sets = data.held_out or data.validation_sets, list[ValidationSet]()
    for name, tokens in data.validation_sets.items():
        batches = in_order(recipe, data, tokens, size, job.module)
        microbatches = rows_of(batches, min(size, batches.sequences), rows, mesh, mesh.divided, alone)
        shown = "" if len(data.validation_sets) == 1 else name
        sets.append(ValidationSet(shown, name in headlines, microbatches, token_bytes))
    return sets


def in_order(
    recipe: Recipe, data: DataSet, tokens: Tokens, size: int, module: nn.Module | None = None
) -> Batches:
    """Batches of `size` sequences in their own order, for validation. module: as in `batches_of`."""
    return _batches(recipe, data, [tokens], size, _sees_documents(module), shuffle=False)


def batches_of(
    recipe: Recipe, data: DataSet, left_out: LeftOut = (), module: nn.Module | None = None
) -> Batches:
    """The training batches of a run. module: the user's own, if it is not the recipe's."""
    assert recipe.model.vocab_size is not None
    train, order = recipe.train, order_of(recipe, amounts(recipe, data))
    begins = partial(place, train, left_out=left_out) if train.batch_ramp or left_out else None
    sources, apart = data.sources.values(), _sees_documents(module)
    return _batches(recipe, data, sources, train.global_batch_size, apart, begins=begins, order=order)


def _batches(
    recipe: Recipe, data: DataSet, sources: Iterable[Tokens | Stream], size: int, apart: bool, **more: Any
) -> Batches:
    objective, seed = objective_of(recipe), recipe.train.seed
    cuts = [cut_of(recipe, data, tokens, apart) for tokens in sources]
    given = recipe.model.seq_len, size, seed, objective, data.mask_id, data.vocab_size
    return Batches(cuts, *given, **more)


def documents_of(job: Job) -> Sample | None:
    """Sequences of a run with the documents that its attention sees; None: each is seen as a whole, or they are not
    known before it."""
    own = job.data is None or job.batches is not None or not _sees_documents(job.module)
    if own or not job.recipe.data.document_masks:
        return None
    assert job.data is not None
    return sample(job.recipe, job.data)


def _sees_documents(module: nn.Module | None) -> bool:
    """True if a module can be told of documents: the recipe's, or the user's own where `forward` (of its blocks, if it
    is a `LanguageModel`) has the argument `documents`."""
    parts = list(module.blocks.values()) if isinstance(module, LanguageModel) else [module]
    return all(part is None or "documents" in signature(part.forward).parameters for part in parts)


def share_of(
    batches: BatchSource,
    i: int,
    size: int,
    microbatch: int,
    mesh: Mesh,
    share: tuple[int, int] | None = None,
) -> Share:
    """This rank's microbatches of global batch i, of `size` rows, and its columns of them, on its device. Every rank
    reads the targets of the whole batch if they may count unequally often; so none has to be told.

    share: (index, number of shares) of the batch, if the mesh does not say it.
    """
    dp = mesh.axis("dp")
    assert size % microbatch == 0, f"{size} sequences in microbatches of {microbatch}"
    index, ranks = share or _place(mesh)
    whole = size // microbatch
    mine = layout.share(whole, index, ranks)
    parts = [range(number * microbatch, (number + 1) * microbatch) for number in mine]
    empty = layout.largest(whole, ranks) - len(parts) if mesh.in_step else 0
    pairs = [_rows(batches, i, rows, mesh) for rows in parts]
    microbatches = [columns for columns, _ in pairs]
    if getattr(batches, "uneven", False):
        average = max(1, batches.counted(i, size)) / whole  # type: ignore[attr-defined]
        microbatches = [columns._replace(weight=count / average) for columns, count in pairs]
    microbatches += [_fill(_rows(batches, i, range(1), mesh)[0], 0, microbatch) for _ in range(empty)]
    return Share(microbatches, len(parts), whole * dp.size // ranks)


def rows_of(
    batches: BatchSource,
    size: int,
    microbatch: int,
    mesh: Mesh,
    equal: bool = False,
    share: tuple[int, int] | None = None,
) -> list[Microbatch]:
    """This rank's rows of `size` in all, as equally many as can be, in microbatches: for validation, whose caller
    weighs each by its targets.

    equal: all ranks get equally many microbatches, all of them full, filled up with rows that do not count. Where ranks
    compute a model together, one that has nothing to do still has to take part. share: as in `share_of`.
    """
    index, ranks = share or _place(mesh)
    mine = layout.share(size, index, ranks)
    parts = [range(row, min(row + microbatch, mine.stop)) for row in mine[::microbatch]]
    if equal:
        parts += [range(0)] * (-(-layout.largest(size, ranks) // microbatch) - len(parts))
    microbatches = []
    for rows in parts:
        columns, _ = _rows(batches, 0, rows or range(1), mesh)
        microbatches.append(_fill(columns, len(rows), microbatch) if equal else columns)
    return microbatches


def _place(mesh: Mesh) -> tuple[int, int]:
    """This rank's number among all data-parallel ranks of the run, and their number."""
    dp = mesh.axis("dp")
    return mesh.replica_group * dp.size + dp.index, mesh.replica_groups * dp.size


def _rows(batches: BatchSource, i: int, rows: range, mesh: Mesh) -> tuple[Microbatch, int]:
    """This rank's columns of these rows of batch i, on its device, and the number of targets that count in all
    columns."""
    batch = Batch(*batches.batch(i, rows))
    given = (torch.as_tensor(x).to(torch.int64) for x in (batch.inputs, batch.targets))
    tokens, targets = (to_device(x, mesh.device) for x in given)
    first_BT = None if batch.first is None else np.asarray(batch.first)
    return divided(tokens, targets, first_BT, mesh), int((batch.targets >= 0).sum())


def _fill(given: Microbatch, real: int, rows: int) -> Microbatch:
    """Pads at most `rows` sequences, `real` of them counted, to `rows` sequences. The others do not count."""
    ahead, documents = given.further, given.documents
    whole = given.inputs, given.targets, *(ahead[:2] if ahead else ())
    filled = [torch.cat([x, x[:1].expand(rows - len(x), *x.shape[1:])]) for x in whole]
    for targets in filled[1::2]:
        targets[real:] = NOT_COUNTED
    inputs, targets, *more = filled
    ahead = ahead and Further(more[0], more[1], ahead.counts)
    documents = documents and documents.filled(rows)
    return given._replace(inputs=inputs, targets=targets, documents=documents, further=ahead)

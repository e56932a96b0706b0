"""Batch i of a run is a pure function of (seed, i), for any number of ranks.

`cut.py` says what sequence n of a source is. The run walks through places 0, 1, 2, ... Batch i holds places i B to
(i + 1) B - 1, or those after all smaller batches before it (`train.batch_ramp`). Which sequence of which source stands
at a place is said by `order.py`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from fivefold.data.order import Order, hash_keys, item_numbers, seed_of
from fivefold.data.packing import NOT_COUNTED, Batch, Concatenated, Cut, count_sequences
from fivefold.data.stream import Stream
from fivefold.data.tokens import Tokens
from fivefold.models.card import card_of
from fivefold.models.registry import Objective, predicted
from fivefold.recipe import Recipe, total_steps

# Of the positions that `mlm` predicts 80% become the mask token, 10% a random one, 10% stay.
MASK_TO_MASK, MASK_TO_RANDOM = 0.8, 0.1


class Batches:
    """The batches of a set of tokens, or of several sources in the order that `order` says. A source is cut by a `Cut`;
    tokens are cut one sequence behind the other.

    objective: `causal` (the target is the next token) or `mlm` (the target is the hidden token; needs mask_id and
    vocab_size). begins: the position at which batch i begins; None: all have the same size. shuffle=False keeps the
    sequences in their own order, for validation. `counts` are the numbers of sequences of the sources, `sequences` is
    their sum. `uneven`: microbatches may differ in how many targets count.
    """

    def __init__(
        self,
        tokens: Tokens | Stream | Cut | Sequence[Tokens | Stream | Cut],
        seq_len: int,
        batch_size: int,
        seed: int,
        objective: Objective = "causal",
        mask_id: int | None = None,
        vocab_size: int | None = None,
        shuffle: bool = True,
        begins: Callable[[int], int] | None = None,
        order: Order | None = None,
    ):
        self.begins = begins or (lambda i: i * batch_size)
        given = tokens if isinstance(tokens, Sequence) else [tokens]
        self.sources = [_cut(source, seq_len, objective) for source in given]
        self.order = order or Order()
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self.objective, self.mask_id, self.vocab_size, self.shuffle = objective, mask_id, vocab_size, shuffle
        self.counts = [source.count for source in self.sources]
        self.sequences, self.uneven = sum(self.counts), any(source.uneven for source in self.sources)
        assert len(self.sources) == self.order.sources
        assert min(self.counts) >= 1, "prepare() refuses a source smaller than one sequence"
        assert objective == "causal" or (mask_id is not None and vocab_size is not None)

    def batch(self, i: int, rows: range | None = None) -> Batch:
        """Batch i: inputs, targets and documents. The loss ignores targets of -100.

        rows: the wanted sequences among the B of the global batch [default: all]. Ranks and microbatches can cut the
        same batch in any way.
        """
        rows = range(self.batch_size) if rows is None else rows
        assert 0 <= rows.start <= rows.stop <= self.batch_size
        places_R = self.begins(i) + np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
        found = self._read(places_R)
        return found if self.objective == "causal" else self._mask(found, places_R)

    def counted(self, i: int, size: int) -> int:
        """Number of targets that count in the first `size` sequences of batch i: in all of it, for all ranks."""
        return int((self.batch(i, range(size)).targets >= 0).sum())

    def first(self, places_R: np.ndarray) -> np.ndarray:
        """The column at which the document of each token begins, in the sequences at these places: (R, T)."""
        found = self._read(places_R).first
        return np.zeros((len(places_R), self.seq_len), np.int64) if found is None else found

    def _read(self, places_R: np.ndarray) -> Batch:
        """The sequence at each place."""
        sources_R, uses_R = self.order.at(places_R)
        shape = len(places_R), self.seq_len
        inputs, targets = np.empty(shape, np.int64), np.empty(shape, np.int64)
        first = np.zeros(shape, np.int64)
        for source in np.unique(sources_R).tolist():
            here = sources_R == source
            part = self.sources[source].read(self._numbers(source, uses_R[here]))
            if len(self.sources) == 1:
                return part
            inputs[here], targets[here] = part.inputs, part.targets
            if part.first is not None:
                first[here] = part.first
        return Batch(inputs, targets, first if first.any() else None)

    def _numbers(self, source: int, uses_R: np.ndarray) -> np.ndarray:
        """The sequences of a source that its uses take."""
        cut, count = self.sources[source], self.counts[source]
        if isinstance(cut, Concatenated) and isinstance(cut.tokens, Stream):
            overlap = int(self.objective == "causal")
            return cut.tokens.numbers(uses_R, self.seq_len, overlap, seed_of(self.seed, source))
        return item_numbers(uses_R, count, self.seed, source) if self.shuffle else uses_R % count

    def _mask(self, found: Batch, places_R: np.ndarray) -> Batch:
        """Hides exactly round(0.15 T) positions of each sequence, so that every microbatch has equal weight."""
        assert self.mask_id is not None
        assert self.vocab_size is not None
        tokens_RT = found.inputs
        hidden = predicted("mlm", self.seq_len)  # M positions per sequence
        columns_T = np.arange(self.seq_len)
        scores_RT = hash_keys(self.seed, 1, places_R[:, None], columns_T)
        at_RM = np.sort(np.argpartition(scores_RT, hidden - 1, axis=1)[:, :hidden], axis=1)
        draw_RM = hash_keys(self.seed, 2, places_R[:, None], at_RM)
        uniform_RM = draw_RM / np.float64(2**64)
        random_RM = (mix_again(draw_RM) % np.uint64(self.vocab_size)).astype(np.int64)
        original_RM = np.take_along_axis(tokens_RT, at_RM, 1)
        shown_RM = np.where(uniform_RM < MASK_TO_MASK + MASK_TO_RANDOM, random_RM, original_RM)
        shown_RM = np.where(uniform_RM < MASK_TO_MASK, self.mask_id, shown_RM)
        targets_RT = np.full_like(tokens_RT, NOT_COUNTED)
        np.put_along_axis(targets_RT, at_RM, original_RM, 1)
        np.put_along_axis(tokens_RT, at_RM, shown_RM, 1)
        return Batch(tokens_RT, targets_RT, found.first)


def _cut(source: Tokens | Stream | Cut, seq_len: int, objective: Objective) -> Cut:
    return source if hasattr(source, "read") else Concatenated(source, seq_len, objective)  # pyright: ignore


def mix_again(draw: np.ndarray) -> np.ndarray:
    """A second random number from the same draw, independent enough of the first."""
    return hash_keys(3, draw)


def objective_of(recipe: Recipe) -> Objective:
    return card_of(recipe.model).objective


def steps_of(recipe: Recipe) -> int | None:
    """Optimizer steps of the run, or None if the recipe sets none (data can be prepared without training)."""
    return total_steps(recipe) if recipe.train.steps or recipe.train.tokens else None


def items_in(recipe: Recipe, tokens: int) -> int:
    """The number of sequences in so many tokens, one behind the other."""
    return count_sequences(tokens, recipe.model.seq_len, objective_of(recipe))


T = TypeVar("T")


class Prefetch(Generic[T]):
    """A thread that calls fetch(start), fetch(start + 1), ... up to stop (None: endless), at most `depth` ahead.

    A thread is enough, because a batch takes far less time than a step. Close it (or use `with`) to end the thread:

        with Prefetch(lambda i: batches.batch(i, rows), step) as ready:
            (inputs, targets), waited = ready.next()
    """

    def __init__(self, fetch: Callable[[int], T], start: int = 0, stop: int | None = None, depth: int = 2):
        self._fetch, self._next, self._stop_at = fetch, start, stop
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fivefold-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> tuple[T, float]:
        """The next batch, and the seconds waited for it. Raises what fetch raised, and StopIteration at the end."""
        assert not self._closed.is_set(), "closed"
        began = time.perf_counter()
        batch, error = self._ready.get()
        if error is not None:
            self.close()
            raise error
        return batch, time.perf_counter() - began  # type: ignore[return-value]

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                if self._next == self._stop_at:
                    raise StopIteration
                item = (self._fetch(self._next), None)
            except BaseException as error:  # raised to the caller of next()
                item = (None, error)
            self._next += 1
            while not self._closed.is_set():
                try:
                    self._ready.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if item[1] is not None:
                return

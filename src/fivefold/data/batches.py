"""Batch i of a run is a pure function of (seed, i), for any number of ranks; so resuming needs no state.

A run walks through places 0, 1, 2, ... Batch i holds places i B to (i + 1) B - 1, or those after all smaller batches
before it (`train.batch_ramp`). Two sources share the places as a line on a grid does (Bresenham, 1965). Of the first n
places floor(n w + 1/2) are the first one's, where w is its share. More sources are the leaves of a tree, built as
Huffman's (1952). Each node deals its places out to two children. So in every prefix of a stage each source has the
number of items that its weight says, but for less than 2. Megatron-LM meets weights as closely by a list (helpers.cpp,
build_blending_indices: the source that is furthest behind is next), which has to be made up to the last place. Within a
source items come in the order of a keyed permutation, which differs in each of its epochs.

An item is a sequence. A document in it begins with the end token before it, which a prompt begins with, too. So the
first word of a document is predicted from nothing else, as in evaluation. Masked tokens are predicted from all around
them: there the end token belongs to the document that it ends.

Where a source has conversations, flags of its tokens say where documents end and which targets count. Elsewhere it is
the index of Megatron-LM's files, or else the end token, and all count. A conversation begins with its own first token,
as the prompt of a chat does, and so does a document that follows no end token. That token is no target.

Legend: R sequences, T tokens of a sequence.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from fivefold.data.stream import Stream
from fivefold.data.tokens import COUNTED, ENDS, Tokens
from fivefold.models import Objective, predicted
from fivefold.models.card import card_of
from fivefold.recipe import Recipe

NOT_COUNTED = -100  # a target that the loss ignores (the convention of torch's cross entropy)
# Of the positions that `mlm` predicts 80% become the mask token, 10% a random one, 10% stay.
MASK_TO_MASK, MASK_TO_RANDOM = 0.8, 0.1
ROUNDS = 6  # 4 are proven enough for random round functions; 2 more because a hash is not random
UNIT = 1 << 30
"""Weights are whole numbers with about this sum, so that all machines compute the same."""


class Batch(NamedTuple):
    """Sequences of a batch, all int64 (R, T).

    targets: negative ones do not count in the loss. first: the column at which the document of each token begins; None:
    every sequence is one document.
    """

    inputs: np.ndarray
    targets: np.ndarray
    first: np.ndarray | None = None


class Cut(Protocol):
    """The sequences of a source. count: their number. uneven: sequences differ in how many targets count."""

    count: int
    uneven: bool

    def read(self, numbers_R: np.ndarray) -> Batch:
        """The sequences with these numbers. Where tokens are hidden later, targets are the inputs."""
        ...


def count_sequences(tokens: int, seq_len: int, objective: str) -> int:
    """Number of whole sequences in `tokens` tokens. A causal sequence has T + 1 tokens (overlap 1), a masked one T."""
    return max(0, tokens - 1) // seq_len if objective == "causal" else tokens // seq_len


class Concatenated:
    """Sequence n of a source is tokens[n T : n T + T + 1]. A remainder is dropped. end: the token between documents;
    None: it is not known. apart: a sequence has documents; False: it is one. Unset: True if `end` is known."""

    def __init__(
        self,
        tokens: Tokens | Stream,
        seq_len: int,
        objective: Objective = "causal",
        end: int | None = None,
        apart: bool | None = None,
    ):
        self.tokens, self.seq_len, self.objective, self.end = tokens, seq_len, objective, end
        self.apart = end is not None if apart is None else apart
        self.indexed = self.apart and isinstance(tokens, Tokens) and tokens.indexed
        self.uneven = tokens.flags is not None or (self.indexed and objective == "causal")
        self.count = count_sequences(len(tokens), seq_len, objective)

    def read(self, numbers_R: np.ndarray) -> Batch:
        causal = self.objective == "causal"
        starts_R, length = numbers_R * self.seq_len, self.seq_len + causal
        block = self.tokens.rows(starts_R, length)
        flags = None if self.tokens.flags is None else self.tokens.flags.rows(starts_R, length)
        first = None
        others = np.zeros_like(block, bool)  # last tokens that do not belong to the next document, too
        if self.apart:
            ends = self._ends(starts_R, block, flags)
            inside = ends & (block == self.end) if causal and flags is None else others
            others = ends & ~inside
            begins_RT = (inside | np.roll(others, 1, axis=1))[:, : self.seq_len]
            if begins_RT[:, 1:].any():  # else every sequence is one document
                columns_T = np.arange(self.seq_len)
                first = np.maximum.accumulate(np.where(begins_RT & (columns_T > 0), columns_T, 0), axis=1)
        if not causal:
            return Batch(block, block, first)
        targets_RT = block[:, 1:].copy()  # of a single row it would be a view, and inputs must not change
        if flags is not None:
            targets_RT[flags[:, 1:] & COUNTED == 0] = NOT_COUNTED
        targets_RT[others[:, :-1]] = NOT_COUNTED  # the first token of the next document
        return Batch(np.ascontiguousarray(block[:, :-1]), targets_RT, first)

    def _ends(self, starts_R: np.ndarray, block: np.ndarray, flags: np.ndarray | None) -> np.ndarray:
        """Which tokens of a block are the last of their document."""
        if flags is not None:
            return flags & ENDS > 0
        if not self.indexed:
            return block == self.end
        assert isinstance(self.tokens, Tokens)
        ends = np.zeros_like(block, bool)
        for row, start in zip(ends, starts_R.tolist(), strict=True):
            row[self.tokens.ends(start, start + len(row), self.end) - start] = True
        return ends


def mix64(x: np.ndarray) -> np.ndarray:
    """Hash of each uint64 (the finalizer of splitmix64: Steele, Lea and Flood, 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_keys(*parts: int | np.ndarray) -> np.ndarray:
    """uint64 hash of the parts, broadcast together: hash_keys(seed, rows (R, 1), columns (T,)) is (R, T)."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        if isinstance(part, int):
            part = np.array([part & 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
        state = mix64(state ^ part.astype(np.uint64))
    return state


def permute(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Applies the permutation of range(n) for (seed, epoch) to each position.

    A Feistel network (Luby and Rackoff, 1988) permutes the numbers of 2k bits. Cycle walking (Black and Rogaway,
    2002) applies it again until the result is below n. The domain is smaller than 4 n, so a position takes fewer
    than 4 rounds on average. Memory is O(1) in n.

    positions: integers in [0, n), any shape. Returns int64 of that shape.
    """
    assert n >= 1
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    keys = [hash_keys(seed, epoch, r) for r in range(ROUNDS)]

    def network(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for key in keys:
            left, right = right, left ^ (mix64(right ^ key) & mask)
        return (left << shift) | right

    x = network(np.asarray(positions).astype(np.uint64).reshape(-1))
    outside = x >= n
    while outside.any():
        x[outside] = network(x[outside])
        outside = x >= n
    return x.astype(np.int64).reshape(np.shape(positions))


def seed_of(seed: int, source: int) -> int:
    """The seed of a source's order: sources of one size do not share one."""
    return int(hash_keys(seed, source)[0]) if source else seed


def item_numbers(uses_R: np.ndarray, count: int, seed: int, source: int = 0) -> np.ndarray:
    """The items of a source of `count` items that its uses 0, 1, 2, ... take. Each epoch takes every item once."""
    seed = seed_of(seed, source)
    epochs_R, positions_R = np.divmod(uses_R, count)
    numbers_R = np.empty_like(positions_R)
    for epoch in np.unique(epochs_R).tolist():  # two epochs if a batch crosses a border
        here = epochs_R == epoch
        numbers_R[here] = permute(positions_R[here], count, seed, epoch)
    return numbers_R


def shuffled_window(seed: int, positions: np.ndarray, items: int, epoch: int, window: int) -> np.ndarray:
    """The items of a stream's window at some positions."""
    return permute(positions, items, seed, int(hash_keys(epoch, window)[0]) >> 1)


class _Node(NamedTuple):
    """Deals places out to two children: source numbers, or nodes."""

    left: _Node | int
    right: _Node | int
    own: int  # weight of the left child
    whole: int


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """The weights as whole numbers with a sum of about UNIT. One that is not 0 stays so."""
    total = math.fsum(weights)
    return tuple(max(1, round(weight / total * UNIT)) if weight else 0 for weight in weights)


def _tree(weights: Sequence[int]) -> _Node | int:
    queue: list[tuple[int, int, _Node | int]] = [(w, i, i) for i, w in enumerate(weights) if w]
    assert queue, "the recipe's rules want a weight above 0"
    heapq.heapify(queue)
    number = len(weights)
    while len(queue) > 1:
        (light, _, small), (heavy, _, large) = heapq.heappop(queue), heapq.heappop(queue)
        heapq.heappush(queue, (light + heavy, number, _Node(small, large, light, light + heavy)))
        number += 1
    return queue[0][2]


class Stage(NamedTuple):
    """The places from `begin` on: the weight of each source there."""

    begin: int = 0
    weights: tuple[int, ...] = (1,)


class Order:
    """Deals the places of a run out to sources. Stages are in order, and the first begins at 0."""

    def __init__(self, stages: Sequence[Stage] = (Stage(),)):
        assert stages[0].begin == 0
        self.stages = tuple(stages)
        self.sources = len(stages[0].weights)
        self._trees = [_tree(stage.weights) for stage in stages]
        self._used = [np.zeros(self.sources, np.int64)]  # uses of each source before each stage
        for number, (stage, after) in enumerate(pairwise(stages)):
            self._used.append(self._used[-1] + self._dealt(number, after.begin - stage.begin))

    def at(self, places_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(number of the source, which of its uses this is) for each place."""
        sources_R, uses_R = np.zeros_like(places_R), np.zeros_like(places_R)
        begins = np.array([stage.begin for stage in self.stages])
        stages_R = np.searchsorted(begins, places_R, side="right") - 1
        for number in np.unique(stages_R).tolist():
            (here,) = np.nonzero(stages_R == number)
            places = places_R[here] - begins[number]
            before = self._dealt(number, places)
            sources_R[here] = (self._dealt(number, places + 1) - before).argmax(0)  # one is dealt one more
            uses_R[here] = before[sources_R[here], np.arange(len(here))] + self._used[number][sources_R[here]]
        return sources_R, uses_R

    def before(self, place: int) -> list[int]:
        """Uses of each source in the places before this one."""
        number = max(n for n, stage in enumerate(self.stages) if n == 0 or stage.begin < place)
        return (self._used[number] + self._dealt(number, place - self.stages[number].begin)).tolist()

    def _dealt(self, number: int, places: int | np.ndarray) -> np.ndarray:
        """Uses of each source in the first `places` places of a stage: (sources, ...)."""
        counts = np.zeros((self.sources, *np.shape(places)), np.int64)
        open_ = [(self._trees[number], np.asarray(places, np.int64))]
        while open_:
            node, count = open_.pop()
            if isinstance(node, int):
                counts[node] = count
            else:
                periods, rest = np.divmod(count, node.whole)  # the left child has exact floor(count w + 1/2)
                left = periods * node.own + (2 * rest * node.own + node.whole) // (2 * node.whole)
                open_ += [(node.left, left), (node.right, count - left)]
        return counts


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
        self.sources: list[Cut] = [
            Concatenated(source, seq_len, objective) if isinstance(source, Tokens | Stream) else source
            for source in given
        ]
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
        batch = self._read(places_R)
        return batch if self.objective == "causal" else self._mask(batch, places_R)

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
            assert cut.tokens.seq_len == self.seq_len
            return cut.tokens.numbers(uses_R, partial(shuffled_window, seed_of(self.seed, source)))
        return item_numbers(uses_R, count, self.seed, source) if self.shuffle else uses_R % count

    def _mask(self, batch: Batch, places_R: np.ndarray) -> Batch:
        """Hides exactly round(0.15 T) positions of each sequence, so that every microbatch has equal weight."""
        assert self.mask_id is not None
        assert self.vocab_size is not None
        tokens_RT = batch.inputs
        hidden = predicted("mlm", self.seq_len)  # M positions per sequence
        columns_T = np.arange(self.seq_len)
        scores_RT = hash_keys(self.seed, 1, places_R[:, None], columns_T)
        at_RM = np.sort(np.argpartition(scores_RT, hidden - 1, axis=1)[:, :hidden], axis=1)
        draw_RM = hash_keys(self.seed, 2, places_R[:, None], at_RM)
        uniform_RM = draw_RM / np.float64(2**64)
        random_RM = (hash_keys(3, draw_RM) % np.uint64(self.vocab_size)).astype(np.int64)
        original_RM = np.take_along_axis(tokens_RT, at_RM, 1)
        shown_RM = np.where(uniform_RM < MASK_TO_MASK + MASK_TO_RANDOM, random_RM, original_RM)
        shown_RM = np.where(uniform_RM < MASK_TO_MASK, self.mask_id, shown_RM)
        targets_RT = np.full_like(tokens_RT, NOT_COUNTED)
        np.put_along_axis(targets_RT, at_RM, original_RM, 1)
        np.put_along_axis(tokens_RT, at_RM, shown_RM, 1)
        return Batch(tokens_RT, targets_RT, batch.first)


def objective_of(recipe: Recipe) -> Objective:
    return card_of(recipe.model).objective


def items_in(recipe: Recipe, tokens: int) -> int:
    """The number of sequences in so many tokens, one behind the other."""
    return count_sequences(tokens, recipe.model.seq_len, objective_of(recipe))


T = TypeVar("T")


class Prefetch(Generic[T]):
    """A thread that calls fetch(start), fetch(start + 1), ... up to stop (None: endless), at most `depth` ahead.

    A thread is enough, because a batch takes far less time than a step. It ends with the block:

        with Prefetch(lambda i: batches.batch(i, rows), step) as ready:
            (inputs, targets), waited = ready.next()
    """

    def __init__(self, fetch: Callable[[int], T], start: int = 0, stop: int | None = None, depth: int = 2):
        self._fetch = fetch
        self._steps = iter(range(start, 1 << 62 if stop is None else stop))
        self._pool = ThreadPoolExecutor(1, "fivefold-prefetch")
        self._ready = deque(self._pool.submit(fetch, step) for step in islice(self._steps, depth))

    def next(self) -> tuple[T, float]:
        """The next batch, and the seconds waited for it. Raises what fetch raised, and StopIteration at the end."""
        began = time.perf_counter()
        if not self._ready:
            raise StopIteration
        batch = self._ready.popleft().result()
        self._ready.extend(self._pool.submit(self._fetch, step) for step in islice(self._steps, 1))
        return batch, time.perf_counter() - began

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

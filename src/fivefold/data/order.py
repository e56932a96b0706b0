"""Which item of which source stands at which place of a run: a function, so resuming needs no state.

A run walks through places 0, 1, 2, ... Two sources share them as a line on a grid does (Bresenham, 1965). Of the first
n places floor(n w + 1/2) are the first one's, where w is its share. More sources are the leaves of a tree, built as
Huffman's (1952). Each node deals its places out to two children. So in every prefix of a stage each source has the
number of items that its weight says, but for less than 2. Megatron-LM meets weights as closely by a list (helpers.cpp,
build_blending_indices: the source that is furthest behind is next), which has to be made up to the last place.

Within a source items come in the order of a keyed permutation, which differs in each of its epochs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

ROUNDS = 6  # 4 are proven enough for random round functions; 2 more because a hash is not random
UNIT = 1 << 30
"""Weights are whole numbers with about this sum, so that all machines compute the same."""


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


class _Node(NamedTuple):
    """Deals places out to two children: source numbers, or nodes."""

    left: _Node | int
    right: _Node | int
    own: int  # weight of the left child
    whole: int

    def lefts(self, places: np.ndarray) -> np.ndarray:
        """How many of the first `places` places are the left child's: exact floor(places w + 1/2)."""
        periods, rest = np.divmod(places, self.whole)
        return periods * self.own + (2 * rest * self.own + self.whole) // (2 * self.whole)


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

    begin: int
    weights: tuple[int, ...]


ONE_SOURCE = (Stage(0, (1,)),)


class Order:
    """Deals the places of a run out to sources. Stages are in order, and the first begins at 0."""

    def __init__(self, stages: Sequence[Stage] = ONE_SOURCE):
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
            self._deal(self._trees[number], here, places_R[here] - begins[number], sources_R, uses_R)
            uses_R[here] += self._used[number][sources_R[here]]
        return sources_R, uses_R

    def before(self, place: int) -> list[int]:
        """Uses of each source in the places before this one."""
        number = max(n for n, stage in enumerate(self.stages) if n == 0 or stage.begin < place)
        return (self._used[number] + self._dealt(number, place - self.stages[number].begin)).tolist()

    def _dealt(self, number: int, places: int) -> np.ndarray:
        """Uses of each source in the first places of a stage."""
        found = np.zeros(self.sources, np.int64)
        open_ = [(self._trees[number], np.array(places, np.int64))]
        while open_:
            node, count = open_.pop()
            if isinstance(node, int):
                found[node] = count
            else:
                left = node.lefts(count)
                open_ += [(node.left, left), (node.right, count - left)]
        return found

    def _deal(
        self,
        node: _Node | int,
        rows: np.ndarray,
        places: np.ndarray,
        sources_R: np.ndarray,
        uses_R: np.ndarray,
    ) -> None:
        """Writes source and use of these rows, whose places below the node are given."""
        if isinstance(node, int):
            sources_R[rows], uses_R[rows] = node, places
            return
        before = node.lefts(places)
        left = node.lefts(places + 1) > before
        self._deal(node.left, rows[left], before[left], sources_R, uses_R)
        self._deal(node.right, rows[~left], (places - before)[~left], sources_R, uses_R)

"""The order in which sequences are seen: a keyed permutation of range(n), with no index in memory.

A Feistel network (Luby and Rackoff, 1988) permutes the numbers of 2k bits, and cycle walking (Black and
Rogaway, 2002: apply it again until the result is below n) makes that a permutation of any range(n).
Position -> sequence is therefore a pure function of (seed, epoch, position): a resumed run, or one with
another number of ranks, asks for position p and gets the same sequence.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6  # 4 are proven enough with random round functions; 2 more for a hash that is not


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
    """Where the permutation of range(n) for (seed, epoch) sends each position.

    positions: integers in [0, n), any shape. Returns int64 of that shape. O(1) memory in n; the domain is
    smaller than 4 n, so a position walks fewer than 4 steps on average.
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

"""Checks of 05_context_parallelism.py."""

import numpy as np

DRAW = np.random.default_rng(0)
Q, K, V = (DRAW.normal(size=(n, 4)) for n in (3, 10, 10))


def whole(q, k, v):
    weights = np.exp(q @ k.T / 2)
    return weights @ v / weights.sum(1, keepdims=True), np.log(weights.sum(1))


def check_partial(partial):
    out, lse = partial(Q, K, V)
    for name, found, wanted in zip(("output", "log-sum-exp"), (out, lse), whole(Q, K, V), strict=True):
        if found.shape != wanted.shape or not np.allclose(found, wanted):
            partial.wrong(f"the {name} of a small example is {np.round(found, 3).tolist()}, "
                          f"expected {np.round(wanted, 3).tolist()}")  # fmt: skip
    with np.errstate(all="ignore"):
        out, _ = partial(1000 * Q, 1000 * K, V)
    if not np.isfinite(out).all():
        partial.wrong("scores of a million overflow: subtract the largest one first")


def check_merge(merge):
    first, second = whole(Q, K[:7], V[:7]), whole(Q, K[7:], V[7:])
    out, lse = merge(*first, *second)
    wanted_out, wanted_lse = whole(Q, K, V)
    if not np.allclose(lse, wanted_lse):
        merge.wrong("the log-sum-exp is not log(exp(lse1) + exp(lse2))")
    if not np.allclose(out, wanted_out):
        merge.wrong("two parts of the keys, merged, are not attention to all of them")
    shifted, _ = merge(first[0], first[1] + 2000, second[0], second[1] + 2000)
    if not np.allclose(shifted, wanted_out):
        merge.wrong("log-sum-exps of 2000 overflow: only their differences may be exponentials")


def check_zigzag(zigzag):
    zigzag.gives([0, 1, 14, 15], 16, 4, 0)
    zigzag.gives([6, 7, 8, 9], 16, 4, 3)
    together = sorted(position for rank in range(3) for position in zigzag(24, 3, rank))
    if together != list(range(24)):
        zigzag.wrong(f"24 tokens on 3 ranks: together they have {together}")


def check_pairs(pairs):
    pairs.gives(6, [0, 1, 2])
    pairs.gives(100, [99])
    mine = pairs.others["zigzag"]
    shares = [pairs(mine(64, 4, rank)) for rank in range(4)]
    if len(set(shares)) != 1 or sum(shares) != 64 * 65 // 2:
        pairs.wrong(
            f"with zig-zag parts of 64 tokens the four ranks have {shares} pairs, not a quarter of 2080 each"
        )

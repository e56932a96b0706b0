"""Checks of 07_expert_parallelism.py."""

import numpy as np

DRAW = np.random.default_rng(0)


def check_route(route):
    chosen, weights = route(np.log(np.array([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])), 2)
    if np.asarray(chosen).tolist() != [[1, 2], [0, 2]]:
        route.wrong(f"of shares [0.1, 0.6, 0.3] and [0.5, 0.2, 0.3] it takes {np.asarray(chosen).tolist()}")
    if not np.allclose(weights, [[2 / 3, 1 / 3], [5 / 8, 3 / 8]]):
        route.wrong(f"their weights are {np.round(weights, 4).tolist()}, expected [[2/3, 1/3], [5/8, 3/8]]")
    _, weights = route(np.array([[2000.0, 1999.0]]), 2)
    if not np.isfinite(weights).all():
        route.wrong("logits of 2000 overflow: subtract the largest one first")


def check_rows_for_ranks(rows_for_ranks):
    chosen = np.array([[0, 1], [0, 3], [0, 1]])
    rows_for_ranks.gives([5, 1], chosen, 4, 2)
    rows_for_ranks.gives([3, 2, 0, 1], chosen, 4, 4, why="a rank without rows counts, too")


def check_imbalance(imbalance):
    even = np.arange(8).reshape(4, 2)
    imbalance.gives(1.0, even, 8, 4)
    imbalance.gives(4.0, np.zeros((5, 1), dtype=int), 4, 4, why="all tokens choose one of four ranks")
    imbalance.gives(1.5, np.array([[0], [1], [0], [2]]), 4, 2, why="3 rows of 4, where 2 are even")


def check_balance_loss(balance_loss):
    even = np.full((8, 4), 0.25)
    balance_loss.gives(1.0, even, np.arange(8).reshape(8, 1) % 4, why="an even load")
    worst = np.eye(4)[np.zeros(8, dtype=int)]
    balance_loss.gives(4.0, worst, np.zeros((8, 1), dtype=int), why="all tokens want one of four experts")
    balance_loss.gives(
        1.0, even, np.zeros((8, 2), dtype=int), why="undecided shares: there is nothing to push"
    )


def check_balanced(balanced):
    scores = DRAW.uniform(size=(400, 8)) * 0.2 + np.linspace(0, 0.4, 8)
    bias = balanced(scores, 2, 0.002, 400)
    if np.shape(bias) != (8,):
        balanced.wrong(f"the bias has the shape {np.shape(bias)}, expected (8,)")

    def most(bias):
        chosen = np.argsort(-(scores + bias), axis=1)[:, :2]
        return np.bincount(chosen.ravel(), minlength=8).max() / 100

    if most(bias) > 1.2:
        balanced.wrong(f"behind 400 steps the busiest expert has {most(bias):.2f} times an even share; without a bias "
                       f"it has {most(np.zeros(8)):.2f} times, and at most 1.20 is expected")  # fmt: skip
    first = balanced(scores, 2, 0.5, 1)
    counts = np.bincount(np.argsort(-scores, axis=1)[:, :2].ravel(), minlength=8)
    if not np.allclose(first, 0.5 * np.sign(100 - counts)):
        balanced.wrong(
            f"one step at a rate of 0.5 from loads {counts.tolist()} (100 are even) gives {first.tolist()}"
        )

"""Checks of 03_tensor_parallelism.py."""

from typing import Any

import numpy as np

DRAW = np.random.default_rng(0)
X, A, B, DZ = (DRAW.normal(size=shape) for shape in ((5, 4), (4, 12), (12, 4), (5, 4)))


def loss(x, a, b):
    """sum(dz * Z), whose gradients are those that backward computes."""
    return float((np.maximum(x @ a, 0) @ b * DZ).sum())


def slope(what, place):
    """The derivative of `loss` by one element of x (0), a (1) or b (2), by a difference."""
    at = [X.copy(), A.copy(), B.copy()]
    values = []
    for step in (1e-6, -1e-6):
        at[what][place] += step
        values.append(loss(*at))
        at[what][place] -= step
    return (values[0] - values[1]) / 2e-6


def check_cut(cut):
    for ranks in (1, 2, 3):
        parts = cut(A, B, ranks)
        shapes = [(a.shape, b.shape) for a, b in parts]
        if shapes != [((4, 12 // ranks), (12 // ranks, 4))] * ranks:
            cut.wrong(f"on {ranks} ranks the parts have the shapes {shapes}")
        if not np.array_equal(np.concatenate([a for a, _ in parts], 1), A):
            cut.wrong("the columns of a, side by side, are not a")
        if not np.array_equal(np.concatenate([b for _, b in parts]), B):
            cut.wrong("the rows of b, one below the other, are not b")


def check_forward(forward):
    for ranks in (1, 3):
        total = sum(forward(X, A[:, r::ranks], B[r::ranks]) for r in range(ranks))
        if not np.allclose(total, np.maximum(X @ A, 0) @ B):
            forward.wrong(f"the sum over {ranks} ranks is not Z")


def check_backward(backward):
    for ranks in (1, 3):
        parts = [backward(X, A[:, r::ranks], B[r::ranks], DZ) for r in range(ranks)]
        dx = sum(part[0] for part in parts)
        cases: list[tuple[str, int, Any, tuple[int, int]]] = [
            ("the sum of the ranks' dx", 0, dx, (2, 1)),
            ("da of rank 0", 1, parts[0][1], (1, 0)),
            ("db of rank 0", 2, parts[0][2], (0, 3)),
        ]
        for name, what, found, place in cases:
            wanted = slope(what, place)
            if not np.isclose(found[place], wanted, rtol=1e-4, atol=1e-6):
                backward.wrong(f"{name} at {place} is {found[place]:.6f}; by a difference it is {wanted:.6f}")


def check_messages(messages):
    messages.gives(8 * 6.0, 1, 4, 4, 2, why="a ring sends 2 (n - 1) / n of 8 elements, four times")
    messages.gives(0.0, 96, 1, 10, 10, why="one rank sends nothing")
    messages.gives(2 * 4 * 1.0 * 8, 2, 2, 4, 2)

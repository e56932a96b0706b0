"""Checks of 09_optimizers.py."""

import numpy as np

DRAW = np.random.default_rng(0)


def check_adam(adam):
    w, g = np.array([1.0, -2.0]), np.array([0.3, -4.0])
    found = adam(w, [g], 0.1, 0.9, 0.95, 0.0, 0.0)
    if not np.allclose(found, [0.9, -1.9]):
        found = np.round(found, 4).tolist()
        adam.wrong(
            f"the first update moves weights by lr against the gradient's sign: {found}, not [0.9, -1.9]"
        )
    same = adam(w, [g] * 10, 0.1, 0.9, 0.95, 0.0, 0.0)
    if not np.allclose(same, [0.0, -1.0]):
        adam.wrong(
            f"ten times the same gradient: {np.round(same, 4).tolist()}, expected [0, -1]: is the bias corrected?"
        )
    two = adam(np.zeros(1), [np.ones(1), -np.ones(1)], 1.0, 0.5, 0.5, 0.0, 0.0)
    if not np.allclose(two, -1 + (0.25 / 0.75)):
        adam.wrong(
            f"gradients 1 and -1 with betas of 0.5 and lr 1, from 0: {two.tolist()}, expected [-0.6667]"
        )
    small = adam(np.zeros(1), [np.full(1, 1e-3)], 1.0, 0.9, 0.95, 1e-3, 0.0)
    if not np.allclose(small, -0.5):
        adam.wrong(f"a gradient as large as eps is halved: {small.tolist()}, expected [-0.5]")
    decayed = adam(np.array([2.0]), [np.zeros(1)] * 2, 0.1, 0.9, 0.95, 1e-8, 0.5)
    if not np.allclose(decayed, 2 * 0.95**2):
        adam.wrong(
            f"without gradients decay alone shrinks a weight of 2 to {decayed.tolist()}, expected [1.805]"
        )


def check_orthogonal(orthogonal):
    g = DRAW.normal(size=(6, 10)) * np.logspace(0, -1.5, 6)[:, None]
    before = np.linalg.svd(g / np.linalg.norm(g))[1]
    x = orthogonal(g)
    if np.shape(x) != g.shape:
        orthogonal.wrong(f"the direction has the shape {np.shape(x)}, expected {g.shape}")
    after = np.linalg.svd(x)[1]
    if after.max() > 1.25 or after.min() < 0.6:
        orthogonal.wrong(f"singular values of {before.max():.2f} to {before.min():.3f} become {after.max():.2f} to "
                         f"{after.min():.3f}, expected 0.6 to 1.25")  # fmt: skip
    left, _, right = np.linalg.svd(g, full_matrices=False)
    if not np.allclose(left.T @ x @ right.T, np.diag(np.diag(left.T @ x @ right.T)), atol=1e-6):
        orthogonal.wrong("the singular vectors have changed")
    if not np.allclose(x, orthogonal(100 * g)):
        orthogonal.wrong("a gradient a hundred times as large has another direction")


def check_state_bytes(state_bytes):
    one = 4 * 4096 * 4096
    bytes_of = {"sgd": 0, "momentum": one, "muon": one, "adam": 2 * one, "adafactor": 4 * 8192}
    for name, wanted in bytes_of.items():
        state_bytes.gives(wanted, 4096, 4096, name)


def check_stable_rate(stable_rate):
    for curvatures in ([1.0, 100.0], [0.5], [3.0, 4.0, 2.0]):
        rate = stable_rate(curvatures)
        ends = []
        for lr in (0.99 * rate, 1.01 * rate):
            w = np.ones(len(curvatures))
            for _ in range(3000):
                w = w - lr * np.array(curvatures) * w
            ends.append(float(np.abs(w).max()))
        if not ends[0] < 1 < ends[1]:
            stable_rate.wrong(f"{curvatures}: {rate:.6g}, but at 0.99 times that the largest weight goes from 1 to "
                              f"{ends[0]:.3g}, and at 1.01 times to {ends[1]:.3g}")  # fmt: skip

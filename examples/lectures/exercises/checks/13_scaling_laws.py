"""Checks of 13_scaling_laws.py."""

import numpy as np

SIZES = np.array([1e6, 3e6, 1e7, 3e7, 1e8])


def check_parameters(parameters):
    parameters.gives(174_570_209_280, 50304, 12288, 96, why="GPT-3, as the page prints")
    parameters.gives(10, 10, 1, 0, why="an embedding alone")


def check_days(days):
    days.gives(1.0, 1e9, 86400e3 / 6, 1, 1e12)
    days.gives(0.25, 1e9, 86400e3 / 6, 2, 2e12)
    found = days(175e9, 300e9, 760, 160e12)
    if not 29.9 < found < 30.0:
        days.wrong(
            f"GPT-3 on 760 devices takes {found:.6g} days; the page says that they are enough for thirty"
        )


def check_best_size(best_size):
    for flops in (1e18, 5.76e23):
        size, tokens = best_size(flops)
        if not np.isclose(tokens, 20 * size):
            best_size.wrong(
                f"{flops:.3g} FLOPs: {tokens:.4g} tokens for {size:.4g} parameters are not 20 each"
            )
        if not np.isclose(6 * size * tokens, flops):
            best_size.wrong(
                f"{flops:.3g} FLOPs: {size:.4g} parameters and {tokens:.4g} tokens use {6 * size * tokens:.3g}"
            )


def check_power_law(power_law):
    for a, alpha in ((10.0, 0.1), (400.0, 0.34)):
        found = power_law(SIZES, a / SIZES**alpha)
        if not np.allclose(found, (a, alpha)):
            power_law.wrong(f"losses of {a:g} / N^{alpha}: (A, alpha) is {found}")
    noise = np.exp(np.random.default_rng(0).normal(size=5) * 0.01)
    a, alpha = power_law(SIZES, 400 / SIZES**0.34 * noise)
    if abs(alpha - 0.34) > 0.01:
        power_law.wrong(f"with 1% of noise alpha is {alpha:.4f}, expected about 0.34")


def check_with_floor(with_floor):
    floors = np.linspace(0.5, 2.0, 16)
    for floor in (0.7, 1.4, 1.7):
        losses = floor + 400 / SIZES**0.34
        found = with_floor(SIZES, losses, floors[floors < losses.min()])
        if not np.isclose(found, floor):
            with_floor.wrong(f"losses of {floor} + 400 / N^0.34: the floor is {found:.4g}")

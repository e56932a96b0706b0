"""Checks of 17_fp8.py."""

import numpy as np


def numbers():
    """All finite numbers of E4M3 that are not negative: all codes but the last of 4 + 3 bits, which is no number."""
    found = []
    for code in range(127):
        exponent, fraction = code >> 3, code & 7
        found.append(fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10))
    return np.array(found)


def nearest(x):
    """By a search of all numbers; of two that are as near the one with the even code."""
    table = numbers()
    distance = np.abs(np.abs(x)[:, None] - table)
    odd = np.arange(len(table)) % 2
    codes = np.lexsort((np.broadcast_to(odd, distance.shape), distance), axis=1)[:, 0]
    return np.sign(x) * table[codes]


def check_e4m3(e4m3):
    table = numbers()
    if not np.array_equal(e4m3(table), table):
        first = table[e4m3(table) != table][0]
        e4m3.wrong(f"{first:.6g} is a number of E4M3 and becomes {float(e4m3(np.array([first]))[0]):.6g}")
    draw = np.random.default_rng(0)
    x = np.concatenate(
        [draw.normal(size=500) * np.exp2(draw.uniform(-12, 10, 500)), (table[1:] + table[:-1]) / 2]
    )
    wanted, found = nearest(x), e4m3(x)
    if not np.array_equal(found, wanted):
        at = np.flatnonzero(found != wanted)[0]
        e4m3.wrong(f"{x[at]:.8g} becomes {found[at]:.6g}, but {wanted[at]:.6g} is nearest (halves to even)")


def check_scale(scale):
    scale.gives(1.0, np.array([448.0, -3.0]))
    scale.gives(0.5, np.array([449.0]), why="with 1 it would overflow")
    scale.gives(256.0, np.array([0.5, -1.75]), why="1.75 x 256 is 448")
    scale.gives(128.0, np.array([1.76]))
    scale.gives(1.0, np.zeros(3))


def check_quantised(quantised):
    x = np.array([1e-4, 2e-4, 3e-4, 1e-4, 300.0, 20.0, 1.0, 0.1])
    whole, parts = quantised(x, 8), quantised(x, 4)
    if np.any(whole[:4] != 0):
        quantised.wrong(
            f"one scale for all: beside 300 the numbers of 0.0001 become 0, not {whole[:4].tolist()}"
        )
    if not np.allclose(parts[:4], x[:4], rtol=1 / 16):
        quantised.wrong(
            f"with blocks of 4 the first four become {parts[:4].tolist()}, not about {x[:4].tolist()}"
        )
    if not np.array_equal(parts[4:], whole[4:]):
        quantised.wrong("the second block of 4 has the same scale as the whole, and other results")


def check_bits(bits):
    bits.gives(8.25, 32, why="as mxfp8 of page 8")
    bits.gives(16.0, 1, why="a scale for each number")


def check_stuck(stuck):
    stuck.gives(10.0, 10)
    stuck.gives(16.0, 16)
    stuck.gives(16.0, 100, why="16 + 1 lies between 16 and 18, and is rounded to even")

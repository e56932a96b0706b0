"""Checks of 08_precision.py."""

import math
import struct


def half(code):
    """The fp16 number with these bits, by this machine."""
    return struct.unpack("<e", struct.pack("<H", code))[0]


def single(x):
    """The bits of a number as fp32."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def check_value(value):
    for code in (0x3C00, 0xC000, 0x0001, 0x03FF, 0x7BFF, 0x8001, 0x7C00, 0x3555):
        wanted = half(code)
        value.gives(wanted, code, 5, 10, why=f"fp16 {code:016b}")
    if not math.isnan(value(0x7C01, 5, 10)):
        value.wrong("fp16 0111110000000001 is no number (nan)")
    value.gives(1.5, single(1.5) >> 16, 8, 7, why="bf16 is the first half of fp32")


def check_largest(largest):
    largest.gives(65504.0, 5, 10, why="fp16")
    largest.gives(57344.0, 5, 2, why="fp8 e5m2")
    largest.gives((2 - 2.0**-7) * 2.0**127, 8, 7, why="bf16")


def check_rounded(rounded):
    for x in (0.1, -3.14159, 1e-7, 6e-8, 2e-8, 65519.0, 1 / 3, 2049.0, 2051.0, 1.0, 0.0):
        wanted = struct.unpack("<e", struct.pack("<e", x))[0]
        rounded.gives(wanted, x, 5, 10, why="to fp16, as this machine does it")
    rounded.gives(math.inf, 65520.0, 5, 10, why="half a step beyond the largest number of fp16")
    rounded.gives(1.0, 1.00390625, 8, 7, why="half a step of bf16 above 1: to the even fraction")
    rounded.gives(
        1.015625, 1.01171875, 8, 7, why="one and a half steps of bf16 above 1: to the even fraction"
    )


def check_loss_scale(loss_scale):
    no = False
    loss_scale.gives([8.0, 8.0, 16.0, 16.0, 32.0], [no] * 5, 8.0, 2)
    loss_scale.gives([8.0, 4.0, 2.0, 2.0, 2.0, 4.0], [True, True, no, no, no, no], 8.0, 3)
    loss_scale.gives([8.0, 8.0, 4.0, 4.0, 4.0, 8.0], [no, True, no, no, no, no], 8.0, 3,
                     why="an overflow begins the count anew")  # fmt: skip

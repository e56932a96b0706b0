"""Memory transactions of `add`, as the compiler wrote it: a warp asks for 32 addresses at once, and memory answers in
sectors of 32 bytes. Neighbours share sectors; numbers far apart each fetch one of their own.

python examples/kernels/loads.py
"""

import os
import re
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "0"  # kernels to compile

import elementwise
import lab
from counts import instructions

WARP, SECTOR, FP32 = 32, 32, 4  # threads; bytes
ARCH = 80


class Loads(NamedTuple):
    """Of one tensor and one warp. width: numbers of an instruction and thread. requests: instructions. asked: sectors
    of all requests. fetched: those of them that differ, which come from memory if a cache keeps them meanwhile. used:
    bytes that the warp needs."""

    width: int
    requests: int
    asked: int
    fetched: int
    used: int


def sectors(addresses: list[list[int]], width: int) -> set[int]:
    """Sectors that numbers at these bytes are in. addresses: of each thread."""
    return {a // SECTOR for thread in addresses for a in thread[:width]}


def loads(stride: int, block: int = 1024, warps: int = 4) -> Loads:
    """Of `add` with this stride: the instruction's width from PTX, which thread has which number from the layout."""
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32:16"}
    made = lab.Compiled(elementwise.add, ARCH, warps, 1, {**types, "stride": stride, "BLOCK": block})
    each = re.search(r"sizePerThread = \[(\d+)\], threadsPerWarp = \[32\]", made.layouts)
    if each is None:
        raise RuntimeError(f"the compiler chose another layout: {made.layouts[:200]}")
    together = int(each[1])  # numbers of a thread that are neighbours
    lines = [line for line in instructions(made.ptx) if "ld.global" in line]
    widths = {int(found[1]) if (found := re.search(r"\.v(\d)", line)) else 1 for line in lines}
    [width] = widths
    requests = len(lines) // 2  # of x; y has as many
    if requests * width * WARP * warps != block:
        raise RuntimeError(f"{requests} loads of {width} numbers are not a block of {block}")
    asked, all_of = 0, set[int]()
    for request in range(requests):
        turn, first = divmod(
            request * width, together
        )  # a thread's neighbours, and where in them the request begins
        start = turn * together * WARP * warps + first
        addresses = [
            [(start + thread * together + i) * stride * FP32 for i in range(width)] for thread in range(WARP)
        ]
        found = sectors(addresses, width)
        asked, all_of = asked + len(found), all_of | found
    return Loads(width, requests, asked, len(all_of), requests * width * WARP * FP32)


def main() -> None:
    print("stride  bytes per load  loads  sectors asked  sectors fetched  bytes used  of bytes fetched")
    for stride in (1, 2, 4, 8, 32):
        width, requests, asked, fetched, used = loads(stride)
        print(f"{stride:>6}{width * FP32:>16}{requests:>7}{asked:>15}{fetched:>17}{used:>12}"
              f"{used / (fetched * SECTOR):>18.1%}")  # fmt: skip


if __name__ == "__main__":
    main()

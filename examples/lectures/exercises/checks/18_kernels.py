"""Checks of 18_kernels.py."""

import math
import random

WARP, SECTOR, FP32 = 32, 32, 4


def check_sectors(sectors):
    for stride, wanted in ((1, 4), (2, 8), (4, 16), (8, 32), (32, 32)):
        addresses = [thread * stride * FP32 for thread in range(WARP)]
        sectors.gives(wanted, addresses, FP32, why=f"every {stride}. number of 4 bytes")
    sectors.gives(
        16, [16 * thread for thread in range(WARP)], 16, why="16 bytes of each thread, side by side"
    )
    sectors.gives(1, [64] * WARP, 4, why="all threads read the same number")
    sectors.gives(2, [30] * WARP, 4, why="the number lies across two sectors")


def check_blocks_per_sm(blocks_per_sm):
    for wanted, given, why in (
        (16, (128, 16, 0), "16 blocks of 4 warps are all 64 warps"),
        (16, (128, 32, 0), "16 blocks of 4 warps are all 64 warps, and all registers"),
        (2, (1024, 32, 1024), "two blocks of 32 warps are all 64"),
        (21, (96, 32, 0), "3 warps each"),
        (32, (32, 16, 0), "there are 32 blocks at most"),
        (
            10,
            (128, 47, 0),
            "a warp of 47 registers per thread gets 1536; 10 such warps fit into a part of 16384",
        ),
        (8, (128, 64, 0), "a warp gets 2048 registers; 8 fit into each of four parts"),
        (5, (128, 90, 0), "a warp gets 3072 registers; 5 fit into a part, so 20 warps"),
        (2, (256, 97, 49152), "a warp gets 3328 registers; 4 fit into a part, so 16 warps"),
        (4, (128, 32, 49152), "48 KiB and one more are taken of 228"),
        (1, (256, 32, 114 * 1024), "two blocks of 114 KiB and one more are more than 228"),
    ):
        blocks_per_sm.gives(wanted, *given, why=why)


def check_waves(waves):
    waves.gives((1, 1.0), 132, 132)
    waves.gives((2, 133 / 264), 133, 132, why="one block alone makes a second wave")
    waves.gives((3, 1024 / 1188), 1024, 396)
    waves.gives((1, 0.25), 33, 132)


def check_steps(steps):
    steps.gives(5, [True] * WARP, 5, 3)
    steps.gives(3, [False] * WARP, 5, 3)
    steps.gives(8, [True, False] * 16, 5, 3, why="the warp goes through both sides")
    steps.gives(16, [True, False] * WARP, 5, 3, why="two warps, both through both sides")
    steps.gives(8, [True] * WARP + [False] * WARP, 5, 3, why="two warps, each through one side")
    steps.gives(
        13, [True] * WARP + [False] * 31 + [True], 5, 3, why="one thread sends its warp through both sides"
    )
    steps.gives(12, [True] * WARP + [False] * 8, 9, 3, why="the last warp is not full")


def check_merge(merge):
    draw = random.Random(0)
    for first, second in ((3, 4), (1, 6), (5, 2)):
        scores = [draw.uniform(-9, 9) for _ in range(first + second)]
        values = [[draw.uniform(-1, 1) for _ in range(3)] for _ in scores]

        def partial(which: range, scores=scores, values=values):
            m = max(scores[i] for i in which)
            p = {i: math.exp(scores[i] - m) for i in which}
            return m, sum(p.values()), [sum(p[i] * values[i][d] for i in which) for d in range(3)]

        a, b = range(first), range(first, first + second)
        for x, y in ((a, b), (b, a)):
            merge.gives(partial(range(first + second)), partial(x), partial(y), why="over all keys at once")
    large = (900.0, 1.0, [2.0]), (905.0, 1.0, [3.0])
    merge.gives((905.0, 1 + math.exp(-5), [3 + 2 * math.exp(-5)]), *large, why="exp(905) overflows")


def check_transpose(transpose):
    for n in (32, 64):
        matrix, result = [draw * 7 % 10007 for draw in range(n * n)], [None] * (n * n)
        kept = {"now": 0}

        def sectors_of(indices) -> int:
            if len(indices) != WARP:
                transpose.wrong(f"a warp has 32 indices, not {len(indices)}")
            return len({index * FP32 // SECTOR for index in indices})

        def neighbours(what: str, indices) -> None:
            if (count := sectors_of(indices)) > 4:
                transpose.wrong(f"a {what} of 32 numbers takes {count} sectors, where neighbours take 4")

        def load(indices, matrix=matrix, kept=kept):
            neighbours("load", indices)
            kept["now"] += WARP
            if kept["now"] > WARP * WARP:
                transpose.wrong("more than 32 x 32 numbers are loaded and not yet stored")
            return [matrix[index] for index in indices]

        def store(indices, numbers, result=result, kept=kept):
            neighbours("store", indices)
            kept["now"] -= WARP
            for index, number in zip(indices, numbers, strict=True):
                result[index] = number

        transpose(load, store, n)
        for i in range(n):
            for j in range(n):
                if result[j * n + i] != matrix[i * n + j]:
                    transpose.wrong(f"n = {n}: row {j}, column {i} of the result is {result[j * n + i]}, expected "
                                    f"{matrix[i * n + j]}")  # fmt: skip

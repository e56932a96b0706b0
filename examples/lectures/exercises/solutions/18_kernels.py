"""Kernels: what a warp fetches, how many blocks an SM holds, waves, divergence, the merge of flash attention, and a
transposition by tiles.

Time: an hour. Data: none. Plain Python.
"""

import math

WARP = 32  # threads
SECTOR = 32  # bytes that memory answers with
# An SM of an H100: warps and blocks at once, registers, bytes of shared memory
WARPS, BLOCKS, REGISTERS, SHARED = 64, 32, 65536, 233472
PARTS = 4  # of an SM, each with a quarter of the registers; a warp is in one of them
UNIT = 256  # registers: a warp gets multiples of it
RESERVED = 1024  # bytes of shared memory that each block takes beside its own


def sectors(addresses: list[int], width: int) -> int:
    """Sectors that a warp's load fetches: those with any of the `width` bytes from each thread's address on."""
    return len({byte // SECTOR for address in addresses for byte in range(address, address + width)})


def blocks_per_sm(threads: int, registers: int, shared: int) -> int:
    """Blocks that an SM holds at once. threads: of a block. registers: of a thread. shared: bytes of a block, a
    multiple of 1024. Warps, registers, shared memory and the number of blocks each set a limit."""
    warps = math.ceil(threads / WARP)
    of_a_warp = math.ceil(registers * WARP / UNIT) * UNIT
    with_registers = REGISTERS // PARTS // of_a_warp * PARTS
    return min(WARPS // warps, with_registers // warps, SHARED // (shared + RESERVED), BLOCKS)


def waves(blocks: int, at_once: int) -> tuple[int, float]:
    """Waves in which a device runs a launch, if it holds `at_once` blocks; and the share of all their places used."""
    count = math.ceil(blocks / at_once)
    return count, blocks / (count * at_once)


def steps(conditions: list[bool], then: int, otherwise: int) -> int:
    """Instructions that warps spend on `if condition: ... else: ...`, whose sides have `then` and `otherwise` of them.
    Threads are in warps in their order. A warp executes a side if any of its threads takes it."""
    total = 0
    for start in range(0, len(conditions), WARP):
        warp = conditions[start : start + WARP]
        total += then * any(warp) + otherwise * (not all(warp))
    return total


def merge(
    a: tuple[float, float, list[float]], b: tuple[float, float, list[float]]
) -> tuple[float, float, list[float]]:
    """Attention of one query over two sets of keys, from its attention over each. Of a set: the largest score m, the
    sum of exp(score - m), and the sum of exp(score - m) times the value (a list)."""
    m = max(a[0], b[0])
    of_a, of_b = math.exp(a[0] - m), math.exp(b[0] - m)
    return m, a[1] * of_a + b[1] * of_b, [x * of_a + y * of_b for x, y in zip(a[2], b[2], strict=True)]


def transpose(load, store, n: int) -> None:
    """Writes the transposed of an (n, n) matrix, 32 dividing n. load(indices) returns the numbers of a warp's 32
    indices into the flat matrix, store(indices, numbers) writes 32 into the flat result. Each must be of neighbours.
    What was loaded may be kept in between, at most 32 x 32 numbers at a time: that is the block's shared memory."""
    for top in range(0, n, WARP):
        for left in range(0, n, WARP):
            tile = [load([(top + i) * n + left + j for j in range(WARP)]) for i in range(WARP)]
            for j in range(WARP):
                store([(left + j) * n + top + i for i in range(WARP)], [row[j] for row in tile])

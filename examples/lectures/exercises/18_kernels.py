"""Kernels: what a warp fetches, how many blocks an SM holds, waves, divergence, the merge of flash attention, and a
transposition by tiles.

Time: an hour. Data: none. Plain Python.
"""

WARP = 32  # threads
SECTOR = 32  # bytes that memory answers with
# An SM of an H100: warps and blocks at once, registers, bytes of shared memory
WARPS, BLOCKS, REGISTERS, SHARED = 64, 32, 65536, 233472
PARTS = 4  # of an SM, each with a quarter of the registers; a warp is in one of them
UNIT = 256  # registers: a warp gets multiples of it
RESERVED = 1024  # bytes of shared memory that each block takes beside its own


def sectors(addresses: list[int], width: int) -> int:
    """Sectors that a warp's load fetches: those with any of the `width` bytes from each thread's address on."""
    raise NotImplementedError


def blocks_per_sm(threads: int, registers: int, shared: int) -> int:
    """Blocks that an SM holds at once. threads: of a block. registers: of a thread. shared: bytes of a block, a
    multiple of 1024. Warps, registers, shared memory and the number of blocks each set a limit."""
    raise NotImplementedError


def waves(blocks: int, at_once: int) -> tuple[int, float]:
    """Waves in which a device runs a launch, if it holds `at_once` blocks; and the share of all their places used."""
    raise NotImplementedError


def steps(conditions: list[bool], then: int, otherwise: int) -> int:
    """Instructions that warps spend on `if condition: ... else: ...`, whose sides have `then` and `otherwise` of them.
    Threads are in warps in their order. A warp executes a side if any of its threads takes it."""
    raise NotImplementedError


def merge(
    a: tuple[float, float, list[float]], b: tuple[float, float, list[float]]
) -> tuple[float, float, list[float]]:
    """Attention of one query over two sets of keys, from its attention over each. Of a set: the largest score m, the
    sum of exp(score - m), and the sum of exp(score - m) times the value (a list)."""
    raise NotImplementedError


def transpose(load, store, n: int) -> None:
    """Writes the transposed of an (n, n) matrix, 32 dividing n. load(indices) returns the numbers of a warp's 32
    indices into the flat matrix, store(indices, numbers) writes 32 into the flat result. Each must be of neighbours.
    What was loaded may be kept in between, at most 32 x 32 numbers at a time: that is the block's shared memory."""
    raise NotImplementedError

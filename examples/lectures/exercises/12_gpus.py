"""GPUs: what bounds an operation, how tiles save reads, and how well a device is used.

Time: forty minutes. Data: none. Plain Python.
"""


def matmul(m: int, n: int, k: int, width: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of (m, k) times (k, n), if each number of `width` bytes moves once: two matrices in, one out. A
    multiplication and an addition are two FLOPs."""
    raise NotImplementedError


def seconds(flops: float, moved: float, peak: float, bandwidth: float) -> float:
    """The roofline: the longer of computing and moving."""
    raise NotImplementedError


def tiled_reads(n: int, tile: int) -> int:
    """Numbers that a matmul of two (n, n) matrices reads from slow memory, if fast memory holds a tile x tile part of
    each: for each tile of the result all tiles of its rows and of its columns are read. tile divides n."""
    raise NotImplementedError


def smallest_batch(k: int, n: int, peak: float, bandwidth: float) -> int:
    """The fewest rows m for which an (m, k) x (k, n) matmul in 16 bits takes as long to compute as to move, or
    longer."""
    raise NotImplementedError


def utilisation(tokens: float, parameters: float, again: float, peak: float) -> tuple[float, float]:
    """(MFU, HFU) of a device that trains `tokens` per second: 6 FLOPs per token and parameter. HFU also counts the
    forward that backward repeats, of 2 FLOPs per token and parameter, for the share `again` of the blocks."""
    raise NotImplementedError

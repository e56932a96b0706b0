"""Memory: what blocks keep, when it is most, and what recomputation buys.

Time: three quarters of an hour. Data: none. Plain Python.
"""


def block_bytes(s: int, b: int, h: int, a: int, recompute: str) -> float:
    """Bytes that a block keeps for backward with s tokens, b sequences, width h and a heads in 16 bits (arXiv
    2205.05198): 34 sbh + 5 a b s^2. recompute: "none"; "selective" keeps nothing with s^2; "full" keeps the block's
    input, of 2 bytes each."""
    raise NotImplementedError


def peak(events: list[tuple[str, float]]) -> float:
    """The most bytes that are in use at a time. events, in order: (name, bytes) allocates; the same name with 0 frees
    it."""
    raise NotImplementedError


def peak_of_step(blocks: int, inside: float, given: float, recompute: bool) -> float:
    """The most bytes of activations in forward and backward of a stack of blocks. A block's input takes `given`, what
    it keeps beside that `inside`. Without recomputation both are kept from the block's forward to its backward. With it
    only inputs are; a block's forward has the others for a moment, and its backward makes them again before it
    begins."""
    raise NotImplementedError


def best_interval(blocks: int, inside: float, given: float) -> int:
    """Recomputing segments of k blocks keeps an input for each segment, and in backward all blocks of one segment:
    blocks / k inputs and k times (given + inside) - given beside them. The k with the lowest peak; k divides
    `blocks`."""
    raise NotImplementedError

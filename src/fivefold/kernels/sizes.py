"""The sizes into which kernels cut their work, as functions of shapes. Kernels use them, the planner reads them. No
torch.

Legend: N rows of logits (tokens), V columns (vocabulary), T tokens of a sequence.
"""

from __future__ import annotations

import math

LOGITS_BYTES = {"cpu": 16 << 20, "accelerator": 512 << 20}
"""Bytes of one chunk of logits, in the compute dtype. A CPU should keep a chunk in its last cache (2048 rows at V 4096
in bf16). An accelerator needs thousands of rows for a fast matmul, and after each chunk it adds a gradient of the whole
output layer in fp32. At V = 128k on an H100, 1 GiB is 9% faster and takes 1 GiB more (docs/gpu.md)."""
FP32_BYTES = 64 << 20
"""Where the loss has neither a fused kernel nor a compiler: bytes of the fp32 copy of a chunk's logits that exists at
once."""
MIN_ROWS = 512
"""Minimum rows of logits at once: with fewer the matmuls are slow."""
SUM_SIZE = 4
"""Bytes per element of the sum of the chunks' weight gradients, in fp32. A single chunk has none."""
TILE = 128
"""Columns of a tile of logits: slabs of the vocabulary have whole ones."""

FP32_BLOCK, BLOCK = 64, 128
"""Queries in a block of attention, in fp32 and in other dtypes. Smaller blocks skip more of what a causal mask hides,
but small matmuls are slower."""
MAX_BLOCKS = 16
"""Longer sequences get larger blocks: few, large matmuls."""
KEEP = 1024
"""Largest T at which attention keeps its probabilities for backward. Beyond it they are recomputed."""


def logits_bytes(device: str) -> int:
    """Bytes of logits that exist at once on a device of this type ("cpu", "cuda", ...)."""
    return LOGITS_BYTES["cpu" if device == "cpu" else "accelerator"]


def loss_chunks(N: float, V: float, D: float, element_size: float, at_once: float) -> int:
    """The number of chunks that the loss cuts N rows of D features into, so that V logits of each row fit `at_once`
    bytes. One, if the logits of all rows take no more memory than those of a chunk and the sum of weight gradients."""
    rows = max(MIN_ROWS, at_once // (V * element_size))
    if N * element_size <= rows * element_size + D * SUM_SIZE:
        return 1
    return math.ceil(N / rows)


def rows_at_once(N: int, V: int, D: int, element_size: int, at_once: float) -> int:
    """Rows per chunk of the loss: the same number in each except the last."""
    return -(-N // loss_chunks(N, V, D, element_size, at_once))


def slab_columns(N: int, V: int, element_size: int, device: str) -> int:
    """Columns of the vocabulary whose N x V logits the fused loss computes again at once (kernels/gpu/loss.py)."""
    columns = logits_bytes(device) // max(1, N * element_size) // TILE * TILE
    return max(1, min(V, max(TILE, columns)))


def fp32_parts(N: int, V: int) -> list[slice]:
    """The rows of N x V logits whose fp32 copies exist at once."""
    rows = max(1, FP32_BYTES // (4 * V))
    return [slice(start, start + rows) for start in range(0, N, rows)]


WINDOW_BLOCKS = 8
"""Blocks of queries in a window at least, if these are not too small. The first query of a block computes the keys of
the last one, too: an eighth more than its own."""


def block_size(T: int, element_size: int, window: int = 0) -> int:
    """Queries in a block of attention on CPUs. window: keys that a query sees; 0: all."""
    least, most = FP32_BLOCK if element_size == 4 else BLOCK, -(-T // MAX_BLOCKS)
    return max(least, min(most, window // WINDOW_BLOCKS) if window else most)


def query_blocks(T: int, causal: bool, element_size: int, window: int = 0) -> list[tuple[int, int, int]]:
    """(start, end, keys computed) of each block of queries, for attention on CPUs. window: see `block_size`."""
    size = block_size(T, element_size, window)
    blocks = [(s, min(s + size, T), min(s + size, T) if causal else T) for s in range(0, T, size)]
    if not window:
        return blocks
    step = size // SPAN_STEPS
    return [
        (s, e, min(-(-e // step) * step, T) - max(0, s - window + 1) // step * step) for s, e, _ in blocks
    ]


SPAN_STEPS = 4
"""Spans of keys begin and end at multiples of a block's queries, divided by this. oneDNN makes a program for each shape
of a matmul and keeps about a thousand. Spans of any length would be new ones in every step, and making them took as
long as the matmuls."""
WASTE = 1.25
"""Keys that a tile of attention may have, relative to those that its sequences need: a matmul of several sequences is
faster than one of each."""


def any_length(element_size: float, head: int) -> bool:
    """True if GPUs go over documents one by one, as sequences of any lengths: what PyTorch's flash attention takes."""
    return element_size == 2 and head % 8 == 0 and head <= 256


def keeps_probabilities(T: float) -> bool:
    """True if attention on CPUs keeps its probabilities for backward."""
    return T <= KEEP


DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule, as in arXiv 2412.06464: large enough for matmuls, and the matrices between
a chunk's tokens are as wide as a head."""

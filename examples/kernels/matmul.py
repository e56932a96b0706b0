"""A tiled matmul: a program computes a tile of the result. The larger the tile, the more results a thread has
(coarsening), and the fewer times the factors are read.

python examples/kernels/matmul.py
"""
# pyright: reportIndexIssue=false

import lab  # first: it chooses between interpreter and GPU
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

DEPTH, STAGES = 32, 3  # of a tile along K; tiles in flight


@triton.jit
def matmul(a, b, out, M, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    """out (M, N) = a (M, K) times b (K, N), all contiguous. A program has ROWS x COLUMNS results and goes along K in
    tiles of DEPTH. Sums are in fp32."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    deep = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, DEPTH):
        k = start + deep
        left = tl.load(a + rows * K + k[None, :], mask=(rows < M) & (k[None, :] < K), other=0.0)
        right = tl.load(b + k[:, None] * N + columns, mask=(k[:, None] < K) & (columns < N), other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    tl.store(out + rows * N + columns, total, mask=(rows < M) & (columns < N))


def run_matmul(a: Tensor, b: Tensor, rows: int = 64, columns: int = 64, warps: int = 4) -> Tensor:
    """a (M, K) times b (K, N), by tiles of rows x columns.

    Raises:
        ValueError: bf16 in the interpreter.
    """
    lab.refuse_bf16(a, b)
    (M, K), N = a.shape, b.shape[1]
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = triton.cdiv(M, rows), triton.cdiv(N, columns)
    matmul[grid](a, b, out, M, N, K, rows, columns, DEPTH, num_warps=warps, num_stages=STAGES)
    return out


def main() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(200, 300, device=lab.DEVICE), torch.randn(300, 100, device=lab.DEVICE)
    for dtype, most in ((torch.float32, 1e-5), (torch.float16, 1e-3)):
        left, right = a.to(dtype), b.to(dtype)
        far = lab.farthest(run_matmul(left, right), left.double() @ right.double())
        print(f"matmul in {str(dtype)[6:]}: equals PyTorch's to {most:g}: {far < most}")
    if not lab.INTERPRETED:
        return
    n = 256
    square = torch.randn(n, n, dtype=torch.float16)
    print(f"({n}, {n}) times ({n}, {n}) in 16 bits: each factor has {square.nbytes:,} bytes")
    for tile in (32, 64, 128):
        with lab.Moved() as moved:
            run_matmul(square, square, tile, tile)
        outputs = tile * tile // 128
        print(f"  tiles of {tile:>3}: {outputs:>3} results per thread of 128, {moved.read:>9,} bytes read, "
              f"{2 * n**3 / moved.read:>4.0f} FLOPs per byte")  # fmt: skip


if __name__ == "__main__":
    main()

"""Flash attention in Triton, causal: forward as its first version (arXiv 2205.14135) and its second (2307.08691) have
it, and the second one's backward. examples/lectures/flash_attention.py explains the arithmetic in plain PyTorch.

The first version goes over tiles of keys and, for each, over all queries: sums and outputs are read and written again
for every tile of keys. The second one turns the loops around. A program has a tile of queries, keeps what belongs to it
in registers, and divides by the sum once, at the end. So there are more programs, too.

python examples/kernels/flash.py
"""
# pyright: reportIndexIssue=false

import math
from typing import Any, NamedTuple

import lab  # first: it chooses between interpreter and GPU
import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.autograd import Function, grad


class Tiles(NamedTuple):
    """Queries and keys of a tile, warps of a block, tiles of its loop in flight."""

    rows: int
    keys: int
    warps: int
    stages: int = 2


FIRST, FORWARD = Tiles(128, 64, 8), Tiles(128, 64, 8)
FOR_QUERIES, FOR_KEYS = Tiles(64, 64, 4), Tiles(64, 64, 8, stages=1)


@triton.jit
def rows_of(x, head, at, T, HEAD: tl.constexpr):
    """Rows `at` of a head: (len(at), HEAD), zeros beyond T."""
    d = tl.arange(0, HEAD)[None, :]
    return tl.load(x + head * T * HEAD + at[:, None] * HEAD + d, mask=at[:, None] < T, other=0.0)


@triton.jit
def store_rows(x, head, at, value, T, HEAD: tl.constexpr):
    d = tl.arange(0, HEAD)[None, :]
    tl.store(x + head * T * HEAD + at[:, None] * HEAD + d, value, mask=at[:, None] < T)


@triton.jit
def scores_of(query, key, rows, keys, scale):
    """Scores of a tile, -inf where the key comes later."""
    s = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    return tl.where(keys[None, :] <= rows[:, None], s, -float("inf"))


@triton.jit
def first(q, k, v, out, sums, largest, T, scale, HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """q, k, v, out (heads, T, HEAD); sums, largest (heads, T). A program per head. out, sums and largest are in fp32,
    and start as 0, 0 and -inf."""
    head = tl.program_id(0)
    for start in range(0, T, KEYS):
        keys = start + tl.arange(0, KEYS)
        key, value = rows_of(k, head, keys, T, HEAD), rows_of(v, head, keys, T, HEAD)
        for top in range(start // ROWS * ROWS, T, ROWS):  # earlier queries do not see these keys
            rows = top + tl.arange(0, ROWS)
            m = tl.load(largest + head * T + rows, mask=rows < T, other=0.0)
            total = tl.load(sums + head * T + rows, mask=rows < T, other=1.0)
            o = rows_of(out, head, rows, T, HEAD)
            s = scores_of(rows_of(q, head, rows, T, HEAD), key, rows, keys, scale)
            larger = tl.maximum(m, tl.max(s, 1))
            p = tl.exp(s - larger[:, None])
            kept = total * tl.exp(m - larger)
            total = kept + tl.sum(p, 1)
            o = o * (kept / total)[:, None]
            o += tl.dot((p / total[:, None]).to(value.dtype), value, input_precision="ieee")
            store_rows(out, head, rows, o, T, HEAD)
            tl.store(sums + head * T + rows, total, mask=rows < T)
            tl.store(largest + head * T + rows, larger, mask=rows < T)
            tl.debug_barrier()  # other threads of the block read this in the next turn


@triton.jit
def second(q, k, v, out, lse, T, scale, HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """lse (heads, T): the log-sum-exp of each query's scores. A program per tile of queries and head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    query = rows_of(q, head, rows, T, HEAD)
    m = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, HEAD), tl.float32)
    for start in range(0, tl.minimum(tile * ROWS + ROWS, T), KEYS):  # tiles of later keys are skipped
        keys = start + tl.arange(0, KEYS)
        s = scores_of(query, rows_of(k, head, keys, T, HEAD), rows, keys, scale)
        larger = tl.maximum(m, tl.max(s, 1))
        p, shrink = tl.exp(s - larger[:, None]), tl.exp(m - larger)
        total = total * shrink + tl.sum(p, 1)
        value = rows_of(v, head, keys, T, HEAD)
        o = tl.dot(p.to(value.dtype), value, o * shrink[:, None], input_precision="ieee")
        m = larger
    store_rows(out, head, rows, o / total[:, None], T, HEAD)
    tl.store(lse + head * T + rows, m + tl.log(total), mask=rows < T)


@triton.jit
def for_queries(
    q, k, v, dout, lse, delta, dq, T, scale, HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """dq of a tile of queries. delta (heads, T): of each query the sum of dout times out. Scores are computed again."""
    tile, head = tl.program_id(0), tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    query, do = rows_of(q, head, rows, T, HEAD), rows_of(dout, head, rows, T, HEAD)
    logs = tl.load(lse + head * T + rows, mask=rows < T, other=0.0)
    d = tl.load(delta + head * T + rows, mask=rows < T, other=0.0)
    total = tl.zeros((ROWS, HEAD), tl.float32)
    for start in range(0, tl.minimum(tile * ROWS + ROWS, T), KEYS):
        keys = start + tl.arange(0, KEYS)
        key = rows_of(k, head, keys, T, HEAD)
        p = tl.exp(scores_of(query, key, rows, keys, scale) - logs[:, None])
        dp = tl.dot(do, tl.trans(rows_of(v, head, keys, T, HEAD)), input_precision="ieee")
        ds = p * (dp - d[:, None]) * scale
        total = tl.dot(ds.to(key.dtype), key, total, input_precision="ieee")
    store_rows(dq, head, rows, total, T, HEAD)


@triton.jit
def for_keys(
    q, k, v, dout, lse, delta, dk, dv, T, scale, HEAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr
):
    """dk and dv of a tile of keys, over the tiles of queries that see it."""
    tile, head = tl.program_id(0), tl.program_id(1)
    keys = tile * KEYS + tl.arange(0, KEYS)
    key, value = rows_of(k, head, keys, T, HEAD), rows_of(v, head, keys, T, HEAD)
    total_k = tl.zeros((KEYS, HEAD), tl.float32)
    total_v = tl.zeros((KEYS, HEAD), tl.float32)
    for top in range(tile * KEYS // ROWS * ROWS, T, ROWS):
        rows = top + tl.arange(0, ROWS)
        query, do = rows_of(q, head, rows, T, HEAD), rows_of(dout, head, rows, T, HEAD)
        logs = tl.load(lse + head * T + rows, mask=rows < T, other=float("inf"))  # exp(s - inf) = 0 beyond T
        d = tl.load(delta + head * T + rows, mask=rows < T, other=0.0)
        p = tl.exp(scores_of(query, key, rows, keys, scale) - logs[:, None])
        total_v = tl.dot(tl.trans(p).to(do.dtype), do, total_v, input_precision="ieee")
        ds = p * (tl.dot(do, tl.trans(value), input_precision="ieee") - d[:, None]) * scale
        total_k = tl.dot(tl.trans(ds).to(query.dtype), query, total_k, input_precision="ieee")
    store_rows(dk, head, keys, total_k, T, HEAD)
    store_rows(dv, head, keys, total_v, T, HEAD)


def run_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v (heads, T, head), contiguous. The output is kept in memory, in fp32, between tiles.

    Raises:
        ValueError: bf16 in the interpreter.
    """
    lab.refuse_bf16(q, k, v)
    heads, T, head = q.shape
    out, sums = (torch.zeros_like(x, dtype=torch.float32) for x in (q, q[..., 0]))
    largest = torch.full_like(sums, -math.inf)
    rows, keys, warps, stages = FIRST
    first[(heads,)](
        q, k, v, out, sums, largest, T, head**-0.5, head, rows, keys, num_warps=warps, num_stages=stages
    )
    return out.to(q.dtype)


def run_second(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp in fp32 (heads, T), which backward needs.

    Raises:
        ValueError: bf16 in the interpreter.
    """
    lab.refuse_bf16(q, k, v)
    heads, T, head = q.shape
    out, lse = torch.empty_like(q), torch.empty(heads, T, device=q.device)
    rows, keys, warps, stages = FORWARD
    grid = triton.cdiv(T, rows), heads
    second[grid](q, k, v, out, lse, T, head**-0.5, head, rows, keys, num_warps=warps, num_stages=stages)
    return out, lse


class Attention(Function):
    """q, k, v (heads, T, head) -> (heads, T, head). Causal. head: a power of two, at least 16."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = run_second(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        (heads, T, head), dout = q.shape, grads[0].contiguous()
        delta = (dout.float() * out.float()).sum(-1)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        given, sizes = (q, k, v, dout, lse, delta), (T, head**-0.5, head)
        rows, keys, warps, stages = FOR_QUERIES
        grid = triton.cdiv(T, rows), heads
        for_queries[grid](*given, dq, *sizes, rows, keys, num_warps=warps, num_stages=stages)
        rows, keys, warps, stages = FOR_KEYS
        grid = triton.cdiv(T, keys), heads
        for_keys[grid](*given, dk, dv, *sizes, rows, keys, num_warps=warps, num_stages=stages)
        return dq, dk, dv


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def main() -> None:
    torch.manual_seed(0)
    heads, T, head = 2, 120, 16
    q, k, v, dout = torch.randn(4, heads, T, head, device=lab.DEVICE)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    results = [(out, *grad(out, inputs, dout)) for out in (Attention.apply(*inputs), plain(*inputs))]
    far = max(lab.farthest(a, b) for a, b in zip(*results, strict=True))
    print(
        f"first version: output equals PyTorch's to 1e-5: {lab.farthest(run_first(q, k, v), plain(q, k, v)) < 1e-5}"
    )
    print(f"second version: output and gradients equal PyTorch's to 1e-5: {far < 1e-5}")
    if not lab.INTERPRETED:
        return
    print(f"\n{heads} heads of {head} in fp32; bytes moved per number of q, k, v and out")
    print("tokens  all scores   first  second")
    for T in (128, 256, 512):
        q, k, v = torch.randn(3, heads, T, head)
        numbers, moved = 4 * q.numel(), {}
        for run in (run_first, run_second):
            with lab.Moved() as bytes_of:
                run(q, k, v)
            moved[run] = (bytes_of.read + bytes_of.written) / numbers
        scores = 4 * heads * T * T  # bytes: written, read and written by the softmax, read again
        whole = (q.nbytes * 4 + 4 * scores) / numbers
        print(f"{T:>6}{whole:>12.1f}{moved[run_first]:>8.1f}{moved[run_second]:>8.1f}")


if __name__ == "__main__":
    main()

"""Ring attention by hand (arXiv 2310.01889): each rank has a part of the sequence, keys and values go round.

A rank keeps its queries. In each turn it attends to the keys that are there, merges the result with what it has by the
log of the softmax's sum, and hands the keys on. In backward the keys go round again, with their gradients, which are
home after the last turn. Under a causal mask a rank has nothing to do for the keys of later ranks.

torchrun --nproc-per-node 4 examples/lectures/ring_attention.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function, grad

B, H, T, HEAD = 2, 4, 64, 16  # sequences, heads, tokens of a whole sequence, size of a head


def pass_on(x: Tensor) -> Tensor:
    """Sends x to the next rank; what the one before has sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    leaving, arriving = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    moves = [
        dist.P2POp(dist.isend, leaving, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    return arriving


def scores(q: Tensor, k: Tensor, same: bool) -> Tensor:
    """Of this rank's queries (B, H, t, d) and the keys that are there: (B, H, t, t). same: they are of one part of the
    sequence, so a query sees the keys up to its own place."""
    found = q @ k.mT * q.shape[-1] ** -0.5
    if same:
        found = found.masked_fill(torch.ones_like(found, dtype=torch.bool).triu(1), -torch.inf)
    return found


class RingAttention(Function):
    """q, k, v (B, H, t, d) of this rank's tokens -> (B, H, t, d). Causal."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
        kv = torch.stack((k, v))
        for turn in range(ranks):
            owner = (rank - turn) % ranks
            if owner <= rank:
                s = scores(q, kv[0], owner == rank)
                here = s.logsumexp(-1, keepdim=True)
                total = torch.logaddexp(lse, here)
                out = out * (lse - total).exp() + (s - total).exp() @ kv[1]
                lse = total
            if turn < ranks - 1:
                kv = pass_on(kv)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        (q, k, v, out, lse), dout = ctx.saved_tensors, grads[0]
        rank, ranks, scale = dist.get_rank(), dist.get_world_size(), q.shape[-1] ** -0.5
        dq, travelling = torch.zeros_like(q), torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))
        delta = (dout * out).sum(-1, keepdim=True)
        for turn in range(ranks):
            owner, (k, v, dk, dv) = (rank - turn) % ranks, travelling
            if owner <= rank:
                p = (scores(q, k, owner == rank) - lse).exp()
                ds = p * (dout @ v.mT - delta) * scale
                dq += ds @ k
                dk += ds.mT @ q  # in place, within what travels
                dv += p.mT @ dout
            travelling = pass_on(travelling)
        return dq, travelling[2], travelling[3]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of a whole sequence on one device."""
    return scores(q, k, True).softmax(-1) @ v


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # all ranks make the same whole tensors
    whole = [torch.randn(B, H, T, HEAD, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    dout = torch.randn(B, H, T, HEAD, dtype=torch.float64)
    one = attention(*whole)
    wanted = one, *grad(one, whole, dout)

    mine = [x.detach().chunk(ranks, 2)[rank].clone().requires_grad_() for x in whole]
    out = RingAttention.apply(*mine)
    found = out, *grad(out, mine, dout.chunk(ranks, 2)[rank])

    t, largest = T // ranks, T * T * B * H
    pairs = rank * t * t + t * (t + 1) // 2
    of_each: list[Any] = [None] * ranks
    apart = max((f - w.chunk(ranks, 2)[rank]).abs().max().item() for f, w in zip(found, wanted, strict=True))
    dist.all_gather_object(of_each, (pairs, apart))
    if rank == 0:
        print(f"{T} tokens on {ranks} ranks: a turn has {B * H * t * t} scores, whole attention {largest}")
        for number, (pairs, _) in enumerate(of_each):
            print(f"rank {number}: {ranks} turns, of which {number + 1} with work; {pairs} pairs per head")
        equal = max(apart for _, apart in of_each) < 1e-12
        print(f"output and gradients of q, k, v equal those of one device to 1e-12: {equal}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

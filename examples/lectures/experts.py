"""Expert parallelism by hand: a mixture of experts whose tokens travel to their experts and back (arXiv 2006.16668).

Each rank has tokens of its own and some of the experts. A router chooses two experts for each token. The rows are
sorted by expert. Ranks tell each other how many rows they send (an all-to-all of counts), send them, compute what has
arrived, and send the results back. Backward is the same with gradients, in reverse.

torchrun --nproc-per-node 4 examples/lectures/experts.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import silu

E, K, D, F, N = 8, 2, 32, 48, 64  # experts, of a token, width, an expert's inner width, tokens of a rank


class Experts(nn.Module):
    """The experts of this rank; `gate_up` has the rows of the gate, then those of up. With a router for all."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same whole weights on every rank
        router, gate_up, down = torch.randn(E, D), torch.randn(E, 2 * F, D) / 6, torch.randn(E, D, F) / 7
        self.router = nn.Parameter(router / 6)
        self.gate_up, self.down = (
            nn.Parameter(gate_up[first:last].clone()),
            nn.Parameter(down[first:last].clone()),
        )

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, and their weights: (N, K) each."""
        shares = (x @ self.router.T).softmax(-1)
        chosen = shares.topk(K, dim=-1).indices
        weights = shares.gather(-1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True)

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows sorted by expert -> their results."""
        done = []
        for number, part in enumerate(rows.split(counts)):
            gate, up = (part @ self.gate_up[number].T).chunk(2, dim=-1)
            done.append((silu(gate) * up) @ self.down[number].T)
        return torch.cat(done)


class Exchange(Function):
    """An all-to-all of rows: `leaving` says how many go to each rank, `arriving` how many come from each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        ctx.leaving, ctx.arriving = leaving, arriving
        out = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), arriving, leaving)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        return Exchange.apply(grads[0], ctx.arriving, ctx.leaving), None, None


def mixture(layer: Experts, x: Tensor) -> tuple[Tensor, list[int]]:
    """This rank's tokens (N, D) -> their results (N, D), and the rows that this rank has computed for each rank."""
    ranks = dist.get_world_size()
    chosen, weights = layer.choose(x)
    order = chosen.flatten().argsort(
        stable=True
    )  # slots, a token's first and second choice, sorted by expert
    token = order // K
    counts = torch.bincount(chosen.flatten(), minlength=E).view(ranks, -1)  # of each rank's experts
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    leaving, arriving = counts.sum(1).tolist(), theirs.sum(1).tolist()
    rows = Exchange.apply(x[token], leaving, arriving)
    # They arrive sorted by rank, then expert. Experts want them by expert.
    expert = torch.arange(theirs.shape[1]).repeat(ranks).repeat_interleave(theirs.flatten())
    by_expert = expert.argsort(stable=True)
    results = layer.compute(rows[by_expert], theirs.sum(0).tolist())
    back = Exchange.apply(results[by_expert.argsort()], arriving, leaving)
    weighted = back * weights.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, token, weighted), arriving


def one_device(layer: Experts, x: Tensor) -> Tensor:
    """All experts here: each computes its tokens."""
    chosen, weights = layer.choose(x)
    y = torch.zeros_like(x)
    for number in range(E):
        token, slot = (chosen == number).nonzero(as_tuple=True)
        gate, up = (x[token] @ layer.gate_up[number].T).chunk(2, dim=-1)
        y = y.index_add(0, token, (silu(gate) * up) @ layer.down[number].T * weights[token, slot][:, None])
    return y


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, last = rank * E // ranks, (rank + 1) * E // ranks
    tokens = torch.randn(ranks, N, D, generator=torch.Generator().manual_seed(1))  # of all ranks
    layer, whole = Experts(first, last), Experts(0, E)
    y, rows = mixture(layer, tokens[rank])
    y.square().sum().backward()
    want = one_device(whole, tokens.flatten(0, 1))
    want.square().sum().backward()
    router = gradient(layer.router)
    dist.all_reduce(router)  # of all tokens; an expert's gradient is whole, since all its tokens were here
    pairs = [(y, want[rank * N : (rank + 1) * N]), (router, gradient(whole.router))]
    for part, all_experts in ((layer.gate_up, whole.gate_up), (layer.down, whole.down)):
        pairs.append((gradient(part), gradient(all_experts)[first:last]))
    apart = max(((f - w).norm() / w.norm()).item() for f, w in pairs)
    of_each: list[Any] = [None] * ranks
    dist.all_gather_object(of_each, (rows, apart))
    if rank == 0:
        print(
            f"{ranks} ranks with {N} tokens each, {E} experts, {K} per token: an even share is {N * K} rows"
        )
        for number, (rows, _) in enumerate(of_each):
            print(f"rank {number}, experts {number * E // ranks} to {(number + 1) * E // ranks - 1}: {sum(rows)} rows, "
                  f"from each rank {rows}")  # fmt: skip
        busiest = max(sum(rows) for rows, _ in of_each) / (N * K)
        print(f"everybody waits for the busiest rank: {busiest:.2f} times the even share")
        print(f"outputs and gradients equal those of one device to 1e-5: {max(a for _, a in of_each) < 1e-5}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Collectives by hand: what each one does, and a ring all-reduce made of sends and receives.

Each rank begins with a tensor of its own. With four ranks, rank r has [r + 1, 10 (r + 1), ...], so that a sum shows
who took part. Plain torch.distributed, on this machine's loopback:

torchrun --nproc-per-node 4 examples/lectures/collectives.py
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor


def own(rank: int, ranks: int) -> Tensor:
    """A rank's tensor, with one element for each rank: (ranks)."""
    return (rank + 1) * 10.0 ** torch.arange(ranks)


def broadcast(x: Tensor, root: int) -> Tensor:
    """Everybody gets the root's tensor."""
    dist.broadcast(out := x.clone(), src=root)
    return out


def reduce(x: Tensor, root: int) -> Tensor | None:
    """The root gets the sum. The others get nothing that they may use."""
    dist.reduce(out := x.clone(), dst=root)
    return out if dist.get_rank() == root else None


def gather(x: Tensor, root: int) -> list[Tensor] | None:
    """The root gets everybody's tensor, by rank."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())] if dist.get_rank() == root else None
    dist.gather(x, parts, dst=root)
    return parts


def scatter(x: Tensor, root: int) -> Tensor:
    """Rank r gets the root's element r."""
    parts = list(x.chunk(dist.get_world_size())) if dist.get_rank() == root else None
    dist.scatter(out := torch.empty_like(x[:1]), parts, src=root)
    return out


def all_reduce(x: Tensor) -> Tensor:
    """Everybody gets the sum: a reduce and a broadcast, in one."""
    dist.all_reduce(out := x.clone())
    return out


def shift(leaving: Tensor, arriving: Tensor) -> None:
    """Sends to the next rank of the ring and receives from the one before, both at once. A ring in which everybody
    sends first and receives afterwards may wait for ever."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    moves = [
        dist.P2POp(dist.isend, leaving, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, arriving, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(moves):
        work.wait()


def ring_all_reduce(x: Tensor) -> tuple[Tensor, int]:
    """The sum of everybody's x, and the elements that this rank sent. The length of x is a multiple of the ranks.

    Round by round a chunk travels on and everybody adds its own part: after n - 1 rounds each rank has one chunk of the
    sum (a reduce-scatter). In n - 1 more rounds the finished chunks go round once (an all-gather).
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks, sent = list(x.clone().chunk(ranks)), 0
    arriving = torch.empty_like(chunks[0])
    for number in range(2 * (ranks - 1)):
        leaving = chunks[(rank - 1 - number) % ranks]
        place = chunks[(rank - 2 - number) % ranks]
        shift(leaving, arriving)
        sent += leaving.numel()
        if number < ranks - 1:
            place += arriving
        else:
            place.copy_(arriving)
    return torch.cat(chunks), sent


def waited(late_s: float) -> float:
    """Seconds that a barrier takes if the last rank comes late: nobody leaves before everybody has arrived."""
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(late_s)
    began = time.monotonic()
    dist.barrier()
    return time.monotonic() - began


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = own(rank, ranks)

    def say(what: str, result: list[Tensor] | Tensor | None) -> None:
        """Rank 0 prints what every rank has."""
        whole = torch.stack(result) if isinstance(result, list) else result
        text = "nothing" if whole is None else str(whole.flatten().int().tolist())
        of_each: list[str | None] = [None] * ranks
        dist.all_gather_object(of_each, text)
        if rank == 0:
            print(f"{what:<16}" + "   ".join(f"{number}: {text}" for number, text in enumerate(of_each)))

    say("at the start", x)
    say("broadcast of 1", broadcast(x, 1))
    say("reduce to 0", reduce(x, 0))
    say("scatter of 2", scatter(x, 2))
    say("gather to 3", gather(x[:1], 3))
    say("all-reduce", all_reduce(x))
    total, sent = ring_all_reduce(x)
    say("by a ring", total)
    seconds = waited(0.2)
    if rank == 0:
        print(f"ring: {2 * (ranks - 1)} rounds, each rank sent {sent} elements: 2 (n - 1) / n of {len(x)}")
        print(f"barrier: rank 0 waited for the last rank, which came 0.2 s late: {seconds > 0.15}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

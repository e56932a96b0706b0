"""Computes a microbatch of another rank again, and compares loss and gradients bit by bit.

Each data-parallel rank computes a microbatch of its own, then that of its neighbour, with the same weights and the same
random numbers. A difference means that one of the two computes wrongly: a processor that fails, or memory.
It costs two microbatches. The gradients are those of a microbatch, before any sum over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fivefold.comm import told
from fivefold.kernels.hashing import digest
from fivefold.parallel.data import DataParallel
from fivefold.parallel.microbatch import Microbatch
from fivefold.parallel.zero import Sharded
from fivefold.step.state import State
from fivefold.step.step import dropout_rank, seed_dropout


def replay(state: State, seed: int, step: int, first_of: Callable[[int], Microbatch]) -> str:
    """What differs, in words, the same on all ranks; "" if nothing does. All ranks call it.

    step: 0, 1, ..., of the microbatches. first_of: the microbatch of the data-parallel rank with this index.
    """
    mesh, run = state.mesh, state.mesh.axis("run")
    dp = mesh.axis("dp")
    draws = dp.all_gather(torch.tensor([dropout_rank(mesh)], device=run.device)).tolist()
    other = (dp.index - 1) % dp.size

    def hashes(index: int) -> tuple[list[str], Tensor]:
        seed_dropout(seed, step, 0, draws[index])
        return _hashes(state, first_of(index))

    names, own = hashes(dp.index)
    _, again = hashes(other)
    differs = dp.all_gather(own[None])[other] != again  # (hashes)
    first = torch.where(differs.any(), differs.int().argmax(), -1).view(1)
    found = run.all_gather(first).tolist()
    pairs = [rank for rank, index in enumerate(found) if index >= 0]
    if not pairs:
        return ""
    peers = run.all_gather(torch.tensor([dp.ranks[other]], device=run.device)).tolist()
    name = told(names[found[run.index]] if run.index == pairs[0] else "", pairs[0], run)
    suspects = [{rank, peers[rank]} for rank in pairs]
    common = set.intersection(*suspects) if len(pairs) > 1 else set()
    ranks = sorted(common if len(common) == 1 else set.union(*suspects))
    who = (
        f"rank {ranks[0]} computes"
        if len(ranks) == 1
        else f"one of ranks {', '.join(map(str, ranks))} computes"
    )
    return (
        f"in step {step + 1} rank {pairs[0]} computed another {name} from a microbatch of rank {peers[pairs[0]]} than "
        f"that rank itself: {who} wrongly"
    )


def _hashes(state: State, microbatch: Microbatch) -> tuple[list[str], Tensor]:
    """Names and hashes (int64) of a microbatch's loss and gradients. Its gradients are forgotten in the next step."""
    parallel = state.parallel
    names, found = ["loss"], list[Tensor]()
    for replica in parallel.replicas:
        replica.start_step()
        if isinstance(replica, Sharded):
            replica.enable_sync()  # it scatters a microbatch's gradients then, under all stages
    if parallel.balance is not None:
        parallel.balance.start_step(1.0)
    with _exact(state), _seeing(state, names, found), parallel.saving():
        loss = state.module(microbatch.inputs, microbatch.targets, **microbatch.options(parallel.positions))
        loss.backward(torch.ones_like(loss))
        for replica in parallel.replicas:
            replica.finish()
            if isinstance(replica, DataParallel):
                for name, gradient in replica.gradients.items():
                    names.append(f"gradient of {name}")
                    found.append(digest(gradient))
    return names, torch.stack([digest(loss.detach()), *found])


@contextmanager
def _seeing(state: State, names: list[str], found: list[Tensor]) -> Iterator[None]:
    """Hashes what FSDP2 units scatter. Nobody else watches the gradients meanwhile."""
    watching = [
        messages for r in state.parallel.replicas if isinstance(r, Sharded) for messages in r.messages
    ]
    weights = [r.weights for r in state.parallel.replicas if isinstance(r, DataParallel)]
    before, plain = [one.seen for one in watching], [one.seen for one in weights]

    def see(name: str) -> Callable[[Tensor], None]:
        def seen(gradient: Tensor) -> None:
            names.append(f"gradient of {name}")
            found.append(digest(gradient))

        return seen

    for one in watching:
        one.seen = see(one.name)
    for one in weights:
        one.seen = None
    try:
        yield
    finally:
        for one, old in zip(watching, before, strict=True):
            one.seen = old
        for one, old in zip(weights, plain, strict=True):
            one.seen = old


@contextmanager
def _exact(state: State) -> Iterator[None]:
    """Kernels that give the same bits every time, where GPUs have a choice."""
    if state.mesh.device.type == "cpu":
        yield
        return
    before, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)

"""Every collective on real gloo ranks, beside the plain computation; the same bits every time and on every rank."""

import pytest
import torch
from marks import slow_but
from ranks import run_ranks
from torch import Tensor

import fivefold.comm.axis as axis_
from fivefold.comm import ALONE, Axis
from fivefold.comm.execute import Executor
from fivefold.launch.ranks import Ranks
from fivefold.parallel.mesh import Mesh
from fivefold.schedules.collectives import ALGORITHMS, PRIMITIVES, Collective, Primitive, build, shape_of
from fivefold.schedules.collectives.collective import reverse
from fivefold.sharding.layout import Layout

CPU = torch.device("cpu")


def axis_of(rank: int, world: int) -> Axis:
    return Mesh(Layout(dp_replicate=world), Ranks(rank, world, rank, world, CPU)).axis("replicate")


def of_rank(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small whole numbers: sums of them are exact in bf16, too."""
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def wanted(primitive: Primitive, rank: int, world: int, root: int, every: list[Tensor]) -> Tensor | None:
    """The plain computation; None where a rank gets nothing. every: (n 2, 3) per rank."""
    total, mine = torch.stack(every).sum(0).to(every[0].dtype), slice(2 * rank, 2 * rank + 2)
    if primitive in ("all_reduce", "reduce"):
        return total if primitive == "all_reduce" or rank == root else None
    if primitive == "broadcast" or (primitive == "send" and rank == (root + 1) % world):
        return every[root]
    if primitive in ("all_gather", "gather"):
        both = torch.cat([x[:2] for x in every])
        return both if primitive == "all_gather" or rank == root else None
    if primitive in ("reduce_scatter", "scatter"):
        return total[mine] if primitive == "reduce_scatter" else every[root][mine]
    return torch.cat([x[mine] for x in every]) if primitive == "all_to_all" else None


def plain(rank: int, world: int) -> None:
    axis = axis_of(rank, world)
    for primitive in PRIMITIVES:
        for name, made in ALGORITHMS[primitive].items():
            for local in {1, 2, world} if "per node" in made.needs or name == "ring" else {world}:
                shape = shape_of(world, local, pieces=made.pieces[len(made.pieces) // 2], root=world - 1)
                if made.switches or not made.fits(shape):
                    continue
                run = Executor(axis, build(primitive, name, shape))
                for dtype in (torch.float32, torch.bfloat16)[: 1 if world == 8 else 2]:
                    every = [of_rank(r, dtype, 2 * world, 3) for r in range(world)]
                    x = every[rank][: 2 if primitive in ("all_gather", "gather") else None]
                    right = wanted(primitive, rank, world, world - 1, every)
                    for _ in range(2):  # the second time in the buffers of the first
                        found = run(x.clone())
                        if right is not None:
                            assert torch.equal(found, right), (
                                f"{primitive} {name} {local} per node, rank {rank}"
                            )
    odd = [of_rank(r, torch.float32, 7) for r in range(world)]  # chunks of unequal size, some of them empty
    for name, made in ALGORITHMS["all_reduce"].items():
        if made.fits(shape_of(world)) and not made.switches:
            run = Executor(axis, build("all_reduce", name, world))
            assert torch.equal(run(odd[rank].clone()), torch.stack(odd).sum(0)), name
            assert run(torch.empty(0)).numel() == 0


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_collective_is_the_plain_computation(world: int) -> None:
    run_ranks(world, plain)


def with_a_switch(rank: int, world: int) -> list[Tensor]:
    """The last rank is a process that is the switch; what it brings itself does not count."""
    run = Executor(axis_of(rank, world), build("all_reduce", "in_network", world - 1))
    return [run(of_rank(rank, dtype, 7, 3)) for dtype in (torch.float32, torch.bfloat16) for _ in range(2)]


@pytest.mark.parametrize("world", slow_but([3], [3, 4]))
def test_a_switch_adds_for_the_ranks(world: int) -> None:
    *every, _ = run_ranks(world, with_a_switch)
    for number, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16, torch.bfloat16)):
        right = torch.stack([of_rank(r, dtype, 7, 3) for r in range(world - 1)]).sum(0).to(dtype)
        assert all(torch.equal(found[number], right) for found in every)


def bits(rank: int, world: int) -> dict[str, list[list[float]]]:
    axis, found = axis_of(rank, world), {}
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    for name, made in ALGORITHMS["all_reduce"].items():
        if made.fits(shape_of(world)) and not made.switches:
            run = Executor(axis, build("all_reduce", name, world))
            found[name] = [run(x.clone()).tolist() for _ in range(3)]
    return found


@pytest.mark.parametrize("world", [3, 4])
def test_sums_have_the_same_bits_every_time_and_on_every_rank(world: int) -> None:
    every = run_ranks(world, bits)
    exact = torch.stack(
        [torch.randn(1000, generator=torch.Generator().manual_seed(r)).double() for r in range(world)]
    )
    for name, first in every[0].items():
        assert all(run == first[0] for found in every for run in found[name]), name
        torch.testing.assert_close(torch.tensor(first[0]), exact.sum(0).float(), rtol=1e-5, atol=1e-6)


def self_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T / q.shape[1] ** 0.5).softmax(1) @ v


def of_sequence(length: int, dim: int) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, of a whole sequence."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(length, dim, generator=generator, dtype=torch.float64) for _ in range(4)]


def ring_self_attention(rank: int, world: int, length: int, dim: int) -> list[Tensor]:
    """A rank's rows of the result, and its gradients. Each round brings the keys, then the values of one more rank;
    gradients go the way back."""
    axis, there = axis_of(rank, world), build("all_gather", "keys_then_values", world)
    q, k, v, dout = (x.chunk(world)[rank] for x in of_sequence(length, dim))
    rows, whole = len(q), torch.zeros(world, 2, len(q), dim, dtype=q.dtype)
    whole[rank, 0], whole[rank, 1] = k, v
    scores = torch.empty(rows, length, dtype=q.dtype)
    scores.view(rows, world, rows)[:, rank] = q @ k.T
    weights, out = scores, torch.zeros_like(q)
    for number in Executor(axis, there).rounds(whole.view(-1)):
        if number < world - 1:  # keys
            owner = (rank - number - 1) % world
            assert whole[owner, 0].abs().sum() > 0
            assert whole[owner, 1].abs().sum() == 0, "values go round behind all keys"
            scores.view(rows, world, rows)[:, owner] = q @ whole[owner, 0].T
            continue
        if number == world - 1:  # all scores are there: no running maximum, no rescaling
            weights = (scores / dim**0.5).softmax(1)
            out = weights.view(rows, world, rows)[:, rank] @ v
        owner = (rank - (number - world + 1) - 1) % world
        out += weights.view(rows, world, rows)[:, owner] @ whole[owner, 1]
    keys, values = (x.reshape(length, dim) for x in whole.unbind(1))
    dweights = dout @ values.T
    dscores = weights * (dweights - (dweights * weights).sum(1, keepdim=True)) / dim**0.5
    partial = (
        torch.stack([dscores.T @ q, weights.T @ dout]).view(2, world, rows, dim).transpose(0, 1).contiguous()
    )
    home = Collective("reduce_scatter", "own", world, there.chunks, tuple(reverse(there.rounds, True)))
    dk, dv = Executor(axis, home)(partial)[0]
    return [out, dscores @ keys, dk, dv]


@pytest.mark.parametrize("world", slow_but([3], [2, 3, 4]))
def test_ring_self_attention_is_that_of_one_process(world: int) -> None:
    """Li et al. 2021: result and gradients, in float64."""
    *inputs, dout = (x.requires_grad_() for x in of_sequence(12, 5))
    right = self_attention(*inputs)
    right.backward(dout)
    found = run_ranks(world, ring_self_attention, 12, 5)
    for number, wanted in enumerate([right, *(x.grad for x in inputs)]):
        torch.testing.assert_close(torch.cat([part[number] for part in found]), wanted)


def counted(rank: int, world: int) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    run = Executor(axis_of(rank, world), build("all_reduce", "ring", world))
    axis_.counters.append(lambda axis, operation, size: found.append((operation, size)))
    try:
        run(torch.zeros(400))
    finally:
        axis_.counters.clear()
    return found


def test_messages_go_through_the_axis() -> None:
    """2 (n-1) sends of S/n bytes each, as the schedule says."""
    for found in run_ranks(4, counted):
        assert [size for operation, size in found if operation == "send"] == [400] * 6
        assert [size for operation, size in found if operation == "receive"] == [400] * 6


def test_one_rank_sends_nothing() -> None:
    x = torch.arange(3.0)
    assert Executor(ALONE, build("all_reduce", "ring", 1))(x) is x

"""Expert parallelism: each rank of an "ep" group has some of the experts, and computes them for all ranks of the group.

Ranks of the group have different tokens. In forward each sends its tokens' rows to the ranks that hold their experts
(all-to-all, uneven: the counts go first), computes what it receives, and sends the results back; backward does the same
in the other direction (GShard, arXiv 2006.16668). So a rank has seen all gradients of its experts from its group, and
they are summed over "edp", the ranks with the same experts, while other gradients are summed over "batch".

Also here, for any layout: what the ranks together know of the load of the experts, once a step.

Legend: M rows that a rank has, R rows that it receives, D model, E experts, G ranks of the group, e = E / G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.models.model import LanguageModel
from fivefold.models.moe import Exchange, Mixture, Total
from fivefold.parallel.mesh import Mesh
from fivefold.recipe.schema import ModelSection
from fivefold.sharding import Part, local_shape


def mixtures(stage: LanguageModel) -> Iterator[tuple[int, Mixture]]:
    """The mixtures of experts of a stage, with the numbers of their blocks."""
    for number, block in stage.blocks.items():
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, Mixture):
            yield int(number), mlp


def apply(stage: LanguageModel, mesh: Mesh, table: dict[str, Part]) -> None:
    """Divides the experts of a model that is on "meta", in place, and lets routers that see parts of a sequence know of
    the others."""
    for number, mixture in mixtures(stage):
        sequence = [g for name in sequence_groups(mesh) if (g := mesh.group(name)) is not None]
        if sequence:
            mixture.total = SummedTotal(sequence)
        group = mesh.group("ep")
        if group is None:
            continue
        mixture.experts.exchange = AllToAll(group)
        for name, whole in list(mixture.experts.named_parameters()):
            shape = local_shape(table[f"blocks.{number}.mlp.experts.{name}"].computes)
            setattr(mixture.experts, name, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta")))


def sequence_groups(mesh: Mesh) -> list[str]:
    """The groups whose ranks have parts of the same sequences, where routers work."""
    return ["cp", "tp"] if mesh.layout.sp else ["cp"]


class SummedTotal(Total):
    """The counts of all ranks that have parts of the same sequences. They carry no gradient."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]):
        super().__init__()
        self.groups = groups

    def forward(self, counts_E: Tensor) -> Tensor:
        total = counts_E.clone()
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return total


class AllToAll(Exchange):
    """Sends rows to the ranks that hold their experts, and the results back (see `models.moe.Exchange`)."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.group = group

    def forward(
        self, rows_MD: Tensor, counts_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """compute: of rows sorted by this rank's experts, and how many each has."""
        mine_Ge = counts_E.view(self.group.size(), -1)
        theirs_Ge = torch.empty_like(mine_Ge)
        dist.all_to_all_single(theirs_Ge, mine_Ge, group=self.group)
        sent, received = self.splits(torch.stack([mine_Ge.sum(1), theirs_Ge.sum(1)]), len(rows_MD))
        rows_RD = _Send.apply(rows_MD, received, sent, self.group)
        # They lie by source, then expert; and go by expert, then source.
        experts = torch.arange(theirs_Ge.shape[1], device=rows_MD.device).repeat(len(theirs_Ge))
        order = experts.repeat_interleave(theirs_Ge.flatten(), output_size=len(rows_RD)).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        results_RD = compute(_Permute.apply(rows_RD, order, back), theirs_Ge.sum(0))
        return _Send.apply(_Permute.apply(results_RD, back, order), sent, received, self.group)

    def splits(self, rows_2G: Tensor, rows: int) -> list[list[int]]:
        """Rows that go to each rank, `rows` in all, and rows that come from each."""
        return rows_2G.tolist()


class _Send(Function):
    """all-to-all of rows: `given` [i] of them, in order, go to rank i, from which `taken` [i] come."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, taken: list[int], given: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.splits, ctx.group = (taken, given), group
        return _all_to_all(rows, taken, given, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        taken, given = ctx.splits
        return _all_to_all(grads[0], given, taken, ctx.group), None, None, None


def _all_to_all(rows: Tensor, taken: list[int], given: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(taken), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), taken, given, group=group)
    return out


class _Permute(Function):
    """Rows in another order. back: the order that undoes it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        return grads[0].index_select(0, ctx.back), None, None


class Balance:
    """What all ranks together know of the load of the experts: gathered once a step, and what follows from it.

    A step is: start_step, forward and backward of the microbatches, finish; then `figures` holds, and `update` moves
    the routers' biases where the recipe balances by them.
    """

    def __init__(self, stages: Iterable[LanguageModel], mesh: Mesh, model: ModelSection):
        self.layers = {number: mixture for stage in stages for number, mixture in mixtures(stage)}
        self.mesh, self.model = mesh, model
        self.sums = torch.zeros(0)  # (blocks with experts, E + 4), fp64: see `models.moe.Tally`
        self.figures: dict[str, float] = {}

    def start_step(self, scale: float) -> None:
        """scale: what the gradients of the losses of this step are multiplied by."""
        pieces = self.mesh.size("tp") if self.mesh.layout.sp else 1  # their gradients are summed
        for mixture in self.layers.values():
            mixture.tally.scale, mixture.tally.sums = scale / pieces, None

    def finish(self) -> None:
        """One all-reduce of a few numbers a block."""
        model, mesh = self.model, self.mesh
        assert model.experts, "a resolved recipe has experts"
        rows = model.layers - model.dense_layers
        self.sums = torch.zeros(rows, model.experts + 4, dtype=torch.float64, device=mesh.device)
        if mesh.layout.sp or mesh.index("tp") == 0:  # without sp the ranks of tp have the same tokens
            for number, mixture in self.layers.items():
                if mixture.tally.sums is not None:
                    self.sums[number - model.dense_layers] = mixture.tally.sums
        if mesh.size("all") > 1:
            dist.all_reduce(self.sums, group=mesh.group("all"))
        self.figures = self._figures()

    def _figures(self) -> dict[str, float]:
        """expert_load_max, expert_load_min: tokens of the most and the least used expert of any block, by its even
        share. dropped_share: of the slots. aux_loss, z_loss: means of the terms, without their weights."""
        slots, (dropped, aux, z, passes) = self.sums[:, :-4], self.sums[:, -4:].sum(0).tolist()
        load = slots / slots.mean(1, keepdim=True).clamp(min=1)
        return {
            "expert_load_max": load.max().item(),
            "expert_load_min": load.min().item(),
            "dropped_share": dropped / max(1.0, slots.sum().item()),
            "aux_loss": aux / max(1.0, passes),
            "z_loss": z / max(1.0, passes),
        }

    @torch.no_grad()
    def update(self) -> None:
        """Experts with more than their share become less likely to be chosen, the others more: by a fixed rate."""
        for number, mixture in self.layers.items():
            if mixture.router.bias is not None:
                slots = self.sums[number - self.model.dense_layers, :-4]
                mixture.router.bias += self.model.balance_rate * (slots.mean() - slots).sign().float()

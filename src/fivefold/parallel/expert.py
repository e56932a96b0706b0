"""Expert parallelism: each rank of an "ep" group has some of the experts, and computes them for all ranks of the group.

Ranks of the group have different tokens. In forward each rank sends the rows of its tokens to the ranks that hold their
experts (an uneven all-to-all; the counts go first), computes the rows it receives, and sends the results back. Backward
does the same in reverse (GShard, arXiv 2006.16668). A rank has then seen all gradients of its experts from its group.
They are summed over "edp", the ranks with the same experts; other gradients are summed over "batch".

`Balance` sums the load of the experts over all ranks, once per step, in any layout.

Legend: M rows that a rank has, R rows that it receives, D model, E experts, G ranks of the group, e = E / G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fivefold.comm import Axis
from fivefold.models.base import LanguageModel
from fivefold.models.card import card_of
from fivefold.models.mixture import Exchange, Mixture, Total
from fivefold.models.section import ModelSection
from fivefold.parallel.mesh import Mesh
from fivefold.spread.parts import Part, local_shape
from fivefold.spread.regions import COUNTS, ROWS, Collective, loads


def mixtures(stage: LanguageModel) -> Iterator[tuple[int, Mixture]]:
    """The mixtures of experts of a stage, with the numbers of their blocks."""
    for number, block in stage.blocks.items():
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, Mixture):
            yield int(number), mlp


def apply(stage: LanguageModel, mesh: Mesh, table: dict[str, Part]) -> None:
    """Shards the experts of a model on "meta" over "ep", in place. Routers that see a part of each sequence get the
    counts of the whole sequence."""
    for number, mixture in mixtures(stage):
        sums = [(mesh.axis(load.axis), load) for load in loads(mesh.layout.sp) if mesh.size(load.axis) > 1]
        if sums:
            mixture.total = SummedTotal(sums)
        if mesh.size(ROWS.axis) == 1:
            continue
        mixture.experts.exchange = AllToAll(mesh.axis(ROWS.axis))
        for name, whole in list(mixture.experts.named_parameters()):
            shape = local_shape(table[f"blocks.{number}.mlp.experts.{name}"].computes)
            setattr(mixture.experts, name, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta")))


class SummedTotal(Total):
    """Sums counts over all ranks that have parts of the same sequences. Counts carry no gradient."""

    def __init__(self, sums: Sequence[tuple[Axis, Collective]]):
        super().__init__()
        self.sums = sums

    def forward(self, counts_E: Tensor) -> Tensor:
        total = counts_E.clone()
        for axis, load in self.sums:
            axis.run(load, total)
        return total


class AllToAll(Exchange):
    """Sends rows to the ranks that hold their experts, and the results back (see `models.mixture.Exchange`)."""

    def __init__(self, axis: Axis):
        super().__init__()
        self.axis = axis

    def forward(
        self, rows_MD: Tensor, counts_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """compute(rows sorted by this rank's experts, rows per expert) returns the results, row by row."""
        mine_Ge = counts_E.view(self.axis.size, -1)
        theirs_Ge = self.axis.run(COUNTS, mine_Ge)
        sent, received = self.splits(torch.stack([mine_Ge.sum(1), theirs_Ge.sum(1)]), len(rows_MD))
        rows_RD = _Send.apply(rows_MD, received, sent, self.axis)
        # The rows arrive sorted by source, then expert. Experts need them sorted by expert, then source.
        experts = torch.arange(theirs_Ge.shape[1], device=rows_MD.device).repeat(len(theirs_Ge))
        order = experts.repeat_interleave(theirs_Ge.flatten(), output_size=len(rows_RD)).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        results_RD = compute(_Permute.apply(rows_RD, order, back), theirs_Ge.sum(0))
        return _Send.apply(_Permute.apply(results_RD, back, order), sent, received, self.axis)

    def splits(self, rows_2G: Tensor, rows: int) -> list[list[int]]:
        """Rows to send to each rank (`rows` in all), and rows to receive from each."""
        return rows_2G.tolist()


class _Send(Function):
    """All-to-all of rows: sends given[i] rows to rank i, in order, and receives taken[i] rows from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, taken: list[int], given: list[int], axis: Axis) -> Tensor:
        ctx.splits, ctx.axis = (taken, given), axis
        return axis.run(ROWS, rows.contiguous(), taken, given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        taken, given = ctx.splits
        return ctx.axis.run(ROWS, grads[0].contiguous(), given, taken, backward=True), None, None, None


class _Permute(Function):
    """Reorders rows. back: the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        return grads[0].index_select(0, ctx.back), None, None


class Balance:
    """The load of the experts, summed over all ranks once per step.

    A step is: start_step, forward and backward of the microbatches, finish. Then `figures` is valid, and `update` moves
    the routers' biases if the recipe balances by them.
    """

    def __init__(self, stages: Iterable[LanguageModel], mesh: Mesh, model: ModelSection):
        self.layers = {number: mixture for stage in stages for number, mixture in mixtures(stage)}
        self.mesh, self.model = mesh, model
        mixed = [number for number, is_mixed in enumerate(card_of(model).mixed) if is_mixed]
        self.rows = {number: row for row, number in enumerate(mixed)}  # of `sums`, by block
        self.sums = torch.zeros(0)  # (blocks with experts, E + 4), fp64: see `models.mixture.RouterStats`
        self.figures: dict[str, Tensor] = {}

    def start_step(self, scale: float) -> None:
        """scale: factor on the gradients of this step's losses."""
        pieces = self.mesh.size("tp") if self.mesh.layout.sp else 1  # the gradients of the pieces are summed
        for mixture in self.layers.values():
            mixture.stats.scale, mixture.stats.sums = scale / pieces, None

    def finish(self) -> None:
        """Sums over ranks: one all-reduce of a few numbers per block."""
        mesh, shape = self.mesh, card_of(self.model).load_sums
        self.sums = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
        if mesh.layout.sp or mesh.index("tp") == 0:  # without sp the ranks of tp have the same tokens
            for number, mixture in self.layers.items():
                if mixture.stats.sums is not None:
                    self.sums[self.rows[number]] = mixture.stats.sums
        mesh.axis("all").all_reduce(self.sums)
        self.figures = self._figures()

    def _figures(self) -> dict[str, Tensor]:
        """Scalars on the device. expert_load_max, expert_load_min: tokens of the most and the least used expert of any
        block, relative to an even split. dropped_share: share of slots that were dropped. aux_loss, z_loss: mean terms,
        unweighted."""
        slots, (dropped, aux, z, passes) = self.sums[:, :-4], self.sums[:, -4:].sum(0).unbind()
        load = slots / slots.mean(1, keepdim=True).clamp(min=1)
        return {
            "expert_load_max": load.max(),
            "expert_load_min": load.min(),
            "dropped_share": dropped / slots.sum().clamp(min=1),
            "aux_loss": aux / passes.clamp(min=1),
            "z_loss": z / passes.clamp(min=1),
        }

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Lowers the bias of experts with more than an even share and raises the others, by a fixed rate. skip: 1: not
        in this step (fp32 scalar)."""
        for number, mixture in self.layers.items():
            if mixture.router.bias is not None:
                slots = self.sums[self.rows[number], :-4]
                step = self.model.balance_rate * (slots.mean() - slots).sign().float()
                mixture.router.bias += step * (1 - skip)

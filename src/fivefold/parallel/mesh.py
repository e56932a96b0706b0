"""The ranks of a layout, the axes between them, and the microbatches that a rank computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fivefold.comm import Axis, Beside, Scheduled
from fivefold.comm.execute import agreed
from fivefold.comm.progress import progress
from fivefold.errors import UserError
from fivefold.host.tables import best_all_reduce
from fivefold.kernels.blockwise_attention import Documents
from fivefold.launch.ranks import Ranks, connect, group_options
from fivefold.models.ahead import Further, further
from fivefold.schedules.collectives import Primitive
from fivefold.schedules.collectives.registry import AUTO, LIBRARY, chosen, resolved
from fivefold.schedules.compression import NONE
from fivefold.sharding.layout import Layout, group_of, groups, index_in, on_node, to_text
from fivefold.sharding.layout_rules import on_nodes
from fivefold.sharding.parts import Span
from fivefold.sharding.sequence import deals, token_spans
from fivefold.sharding.sync import in_replica_group, replica_group_layout


class Mesh:
    """The axes of a replica group's layout as this rank sees them, by the names of `layout.groups`. All ranks must
    build it at the same time.

    layout: of the whole run. replica_groups: their number; one replica group is the whole run. Three more axes leave
    the replica group: "replica_groups", this rank's counterparts in all of them, "outer", the same for outer gradients,
    and "run", all ranks. Attribute `layout` is the replica group's, as `divided` and `in_step` are, and `rank` the
    number in it. replica_group: this launch's, if each replica group is a launch of its own: its mesh then has no other
    replica group (`apart`). overlap: the axis "outer" has a group of its own: its sums are under way on a thread while
    a step's figures are summed over "replica_groups". causal: the model's tokens see earlier ones only. further: tokens
    that it predicts beyond the next one.
    """

    def __init__(
        self,
        layout: Layout,
        ranks: Ranks,
        replica_groups: int = 1,
        replica_group: int | None = None,
        overlap: bool = False,
        causal: bool = True,
        further: int = 0,
    ):
        """Raises UserError if ZeRO++ needs other nodes."""
        own = replica_group_layout(layout, replica_groups)
        here = layout if replica_group is None else own
        assert here.ranks == ranks.world, f"{here.ranks} ranks in the layout, {ranks.world} in the launch"
        self.layout, self.device = on_nodes(own, ranks.local_world), ranks.device
        self.divided, self.in_step = own.divided, own.in_step
        self._ranks, self.causal, self.further = ranks, causal, further
        node, local = self.layout.ranks_per_node, ranks.local_world
        if self.layout.zeropp != NONE and node and local % node:
            raise UserError(
                f"layout '{to_text(self.layout)}': ranks_per_node={node} must divide the {local} ranks on a node "
                "of this run"
            )
        index, self.rank = in_replica_group(self.layout, ranks.rank)
        self.replica_groups, self.apart = replica_groups, replica_group is not None
        if replica_groups == 1:  # a worker of parameter servers is alone, whatever its number
            index = 0
        self.replica_group = index if replica_group is None else replica_group
        first = ranks.rank - self.rank  # the replica group's
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}  # axes with the same ranks share a group
        self._axes: dict[str, Axis] = {}
        self._device_meshes: dict[str, DeviceMesh] = {}
        self._scheduled: dict[tuple[Primitive, tuple[int, int]], Scheduled] = {}
        self._besides: dict[tuple[int, int], Beside] = {}

        def add(name: str, members: list[int], index: int) -> None:
            key = tuple(members)
            if key not in made:
                made[key] = _new_group(members, ranks)
            self._axes[name] = Axis(name, members, index, ranks.device, made[key], ranks.timeout_s)

        together = replica_groups > 1 and not self.apart
        every = [list(range(rank, replica_groups * own.ranks, own.ranks)) for rank in range(own.ranks)]
        # Before the others, of which ranks may make different numbers: see `axis_between`.
        alone = None
        for members in every if together and overlap else ():
            alone = axis_between("replica_groups", members, ranks, everywhere=True) or alone
        for name in groups(self.layout):
            members = [first + own for own in group_of(self.layout, name, self.rank)]
            add(name, members, index_in(self.layout, name, self.rank))
        add("replica_groups", every[self.rank] if together else [ranks.rank], index if together else 0)
        self._axes["outer"] = alone or self._axes["replica_groups"]
        self._axes["run"] = self._axes["all"]
        if together:
            add("run", list(range(ranks.world)), ranks.rank)
        self._axes["pp"].connect_neighbours()

    def axis(self, name: str) -> Axis:
        return self._axes[name]

    def new_axis(self, name: str, members: Sequence[int]) -> Axis:
        """This rank's axis between any ranks: see `axis_between`."""
        axis = axis_between(name, members, self._ranks)
        assert axis is not None, f"rank {self._ranks.rank} is not in {members}"
        return axis

    def sums(self, name: str) -> Scheduled:
        """What sums gradients over an axis: see `scheduled`."""
        return self.scheduled("all_reduce", name)

    def scheduled(self, primitive: Primitive, name: str) -> Scheduled:
        """What sums, gathers or scatters over an axis, by the layout's algorithm. All ranks of the axis call it at the
        same time. Raises UserError: the algorithm is not for the ranks of the axis on these nodes."""
        # axes with the same ranks share it: their messages are in one order
        shape = groups(self.layout)[name]
        if (primitive, shape) not in self._scheduled:
            axis, how, best = self.axis(name), getattr(self.layout, primitive), {}
            local = on_node(self.layout, name, self._ranks.local_world)
            if how != LIBRARY and axis.size > 1:
                measured = how == AUTO and local == axis.size
                best = best_all_reduce(axis.size, self.device.type) if measured else {}
                local, best = agreed(local, best, axis)
            by = resolved(how, axis.size, local, best, self.device.type == "cpu")
            chosen(by, axis.size, local, 0, best, primitive)  # refuses one that does not fit these nodes
            beside = Beside(axis)
            if axis.size > 1 and by != LIBRARY:  # a group that nothing else uses
                if shape not in self._besides:
                    self._besides[shape] = Beside(self.new_axis(name, axis.ranks))
                beside = self._besides[shape]
            self._scheduled[primitive, shape] = Scheduled(beside, by, local, best, how == AUTO, primitive)
        return self._scheduled[primitive, shape]

    def notes(self) -> list[str]:
        """How gradients are summed if that was left open."""
        return [note for scheduled in self._scheduled.values() for note in scheduled.notes()]

    def size(self, name: str) -> int:
        return self._axes[name].size

    def index(self, name: str) -> int:
        """This rank's index on the axis."""
        return self._axes[name].index

    def device_mesh(self, name: str) -> DeviceMesh:
        """The axis as a DeviceMesh of one dim, for FSDP2."""
        group, made = self._axes[name].group, self._device_meshes
        if name not in made:
            assert group is not None, f"one rank alone in {name}"
            made[name] = DeviceMesh.from_group(group, self.device.type, mesh_dim_names=(name,))
        return made[name]


def axis_between(name: str, members: Sequence[int], ranks: Ranks, everywhere: bool = False) -> Axis | None:
    """An axis between any ranks, with a process group of its own, even for all ranks. All of them make it at the same
    time, and have made the same number of axes before. everywhere: all ranks of the launch call it, and those that are
    no members get None. They must do so before anything else makes groups: torch names a group by the number of groups
    that a rank has made, and later ranks may have made different numbers (torch 2.15 counts all of them)."""
    group = _new_group(members, ranks, True, everywhere)
    if ranks.rank not in members:
        return None
    return Axis(name, members, members.index(ranks.rank), ranks.device, group, ranks.timeout_s)


def _new_group(
    members: Sequence[int], ranks: Ranks, apart: bool = False, everywhere: bool = False
) -> dist.ProcessGroup | None:
    if len(members) == 1:
        return None
    if len(members) == dist.get_world_size() and not apart:
        return dist.group.WORLD
    timeout = timedelta(seconds=ranks.timeout_s)  # gloo's default is 30 minutes
    options = group_options(dist.get_backend(), timeout)
    with progress.joining(range(ranks.world) if everywhere else members):
        group = dist.new_group([*members], timeout, None, options, use_local_synchronization=not everywhere)
        if not isinstance(group, dist.ProcessGroup):  # this rank is no member
            return None
        connect(group, ranks.device)
    return group


class Microbatch(NamedTuple):
    """Sequences that a rank computes at once.

    inputs, targets: (B, T) int64, this rank's columns. The loss is the mean over targets that are not negative.
    documents: the documents in these sequences, in all of their columns; None: a sequence is one document. weight: the
    factor of the mean loss: this microbatch's targets, relative to the average microbatch of the global batch. So a
    step's loss is the mean over all of its targets, wherever they lie. positions: (T), of this rank's columns; None:
    0, 1, 2, ... further: of these columns, for multi-token prediction.
    """

    inputs: Tensor
    targets: Tensor
    documents: Documents | None = None
    weight: float = 1.0
    positions: Tensor | None = None
    further: Further | None = None

    def options(self) -> dict[str, Any]:
        """The model's arguments besides tokens."""
        further = self.further and self.further._replace(weight=self.weight)
        given = {"positions_T": self.positions, "documents": self.documents, "further": further}
        return {name: value for name, value in given.items() if value is not None}


class Share(list[Microbatch]):
    """The microbatches of a rank, which may have fewer than others (sharding/layout.py).

    counted: how many of them count. Empty ones follow, without targets, where ranks exchange something in every
    microbatch. total: those that count on all data-parallel ranks of the replica group. A microbatch's
    `weight` is relative to their average.
    """

    def __init__(self, microbatches: Iterable[tuple[Any, ...]], counted: int, total: int):
        super().__init__(Microbatch(*microbatch) for microbatch in microbatches)
        self.counted, self.total = counted, total

    @classmethod
    def of(cls, microbatches: Sequence[tuple[Any, ...]], mesh: Mesh) -> Share:
        """The share itself. A plain list stands for one of equal shares."""
        if isinstance(microbatches, Share):
            return microbatches
        count = len(microbatches)
        return cls(microbatches, count, count * mesh.size("dp"))


def divided(inputs_BT: Tensor, targets_BT: Tensor, first_BT: np.ndarray | None, mesh: Mesh) -> Microbatch:
    """This rank's part of whole sequences, which are on its device. first_BT: the column at which the document of each
    token begins; None: a sequence is one document."""
    documents = None if first_BT is None else Documents(first_BT, mesh.device)
    ahead = None
    if mesh.further:
        ahead = further(inputs_BT, targets_BT, documents and documents.first, mesh.further)
    if (c := mesh.size("cp")) == 1:
        return Microbatch(inputs_BT, targets_BT, documents, further=ahead)
    T, index = inputs_BT.shape[1], mesh.index("cp")
    mine: Sequence[Span] = token_spans(mesh.layout, T, index)
    if documents is not None and deals(mesh.layout):
        documents.columns = documents.tiling.dealt(c, mesh.causal)
        mine = documents.columns[index]
    whole = inputs_BT, targets_BT, torch.arange(T, device=mesh.device), *(ahead[:2] if ahead else ())
    inputs, targets, places, *more = (torch.cat([x[..., a:b] for a, b in mine], dim=-1) for x in whole)
    ahead = ahead and Further(more[0], more[1], ahead.counts)
    return Microbatch(inputs, targets, documents, positions=places, further=ahead)

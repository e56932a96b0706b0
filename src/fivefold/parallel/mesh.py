"""The ranks of a layout and the process groups between them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fivefold.layout import EXPERT_GROUPS, GROUPS, Layout, index_in, members
from fivefold.parallel.ranks import Ranks


class Mesh:
    """Process groups by name: "pp", "tp", "cp", "dp", "replicate", "shard", "batch", "all", "ep", "edp", "eshard"
    (see `layout.GROUPS`). All ranks must build it at the same time."""

    def __init__(self, layout: Layout, ranks: Ranks):
        assert layout.ranks == ranks.world, f"{layout.ranks} ranks in the layout, {ranks.world} in the run"
        self.layout, self.rank, self.device = layout, ranks.rank, ranks.device
        self.coordinates = layout.coordinates(ranks.rank)
        self._ranks: dict[str, list[int]] = {}
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        made: dict[
            tuple[tuple[int, ...], ...], dist.ProcessGroup | None
        ] = {}  # equal divisions share a group
        for name in (*GROUPS, *EXPERT_GROUPS):
            division = members(layout, name)
            self._ranks[name] = next(group for group in division if ranks.rank in group)
            key = tuple(map(tuple, division))
            if key not in made:
                made[key] = _new_group(self._ranks[name], ranks)
            self._groups[name] = made[key]

    def ranks(self, name: str) -> list[int]:
        """The ranks of my group, in the order of their index."""
        return self._ranks[name]

    def size(self, name: str) -> int:
        return len(self._ranks[name])

    def index(self, name: str) -> int:
        """My index in the group."""
        return index_in(self.layout, name, self.rank)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """My group; None where I am alone in it."""
        return self._groups[name]

    def device_mesh(self, *names: str) -> DeviceMesh:
        """The named groups (outer first) as PyTorch's mesh of one or two dims, for FSDP2."""
        groups = [group for name in names if (group := self._groups[name]) is not None]
        assert len(groups) == len(names), f"one rank alone in {names}"
        if len(names) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=names)
        outer, inner = names
        rows = [next(g for g in members(self.layout, inner) if rank in g) for rank in self._ranks[outer]]
        mesh = torch.tensor(rows)
        return DeviceMesh.from_group(groups, self.device.type, mesh=mesh, mesh_dim_names=names)


def _new_group(members: list[int], ranks: Ranks) -> dist.ProcessGroup | None:
    if len(members) == 1:
        return None
    if len(members) == ranks.world:
        return dist.group.WORLD
    group = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group

"""Brings the pieces of matrices together on their owners before an update, and the update's pieces back.

The ways and the messages are data (sharding/matrices.py), which the planner counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fivefold.parallel.mesh import Mesh
from fivefold.sharding.layout import index_in
from fivefold.sharding.matrices import Exchange, Hop, Route, exchanges, placed
from fivefold.sharding.parts import Ranges, local_shape, size_of


class Gathered:
    """The gathering of some parameters of a replica (see `optim.updater.Gathering`). routes: their ways."""

    def __init__(self, routes: Mapping[str, Route], mesh: Mesh):
        self.routes, self.members, self.device = routes, frozenset(routes), mesh.device
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: local_shape(route.whole) for name, route in routes.items() if route.mine
        }
        self.exchanges = exchanges(routes, mesh.layout, mesh.rank)
        self.axes = {one.group: mesh.axis(one.group).for_purpose("matrices") for one in self.exchanges}
        self.index = {group: index_in(mesh.layout, group, mesh.rank) for group in self.axes}

    def bring(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        here = dict(pieces)
        for one in self.exchanges:
            hops, index = self._hops(one), self.index[one.group]
            sent = self._flat(here.pop(name) for hop in _by_owner(hops) for name in hop)
            arrived = self.axes[one.group].all_to_all(sent, one.taken, one.given)
            mine = [name for name, hop in hops.items() if hop.owner == index]
            for name in mine:
                here[name] = torch.empty(local_shape(hops[name].whole), device=self.device)
            parts = iter(
                arrived.split([size_of(hops[n].pieces[r]) for r in range(len(one.taken)) for n in mine])
            )
            for rank in range(len(one.taken)):
                for name in mine:
                    _put(next(parts), hops[name].pieces[rank], here[name], hops[name].whole)
        return here

    def back(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        here = dict(wholes)
        for one in reversed(self.exchanges):
            hops, index = self._hops(one), self.index[one.group]
            mine = {name: here.pop(name) for name, hop in hops.items() if hop.owner == index}
            sent = self._flat(
                _take(whole, hops[name].pieces[rank], hops[name].whole)
                for rank in range(len(one.taken))
                for name, whole in mine.items()
            )
            arrived = self.axes[one.group].all_to_all(sent, one.given, one.taken)
            names = [name for some in _by_owner(hops) for name in some]
            parts = arrived.split([size_of(hops[name].pieces[index]) for name in names])
            for name, part in zip(names, parts, strict=True):
                here[name] = part.view(local_shape(hops[name].pieces[index]))
        return here

    def _hops(self, one: Exchange) -> dict[str, Hop]:
        return {
            name: next(hop for hop in self.routes[name].hops if hop.group == one.group) for name in one.names
        }

    def _flat(self, tensors: Iterable[Tensor]) -> Tensor:
        some = [t.reshape(-1) for t in tensors]
        return torch.cat(some) if some else torch.empty(0, device=self.device)


def _by_owner(hops: Mapping[str, Hop]) -> list[list[str]]:
    """Names by the index of their owner."""
    found: dict[int, list[str]] = {}
    for name, hop in hops.items():
        found.setdefault(hop.owner, []).append(name)
    return [found[owner] for owner in sorted(found)]


def _put(piece: Tensor, part: Ranges, whole: Tensor, ranges: Ranges) -> None:
    """Writes a flat piece, which is `part` of the parameter, into a tensor that is `ranges` of it."""
    piece = piece.view(local_shape(part))
    for inner, outer in placed(part, ranges):
        whole[outer] = piece[inner]


def _take(whole: Tensor, part: Ranges, ranges: Ranges) -> Tensor:
    """Reads such a piece."""
    piece = whole.new_empty(local_shape(part))
    for inner, outer in placed(part, ranges):
        piece[inner] = whole[outer]
    return piece

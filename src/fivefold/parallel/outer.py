"""The outer loop of training on several sites (local SGD, DiLoCo: arXiv 2311.08105, streaming: arXiv 2501.18512).

Between outer steps a site trains by itself. In an outer step the sites sum their outer gradients, common weights less
own weights, fragment by fragment; each runs the same outer optimizer on the mean, and continues from the new common
weights. Every site computes the same bits, so nothing else is sent. Moments of the inner optimizer stay with the site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fivefold.comm import Axis
from fivefold.optim.outer import OuterOptimizer
from fivefold.optim.updater import Updater
from fivefold.parallel.replica import Replica
from fivefold.precision import torch_dtype
from fivefold.spread.sites import INT8_BLOCK, Sites, int8_share, messages


class Outer:
    """The outer loop on one rank.

    weights: the common weights by name, fp32: this rank's part, as in the masters. axis: this rank's counterparts in
    all sites. fields: values of the outer optimizer's fields.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        axis: Axis,
        sites: Sites,
        optimizer: OuterOptimizer,
        lr: float,
        fields: Mapping[str, Any],
    ):
        self.replicas, self.axis, self.sites, self.lr = replicas, axis, sites, lr
        self.masters = {name: w for replica in replicas for name, w in replica.masters.items()}
        self.weights = {name: w.detach().clone() for name, w in self.masters.items()}
        self.messages = messages(self.masters, sites.fragments)
        self.aligned = True  # all sites have the common weights
        self.state_names = optimizer.card.state_names
        self.updaters: dict[int, Updater] = {}
        for number, fragment in enumerate(self.messages):
            if mine := {name: self.weights[name] for names in fragment for name in names}:
                self.updaters[number] = Updater(optimizer.card, mine, lr, 0.0, fields)

    def start_from_masters(self) -> None:
        """Takes the masters as common weights. They must be the same in all sites."""
        for name, weight in self.weights.items():
            weight.copy_(self.masters[name])

    @torch.no_grad()
    def step(self, step: int, last: int) -> None:
        """Runs the outer steps that are due after inner step `step` of `last`."""
        due, self.aligned = self.sites.due(step, last), self.sites.aligned(step, last)
        for fragment in due:
            self._synchronise(fragment)
        if due:
            self._refresh()

    def _synchronise(self, fragment: int) -> None:
        started = [(names, self._start(names)) for names in self.messages[fragment]]
        gradients: dict[str, Tensor] = {}
        for names, finish in started:
            mean, start = finish().div_(self.sites.count), 0
            for name in names:
                size = self.weights[name].numel()
                gradients[name] = mean[start : start + size].view_as(self.weights[name])
                start += size
        if fragment in self.updaters:
            self.updaters[fragment].step(gradients, self.lr)
        for name in gradients:
            self.weights[name].grad = None
            self.masters[name].copy_(self.weights[name])

    def _start(self, names: Sequence[str]) -> Callable[[], Tensor]:
        """Starts the sum of an outer gradient over the sites. Returns what waits for it: flat, fp32."""
        flat = torch.cat([(self.weights[name] - self.masters[name]).reshape(-1) for name in names])
        if not flat.numel():  # ZeRO left this rank no rows, nor its counterparts
            return lambda: flat
        if self.sites.dtype == "int8":
            return lambda: sum_int8(flat, self.axis)
        started = self.axis.start_all_reduce(flat.to(torch_dtype(self.sites.dtype)))
        return lambda: started().float()

    @contextmanager
    def common(self) -> Iterator[None]:
        """Makes the module compute with the common weights meanwhile: the model of the run, which validation, samples
        and checkpoints mean."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, common in self.weights.items():
            own = self.masters[name].clone()
            self.masters[name].copy_(common)
            common.copy_(own)
        self._refresh()

    def _refresh(self) -> None:
        for replica in self.replicas:
            replica.refresh()

    def states(self) -> dict[str, Tensor]:
        """The outer optimizer's states, under their checkpoint names without a prefix; empty before its first step."""
        return {name: t for updater in self.updaters.values() for name, t in updater.states().items()}

    def kept(self) -> list[Tensor]:
        """Every tensor that the outer loop keeps between steps."""
        return [*self.weights.values(), *(t for updater in self.updaters.values() for t in updater.kept())]


def sum_int8(x: Tensor, axis: Axis) -> Tensor:
    """The sum of every rank's x (flat, fp32), rounded to int8 twice: each rank's share on its way to the rank that
    sums it, and the sum on its way to all. All ranks get the same bits."""
    share, n = int8_share(x.numel(), axis.size), axis.size
    filled = torch.zeros(n * share, device=x.device)
    filled[: x.numel()] = x
    arrived = axis.all_to_all(encode_int8(filled.view(n, share)))
    mine = decode_int8(arrived).sum(0, keepdim=True)  # (1, share), in the order of ranks
    return decode_int8(axis.all_gather(encode_int8(mine))).view(-1)[: x.numel()]


def encode_int8(x: Tensor) -> Tensor:
    """Rows of whole blocks (n, d) in bytes: the codes, then the blocks' scales (n, d + 4 d / INT8_BLOCK). Each block is
    divided by its largest element / 127, so an element is off by half of that at most."""
    blocks = x.view(x.shape[0], -1, INT8_BLOCK)  # (n, blocks, INT8_BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([codes.flatten(1), scales.squeeze(-1).contiguous().view(torch.int8)], 1)


def decode_int8(sent: Tensor) -> Tensor:
    """The inverse of `encode_int8`, up to rounding."""
    blocks = sent.shape[1] // (INT8_BLOCK + 4)
    codes, scales = sent.split([blocks * INT8_BLOCK, 4 * blocks], 1)
    numbers = codes.reshape(len(sent), blocks, INT8_BLOCK).float()
    return (numbers * scales.contiguous().view(torch.float32).unsqueeze(-1)).flatten(1)

"""The outer loop of training on several replica groups (local SGD, DiLoCo: arXiv 2311.08105, streaming: arXiv
2501.18512).

Between outer steps a replica group trains by itself. In an outer step the replica groups sum their outer gradients,
common weights less own weights, fragment by fragment; each runs the same outer optimizer on the mean, and continues
from the new common weights. Every replica group computes the same bits, so nothing else is sent. Moments of the inner
optimizer stay with the replica group. With `sync.overlap` the replica groups train on while a sum is under way.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fivefold.comm import Axis, Beside, Started
from fivefold.comm.membership import Meeting, Membership
from fivefold.comm.progress import progress
from fivefold.errors import CommunicationError
from fivefold.kernels.rounded import Quantizer
from fivefold.optim import OuterOptimizer
from fivefold.optim.updater import Updater
from fivefold.parallel.data import views
from fivefold.parallel.replica import Replica
from fivefold.precision import torch_dtype
from fivefold.schedules.compression import INT8
from fivefold.sharding.sync import OWN_SHARE, ReplicaGroups, outer_messages

ARRIVING = "arriving"
"""In checkpoints, the name of a mean outer gradient that has not changed the weights yet."""
Flats = Mapping[tuple[str, ...], Tensor]
"""The outer gradient of each message, by the names of its parameters."""


class Outer:
    """The outer loop on one rank.

    weights: the common weights by name, fp32: this rank's part, as in the masters. axis: this rank's counterparts in
    all replica groups; if sums overlap, with a process group that nothing else uses. fields: values of the outer
    optimizer's fields. under_way: of each fragment whose sum has started, what waits for its mean outer gradients.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        axis: Axis,
        replica_groups: ReplicaGroups,
        optimizer: OuterOptimizer,
        lr: float,
        fields: Mapping[str, Any],
    ):
        self.replicas, self.axis, self.replica_groups, self.lr = replicas, axis, replica_groups, lr
        self.masters = {name: w for replica in replicas for name, w in replica.masters.items()}
        self.weights = {name: w.detach().to(torch.float32, copy=True) for name, w in self.masters.items()}
        self.messages = outer_messages(self.masters, replica_groups.fragments)
        self.aligned = True  # all replica groups have the common weights
        self.state_names = (*optimizer.card.state_names, *[ARRIVING] * bool(replica_groups.overlap))
        self.under_way: dict[int, Callable[[], dict[str, Tensor]]] = {}
        self._beside = Beside(axis)
        self.membership: Membership | None = None  # of a replica group that is a launch of its own
        self.updaters: dict[int, Updater] = {}
        for number, fragment in enumerate(self.messages):
            if mine := {name: self.weights[name] for names in fragment for name in names}:
                self.updaters[number] = Updater(optimizer.card, mine, lr, 0.0, fields)

    @torch.no_grad()
    def step(self, step: int, last: int) -> None:
        """Starts the sums that are due after inner step `step` of `last`, and takes the outer steps of those that
        arrive."""
        self.aligned, ends = self.replica_groups.aligned(step, last), step == last
        if self.membership is not None:
            if due := self.replica_groups.due(step, last):
                self._hold(self.membership.meet(step), due, self._flats(due))
            return
        arriving = [*sorted(self.under_way)] if ends else []  # of a run that was to be longer
        with progress.phase("an outer step"):  # over a slow network, perhaps
            for fragment in arriving:
                self._apply(fragment, 0.0)
            for fragment in self.replica_groups.due(step, last):
                self.under_way[fragment] = self._start(fragment)
            for fragment in self.replica_groups.arriving(step, last):
                if fragment in self.under_way:
                    self._apply(fragment, OWN_SHARE if self.replica_groups.overlap and not ends else 0.0)
                    arriving.append(fragment)
        if arriving:
            self._refresh()

    def _apply(self, fragment: int, own: float) -> None:
        """Takes the outer step of a fragment whose sum has started. own: the share of its own weights that a replica
        group keeps."""
        gradients = self.under_way.pop(fragment)()
        if fragment in self.updaters:
            self.updaters[fragment].step(gradients, self.lr)
        for name in gradients:
            self.weights[name].grad = None
            common = self.weights[name]
            if own:
                common = torch.lerp(common, self.masters[name].float(), own)
            self.masters[name].copy_(common)

    def _start(self, fragment: int) -> Callable[[], dict[str, Tensor]]:
        """Starts the sum of a fragment's outer gradients over the replica groups. Returns what waits for their
        means."""
        flats = self._flats([fragment])
        if not self.replica_groups.overlap:
            means = self._means(flats, self.axis, self.replica_groups.count)
            return lambda: means
        found: dict[str, Tensor] = {}
        started = Started.here(self.axis, "sum of outer gradients", torch.empty(0))
        started.work = self._beside.start(
            lambda: found.update(self._means(flats, self.axis, self.replica_groups.count)), *flats.values()
        )

        def wait() -> dict[str, Tensor]:
            started()
            for mean in found.values():
                if mean.is_cuda:  # made on another stream
                    mean.record_stream(torch.cuda.current_stream())
            return found

        return wait

    def _means(self, flats: Flats, axis: Axis, count: int) -> dict[str, Tensor]:
        """The mean outer gradients of `count` replica groups, by name. Changes `flats`."""
        sums = [(names, self._sum(flat, axis)) for names, flat in flats.items()]
        found: dict[str, Tensor] = {}
        for names, finish in sums:
            mean = finish().div_(count).to(self.axis.device)
            found |= views(mean, {name: self.weights[name].shape for name in names})
        return found

    def _flats(self, fragments: Iterable[int]) -> Flats:
        """The outer gradients of these fragments, a flat fp32 tensor for each message."""
        return {
            names: torch.cat([(self.weights[name] - self.masters[name]).reshape(-1) for name in names])
            for fragment in fragments
            for names in self.messages[fragment]
        }

    def _sum(self, flat: Tensor, axis: Axis) -> Callable[[], Tensor]:
        """Starts the sum of an outer gradient over the replica groups. Returns what waits for it: flat, fp32."""
        if not flat.numel():  # ZeRO left this rank no rows, nor its counterparts
            return lambda: flat
        if self.replica_groups.dtype == "int8":
            return lambda: sum_int8(flat, axis)
        started = axis.start_all_reduce(flat.to(torch_dtype(self.replica_groups.dtype)))
        return lambda: started().float()

    # Replica groups that are launches of their own: comm/membership.py

    @torch.no_grad()
    def join(self, membership: Membership, step: int, last: int) -> int:
        """Joins the other replica groups, with what was built or resumed after inner step `step` of `last`. A replica
        group that comes late gets the common weights and the outer optimizer's states, and takes part in the others'
        next outer step. Returns the step after which it trains."""
        self.membership = membership
        digest = hashlib.sha256()  # of the common weights and the outer optimizer's states
        for tensor in (*self.weights.values(), *self.states().values()):
            digest.update(tensor.cpu().contiguous().numpy().data)
        meeting = membership.come(step, digest.hexdigest())
        due = () if meeting.first else self.replica_groups.due(meeting.step, last)
        flats = {names: torch.zeros_like(flat) for names, flat in self._flats(due).items()}
        self._hold(meeting, due, flats)
        if membership.endpoint.group in meeting.new:
            self.aligned = True
        return meeting.step

    def _hold(self, meeting: Meeting, due: Sequence[int], flats: Flats) -> None:
        """Holds a meeting until an attempt counts, then takes the outer step."""
        membership, means, state = self.membership, {}, {}
        assert membership is not None
        with progress.phase("meeting the other replica groups", math.inf):  # which have their own patience
            while True:
                try:
                    axis, received = membership.axis(meeting), True
                    state = self._hand_over(meeting, axis)
                    copies = {names: flat.to(axis.device, copy=True) for names, flat in flats.items()}
                    means = self._means(copies, axis, len(meeting.giving))
                except CommunicationError:
                    received = False
                if membership.vote(meeting, received):
                    break
                meeting = membership.again(meeting)
        if membership.endpoint.group in meeting.new:
            for updater in self.updaters.values():
                updater.clear()
            self.load({name: tensor for name, tensor in state.items() if name not in self.weights})
            for name, weight in self.weights.items():
                weight.copy_(state[name])
                self.masters[name].copy_(weight)
        for fragment in due:
            names = [name for some in self.messages[fragment] for name in some]
            self.under_way[fragment] = lambda names=names: {name: means[name] for name in names}
            self._apply(fragment, 0.0)
        self._refresh()

    def _hand_over(self, meeting: Meeting, axis: Axis) -> dict[str, Tensor]:
        """Gives newcomers the common state: the weights, and states of those fragments that have some. Returns it."""
        if not meeting.new:
            return {}
        source = meeting.members.index(meeting.giving[0])
        mine, gives = {**self.weights, **self.states()}, axis.index == source
        has = torch.tensor([int(bool(updater.states())) for updater in self.updaters.values()])
        names = [*self.weights]
        for updater, some in zip(self.updaters.values(), axis.broadcast(has, source).tolist(), strict=True):
            if some:
                names += [f"{state}.{name}" for state in updater.card.state_names for name in updater.masters]
        found = {}
        for name in names:
            like = self.weights[name if name in self.weights else name.partition(".")[2]]
            own = mine[name] if gives else torch.empty_like(like)
            found[name] = axis.broadcast(own.to(axis.device, copy=True), source) if own.numel() else own
        return found

    @contextmanager
    def common(self) -> Iterator[None]:
        """The module computes with the common weights inside. They are the run's model: validation, samples and
        checkpoints use them."""
        # an exchange would round these
        kept = {
            n: self.weights[n].clone() for n, m in self.masters.items() if m.dtype != self.weights[n].dtype
        }
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            for name, weight in kept.items():
                self.weights[name].copy_(weight)

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
        """The outer optimizer's states, and the means that are under way, under their checkpoint names without a
        prefix; empty before its first step. Waits for the sums."""
        found = {name: t for updater in self.updaters.values() for name, t in updater.states().items()}
        return found | {
            f"{ARRIVING}.{name}": t for wait in self.under_way.values() for name, t in wait().items()
        }

    def load(self, found: Mapping[str, Tensor]) -> None:
        """Restores what `states` gave. A fragment may have no states yet, and usually nothing is under way."""
        for number, updater in self.updaters.items():
            names = [f"{state}.{name}" for state in updater.card.state_names for name in updater.masters]
            if all(name in found for name in names):
                updater.load(found, 0)
            means = {n: found[f"{ARRIVING}.{n}"] for n in updater.masters if f"{ARRIVING}.{n}" in found}
            if means:
                self.under_way[number] = lambda means=means: means

    def forget(self) -> None:
        """Forgets the states, and the sums under way once they have arrived: a checkpoint is loaded next."""
        for wait in self.under_way.values():
            wait()
        self.under_way.clear()
        for updater in self.updaters.values():
            updater.clear()

    def kept(self) -> list[Tensor]:
        """Every tensor that the outer loop keeps between steps."""
        return [*self.weights.values(), *(t for updater in self.updaters.values() for t in updater.kept())]


def sum_int8(x: Tensor, axis: Axis) -> Tensor:
    """The sum of every rank's x (flat, fp32), rounded to int8 twice: each rank's share on its way to the rank that
    sums it, and the sum on its way to all. All ranks get the same bits."""
    n, share = axis.size, INT8.block * INT8.chunk([(x.numel(),)], axis.size)
    code = Quantizer(INT8.bits, INT8.block, [share], x.device)
    filled = torch.zeros(n, share, device=x.device)
    filled.view(-1)[: x.numel()] = x
    arrived = torch.empty_like(filled)
    code.decode(axis.all_to_all(code.encoded(filled)), arrived)
    mine = arrived.sum(0, keepdim=True)  # (1, share), in the order of ranks
    code.decode(axis.all_gather(code.encoded(mine)).view(n, code.R), arrived)
    return arrived.view(-1)[: x.numel()]

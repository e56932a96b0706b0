"""A parameter server: it keeps rows of the master weights and of the optimizer's states, adds up what workers push, and
sends them new weights (Li et al., OSDI 2014).

Synchronous, the weights of a part of a message change once all workers have pushed their gradients of it; if the
gradient is clipped, once they have pushed all of it to all servers, because its norm must be known. Otherwise each
worker's gradient changes the weights by itself, clipped by its own norm, once all servers have all of it. So what a
worker leaves behind when it is lost changes all weights or none (`Server.settle`).

Two threads serve each worker: one hears its notes, one waits for its data. So no worker waits for another one's.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.comm import Axis, Started
from fivefold.comm.progress import Named, progress
from fivefold.errors import CommunicationError
from fivefold.launch.ranks import give_up
from fivefold.optim.scaling import clip_scale, sum_of_squares
from fivefold.optim.updater import Updater, largest
from fivefold.parallel.data import views
from fivefold.parallel.link import TEXT_TAG, Kind, Link, Note, as_note, as_tensor, tag_of
from fivefold.parallel.replica import Replica
from fivefold.sharding.parts import Part, local_shape
from fivefold.sharding.sync import Message, Row, Servers

CLOSING_S = 0.5  # between looks at who has still to say goodbye


class Shard(Replica):
    """This server's rows of a unit, in the order of its message.

    arrived: what each worker has pushed. outgoing: what each worker gets; synchronous workers all get the same tensor.
    missing: workers that have still to push each part.
    """

    def __init__(
        self,
        message: Message,
        parts: Mapping[str, Part],
        initial: Callable[[str], Tensor],
        workers: int,
        pushed: torch.dtype,
        pulled: torch.dtype,
        synchronous: bool,
        update: Callable[[Mapping[str, Tensor]], Updater],
    ):
        """update: makes the optimizer of a part."""
        self.message = message
        self.parts = {name: parts[name] for name in message.rows}
        self.flat, self.gradient = torch.empty(message.size), torch.zeros(message.size)
        shapes = {name: local_shape(part.keeps) for name, part in self.parts.items()}
        self.masters, self.gradients = (views(flat, shapes) for flat in (self.flat, self.gradient))
        for name, master in self.masters.items():
            master.copy_(initial(name))
        self.arrived = [torch.empty(message.size, dtype=pushed) for _ in range(workers)]
        own = [torch.empty(message.size, dtype=pulled) for _ in range(1 if synchronous else workers)]
        self.shared = synchronous
        same = synchronous and pulled == torch.float32
        self.outgoing = [self.flat if same else own[0]] * workers if synchronous else own
        self.missing = [workers] * len(message.parts)
        self.updater: Updater = _ByPart(
            [update(self._rows(self.masters, part)) for part in message.parts], self.masters
        )
        self.refresh()

    def _rows(self, tensors: Mapping[str, Tensor], part: Sequence[Row]) -> dict[str, Tensor]:
        found = {}
        for name, start, stop in part:
            first, width = self.message.rows[name][0], tensors[name][0].numel()
            found[name] = tensors[name][(start - first) // width : (stop - first) // width]
        return found

    def refresh(self, part: int | None = None) -> None:
        """The weights have changed. Workers that share what they get find them there; others get copies of their own
        when they pull."""
        if self.shared and self.outgoing[0] is not self.flat:
            here = slice(*self.message.cuts[part]) if part is not None else slice(None)
            self.outgoing[0][here].copy_(self.flat[here])

    def take(self, part: int, workers: Sequence[int]) -> Tensor:
        """Makes the mean of what these workers have pushed of a part its gradient. Returns the sum of squares."""
        here = slice(*self.message.cuts[part])
        gradient = self.gradient[here]
        gradient.copy_(self.arrived[workers[0]][here])
        for worker in workers[1:]:
            gradient.add_(self.arrived[worker][here])
        if len(workers) > 1:
            gradient.div_(len(workers))
        return sum_of_squares([gradient], gradient.device)

    def update(self, part: int, lr: float, scale: Tensor | None, skip: Tensor) -> None:
        assert isinstance(self.updater, _ByPart)
        gradients = self._rows(self.gradients, self.message.parts[part])
        self.updater.parts[part].step(gradients, lr, scale, skip)
        self.refresh(part)


class _ByPart(Updater):
    """The optimizers of a shard's parts, as one of the shard."""

    def __init__(self, parts: Sequence[Updater], masters: Mapping[str, Tensor]):
        self.parts, self.card, self.masters, self.rules = list(parts), parts[0].card, masters, None

    @property
    def largest(self) -> Tensor | None:
        return largest([part.largest for part in self.parts if part.largest is not None])

    @largest.setter
    def largest(self, value: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        for part in self.parts:
            part.largest = value

    def states(self) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for part in self.parts:
            for name, state in part.states().items():
                found.setdefault(name, []).append(state)
        return {name: torch.cat(some) for name, some in found.items()}

    def load(self, tensors: Mapping[str, Tensor], steps: int, number: int | None = None) -> None:
        begun = dict.fromkeys(tensors, 0)
        for part in self.parts:
            mine = {}
            for name, weight in part.masters.items():
                for key in (f"{state}.{name}" for state in self.card.state_names):
                    mine[key] = tensors[key][begun[key] : begun[key] + len(weight)]
                    begun[key] += len(weight)
            part.load(mine, steps, number)

    def begin(self, number: int) -> None:
        for part in self.parts:
            part.begin(number)

    def kept(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.kept()]


class Event(NamedTuple):
    """What a worker told, or the error by which it was lost (worker -1: this server's own)."""

    worker: int
    note: Note | None
    lost: BaseException | None = None
    text: str = ""


class Server:
    """Serves workers until they say goodbye.

    links: one per worker. norms: all servers. rate: the learning rate of a step. events: what the run's first server
    acts upon; others keep none.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        links: Sequence[Link],
        servers: Servers,
        norms: Axis,
        grad_clip: float,
        rate: Callable[[int], float],
    ):
        self.shards, self.links, self.servers, self.norms = list(shards), list(links), servers, norms
        self.grad_clip, self.rate = grad_clip, rate
        self.events = SimpleQueue[Event]()
        self.most = max((len(shard.message.parts) for shard in shards), default=1)
        self._all = sum(len(shard.message.parts) for shard in shards)
        self._by_number = {shard.message.number: shard for shard in shards}
        self._lock = threading.Condition(threading.RLock())
        self._workers = [_Worker() for _ in links]
        self._payloads = [SimpleQueue[tuple[Started, Note] | None]() for _ in links]
        self._steps = defaultdict[int, _Step](_Step)
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(worker, target), daemon=True)
            for worker in range(len(links))
            for target in (self._listen, self._receive)
        ]

    def start(self) -> None:
        """Begins to serve."""
        for shard in self.shards:
            shard.refresh()
        for thread in self._threads:
            thread.start()

    def order(self, worker: int, kind: Kind, step: int = 0, share: int = 0) -> None:
        try:
            self.links[worker].tell(kind, step, share)
        except CommunicationError as lost:
            self._lose(worker, lost)

    def keep_alive(self, stopped: Callable[[], bool]) -> bool:
        """Called every second, lets workers wait for longer than `launch.timeout`. Returns what `stopped` says."""
        for worker in range(len(self.links)):
            if not self._workers[worker].lost:
                self.order(worker, Kind.ALIVE)
        return stopped()

    def finished(self, step: int, timeout_s: float) -> tuple[float, float]:
        """Waits until a synchronous step has changed all weights: (this server's sum of squares of its gradient, number
        of parts whose update was skipped)."""
        with self._lock:
            self._lock.wait_for(lambda: self._error or self._steps[step].updated == self._all, timeout_s)
            if self._error:
                raise self._error
            found = self._steps.pop(step)
            if found.updated < self._all:
                raise CommunicationError(
                    f"step {step + 1} has not ended after launch.timeout = {timeout_s:g} s: workers are too slow, or "
                    "stuck"
                )
            return float(found.square), float(found.skipped)

    def settle(self, worker: int) -> Note | None:
        """Ends what a lost worker of an asynchronous run has left behind. All servers call it. A worker says that a
        share is computed when all servers have all of its gradient. So if one of them has heard it, all apply it; what
        came of a later share is dropped. Returns the note of the last share that was applied; None: there was none."""
        own = self._workers[worker]
        with self._held():
            own.lost = True  # notes that come from now on are ignored
            heard = own.heard or Note(Kind.COMPUTED, step=-1)
        self._payloads[worker].put(None)
        every = self.norms.all_gather(as_tensor(heard)[None])  # (servers, numbers of a note)
        last = as_note(every[every[:, 3].argmax()])
        with self._held():
            if last.step > own.applied:
                wanted = lambda: len(own.arrived) == self._all  # noqa: E731
                if not self._lock.wait_for(wanted, self.norms.timeout_s):
                    raise CommunicationError(f"the gradient of lost worker {worker} is not complete")
                self._apply(worker, last)
            own.arrived = []
            return last if last.step >= 0 else None

    def await_workers(self, what: str, workers: Iterable[int]) -> float:
        """The main thread waits for one of these workers: see `progress.expect`."""
        return progress.expect(what, Named("workers", (self.links[worker].rank for worker in workers)))

    def close(self) -> None:
        """Waits for the goodbye of each worker that is not lost."""
        began = self.await_workers("goodbye", [])
        while serving := [number for number, thread in enumerate(self._threads) if thread.is_alive()]:
            self.await_workers("goodbye", sorted({number // 2 for number in serving}))
            self._threads[serving[0]].join(CLOSING_S)
        progress.leave(began)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Holds the lock. A thread that waits for it is not the one that keeps others waiting."""
        with progress.rest():
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _guarded(self, worker: int, target: Callable[[int], None]) -> None:
        try:
            with progress.serves():
                target(worker)
        except CommunicationError as lost:
            self._lose(worker, lost)
        except BaseException as error:  # a mistake of ours
            self._fail(error)
            if self.norms.index:  # nobody waits for this server's events: all must see that it is gone
                give_up(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            self._lock.notify_all()
        self._note(Event(-1, None, error))

    def _note(self, event: Event) -> None:
        if self.norms.index == 0:  # others keep none
            self.events.put(event)

    def _lose(self, worker: int, error: CommunicationError) -> None:
        """The worker is gone. Others go on, unless they train together."""
        with self._held():
            if self._workers[worker].lost:
                return
            self._workers[worker].lost = True
        self._payloads[worker].put(None)
        if self.servers.synchronous:
            self._fail(error)
        else:
            self._note(Event(worker, None, error))

    def _listen(self, worker: int) -> None:
        link = self.links[worker]
        while True:
            note = link.hear()
            if note.kind == Kind.PUSHED:
                shard = self._by_number[note.first]
                start, stop = shard.message.cuts[note.second]
                tag = tag_of(note.first, note.second, self.most)
                started = link.up.start_receive(shard.arrived[worker][start:stop], link.peer, tag)
                self._payloads[worker].put((started, note))
            elif note.kind == Kind.PULL:
                self._send(worker, self._by_number[note.first], note.second)
            elif note.kind == Kind.TEXT:
                text = torch.empty(note.first, dtype=torch.uint8)
                if note.first:
                    link.up.start_receive(text, link.peer, TEXT_TAG)()
                self._note(Event(worker, note, text=bytes(text.tolist()).decode()))
            elif note.kind == Kind.BYE:
                self._payloads[worker].put(None)
                link.tell(Kind.BYE)
                link.flush()
                return
            elif note.kind == Kind.COMPUTED:
                with self._held():
                    own = self._workers[worker]
                    if own.lost:
                        continue
                    own.computed = own.heard = note
                    self._go_on(worker, note.first)
                self._note(Event(worker, note))
            elif note.kind != Kind.ALIVE:
                self._note(Event(worker, note))

    def _send(self, worker: int, shard: Shard, part: int) -> None:
        link, here = self.links[worker], slice(*shard.message.cuts[part])
        out = shard.outgoing[worker][here]
        sending, key = self._workers[worker].sending, (shard.message.number, part)
        if before := sending.pop(key, None):
            before()
        if not self.servers.synchronous:
            with self._held():
                out.copy_(shard.flat[here])
        tag = tag_of(*key, self.most, down=True)
        sending[key] = link.down.start_send(out, link.peer, tag)

    def _receive(self, worker: int) -> None:
        """Waits for the data that notes have announced, in their order."""
        while True:
            with progress.rest():
                found = self._payloads[worker].get()
            if found is None:
                return
            started, note = found
            started()
            self.links[worker].tell(Kind.ACKNOWLEDGED, note.first, note.second)
            with self._held():
                self._arrived(worker, self._by_number[note.first], note.second, note.step)

    def _arrived(self, worker: int, shard: Shard, part: int, step: int) -> None:
        """A worker has pushed a part."""
        everyone, own = range(len(self.links)), self._workers[worker]
        if not self.servers.synchronous:
            own.arrived.append((shard, part))
            self._lock.notify_all()
        else:
            shard.missing[part] -= 1
            if shard.missing[part] == 0:
                shard.missing[part], found = len(self.links), self._steps[step]
                square = shard.take(part, everyone)
                found.squares[shard.message.number, part] = square
                if not self.servers.judging:
                    found.skipped += self._update(everyone, [(shard, part)], square, step, None)
                    found.updated += 1
                    self._lock.notify_all()
        self._go_on(worker, step)

    def _go_on(self, worker: int, step: int) -> None:
        """Does what a share's end, or its last part, allows."""
        own = self._workers[worker]
        if self.servers.synchronous:
            if self.servers.judging:
                self._judge_together(step)
        elif own.computed and not own.lost and len(own.arrived) == self._all:
            self._apply(worker, own.computed)

    def _apply(self, worker: int, note: Note) -> None:
        """An asynchronous worker's share changes this server's weights."""
        own = self._workers[worker]
        arrived, own.arrived, own.computed, own.applied = own.arrived, [], None, note.step
        square = torch.tensor(note.figures[1], dtype=torch.float64)
        scale = clip_scale(square.sqrt(), self.grad_clip) if self.grad_clip else None
        for shard, part in arrived:
            shard.take(part, [worker])
        self._update([worker], arrived, square, note.first, scale)

    def _judge_together(self, step: int) -> None:
        """Once everything has been pushed everywhere, all servers know the norm of the whole gradient."""
        found, computed = self._steps[step], [own.computed for own in self._workers]
        if len(found.squares) < self._all or found.updated:
            return
        if any(note is None or note.first != step for note in computed):
            return
        square = self.norms.all_reduce(found.square)
        losses = torch.tensor([note.figures[0] for note in computed if note])
        judged = torch.where(losses.isfinite().all(), square, torch.nan)
        scale = clip_scale(square.sqrt(), self.grad_clip) if self.grad_clip else None
        everyone = range(len(self.links))
        every = [(shard, part) for shard in self.shards for part in range(len(shard.message.parts))]
        found.skipped += self._update(everyone, every, judged, step, scale)
        found.updated = self._all
        self._lock.notify_all()

    def _update(
        self,
        workers: Sequence[int],
        parts: Sequence[tuple[Shard, int]],
        square: Tensor,
        step: int,
        scale: Tensor | None,
    ) -> int:
        """Updates the weights of these parts, unless the norm is not finite, and tells the workers. Returns the number
        of parts whose update was skipped."""
        skip = (~square.isfinite()).float()
        for shard, part in parts:
            shard.update(part, self.rate(step), scale, skip)
        for shard, part in parts:
            for worker in workers:
                if not self._workers[worker].lost:
                    self.links[worker].tell(Kind.UPDATED, shard.message.number, part)
        return int(skip) * len(parts)


@dataclass
class _Worker:
    """What a server knows of a worker. computed: the end of its share, until all weights have it. heard: the last such
    note. applied: the number of the worker's last share that the weights have. arrived: the parts that it has pushed.
    sending: those on their way to it."""

    lost: bool = False
    computed: Note | None = None
    heard: Note | None = None
    applied: int = -1
    arrived: list[tuple[Shard, int]] = field(default_factory=list)
    sending: dict[tuple[int, int], Started] = field(default_factory=dict)


@dataclass
class _Step:
    """A synchronous step. squares: of the parts that have arrived from all workers. updated: parts whose weights have
    changed. skipped: those whose weights have not, for their gradient is not finite."""

    squares: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    updated: int = 0
    skipped: int = 0

    @property
    def square(self) -> Tensor:
        """Their sum, a scalar in fp64, in an order that does not depend on when they arrived."""
        ordered = [self.squares[key] for key in sorted(self.squares)]
        return torch.stack(ordered).sum() if ordered else torch.zeros((), dtype=torch.float64)

"""A worker of parameter servers: it pushes gradients while backward computes, and pulls weights before forward needs
them (wait-free backpropagation, arXiv 1706.03292).

Messages are cut into parts. Which part goes next is decided late: by `sync.order`, and only CREDITS parts are under way
in each direction (ByteScheduler, SOSP 2019). The queue that decides is the simulator's, too (schedules/priority.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from fivefold.comm import Started
from fivefold.comm.compress import CompressedSum
from fivefold.comm.progress import Named, progress
from fivefold.errors import CommunicationError
from fivefold.models.base import LanguageModel
from fivefold.parallel.data import DataParallel
from fivefold.parallel.link import ORDERS, TEXT_TAG, Kind, Link, Note, tag_of
from fivefold.schedules.priority import CREDITS, Ready
from fivefold.sharding.sync import Message, Servers, pieces

Part = tuple[int, int]
"""(number of a message, number of its part)."""


class _Way:
    """A message's data in one direction: its elements in a flat buffer, gathered if they are not one slice of it."""

    def __init__(self, message: Message, offsets: dict[str, int], buffer: Tensor, dtype: torch.dtype):
        # autograd counts no change: backward is done with a unit's weights when new ones come
        buffer = buffer.data
        whole = pieces(chain.from_iterable(message.parts), offsets)
        self.direct, self.cuts = len(whole) == 1 and buffer.dtype == dtype, message.cuts
        self.data = buffer[slice(*whole[0])] if self.direct else torch.empty(message.size, dtype=dtype)
        self._slices = [[buffer[a:b] for a, b in pieces(part, offsets)] for part in message.parts]

    def gather(self, part: int) -> Tensor:
        """The part as it is sent."""
        for piece, room in self._pairs(part):
            room.copy_(piece)
        return self.data[slice(*self.cuts[part])]

    def scatter(self, part: int) -> None:
        """The part has arrived."""
        for piece, room in self._pairs(part):
            piece.copy_(room)

    def _pairs(self, part: int) -> Any:
        slices = [] if self.direct else self._slices[part]
        room = self.data[slice(*self.cuts[part])].split([len(piece) for piece in slices]) if slices else []
        return zip(slices, room, strict=True)


class Exchange:
    """Takes the gradients of `replica` to the servers in the last backward of a share (see `data.Sum`), and makes
    `module` wait for its weights. Sends and receives in threads of its own: one starts messages, one waits for weights,
    one per server hears notes.

    Synchronous workers pull a part once its weights are new. Others pull all weights when they get an order: what
    bounds their staleness is when the first server gives it.

    units: the parameters of each. step: of the share that is computed. orders: what the first server asks for.
    serial: counts the shares that were begun. waited: seconds in `need`. trace: None, or a list that gets (what, unit,
    start, end) of what happens from now on. "need": forward waits for weights; "loss": it has ended; "ready": a unit's
    gradients are there; "push", "pull": a part is under way.
    """

    compressed: Sequence[CompressedSum] = ()

    def __init__(
        self,
        messages: Sequence[Message],
        units: Sequence[Sequence[str]],
        module: LanguageModel,
        replica: DataParallel,
        links: Sequence[Link],
        servers: Servers,
        pushed: torch.dtype,
    ):
        """pushed: dtype of gradients on their way."""
        self.messages, self.links, self.servers = list(messages), list(links), servers
        unit_of = {name: unit for unit, names in enumerate(units) for name in names}
        self._unit_of, self._parameters = [unit_of[n] for n in replica.names], [len(names) for names in units]
        self._missing, self._syncing = list(self._parameters), False
        replica.on_gradient = self._gradient_ready
        offsets = dict(zip(replica.names, replica.offsets, strict=False))
        working = replica.flat_working
        self._up = [_Way(message, offsets, replica.flat_grads, pushed) for message in messages]
        self._down = [_Way(message, offsets, working, working.dtype) for message in messages]
        self._of_unit: dict[int, list[Message]] = {}
        for message in messages:
            self._of_unit.setdefault(message.unit, []).append(message)
        count = range(len(links))
        self.most = [max((len(m.parts) for m in messages if m.server == s), default=1) for s in count]
        self._lock = threading.Condition()
        self._pushes, self._pulls = (Ready(servers.order.name) for _ in range(2))
        self._parts = {(m.number, part): m.unit for m in messages for part in range(len(m.parts))}
        self._credits = {"push": CREDITS, "pull": CREDITS}
        self._sizes = {unit: sum(len(m.parts) for m in some) for unit, some in self._of_unit.items()}
        self._stale = dict.fromkeys(self._sizes, 0)  # parts still to be pulled
        self._sending: dict[Part, tuple[Started, float]] = {}  # and when that began
        self._unacknowledged = 0  # parts pushed that servers may not have yet
        self._receiving = SimpleQueue[tuple[Started, Message, int, float] | None]()
        self._updates, self.step, self.serial = 0, 0, -1
        self._computed: tuple[int, int, int, tuple[float, ...]] | None = None  # until servers have all parts
        self._share: tuple[int, int] | None = None  # until they have applied it
        self._error: BaseException | None = None
        self._closing, self.waited = False, 0.0
        self.trace: list[tuple[str, int, float, float]] | None = None
        self.orders = SimpleQueue[Note | None]()
        if servers.synchronous:
            self._pull_all()  # the servers have the first weights
        listening = [lambda server=server: self._listen(server) for server in range(len(links))]
        self._threads = [
            threading.Thread(target=self._guarded, args=(target,), daemon=True)
            for target in (self._start_messages, self._receive, *listening)
        ]
        for thread in self._threads:
            thread.start()
        self._wait_in(module, units)

    def _wait_in(self, module: LanguageModel, units: Sequence[Sequence[str]]) -> None:
        """Makes each part of the model wait for its weights before it runs."""
        before, behind = list[int](), list[int]()
        for unit, (name, *_) in enumerate(units):
            if name.startswith("blocks."):
                block = module.blocks[name.split(".")[1]]
                block.register_forward_pre_hook(lambda *_, unit=unit: self.need([unit]))
            else:
                (before if name.startswith("embed") else behind).append(unit)
        begin, end = module.begin, module.end

        def beginning(*arguments: Any) -> Tensor:
            self.need(before)
            return begin(*arguments)

        def ending(*arguments: Any) -> Tensor:
            self.need(behind)
            loss = end(*arguments)
            self.note("loss", 0)
            return loss

        setattr(module, "begin", beginning)  # noqa: B010, a type checker takes no other function
        setattr(module, "end", ending)  # noqa: B010

    def enable_sync(self) -> None:
        self._missing, self._syncing = list(self._parameters), True
        with self._lock:
            self.serial += 1

    def _gradient_ready(self, index: int) -> None:
        if self._syncing:
            unit = self._unit_of[index]
            self._missing[unit] -= 1
            if self._missing[unit] == 0:
                self._push(unit)

    def wait(self) -> None:
        """All gradients are pushed, or will be. Some parameters may have got none."""
        if self._syncing:
            for unit, missing in enumerate(self._missing):
                if missing:
                    self._push(unit)
        self._syncing = False

    def kept(self) -> list[Tensor]:
        return [way.data for way in (*self._up, *self._down) if not way.direct]

    def order(self) -> Note:
        """Waits for the first server's next order."""
        with self._waiting("an order", range(len(self.links))):
            note = self.orders.get()
        if note is None:
            assert self._error
            raise self._error
        if note.kind != Kind.END and not self.servers.synchronous:
            self._pull_all()
        return note

    def _pull_all(self) -> None:
        self.need_all()  # what is on its way
        with self._lock:
            self._stale = dict(self._sizes)
            for part, unit in self._parts.items():
                self._pulls.add(part, unit)
            self._lock.notify_all()

    @contextmanager
    def _waiting(self, what: str, servers: Iterable[int]) -> Iterator[None]:
        """The main thread waits for these servers: see `progress.expect`."""
        began = progress.expect(what, Named("servers", (self.links[server].rank for server in servers)))
        try:
            yield
        finally:
            progress.leave(began)

    def need(self, units: Sequence[int]) -> None:
        """Waits until these units have their new weights."""
        began = time.perf_counter()
        with self._lock:
            stale = [unit for unit in units if self._stale[unit]]
            missing = sorted({message.server for unit in stale for message in self._of_unit[unit]})
            with self._waiting("weights", missing) if stale else nullcontext():
                self._lock.wait_for(lambda: self._error or not any(self._stale[unit] for unit in units))
            if self._error:
                raise self._error
        self.waited += time.perf_counter() - began
        if units:
            self.note("need", units[-1], began)

    def note(self, what: str, unit: int, start: float | None = None) -> None:
        """Adds to the trace what ends now."""
        if self.trace is not None:
            now = time.perf_counter()
            self.trace.append((what, unit, now if start is None else start, now))

    def need_all(self, pull: bool = False) -> None:
        """pull: no order has come yet."""
        if pull and not self.servers.synchronous:
            self._pull_all()
        self.need(list(self._stale))

    def _push(self, unit: int) -> None:
        """The unit's gradients are complete. Its weights are old from now on."""
        self.note("ready", unit)
        with self._lock:
            if self._error:
                raise self._error
            if self.servers.synchronous:
                self._stale[unit] = self._sizes[unit]
            self._unacknowledged += self._sizes[unit]
            for message in self._of_unit[unit]:
                for part in range(len(message.parts)):
                    self._pushes.add((message.number, part, self.step), unit)
            self._lock.notify_all()

    def computed(self, step: int, share: int, figures: tuple[float, ...]) -> None:
        """A share's backward is done. Tells all servers once they have all of its gradient."""
        with self._lock:
            self._computed = step, share, self.serial, figures
        self._tell_if_received()

    def _tell_if_received(self) -> None:
        with self._lock:
            if self._computed is None or self._unacknowledged:
                return
            told, self._computed = self._computed, None
        for link in self.links:
            link.tell(Kind.COMPUTED, *told)
        with self._lock:
            self._share = told[:2]
        self._tell_if_applied()

    def _tell_if_applied(self) -> None:
        """Tells the first server once all servers have applied a share's gradients."""
        with self._lock:
            if self._share is None or self._updates < len(self._parts):
                return
            (step, share), self._share = self._share, None
            self._updates -= len(self._parts)
        self.links[0].tell(Kind.APPLIED, step, share)

    def report(self, step: int, text: str, figures: tuple[float, ...] = ()) -> None:
        """Answers an order of the first server."""
        link = self.links[0]
        content = torch.tensor(list(text.encode()), dtype=torch.uint8)
        link.tell(Kind.TEXT, len(content), step=step, figures=figures)
        if len(content):
            link.up.start_send(content, link.peer, TEXT_TAG)()

    def close(self) -> None:
        """Says goodbye to all servers, once nothing is under way."""
        with self._lock:
            with self._waiting("the end of what is under way", range(len(self.links))):
                under_way = lambda: self._unacknowledged or any(self._stale.values())  # noqa: E731
                self._lock.wait_for(lambda: self._error or not under_way())
            if self._error:
                raise self._error
            self._closing = True
            self._lock.notify_all()
        for link in self.links:
            link.tell(Kind.BYE)
        with self._waiting("goodbye", range(len(self.links))):
            for thread in self._threads:
                thread.join()

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            with progress.serves():
                target()
        except BaseException as error:  # whoever waits raises it
            with self._lock:
                if self._error is None and not (self._closing and isinstance(error, CommunicationError)):
                    self._error = error
                self._lock.notify_all()
            self._receiving.put(None)
            self.orders.put(None)

    def _start_messages(self) -> None:
        """Starts the next part of a gradient, or of weights, while there are credits."""
        while True:
            with self._lock:
                with progress.rest():
                    self._lock.wait_for(self._next_way)
                way = self._next_way()
                if way == "end":
                    self._receiving.put(None)
                    return
                self._credits[way] -= 1
                number, part, *step = (self._pushes if way == "push" else self._pulls).pop()
            message = self.messages[number]
            link, most = self.links[message.server], self.most[message.server]
            tag = tag_of(number, part, most, down=way == "pull")
            if way == "push":
                started = link.up.start_send(self._up[number].gather(part), link.peer, tag)
                with self._lock:
                    self._sending[number, part] = started, time.perf_counter()
                link.tell(Kind.PUSHED, number, part, *step)
            else:
                link.tell(Kind.PULL, number, part)
                room = self._down[number].data[slice(*message.cuts[part])]
                started = link.down.start_receive(room, link.peer, tag)
                self._receiving.put((started, message, part, time.perf_counter()))

    def _next_way(self) -> str:
        if self._error or self._closing:
            return "end"
        if len(self._pulls) and self._credits["pull"]:
            return "pull"
        return "push" if len(self._pushes) and self._credits["push"] else ""

    def _receive(self) -> None:
        """Waits for weights, in the order in which they were asked for."""
        while True:
            with progress.rest():
                pulled = self._receiving.get()
            if pulled is None:
                return
            started, message, part, began = pulled
            started()
            self.note("pull", message.unit, began)
            self._down[message.number].scatter(part)
            with self._lock:
                self._credits["pull"] += 1
                self._stale[message.unit] -= 1
                self._lock.notify_all()

    def _listen(self, server: int) -> None:
        while True:
            note = self.links[server].hear()
            if note.kind == Kind.BYE:
                return
            if note.kind in ORDERS:
                self.orders.put(note)
            elif note.kind == Kind.ALIVE:
                self.links[server].tell(Kind.ALIVE)
            elif note.kind == Kind.ACKNOWLEDGED:
                with self._lock:
                    started, began = self._sending.pop((note.first, note.second))
                    self.note("push", self.messages[note.first].unit, began)
                    self._credits["push"] += 1
                    self._unacknowledged -= 1
                    self._lock.notify_all()
                started()  # it has arrived
                self._tell_if_received()
            else:
                assert note.kind == Kind.UPDATED, note
                part = note.first, note.second
                with self._lock:
                    self._updates += 1
                    if self.servers.synchronous:
                        self._pulls.add(part, self._parts[part])
                    self._lock.notify_all()
                self._tell_if_applied()

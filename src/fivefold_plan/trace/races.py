"""Finds races: uses of memory on one stream while another one may still use it (streams.py).

For each storage it knows which operations have used which bytes last, on each stream. A later use of the same bytes
that no wait puts behind them is a race, if one of the two writes. An allocation writes: on its own stream somebody else
may still use the memory. These are races, too:

- Memory is freed while a stream other than its own may still use it. PyTorch's allocator gives it away at once, to
  operations of the stream that allocated it. `record_stream` tells the allocator of another stream.
- The host uses pinned memory before a `non_blocking` copy is done. Other memory is copied before the call returns.

A storage that was there before the trace has no uses before it. Not seen: operations inside of DTensor.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.comm.progress import Place
from fivefold_plan.trace.fake import COPIES, CPU, Fake, non_blocking
from fivefold_plan.trace.memory import plain, tensors_in
from fivefold_plan.trace.streams import HOST, Clock, Stream, Streams, nobody, place
from fivefold_plan.trace.traffic import group_name

c10d = torch.ops.c10d
_SHARES = ("aten::_unsafe_view",)
"""Operators whose result shares memory with an argument, though their schema does not say it."""
_WRITES = {"fsdp::all_gather_copy_in": {"all_gather_output"}}
"""Operators that write arguments, though their schema does not say it."""


class Use(NamedTuple):
    """An operation on a stream. count: the stream's, see streams.py."""

    stream: Stream
    count: int
    what: Any
    place: Place | None

    def before(self, clock: Clock) -> bool:
        return self.stream.stream_id == HOST or clock.get(self.stream.stream_id, 0) >= self.count

    def __str__(self) -> str:
        what = self.what if isinstance(self.what, str) else self.what.name()
        return f"{what} on {self.stream.name} ({self.place or 'autograd'})"


@dataclass(eq=False, slots=True)
class _Memory:
    """A storage. home: the stream that allocated it; None: it was there before. uses: by (first byte, end, stream, does
    it write). told: the streams that the allocator knows of."""

    home: Stream | None
    uses: dict[tuple[int, int, int, bool], Use] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    reference: Any = None


class Races:
    """found: the races, each with its number of times."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.found: Counter[str] = Counter()
        self._there: dict[int, _Memory] = {}  # by the storage's address

    def see(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, waits: bool = False) -> None:
        """An operation that the host has just queued on the current stream, or has run itself. waits: the host waits
        for it."""
        if (written := _written(func)) is None:
            return
        names, writes = written
        values = [*zip(names, args, strict=False), *kwargs.items()]
        given = [(fake, name in writes) for name, value in values for fake in _fakes(value)]
        made = [*_fakes(out)]
        later = func in COPIES and non_blocking(func, args, kwargs)
        later = later and any(fake.on != CPU for fake in (*made, *(fake for fake, _ in given)))
        device = self._use(func, self.streams.current())
        host = device._replace(stream=self.streams.host)

        def user(fake: Fake) -> Use:
            return host if fake.on == CPU and not (later and fake.pinned) else device

        for fake, changes in given:
            self._used(fake, user(fake), changes)
        for fake in made:
            if fake.untyped_storage()._cdata not in self._there:
                self._add(fake.untyped_storage(), user(fake))
        if waits:
            self.streams.reach(self.streams.current().point())

    def send(self, func: Any, args: Any, axis_of: Mapping[str, str]) -> tuple[list[Tensor], Clock]:
        """A collective that the host has just started. Its first argument is its output. axis_of: names of groups."""
        group = next(name for arg in args if (name := group_name(arg)))
        peer = f", peer {args[2]}" if func in (c10d.send.default, c10d.recv_.default) else ""
        stream = self.streams.nccl(axis_of.get(group, group) + peer)
        stream.follow(self.streams.current().point())
        use, writes = self._use(func, stream), func is not c10d.send.default
        for arg in args:
            for fake in _fakes(arg):
                self._used(fake, use, writes)
            writes = False
        return [*_fakes(args)], stream.point()

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Stands for `Tensor.record_stream`."""
        for fake in _fakes(tensor):
            self._at(fake.untyped_storage()).told.add(stream.stream_id)

    def resizing(self, resize: Callable[..., None]) -> Callable[..., None]:
        """`UntypedStorage.resize_`, which frees the memory and allocates other."""

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            if memory := self._there.pop(storage._cdata, None):
                self._freed(memory)
            resize(storage, size)
            if size:
                self._add(storage, self._use("resize_", self.streams.current()))

        return resized

    def close(self) -> None:
        """What is freed or waited for from here on does not count."""
        self._there.clear()
        self.streams.waited = nobody

    def _use(self, what: Any, stream: Stream) -> Use:
        return Use(stream, stream.clock[stream.stream_id], what, place())

    def _at(self, storage: torch.UntypedStorage) -> _Memory:
        return self._there.get(storage._cdata) or self._add(storage, None)

    def _add(self, storage: torch.UntypedStorage, use: Use | None) -> _Memory:
        """use: what allocates it."""
        address, memory = storage._cdata, _Memory(use.stream if use else None)
        if use is not None:
            memory.uses[0, storage.nbytes(), use.stream.stream_id, True] = use

        def gone(_: object) -> None:
            if self._there.get(address) is memory:
                del self._there[address]
                self._freed(memory)

        memory.reference = weakref.ref(storage, gone)
        self._there[address] = memory
        return memory

    def _used(self, fake: Fake, use: Use, writes: bool) -> None:
        memory, (start, end) = self._at(fake.untyped_storage()), _extent(fake.meta)
        number, covered = use.stream.stream_id, []
        for key, other in memory.uses.items():
            first, last, stream, wrote = key
            if start < last and first < end and (writes or wrote):
                if stream != number and not other.before(use.stream.clock):
                    shown = f"{str(fake.dtype).removeprefix('torch.')} {tuple(fake.shape)}"
                    does, did = ("writes" if one else "reads" for one in (writes, wrote))
                    self._race(f"{use} {does} {shown}", other, did)
                if writes and start <= first and last <= end:
                    covered.append(key)
        for key in covered:  # what comes after this one comes after them
            del memory.uses[key]
        memory.uses[start, end, number, writes] = use

    def _freed(self, memory: _Memory) -> None:
        home = memory.home
        if home is None or home.stream_id == HOST:  # whose allocator looks at the copies under way
            return
        for (_, _, stream, _), use in memory.uses.items():
            if stream not in memory.told and not use.before(home.clock):
                self._race(f"memory of {home.name} is freed ({place() or 'autograd'})", use, "uses")

    def _race(self, now: str, other: Use, did: str) -> None:
        self.found[f"{now}, which {other} {did}: neither waits for the other"] += 1


def _fakes(value: Any) -> Iterator[Fake]:
    """The fake tensors in nested lists and tuples, and in DTensors."""
    return (part for tensor in tensors_in(value) for part in plain(tensor) if type(part) is Fake)


def _extent(meta: Tensor) -> tuple[int, int]:
    """A tensor's first byte in its storage, and the end of its last."""
    size, start = meta.element_size(), int(meta.storage_offset())
    if meta.is_contiguous():
        return start * size, start * size + meta.nbytes
    last = sum((length - 1) * stride for length, stride in zip(meta.shape, meta.stride(), strict=True))
    return start * size, (start + int(last) + 1) * size


@cache
def _written(func: Any) -> tuple[list[str], set[str]] | None:
    """The names of an operator's arguments, and of those that it writes; None: it touches no memory, as a view."""
    schema = func._schema
    aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
    if schema.name in _SHARES or not all(alias.is_write for alias in aliases):
        return None
    writes = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
    if schema.name.endswith("_like") or schema.name.startswith("aten::new_"):
        return [], set()  # they look at a shape
    return [one.name for one in schema.arguments], writes | _WRITES.get(schema.name, set())

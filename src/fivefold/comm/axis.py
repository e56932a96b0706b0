"""One axis of the mesh as one rank sees it, and the messages over it.

    dx = axis.start_all_reduce(dx)  # begins
    dweight = dy.t() @ x            # overlaps
    return dx(), dweight            # waits, and returns the sum

`start_...` methods return a `Started`, which waits when it is called. The others wait at once. An axis of one rank
sends nothing. Training calls torch.distributed nowhere else (tests/test_comm.py), so code that concerns every message
belongs here:

- counting: `counters` are told of each message (`fivefold_plan/trace/traffic.py` is one);
- time-outs: a message that fails is a `CommunicationError` that names rank, axis, operation and the caller's line
  (with NCCL, its watchdog ends the process instead);
- hangs: `progress.py` notes what has begun and what is waited for, and `watchdog.py` reads it;
- timelines: `progress.Watch` notes when messages begin and end, in a step that is measured, and `progress.span` names
  them for PyTorch's profiler;
- algorithms: `sum_scatter` is an all-to-all with a local sum on CPUs, and the backend's reduce-scatter on GPUs.

Legend: n ranks on the axis; d0 first dim of a tensor.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.hang import numbers
from fivefold.comm.progress import UNIT, Handle, Ops, Place, Work, caller, message, progress, verdict
from fivefold.errors import PASSING, BusyError, CommunicationError, UserError
from fivefold.launch.ranks import Ranks
from fivefold.sharding.units import Collective

# Before torch 2.13 these had longer names, which later versions may drop.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

Counter = Callable[["Axis", str, int], None]
"""A counter gets the axis, the operation, and the bytes of its input or output, whichever is larger."""
counters: list[Counter] = []
"""The counters of this process. Each is called before a message starts."""
Message = tuple[Callable[..., Any], str, Tensor, int]
"""(function, operation, tensor, the other's index) of a send or a receive."""


class _HandingOver(threading.local):
    now = False


handing_over = _HandingOver()
"""`now` is True while this thread passes a counted message to torch.distributed (only maintained while there are
counters)."""
_counting = threading.Lock()  # several threads send
_numbers = count()


class Axis:
    """n ranks that send messages to each other.

    name: one of `sharding.layout.GROUP_NAMES`, or "machine". ranks: their numbers in the run, by index. index: this
    rank's index. group: None if this rank is alone. timeout_s: seconds until a message fails. purpose: what the
    messages are for, such as "FSDP2 unit blocks.3"; errors and timelines name it.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        index: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        timeout_s: float = 600,
        watched: bool = True,
    ):
        assert (group is None) == (len(ranks) == 1), f"a group for {len(ranks)} ranks of axis {name}"
        self.name, self.ranks, self.index, self.size = name, tuple(ranks), index, len(ranks)
        self.device, self.group, self.timeout_s, self.purpose = device, group, timeout_s, ""
        self.key = f"{name} {next(_numbers)}"  # not the group's name, which axes of several models may have
        self.ops: Ops | None = progress.ops(group) if group is not None and watched else None
        # gloo sums and gathers tensors on GPUs, but sends and receives in host memory only
        self.staged = group is not None and device.type == "cuda" and dist.get_backend(group) == "gloo"

    @property
    def rank(self) -> int:
        """This rank's number in the run."""
        return self.ranks[self.index]

    def of_unit(self, unit: str) -> Axis:
        """Returns a copy of the axis for the messages of an FSDP2 unit."""
        return self.for_purpose(f"{UNIT} {unit}")

    def for_purpose(self, purpose: str) -> Axis:
        """Returns a copy of the axis for these messages."""
        axis = copy.copy(self)
        axis.purpose = purpose
        return axis

    def start_all_reduce(self, x: Tensor, op: str = "sum") -> Started:
        """Starts the sum ("max", "min") of every rank's x, in place."""
        if self.group is None:
            return Started(self, "all_reduce", x)
        return self._start("all_reduce", x, x, lambda: dist.all_reduce(x, OPS[op], self.group, True))

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Computes the sum ("max", "min") of every rank's x, in place."""
        return self.start_all_reduce(x, op).at_once()

    def start_all_gather(self, x: Tensor, out: Tensor | None = None) -> Started:
        """Starts to join every rank's x (contiguous) along the first dim: (n d0, ...)."""
        if out is None:
            out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        if self.group is None:
            return Started(self, "all_gather", out.copy_(x))
        return self._start("all_gather", out, out, lambda: all_gather_single(out, x, self.group, True))

    def all_gather(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Joins every rank's x (contiguous) along the first dim: (n d0, ...)."""
        return self.start_all_gather(x, out).at_once()

    def start_reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Started:
        """Starts the sum of every rank's x (contiguous), cut along the first dim: this rank's part, (d0 / n, ...). The
        backend sums it, in the dtype of x."""
        if self.group is None:
            return Started(self, "reduce_scatter", x)
        assert x.shape[0] % self.size == 0, f"{x.shape[0]} rows over {self.size} ranks"
        if out is None:
            out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        add = dist.ReduceOp.SUM
        return self._start(
            "reduce_scatter", out, x, lambda: reduce_scatter_single(out, x, add, self.group, True)
        )

    def sum_scatter(self, x: Tensor, out: Tensor, sent: torch.dtype) -> Tensor:
        """Sums every rank's x, cuts the sum along the first dim, and writes this rank's part into `out`. x, out:
        contiguous. sent: the dtype of the message.

        gloo has no reduce-scatter of its own; its substitute is an all-reduce, which sends twice as much. On CPUs every
        rank sends each other rank its part, and adds the parts it receives in fp32, in the order of ranks.
        """
        x = x.to(sent)
        if self.group is None:
            return out.copy_(x)
        if x.is_cuda:
            part = out if sent == out.dtype else torch.empty_like(out, dtype=sent)
            self.start_reduce_scatter(x, part).at_once()
            return out if part is out else out.copy_(part)
        parts = self.all_to_all(x).view(self.size, *out.shape)
        if out.dtype == torch.float32:
            return torch.sum(parts, 0, dtype=torch.float32, out=out)
        return out.copy_(torch.sum(parts, 0, dtype=torch.float32))

    def all_to_all(
        self, x: Tensor, taken: Sequence[int] | None = None, given: Sequence[int] | None = None
    ) -> Tensor:
        """Cuts x (contiguous) along the first dim, sends slice i to rank i, and joins the received slices, by rank.

        given: number of rows sent to each rank. taken: number of rows received from each. None: equal numbers.
        """
        return self.start_all_to_all(x, taken, given).at_once()

    def start_all_to_all(
        self, x: Tensor, taken: Sequence[int] | None = None, given: Sequence[int] | None = None
    ) -> Started:
        if self.group is None:
            return Started(self, "all_to_all", x)
        out = torch.empty_like(x) if taken is None else x.new_empty(sum(taken), *x.shape[1:])
        larger = x if x.numel() > out.numel() else out
        return self._start("all_to_all", out, larger, lambda: self._all_to_all(out, x, taken, given))

    def run(self, collective: Collective, x: Tensor, *rows: Sequence[int], backward: bool = False) -> Tensor:
        """Runs a collective of `sharding/units.py`, or the one that sends its gradient. rows: as in `all_to_all`."""
        return self.start(collective, x, *rows, backward=backward).at_once()

    def start(
        self, collective: Collective, x: Tensor, *rows: Sequence[int], backward: bool = False
    ) -> Started:
        operation = collective.backward if backward else collective.forward
        assert operation is not None, f"{collective}: nothing is sent back"
        assert collective.number in (0, x.element_size()), f"{collective} of {x.dtype}"
        return getattr(self, f"start_{operation}")(x, *rows)

    def start_send(self, x: Tensor, to: int, tag: int = 0) -> Started:
        """Sends x (contiguous) to the rank with this index. gloo matches messages by tag, NCCL by their order."""
        return self._start("send", x, x, lambda: self._post(dist.isend, x, to, tag), (to,))

    def start_receive(self, out: Tensor, source: int, tag: int = 0) -> Started:
        """Receives `out` (contiguous) from the rank with this index."""
        return self._start("receive", out, out, lambda: self._post(dist.irecv, out, source, tag), (source,))

    def start_exchange(self, leaving: Tensor, to: int, arriving: Tensor, source: int) -> Started:
        """Sends one tensor to a rank and receives another from a rank, by index. Both are contiguous. Returns
        `arriving`."""
        if self.group is None:
            return Started(self, "exchange", arriving.copy_(leaving))
        return self.start_moves([(leaving, to)], [(arriving, source)])

    def start_moves(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Started:
        """Sends and receives tensors (contiguous) to and from ranks by index, all at once, as one group with NCCL. At
        least one. Between two ranks, messages are matched by their order."""
        messages: list[Message] = [(dist.isend, "send", *x) for x in sends]
        messages += [(dist.irecv, "receive", *x) for x in receives]
        if counters:
            for _, operation, x, _ in messages[:-1]:
                _count(self, operation, x)
        _, operation, x, _ = messages[-1]
        peers = tuple(message[3] for message in messages)
        return self._start(operation, x, x, lambda: self._move(messages), peers)

    def connect_neighbours(self) -> None:
        """Makes NCCL's communicator of each pair of neighbours in the ring, in one order. Pipelines send through it."""
        if self.group is None or dist.get_backend(self.group) != "nccl":
            return
        x = torch.zeros(1, device=self.device)
        for first in range(self.size if self.size > 2 else 1):
            second = (first + 1) % self.size
            if self.index == first:
                self.start_send(x, second)()
            elif self.index == second:
                self.start_receive(x, first)()

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Gives every rank the x of the rank with this index, in place."""
        group = self.group
        if group is not None:
            self._start("broadcast", x, x, lambda: dist.broadcast(x, None, group, True, source)).at_once()
        return x

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        if self.group is not None:
            at = [self.device.index] if dist.get_backend(self.group) == "nccl" else None  # else it warns
            self._start("barrier", torch.empty(0), None, lambda: dist.barrier(self.group, True, at)).at_once()

    def explain(self, operation: str, started: Place | None, error: RuntimeError) -> None:
        """Raises a CommunicationError if a rank is lost; does nothing for a wrong call. started: where the message
        began, if the wait is elsewhere."""
        purpose = f", {self.purpose}" * bool(self.purpose)
        what = f"rank {self.rank}: {operation} over axis {self.name} ({numbers(self.ranks)}){purpose}"
        if (text := verdict(what, self.timeout_s, caller(), started, error)) is not None:
            raise CommunicationError(text) from error

    def _start(
        self,
        operation: str,
        result: Tensor,
        larger: Tensor | None,
        function: Callable[[], Any],
        peers: tuple[int, ...] = (),
    ) -> Started:
        """Starts `function`, which returns a handle to wait for. larger: the larger of its input and output;
        None: it has none. peers: of a send or receive, by index."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename == __file__:  # `start`
            assert frame.f_back is not None
            frame = frame.f_back
        started = Started(self, operation, result, function, Place(frame.f_code, frame.f_lasti))
        if self.ops is not None:
            started.begin(self.ops, peers)
        if counters:
            _count(self, operation, larger)
        watch = progress.watch
        began, entered = watch.clock() if watch else 0.0, 0.0
        if self.ops is not None:  # the first call of a group may wait for all of its ranks
            entered = progress.enter((self, operation, self.ops, started.number, peers, None))
        try:
            with message(operation, self):
                started.work = function()
        except RuntimeError as error:
            self.explain(operation, None, error)
            raise
        finally:
            handing_over.now = False
            if self.ops is not None:
                progress.leave(entered)
        if watch:
            started.work = watch.follow(self, operation, started.work, began)
        return started

    def _move(self, messages: list[Message]) -> Work:
        # gloo asks a peer for data once a receive is posted. Behind a send that is already under way, the request would
        # wait in the socket, and both directions would take turns. So receives are posted first.
        ordered = sorted(messages, key=lambda message: message[0] is dist.isend)
        if self.staged:
            works = [self._post(function, x, peer) for function, _, x, peer in ordered]
        else:
            group = self.group
            ops = [dist.P2POp(what, x, group=group, group_peer=peer) for what, _, x, peer in ordered]
            works = dist.batch_isend_irecv(ops)
        return Handle(lambda: [work.wait() for work in works])

    def _post(self, function: Callable[..., Any], x: Tensor, peer: int, tag: int = 0) -> Work:
        """Posts a send or a receive."""
        here = x.cpu() if self.staged else x
        work = function(here, None, self.group, tag, peer)
        if not self.staged:
            return work
        return Handle(lambda: (work.wait(), function is dist.irecv and x.copy_(here)))

    def _all_to_all(
        self, out: Tensor, x: Tensor, taken: Sequence[int] | None, given: Sequence[int] | None
    ) -> Work | None:
        """The backend's all-to-all. gloo's posts sends first (see `_move`); on CPUs messages that do not
        take its place."""
        if x.is_cuda:
            return dist.all_to_all_single(out, x, taken, given, self.group, True)
        n, index = self.size, self.index
        leaving, arriving = (
            tensor.tensor_split(n) if rows is None else tensor.split(list(rows))
            for tensor, rows in ((x, given), (out, taken))
        )
        others = [(index + i) % n for i in range(1, n)]  # ranks begin with different ones
        both: list[Message] = [(dist.isend, "send", leaving[i], i) for i in others if leaving[i].numel()]
        both += [(dist.irecv, "receive", arriving[i], i) for i in reversed(others) if arriving[i].numel()]
        work = self._move(both) if both else None
        arriving[index].copy_(leaving[index])
        return work


def _count(axis: Axis, operation: str, larger: Tensor | None) -> None:
    handing_over.now = True
    with _counting:
        for counter in counters:
            counter(axis, operation, 0 if larger is None else larger.nbytes)


ALONE = Axis("all", [0], 0, torch.device("cpu"), None)
"""The axis of a process without others."""


def everyone(ranks: Ranks) -> Axis:
    """The axis of all ranks of a run."""
    group = dist.group.WORLD if ranks.world > 1 else None
    return Axis("all", range(ranks.world), ranks.rank, ranks.device, group, ranks.timeout_s)


class Started:
    """A message that has started. Calling it waits, and returns its result."""

    __slots__ = ("axis", "kept", "number", "operation", "ops", "peers", "place", "result", "work")

    def __init__(
        self,
        axis: Axis,
        operation: str,
        result: Tensor,
        kept: Callable[[], Any] | None = None,
        place: Place | None = None,
    ):
        self.axis, self.operation, self.result = axis, operation, result
        self.kept = kept  # keeps its tensors alive until they are sent
        self.place = place  # where it started
        self.work: Work | None = None
        self.ops: Ops | None = None  # see `progress.Waiting`
        self.number, self.peers = 0, ()

    def at_once(self) -> Tensor:
        """Waits where it has just begun: an error names that place once."""
        self.place = None
        return self()

    @classmethod
    def here(cls, axis: Axis, operation: str, result: Tensor) -> Started:
        """A sum of many messages that the caller's caller starts, and a thread drives."""
        frame = sys._getframe(2)
        started = cls(axis, operation, result, None, Place(frame.f_code, frame.f_lasti))
        if axis.ops is not None and axis.group is not None:
            started.begin(progress.ops(axis.group, beside=True), ())
        return started

    def begin(self, ops: Ops, peers: tuple[int, ...]) -> None:
        """Notes that it begins. A send or receive (`peers`) has no number: other ranks of the group have no part."""
        self.ops, self.peers = ops, peers
        if not peers:
            ops.begun += 1
            self.number = ops.begun
        progress.moved += 1

    def __call__(self) -> Tensor:
        if self.work is not None:
            ops, entered = self.ops, 0.0
            if ops is not None:
                entered = progress.enter(
                    (self.axis, self.operation, ops, self.number, self.peers, self.place)
                )
            try:
                with message(self.operation, self.axis, wait=True):
                    self.work.wait()
            except RuntimeError as error:
                self.axis.explain(self.operation, self.place, error)
                raise
            finally:
                if ops is not None:
                    progress.leave(entered)
            self.work = self.kept = None
        return self.result


KINDS = (CommunicationError, BusyError, UserError)
"""What an error of one rank is on the others: a user's mistake, which stays one everywhere; something that may pass;
and everything else, after which a launcher starts the ranks again. A later one hides those before it."""


@contextmanager
def all_or_none(axis: Axis) -> Iterator[None]:
    """Turns an error inside, on one rank of the axis, into an error on every rank. Otherwise, where no launcher stops
    them (as under Slurm), the others would wait for that rank in their next message until it fails. All ranks call it,
    and code inside must not need another rank.

    Raises:
        UserError: a rank met one: the message of the last such rank.
        BusyError: a rank met something that may pass, and none a mistake of the user's.
        CommunicationError: a rank failed in another way, or the others are gone.
    A rank whose own error is not a UserError raises that.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as found:  # also unexpected errors and signals: the others wait
        error = found
    passing = isinstance(error, BusyError) or (isinstance(error, OSError) and error.errno in PASSING)
    kind = 1 if passing else 2 * isinstance(error, UserError)  # its number in `KINDS`
    mine = -1 if error is None else kind * axis.size + axis.index
    try:
        failed = int(axis.all_reduce(torch.tensor(mine, device=axis.device), "max"))
    except CommunicationError as lost:
        if error is None:
            raise
        raise error from lost  # it came first
    if failed >= 0:
        kind, index = divmod(failed, axis.size)
        text = str(error) if isinstance(error, UserError) else f"rank {axis.rank}: {error!r}"
        everywhere = KINDS[kind](told(text, index, axis))
        raise everywhere if error is None or (isinstance(error, UserError) and axis.size > 1) else error


def told(text: str, index: int, axis: Axis) -> str:
    """Gives every rank the text of the one with this index."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=axis.device)
    length = axis.broadcast(torch.tensor(len(mine), device=axis.device), index)
    content = mine if axis.index == index else mine.new_empty(int(length))
    return bytes(axis.broadcast(content, index).tolist()).decode()

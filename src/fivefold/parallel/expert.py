"""Expert parallelism: each rank of an "ep" group has some of the experts, and computes them for all ranks of the group.

Ranks of the group have different tokens. In forward each rank sends the rows of its tokens to the ranks that hold their
experts (an uneven all-to-all; the counts go first), computes the rows it receives, and sends the results back. Backward
does the same in reverse (GShard, arXiv 2006.16668). A rank has then seen all gradients of its experts from its group.
They are summed over "edp", the ranks with the same experts; other gradients are summed over "batch".

`Balance` sums the load of the experts over all ranks, once per step, in any layout.

Legend: M rows that a rank has, R rows that it receives, D model, E experts, G ranks of the group, e = E / G, C
chunks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from threading import Semaphore
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.comm import Axis, Started
from fivefold.kernels.fp8 import decode_rows, encode_rows
from fivefold.kernels.rounded import RoundedMatmuls
from fivefold.models.base import LanguageModel
from fivefold.models.card import card_of
from fivefold.models.mixture import Assignment, Compute, Exchange, Experts, Mixture, Total, dispatch
from fivefold.models.section import ModelSection
from fivefold.parallel import operators
from fivefold.parallel.autograd import sent
from fivefold.parallel.mesh import Mesh
from fivefold.precision.formats import Format
from fivefold.sharding.parts import Part, local_shape
from fivefold.sharding.units import COUNTS, ROWS, Collective, loads


def mixtures(stage: LanguageModel) -> Iterator[tuple[int, Mixture]]:
    """The mixtures of experts of a stage, with the numbers of their blocks."""
    for number, block in stage.blocks.items():
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, Mixture):
            yield int(number), mlp


def apply(stage: LanguageModel, mesh: Mesh, table: dict[str, Part]) -> None:
    """Gives a model on "meta" this rank's part of the experts, in place. Routers that see a part of each sequence get
    the counts of the whole sequence."""
    beside = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None
    for number, mixture in mixtures(stage):
        sums = [(mesh.axis(load.axis), load) for load in loads(mesh.layout.sp) if mesh.size(load.axis) > 1]
        if sums:
            mixture.total = SummedTotal(sums)
            operators.axes.update({axis.key: axis for axis, _ in sums})
        if mesh.size(ROWS.axis) > 1:
            stream = beside if mixture.shared else None  # without it nothing runs there meanwhile
            how = mesh.layout.expert_chunks, stream, mesh.layout.expert_buffer
            mixture.experts.exchange = AllToAll(mesh.axis(ROWS.axis), *how)
        for name, whole in list(mixture.experts.named_parameters()):
            shape = local_shape(table[f"blocks.{number}.mlp.experts.{name}"].computes)
            setattr(mixture.experts, name, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta")))


def keep_out(block: nn.Module, **how: Any) -> None:
    """Leaves what sends messages out of a compiled block: its shapes depend on data. What experts compute between these
    is compiled by itself. how: options of `torch.compile`."""
    for module in block.modules():
        for name in ("forward", "begin") if isinstance(module, AllToAll) else ():
            setattr(module, name, torch.compiler.disable(getattr(module, name)))
        if isinstance(module, Experts) and not module.exchange.local:
            compute: Any = torch.compile(module.compute, dynamic=True, **how)
            module.compute = compute


class SummedTotal(Total):
    """Sums counts over all ranks that have parts of the same sequences. Counts carry no gradient."""

    def __init__(self, sums: Sequence[tuple[Axis, Collective]]):
        super().__init__()
        self.sums = sums

    def forward(self, counts_E: Tensor) -> Tensor:
        total = counts_E.clone()
        for axis, load in self.sums:
            total = operators.run(axis, load, total)
        return total


class Leaving:
    """Rows between `AllToAll.begin` and `forward`. Their numbers are on the way.

    mine, theirs: rows for each rank, chunk and expert, and from each. there, back: the messages to experts and home,
    one a chunk. beside: a stream of a GPU, on which numbers travel on to the host, and then rows, beside other work.
    pad: of messages whose numbers the host knows before. rows_MD: until they leave. rows_2CG: numbers of rows to and
    from each rank, in host memory.
    """

    def __init__(self, of: AllToAll, mine_GCe: Tensor, pad: Padding | None, how: RoundedMatmuls | None):
        self.mine_GCe, self.pad, self.beside = mine_GCe, pad, of.beside if pad is None else None
        there_form, back_form = (how.inputs, how.gradients) if how else (None, None)
        self.there = [Transfer(of.axis, of.turns, there_form) for _ in range(of.chunks)]
        self.back = [Transfer(of.axis, of.turns, None, back_form) for _ in self.there]
        self.rows_MD: Tensor | None = None
        self.started, self.event = of.axis.start(COUNTS, mine_GCe), None
        if self.beside is not None:
            with torch.cuda.stream(self.beside):  # the message has waited for what it sends
                self._arrive()
                self.event = torch.cuda.Event()
                self.event.record()

    def wait(self) -> None:
        """Waits for what the next messages need: the host for numbers, unless messages are padded."""
        if self.event is None:
            self._arrive()
        else:
            self.event.synchronize()

    def _arrive(self) -> None:
        self.theirs_GCe = self.started()
        if self.pad is None:
            rows_2CG = torch.stack([self.mine_GCe.sum(2).t(), self.theirs_GCe.sum(2).t()])
            self.rows_2CG = rows_2CG.to("cpu", non_blocking=self.beside is not None)


class Padding:
    """Rows for several ranks in as many places for each. mine_G: rows for each rank. each: places. rows: M, their sum.
    Rows lie in the order of ranks. Those without a place of their own are lost: they share one."""

    def __init__(self, mine_G: Tensor, each: int, rows: int) -> None:
        self.each, first_G = each, mine_G.cumsum(0) - mine_G
        place_n, row_M = (torch.arange(n, device=mine_G.device) for n in (each, rows))
        rank_M = (row_M[:, None] >= first_G[1:]).sum(1)
        self.row_R = (first_G[:, None] + place_n).clamp(max=rows - 1).flatten()  # R = G n
        self.taken_R = (place_n < mine_G[:, None]).flatten()
        self.place_M = rank_M * each + (row_M - first_G[rank_M]).clamp(max=each - 1)

    def fill(self, rows_MD: Tensor) -> Tensor:
        """The row at each place; some row where there is none."""
        return rows_MD.index_select(0, self.row_R)

    def empty(self, rows_RD: Tensor) -> Tensor:
        """The rows at their places."""
        return rows_RD.index_select(0, self.place_M)

    def cleared(self, rows_MD: Tensor) -> Tensor:
        """As `fill`, with zeros where there is none."""
        return self.fill(rows_MD).mul_(self.taken_R[:, None])


class AllToAll(Exchange):
    """Sends rows to the ranks that hold their experts, and the results back (see `models.mixture.Exchange`).

    Rows leave before the shared expert computes, and are waited for behind it. With several chunks the messages of one
    are also under way while experts compute another: in forward all rows leave at once, experts compute a chunk when it
    has arrived, and its results leave before the next chunk. Backward runs the same in reverse, because autograd goes
    through nodes in reverse order of their making: the gradients of rows come home beside the shared expert's backward.

    buffer: in training each rank sends every rank `buffer` times the mean number of rows, with filler where there are
    fewer. The host then knows all numbers and waits for none. Rows beyond are lost and counted (`beyond`), which
    ends a run (train/faults.py). 0: as many rows as there are.
    """

    def __init__(
        self, axis: Axis, chunks: int = 1, beside: torch.cuda.Stream | None = None, buffer: float = 0.0
    ):
        super().__init__()
        self.axis, self.chunks, self.local, self.beside, self.buffer = axis, chunks, False, beside, buffer
        self.turns: Turns | None = None  # set if a pipeline runs forwards and backwards in pairs

    @property
    def padded(self) -> bool:
        """True if messages are. Validation loses no row, whatever it needs."""
        return self.buffer > 0 and self.training

    def room(self, rows: int) -> int:
        """Rows in a padded message to each rank, if this one has so many in all."""
        return min(rows, math.ceil(self.buffer * rows / self.axis.size))

    def beyond(self, counts_CE: Tensor, rows: int) -> Tensor | int:
        if not self.padded:
            return 0
        return (counts_CE.view(self.axis.size, -1).sum(1) - self.room(rows)).clamp(min=0).sum()

    def begin(
        self, x_ND: Tensor, way: Assignment, how: RoundedMatmuls | None = None
    ) -> tuple[tuple[Tensor, ...], Leaving]:
        """The rows leave here, unless the host would wait for a GPU that can compute beside: then it queues what comes
        next first, and the rows leave in `forward`, on a stream that waits for nothing else."""
        mine_GCe = way.counts_CE.unflatten(1, (self.axis.size, -1)).transpose(0, 1).contiguous()
        rows = len(way.order_M)
        pad = Padding(mine_GCe.sum((1, 2)), self.room(rows), rows) if self.padded else None
        leaving = Leaving(self, mine_GCe, pad, how)
        rows_MD = dispatch(x_ND, way)
        if pad is not None:
            rows_MD = sent(pad.fill, pad.empty, rows_MD)
        leaving.rows_MD = rows_MD.detach()
        # Backward waits here, behind what forward computes beside.
        there = leaving.there
        made = lambda rows: tuple(rows.new_empty(0) for _ in there)  # noqa: E731
        tokens = sent(made, lambda *_: _wait_for_all(there), rows_MD)
        if leaving.beside is None:
            self.depart(leaving)
        else:
            leaving.beside.wait_stream(torch.cuda.current_stream())  # for the rows
        return tokens, leaving

    def depart(self, leaving: Leaving) -> None:
        """Starts the messages of rows. Waits for their numbers, if they are needed."""
        rows_MD, beside, leaving.rows_MD = leaving.rows_MD, leaving.beside, None
        assert rows_MD is not None, "left before"
        if leaving.pad is not None:
            given = taken = [[leaving.pad.each] * self.axis.size]
        else:
            if self.turns:
                self.turns.give_way()
            leaving.wait()
            given, taken = self.splits(leaving.rows_2CG, len(rows_MD))
        for one, home, *numbers in zip(leaving.there, leaving.back, taken, given, strict=True):
            (one.taken, one.given), (home.given, home.taken), one.beside = numbers, numbers, beside
        with torch.cuda.stream(beside) if beside else nullcontext():
            _start_all(leaving.there, rows_MD)
        if beside:
            rows_MD.record_stream(beside)  # which may still encode them

    def forward(self, rows_MD: tuple[Tensor, ...], compute: Compute, begun: Leaving) -> Tensor:
        pad, back = begun.pad, begun.back
        if begun.rows_MD is not None:
            self.depart(begun)
        if pad is None:
            theirs_GCe = begun.theirs_GCe
        else:
            begun.wait()
            ends_Ge = begun.theirs_GCe[:, 0].cumsum(1).clamp(max=pad.each)
            ends_Ge[:, -1] = pad.each  # rows that fill up are the last expert's
            theirs_GCe = ends_Ge.diff(dim=1, prepend=ends_Ge.new_zeros(len(ends_Ge), 1))[:, None]
        arriving = []
        for one, home, chosen_Ge, token in zip(begun.there, back, theirs_GCe.unbind(1), rows_MD, strict=True):
            rows_RD = sent(one.wait, partial(one.start, backward=True), token)
            # The rows arrive sorted by source, then expert. Experts need them sorted by expert, then source.
            experts = torch.arange(chosen_Ge.shape[1], device=rows_RD.device).repeat(len(chosen_Ge))
            each = experts.repeat_interleave(chosen_Ge.flatten(), output_size=len(rows_RD))
            order = each.argsort(stable=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=order.device)
            results_RD = compute(_permuted(rows_RD, order, inverse), chosen_Ge.sum(0))
            arriving.append(sent(home.start, home.wait, _permuted(results_RD, inverse, order)))
        out = sent(lambda *_: _wait_for_all(back), partial(_start_all, back, backward=True), *arriving)
        return out if pad is None else sent(pad.empty, pad.cleared, out)

    def splits(self, rows_2CG: Tensor, rows: int) -> list[list[list[int]]]:
        """Rows to send to each rank in each chunk (`rows` in all), and rows to receive from each."""
        return rows_2CG.tolist()


class Turns:
    """Two computations that take turns: a forward and a backward of a pair (`Schedule.pairs`). `both` runs them, and
    `give_way` hands over within them; outside of `both` it does nothing. start: called first on the second's thread.

    Each has a thread, and only one of them runs at a time. It gives way where it would wait for experts' rows, whether
    or not they have arrived. So the order of all messages depends on the program alone, and is the same on all ranks.
    """

    def __init__(self, start: Callable[[], object] = lambda: None):
        self._start, self._thread = start, ThreadPoolExecutor(1, "turns")
        self._running: int | None = None  # None: not within `both`, or one has ended
        self._error: BaseException | None = None  # the first one
        self._seconds, self._since = [0.0, 0.0], 0.0

    def both(self, first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
        """Runs both, the first one up to its first message first. Returns the seconds that each had its turn. An error
        of either ends both."""
        self._running, self._seconds, self._since = 0, [0.0, 0.0], time.perf_counter()
        self._gates = Semaphore(0), Semaphore(0)
        other = self._thread.submit(self._run, 1, second)
        self._run(0, first)
        other.result()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._seconds[0], self._seconds[1]

    def give_way(self) -> None:
        """Lets the other computation run until it gives way or ends. Raises CancelledError if it fails."""
        me = self._running
        if me is not None:
            self._count(me)
            self._running = 1 - me
            self._gates[1 - me].release()
            self._gates[me].acquire()
        if self._error is not None:
            raise CancelledError

    def _run(self, me: int, compute: Callable[[], object]) -> None:
        try:
            if me == 1:
                self._gates[1].acquire()
                self._start()
            if self._error is None:
                compute()
        except BaseException as error:  # the other one would wait for ranks that wait for this rank
            self._error = self._error or error
        self._count(me)
        if self._running is not None:  # the other one has not ended
            self._running = None
            self._gates[1 - me].release()

    def _count(self, me: int) -> None:
        now = time.perf_counter()
        self._seconds[me] += now - self._since
        self._since = now


class Transfer:
    """An all-to-all of rows in forward, and that of their gradients in backward. taken, given: rows received from and
    sent to each rank in forward. forms: formats in which rows travel, in forward and in backward (fp8.encode_rows);
    None: as they are. Rows travel beside autograd, which sees empty tensors in their place ("tokens"). beside:
    the stream of a GPU on which it was started, if that is another than the one that waits."""

    def __init__(self, axis: Axis, turns: Turns | None = None, *forms: Format | None):
        self.axis, self.turns, self.taken, self.given = axis, turns, list[int](), list[int]()
        self.forms = (*forms, None, None)
        self.started: Started | None = None
        self.beside: torch.cuda.Stream | None = None
        self.decode: Callable[[Tensor], Tensor] = lambda arrived: arrived

    def start(self, rows: Tensor, backward: bool = False) -> Tensor:
        """Starts it, and returns a token."""
        ways = (self.given, self.taken) if backward else (self.taken, self.given)
        leaving, form = rows.contiguous(), self.forms[backward]
        if form is not None:
            self.decode = partial(decode_rows, D=rows.shape[1], form=form, dtype=rows.dtype)
            leaving = encode_rows(leaving, form)
        self.started = self.axis.start(ROWS, leaving, *ways, backward=backward)
        return rows.new_empty(0)

    def wait(self, token: Tensor | None = None) -> Tensor:
        started, self.started = self.started, None
        assert started is not None, "waited for before"
        kept = started.kept  # until this stream waits, too
        if self.turns:
            self.turns.give_way()
        decode, self.decode = self.decode, lambda arrived: arrived
        beside, self.beside = self.beside, None
        with torch.cuda.stream(beside) if beside else nullcontext():  # whose memory the message has
            arrived = started()
        if beside:
            torch.cuda.current_stream().wait_stream(beside)
            arrived.record_stream(torch.cuda.current_stream())
        del kept
        return decode(arrived)


def _start_all(transfers: Sequence[Transfer], rows: Tensor, backward: bool = False) -> tuple[Tensor, ...]:
    """Starts the transfers of the rows, in order; in backward those of the last rows first. Returns a token for
    each."""
    each = [sum(one.taken if backward else one.given) for one in transfers]
    pairs = list(zip(transfers, rows.split(each), strict=True))
    return tuple(one.start(part, backward) for one, part in (reversed(pairs) if backward else pairs))


def _wait_for_all(transfers: Sequence[Transfer]) -> Tensor:
    """The rows of all transfers, in their order."""
    arrived = [one.wait() for one in transfers]
    return arrived[0] if len(arrived) == 1 else torch.cat(arrived)


def _permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return sent(lambda x: x.index_select(0, order), lambda dx: dx.index_select(0, inverse), rows)


class Balance:
    """The load of the experts, summed over all ranks once per step.

    A step is: start_step, forward and backward of the microbatches, finish. Then `figures` is valid, and `update` moves
    the routers' biases if the recipe balances by them. The figures are scalars on the device. expert_load_max,
    expert_load_min: tokens of the most and the least used expert of any block, relative to an even split.
    dropped_share: share of slots that were dropped. aux_loss, z_loss: mean terms, unweighted.
    """

    def __init__(self, stages: Iterable[LanguageModel], mesh: Mesh, model: ModelSection):
        self.layers = {number: mixture for stage in stages for number, mixture in mixtures(stage)}
        self.mesh, self.model = mesh, model
        mixed = [number for number, is_mixed in enumerate(card_of(model).mixed) if is_mixed]
        self.rows = {number: row for row, number in enumerate(mixed)}  # of `sums`, by block
        self.sums = torch.zeros(0)  # (blocks with experts, E + 4), fp64: see `models.mixture.RouterStats`
        self.figures: dict[str, Tensor] = {}
        self.factors: dict[bool, Tensor] = {}  # of microbatches that count, and of others

    def start_step(self, scale: float | Tensor) -> None:
        """scale: factor on the gradients of this step's losses."""
        pieces = self.mesh.size("tp") if self.mesh.layout.sp else 1  # the gradients of the pieces are summed
        one = torch.ones((), device=self.mesh.device)
        self.factors = {True: torch.stack([one * scale / pieces, one]), False: one.new_zeros(2)}
        for mixture in self.layers.values():
            mixture.stats.start(mixture.count, self.factors[True])

    def count(self, counts: bool) -> None:
        """The next forward is that of a microbatch that counts, or of an empty one."""
        for mixture in self.layers.values():
            mixture.stats.factors = self.factors[counts]

    def finish(self) -> None:
        """Sums over ranks: one all-reduce of a few numbers per block."""
        mesh, shape = self.mesh, card_of(self.model).load_sums
        self.sums = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
        if mesh.layout.sp or mesh.index("tp") == 0:  # without sp the ranks of tp have the same tokens
            for number, mixture in self.layers.items():
                if mixture.stats.sums is not None:
                    self.sums[self.rows[number]] = mixture.stats.sums
        mesh.axis("all").all_reduce(self.sums)
        slots, (dropped, aux, z, passes) = self.sums[:, :-4], self.sums[:, -4:].sum(0).unbind()
        load = slots / slots.mean(1, keepdim=True).clamp(min=1)
        self.figures = {
            "expert_load_max": load.max(),
            "expert_load_min": load.min(),
            "dropped_share": dropped / slots.sum().clamp(min=1),
            "aux_loss": aux / passes.clamp(min=1),
            "z_loss": z / passes.clamp(min=1),
        }

    @torch.no_grad()
    def update(self, skip: Tensor) -> None:
        """Lowers the bias of experts with more than an even share and raises the others, by a fixed rate; and notes the
        load, if it is that of whole batches. skip: 1: not in this step (fp32 scalar)."""
        for number, mixture in self.layers.items():
            slots = self.sums[self.rows[number], :-4]
            if mixture.router.load is not None:
                share = (slots / slots.sum().clamp(min=1)).float()
                mixture.router.load += (share - mixture.router.load) * (1 - skip)
            if mixture.router.bias is not None:
                step = self.model.balance_rate * (slots.mean() - slots).sign().float()
                mixture.router.bias += step * (1 - skip)

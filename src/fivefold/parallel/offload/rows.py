"""ZeRO whose ranks keep their rows in another tier: masters, gradients and perhaps weights (ZeRO-Offload, arXiv
2101.06840; ZeRO-Infinity, arXiv 2104.07857).

docs/parallelism/offload.md, "With ZeRO", says what this adds to FSDP2, which gathers and scatters as ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fivefold.comm import Started
from fivefold.kernels import private
from fivefold.parallel.offload.disk import wait_for
from fivefold.parallel.offload.pages import Pages, Unit
from fivefold.parallel.offload.states import Offload
from fivefold.parallel.zero import Sharded, UnitMessages
from fivefold.sharding.parts import Part
from fivefold.sharding.tiers import unit_of

Shares = Sequence[tuple[str, int]]
"""(name, elements with padding) of a unit's parameters, in the order of its messages."""


@contextmanager
def _on_default_stream(on_gpu: bool) -> Iterator[None]:
    """Threads of I/O with files copy on the default stream. FSDP2 calls us on one of its own."""
    if not on_gpu:
        yield
        return
    main, its = torch.cuda.default_stream(), torch.cuda.current_stream()
    main.wait_stream(its)
    with torch.cuda.stream(main):
        yield
    its.wait_stream(main)


class Rows(Pages, Sharded):
    """A `Sharded` replica whose masters lie elsewhere. initial: this rank's rows of a parameter."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        parts: dict[str, Part],
        compute_dtype: torch.dtype,
        messages: Sequence[UnitMessages],
        initial: Callable[[str], Tensor],
        offload: Offload,
        reduced: bool,
    ):
        masters = offload.masters()
        assert masters is not None
        for name, view in masters.items():
            view.copy_(initial(name))
            offload.disk.touched(view.nbytes)
        Sharded.__init__(self, stages, parts, compute_dtype, messages, masters.__getitem__)
        counts = Counter(each.table.module for each in messages for _ in each.table.names)
        self.keep(offload, counts, compute_dtype, reduced)
        self.masters = masters
        self.gradients = {name: self.gradients[name] for name in self._params}
        self._last: FSDPModule | None = None
        self._summing: deque[tuple[Started, Unit, Shares, Tensor]] = deque()
        names = {id(p): name for name, same in self._params.items() for p in same}
        for each in messages:
            shares = [(names[id(p)], size) for p, size in private.rows(each.module)]
            if shares:
                unit = self.pages[each.table.module]
                each.taken = partial(self._take, each, unit, shares)
                if unit.paged:
                    self._page(each, unit, shares)
        self.computing = {name: same[0].to_local().detach() for name, same in self._params.items()}
        self.settled()
        if self._working is not None:
            for stage, root in zip(stages, self.roots, strict=True):
                private.begin(root)
                here = {e.table.module for e in messages if e.module in {*stage.modules()}}
                units = [unit for unit in self.pages.values() if unit.paged and unit.name in here]
                blocks = dict.fromkeys(unit_of(unit.name) for unit in units)
                # A block itself is gathered before its experts, in backward, too
                back = [unit for block in reversed(blocks) for unit in units if unit_of(unit.name) == block]
                self.in_order(units, back, last_stays=False)
        self.refresh()

    def _page(self, messages: UnitMessages, unit: Unit, shares: Shares) -> None:
        """Puts the rows of a unit into one piece, which is there only while they are gathered."""
        self.give_weights(unit, self.compute_dtype)
        places = ((self.offload.arena.starts[name] - unit.start, size) for name, size in shares)
        private.place(messages.module, [unit.working[at : at + size] for at, size in places])
        before = lambda backward: self.need(unit, -1 if backward else 1)  # noqa: E731
        private.around_gather(messages.module, before, lambda: self.free(unit))

    def wait(self, unit: Unit) -> None:
        """The host waits, because the streams of FSDP2 do not wait for the current one."""
        wait_for(unit.coming)
        Pages.wait(self, unit)

    def start_step(self) -> None:
        self.forget_rows()
        Pages.start_step(self)

    def enable_sync(self) -> None:
        Sharded.enable_sync(self)
        self._syncing = True

    def _take(self, messages: UnitMessages, unit: Unit, shares: Shares, rows: Tensor) -> None:
        """Adds what a scatter has brought. In a hybrid, the last microbatch's sums are summed over replicas, too."""
        if self._last is not None:  # what FSDP2 made of the unit's before
            private.forget_gradients(self._last)
        self._last = messages.module
        with _on_default_stream(rows.is_cuda), torch.no_grad():
            self.gather_sums(unit)
            self.wait(unit)
            for name, part in self._parts(shares, rows):
                if name not in self._fresh and not self.pipeline:
                    part.add_(self.sum_of(unit, name))  # of earlier microbatches
            if messages.last and messages.replicas.size > 1:
                summed = messages.sums.start(rows, messages.replicas.purpose)
                self._summing.append((summed, unit, shares, rows))
                while len(self._summing) > (not rows.is_cuda):  # one sum under way: constant memory
                    self._summed()
            else:
                self._put(unit, shares, rows)

    def _summed(self) -> None:
        finish, unit, shares, rows = self._summing.popleft()
        finish()
        self._put(unit, shares, rows)

    def _put(self, unit: Unit, shares: Shares, rows: Tensor) -> None:
        for name, part in self._parts(shares, rows):
            if self.pipeline and name not in self._fresh:  # a tied embedding: the other stage's
                self.sum_of(unit, name).add_(part)
            else:
                self.sum_of(unit, name).copy_(part)
            self._fresh.discard(name)
        unit.waiting -= len(shares)
        if not unit.waiting:
            unit.waiting = unit.count
            self.write(unit)

    def _parts(self, shares: Shares, rows: Tensor) -> list[tuple[str, Tensor]]:
        """Each parameter's rows, without padding."""
        parts = zip(shares, rows.split([size for _, size in shares]), strict=True)
        return [(name, part[: self.offload.arena.sizes[name]]) for (name, _), part in parts]

    def finish(self) -> None:
        self.scatter_rest()
        while self._summing:
            self._summed()
        for unit in self.pages.values():
            if self.lacking(unit):
                unit.waiting = unit.count
                self.write(unit)
        self.written()
        for each in self.messages:
            private.forget_gradients(each.module)

    def refresh(self) -> None:
        Pages.refresh(self)
        self.forget_gathered()

    def forget_gathered(self) -> None:
        super().forget_gathered()
        for unit in self.pages.values():  # what was read ahead, and not used, is of old weights
            self.free(unit)

    def kept(self) -> dict[str, list[Tensor]]:
        here = Pages.kept(self)
        return {kind: tensors + here.get(kind, []) for kind, tensors in Sharded.kept(self).items()}

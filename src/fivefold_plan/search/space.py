"""All valid layouts of a recipe on a cluster.

They are combinations of shapes, shardings of states, schedules, microbatches, recomputation and precision modes. The
recipe's own rules decide what is valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, groupby, product
from operator import attrgetter
from typing import Any

from fivefold.models.card import card_of
from fivefold.models.operations import Sizes
from fivefold.models.recomputation import MODES, PREFIX, region
from fivefold.optim import OPTIMIZERS
from fivefold.precision import PRECISIONS
from fivefold.recipe import Recipe
from fivefold.recipe.rules import contradictions, with_layout
from fivefold.schedules.pipeline import DEFAULT, SCHEDULES
from fivefold.sharding.layout import Layout, changed, divisors, largest
from fivefold.sharding.layout_rules import problems
from fivefold.sharding.parts import stage_blocks
from fivefold.sharding.sequence import METHODS
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.setting import software_of

SEQUENCES = ((False, False), (True, False), (True, True))
"""(sp, sp_regather) on a tensor axis."""


@dataclass(frozen=True)
class Choice:
    """A layout with `count` microbatches of `B` sequences on the rank with most. mode: of precision. sequences: of the
    global batch, if ranks have unequally many."""

    layout: Layout
    B: int
    count: int
    mode: str
    sequences: int | None = None


@dataclass(frozen=True, eq=False)  # compared by identity, because bounds are cached by it
class Space:
    """The layouts that a search considers. recipe: resolved; its own layout and microbatches are ignored.

    indivisible: takes only sizes of the tensor axis that do not divide the model, within two nodes and without context
    and expert parallelism. It prices the cost of that rule. asked: the precision modes to consider; (): the recipe's.
    """

    recipe: Recipe
    cluster: Cluster
    indivisible: bool = False
    asked: tuple[str, ...] = ()
    _schedules: dict[object, list[dict[str, Any]]] = field(init=False, default_factory=dict)
    _microbatches: dict[int, list[int]] = field(init=False, default_factory=dict)

    @property
    def batch(self) -> int:
        return self.recipe.train.global_batch_size

    @cached_property
    def precisions(self) -> tuple[str, ...]:
        """The precision modes that were asked for, or the recipe's. For `auto`, all that it may stand for and whose
        rates the device has."""
        mode, peaks = self.recipe.precision.mode, self.cluster.device.peak
        if self.asked:
            return self.asked
        if mode != "auto":
            return (mode,)
        return tuple(name for name, mode in reversed(PRECISIONS.items()) if mode.auto and mode.rate in peaks)

    @cached_property
    def modes(self) -> list[str]:
        """Modes of recomputation: those of the table that free something, and the recipe's own choice of operations."""
        model, own = self.recipe.model, self.recipe.layout.recompute
        ops = card_of(model).block_operations(Sizes(model, 1), software_of(self.cluster))
        roles = {saved.role for op in ops for saved in op.saved}
        found = [mode for mode in MODES if mode == "none" or roles - region(mode).keeps - {"copied"}]
        return found + [own] * own.startswith(PREFIX)

    @cached_property
    def families(self) -> list[list[Layout]]:
        """Sizes of all axes, and options of the tensor, context and expert axes. Data-parallel ranks are replicas.
        Those of a family differ in expert and pipeline axes only."""
        devices = self.cluster.devices
        found = [
            [
                replace(way, pp=pp, dp_replicate=dp)
                for way in ways
                for pp in self.stages(way)
                if (dp := devices // (way.tp * way.cp * pp)) <= self.batch
            ]
            for _, ways in groupby(self.ways(), attrgetter("tp", "cp", "cp_method", "sp", "sp_regather"))
        ]
        return [*filter(None, found)]

    @property
    def shapes(self) -> list[Layout]:
        """All shapes, family by family."""
        return [*chain(*self.families)]

    def stages(self, way: Layout) -> list[int]:
        """Pipeline sizes that leave whole ranks for the other axes."""
        rest = self.cluster.devices // (way.tp * way.cp)
        most = self.recipe.model.layers if card_of(self.recipe.model).pipelined else 1
        return [pp for pp in divisors(rest) if pp <= most and rest // pp * way.cp * way.folded % way.ep == 0]

    def ways(self) -> Iterator[Layout]:
        """Combinations of tensor, context and expert axes that the model allows."""
        devices, experts = self.cluster.devices, self.recipe.model.experts or 1
        plain = {tp: self._allowed(Layout(tp=tp)) for tp in divisors(devices)}  # experts may need sp
        allowed = {tp: plain[tp] or (tp > 1 and self._allowed(Layout(tp=tp, sp=True))) for tp in plain}
        tensor = [tp for tp in plain if allowed[tp] is not self.indivisible]
        if self.indivisible:
            most, length = 2 * self.cluster.per_node, self.recipe.model.seq_len
            if not OPTIMIZERS[self.recipe.optim.name].uniform:  # it updates whole matrices, in equal parts
                return
            yield from (Layout(tp=tp, sp=length % tp == 0) for tp in tensor if tp <= most)
            return
        context = [
            layout
            for cp in divisors(devices)
            for method in (METHODS if cp > 1 else METHODS[:1])
            if self._allowed(layout := Layout(cp=cp, cp_method=method))
        ]
        for tp, layout in product(tensor, context):
            dp, left = divmod(devices, tp * layout.cp)
            if left:
                continue
            for sp, regather in SEQUENCES if tp > 1 else SEQUENCES[:1]:
                for ep, fold in _expert_axes(experts, dp * layout.cp, tp if sp else 1):
                    way = replace(
                        layout, tp=tp, sp=sp, sp_regather=regather, ep=ep, ep_fold=fold, dp_replicate=dp
                    )
                    checked = (tp == 1 or layout.cp == 1) and not sp and ep == 1
                    if plain[tp] if checked else self._allowed(way):
                        yield way

    def sharings(self, shape: Layout) -> tuple[Layout, ...]:
        """The shape with every sharding of states: none, or each ZeRO stage over each divisor of the data ranks."""
        return tuple(
            changed(shape, dp_replicate=replicate, dp_shard=shard, zero=zero)
            for replicate, shard, zero in self.ways_to_share(shape)
        )

    def ways_to_share(self, shape: Layout) -> tuple[tuple[int, int, int], ...]:
        """(replicas, shards, ZeRO stage) of every sharding."""
        return _sharings(
            shape.dp_replicate, shape.cp, shape.ep // math.gcd(shape.ep, shape.folded), shape.ranks
        )

    def leanest(self, shape: Layout) -> Layout:
        """The sharding with the least memory per rank."""
        if shape.dp_replicate * shape.cp == 1:
            return shape
        return changed(shape, dp_replicate=1, dp_shard=shape.dp_replicate, zero=3)

    def kinds(self, shape: Layout) -> int:
        """Number of layouts with this shape, for one microbatch, recomputation and precision."""
        return len(self.ways_to_share(shape)) * len(self.schedules(shape))

    def schedules(self, shape: Layout) -> list[dict[str, Any]]:
        """The fields of every pipeline schedule for a shape, but of those that vary (`search.tuned`). Pairs count where
        there are messages of experts to hide."""
        key = shape.pp, shape.tp > 1, shape.cp > 1, shape.ep > 1
        if key not in self._schedules:
            found = [
                way
                for way in self._ways[shape.pp]
                if not any(problems(changed(shape, **way)))
                and (shape.ep > 1 or not SCHEDULES[way["schedule"]].paired)
            ]
            # equal ones are the same, because what follows from them is cached by identity
            self._schedules[key] = next((same for same in self._schedules.values() if same == found), found)
        return self._schedules[key]

    @cached_property
    def _ways(self) -> dict[int, list[dict[str, Any]]]:
        """The schedules that the model allows, by the number of pipeline ranks."""
        found, layers = {1: [{"schedule": DEFAULT}]}, self.recipe.model.layers
        for pp in {shape.pp for shape in self.shapes} - {1}:
            found[pp] = [
                way
                for name, made in SCHEDULES.items()
                if not made.varies
                for virtual in range(made.stages[0], (made.stages[1] or layers // pp) + 1)
                if self._allowed(Layout(pp=pp, **(way := {"schedule": name, "virtual_stages": virtual})))
            ]
        return found

    def splitting(self, shape: Layout) -> Layout | None:
        """The shape under some schedule that splits backward."""
        found = (changed(shape, **way) for way in self.schedules(shape))
        return next((one for one in found if one.splits_backward), None)

    def bare(self, layout: Layout) -> Iterator[Layout]:
        """A pipeline with ends without blocks, under every schedule with which that changes the cut."""
        card = card_of(self.recipe.model)
        for name, made in SCHEDULES.items():
            if made.varies:
                continue
            least, most = made.stages
            for virtual in range(least, (most or (card.model.layers + 2) // layout.pp) + 1):
                plain = replace(layout, schedule=name, virtual_stages=virtual, bare_ends=False)
                bare = replace(plain, bare_ends=True)
                fits = plain.fewest_blocks <= card.model.layers
                if self._allowed(bare) and not (
                    fits and stage_blocks(card, plain) == stage_blocks(card, bare)
                ):
                    yield bare

    def microbatches(self, shape: Layout) -> list[int]:
        """Sizes of a microbatch, in sequences, that give no rank more of them than single sequences would, and none
        none."""
        dp = shape.dp
        if dp not in self._microbatches:
            most = largest(self.batch, dp)
            whole = [B for B in divisors(self.batch) if self.batch // B >= dp]
            self._microbatches[dp] = [B for B in whole if largest(self.batch // B, dp) * B == most]
        return self._microbatches[dp]

    def choice(self, layout: Layout, B: int, mode: str) -> Choice:
        """A layout with this microbatch size."""
        count = largest(self.batch // B, layout.dp)
        unequal = count * B * layout.dp > self.batch
        return Choice(layout, B, count, mode, self.batch if unequal else None)

    def starts(self, shapes: Sequence[Layout]) -> Iterator[Choice]:
        """The starting choices of a search, with the smallest microbatch: everything but its size, schedules and
        shardings of states."""
        for shape in shapes:
            layouts = [replace(shape, recompute=recompute) for recompute in self.modes]
            for layout, mode in product(layouts, self.precisions):
                yield self.choice(layout, self.microbatches(shape)[0], mode)

    def sizes(self, start: Choice) -> list[Choice]:
        """A starting choice with every size of its microbatches."""
        return [self.choice(start.layout, B, start.mode) for B in self.microbatches(start.layout)]

    @cached_property
    def size(self) -> int:
        """Number of valid layouts."""
        return sum(
            self.kinds(shape) * len(self.microbatches(shape)) * len(self.modes) * len(self.precisions)
            for shape in self.shapes
        )

    def allows(self, c: Choice) -> bool:
        """True if the recipe's rules allow a choice."""
        recipe = with_layout(self.recipe, c.layout, microbatch_size=c.B)
        precision = recipe.precision.model_copy(update={"mode": c.mode})
        return not any(contradictions(recipe.model_copy(update={"precision": precision})))

    def _allowed(self, layout: Layout) -> bool:
        """True if the recipe's rules allow the layout for some batch size."""
        recipe = with_layout(self.recipe, layout, global_batch_size=layout.dp, microbatch_size=1)
        return not any(True for _ in contradictions(recipe))


def _expert_axes(experts: int, ranks: int, tp: int) -> Iterator[tuple[int, bool]]:
    """(ep, ep_fold) of every division of experts between ranks with different tokens. tp: further ones, of the tensor
    axis."""
    yield from product(divisors(math.gcd(experts, ranks)), (False,))
    if tp > 1:
        yield from product(divisors(math.gcd(experts, ranks * tp))[1:], (True,))


@lru_cache(maxsize=4096)
def _sharings(dp: int, cp: int, ep: int, ranks: int) -> tuple[tuple[int, int, int], ...]:
    """(replicas, shards, ZeRO stage) of every sharding. One rank shards nothing, so stage 0 stands for all. ep: the
    part of the expert axis beyond the tensor axis."""
    found = [(dp, 1, 0)]
    for zero in (1, 2, 3) if ranks > 1 else ():
        for shard in divisors(dp):
            layout = Layout(dp_replicate=dp // shard, dp_shard=shard, cp=cp, ep=ep, zero=zero)
            if shard * cp > 1 and not any(problems(layout)):
                found.append((dp // shard, shard, zero))
    return tuple(found)

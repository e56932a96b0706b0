"""What a rank keeps from step to step: elements of its parameters, bytes of weights, gradients and optimizer states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.optim import OPTIMIZERS
from fivefold.optim.card import state_bytes as all_state_bytes
from fivefold.plan.setting import Partition, Setting, States, stages
from fivefold.sharding.layout import Layout, changed
from fivefold.sharding.parts import TIED, held, local_parameters, sharing_group, size_of, stages_of
from fivefold.sharding.units import scattered_once


class Elements(NamedTuple):
    """Elements of some parameters on a rank.

    computes: elements the rank computes with, after tensor and expert parallelism. keeps: elements it stores under
    ZeRO. largest: elements of the largest parameter. experts, experts_keep: the part of both in routed experts, which
    have groups of their own if ep > 1. frozen: the part of these four that is not trained.
    """

    computes: float = 0
    keeps: float = 0
    largest: float = 0
    experts: float = 0
    experts_keep: float = 0
    frozen: tuple[float, float, float, float] = (0, 0, 0, 0)

    def __add__(self, other: Elements) -> Elements:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Elements(
            self.computes + other.computes,
            self.keeps + other.keeps,
            max(self.largest, other.largest),
            self.experts + other.experts,
            self.experts_keep + other.experts_keep,
            self.frozen
            if not any(other.frozen)
            else tuple(a + b for a, b in zip(self.frozen, other.frozen, strict=True)),  # pyright: ignore
        )

    def times(self, number: float) -> Elements:
        """So many parts of a model with these elements each."""
        a, b, c, d = (number * size for size in self.frozen)
        computes, keeps, experts, experts_keep = (
            number * size for size in (self.computes, self.keeps, self.experts, self.experts_keep)
        )
        return Elements(computes, keeps, self.largest, experts, experts_keep, (a, b, c, d))

    def groups(self) -> tuple[tuple[float, float, bool], tuple[float, float, bool]]:
        """(elements computed with, elements stored, False) of dense parameters, and (.., .., True) of experts."""
        return (
            (self.computes - self.experts, self.keeps - self.experts_keep, False),
            (self.experts, self.experts_keep, True),
        )

    def frozen_groups(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(elements computed with, elements stored) of frozen dense parameters, and of frozen experts."""
        computes, keeps, experts, experts_keep = self.frozen
        return (computes - experts, keeps - experts_keep), (experts, experts_keep)


def state_bytes(
    bytes_per_parameter: States,
    zero: int,
    computes: float,
    keeps: float,
    microbatches: int = 2,
    pp: int = 1,
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer states. Each is whole (`computes` elements) below the ZeRO stage that
    shards it, and `keeps` elements from that stage on (arXiv 1910.02054, figure 1). FSDP2 (`States.cast`) differs in
    two ways: the gathered weights of stage 3 are buffers, and gradients that are scattered once per step are whole
    until then."""
    b = bytes_per_parameter
    if b.cast and zero:
        whole = scattered_once(zero, pp) and microbatches > 1
        gathered = computes if zero < 3 else 0.0
        own = 0.0 if b.master else b.working * keeps
        return b.working * gathered + own, b.gradient * (computes if whole else keeps), b.optimizer * keeps
    return (
        b.working * (keeps if zero >= 3 else computes),
        b.gradient * (keeps if zero >= 2 else computes),
        b.optimizer * (keeps if zero >= 1 else computes),
    )


@lru_cache(maxsize=4096)
def more_states(optimizer: str, model: ModelSection, layout: Layout, position: int, moments: float) -> float:
    """Bytes of the optimizer's states at a pipeline position beyond `moments` per parameter: those of its first rank.
    Of matrices that are updated whole, it keeps the largest."""
    card, spec, rank = OPTIMIZERS[optimizer], card_of(model), layout.rank({"pp": position})
    if card.uniform:
        return 0.0
    kept = sum(size_of(part.keeps) for part in held(spec, layout, rank).values() if not part.frozen)
    return all_state_bytes(card, spec, layout, rank) - moments * kept


def rank_states(s: Setting, own: Elements) -> tuple[float, float, float]:
    """`state_bytes` of a rank. Parameters whose sharing group has one rank are kept whole, as without ZeRO: all of them
    if there is one data rank, and experts if expert parallelism takes all ranks that share."""
    weights = gradients = optimizer = 0.0
    for (computes, keeps, expert), (still, still_keep) in zip(own.groups(), own.frozen_groups(), strict=True):
        zero = s.layout.zero if sharing_group(s.layout, expert)[1] > 1 else 0
        parts = [(s.states, computes - still, keeps - still_keep)]
        if still:  # FSDP2 keeps masters of its rows, whatever is trained
            only = replace(s.states, gradient=0.0, moments=0.0, master=s.states.master if zero else 0.0)
            parts.append((only, still, still_keep))
        for b, whole, shared in parts:
            w, g, o = state_bytes(b, zero, whole, shared, s.microbatches, s.layout.pp)
            weights, gradients, optimizer = weights + w, gradients + g, optimizer + o
    return weights, gradients, optimizer


class ModelElements(NamedTuple):
    """Elements on the first rank, which has most: of each block, of the parameters before the blocks, of those behind
    them, and of the last stage's copy of a tied embedding."""

    blocks: list[Elements]
    before: Elements
    behind: Elements
    tied: Elements

    def outside(self, first: bool, last: bool) -> Elements:
        """Elements outside of blocks on a rank with the first stage, the last, both or neither."""
        parts = [self.before] * first + [self.behind] * last + [self.tied] * (last and not first)
        return sum(parts, Elements())


def elements(model: ModelSection, layout: Layout) -> ModelElements:
    """Elements of the model's parts."""
    return _elements(model, layout.tp, layout.ep, layout.sp, layout.shards, layout.zero > 0)


@lru_cache(maxsize=4096)
def _elements(model: ModelSection, tp: int, ep: int, sp: bool, shards: int, shared: bool) -> ModelElements:
    layout = Layout(tp=tp, ep=ep, sp=sp, dp_shard=shards, zero=int(shared))
    kinds: dict[str, Elements] = {}
    blocks = [Elements() for _ in range(model.layers)]
    before = behind = Elements()
    frozen = card_of(model).frozen
    for name, local in local_parameters(card_of(model), layout).items():
        expert = ep > 1 and local.axis == "ep"
        size, part = local.size, local.share(sharing_group(layout, expert)[1])
        some = size, part, size if expert else 0, part if expert else 0
        own = kinds[name] = Elements(size, part, size, *some[2:], some if name in frozen else (0, 0, 0, 0))
        if name.startswith("blocks."):
            number = int(name.split(".")[1])
            blocks[number] += own
        elif name.startswith("embed"):
            before += own
        else:
            behind += own
    return ModelElements(blocks, before, behind, kinds[TIED] if model.tie_embeddings else Elements())


def outside_blocks(s: Setting, position: int) -> Elements:
    """Elements outside of blocks on a rank of a pipeline position."""
    return elements(s.model, s.layout).outside(*s.ends(position))


def divided(layout: Layout) -> Layout:
    """The layout by which a rank's part of the model is counted; many layouts have the same."""
    kept = {name: getattr(layout, name) for name in ("pp", "tp", "ep", "sp", "schedule", "virtual_stages")}
    return changed(Layout(), **kept, dp_shard=layout.shards, zero=int(layout.zero > 0))


def rank_elements(s: Setting) -> Sequence[Elements]:
    """Elements per rank at each pipeline position."""
    return _rank_elements(s.model, divided(s.layout), s.software.partition)


@lru_cache(maxsize=1024)
def _rank_elements(model: ModelSection, layout: Layout, how: Partition) -> Sequence[Elements]:
    of, by_stage, found = elements(model, layout), stages(model, layout, how), []
    for position, same in enumerate(_alike(model, layout, how)):
        if same < position:
            found.append(found[same])
            continue
        mine = stages_of(layout, position)
        total = sum((of.blocks[number] for stage in mine for number in by_stage[stage]), Elements())
        found.append(total + of.outside(0 in mine, len(by_stage) - 1 in mine))
    return found


def alike(s: Setting) -> tuple[int, ...]:
    """For each pipeline position the first one whose ranks have blocks of the same kinds and the same ends of the
    model, and so the same elements, messages and buffers."""
    return _alike(s.model, divided(s.layout), s.software.partition)


@lru_cache(maxsize=1024)
def _alike(model: ModelSection, layout: Layout, how: Partition) -> tuple[int, ...]:
    by_stage, mixed, first = stages(model, layout, how), card_of(model).mixed, dict[object, int]()
    found = []
    for position in range(layout.pp):
        mine = stages_of(layout, position)
        kinds = [tuple(i if model.freeze else mixed[i] for i in by_stage[stage]) for stage in mine]
        ends = 0 in mine, len(by_stage) - 1 in mine
        found.append(first.setdefault((tuple(kinds), ends), position))
    return tuple(found)

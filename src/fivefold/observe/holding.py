"""Which rank holds what, as data for the pictures of a layout. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.models.card import card_of
from fivefold.recipe import Recipe
from fivefold.spread.layout import Layout, index_in
from fivefold.spread.parts import (
    Span,
    held,
    joined,
    sharing_group,
    size_of,
    stage_blocks,
    stages_of,
    token_spans,
)
from fivefold.spread.shares import share
from fivefold.spread.sites import in_site, site_layout


@dataclass(frozen=True)
class Holding:
    """The parts of model and batch that one rank computes and stores.

    site: its number, None if there is one site. coordinates: on the axes of the site; `dp_replicate` on the run's.
    stages: its pipeline stages and the blocks of each. first, last: it has the beginning or the end of the model.
    tensor: its part of every cut matrix, (index, number of parts). shard: its part of sharded states; expert_shard: of
    its experts'. rows: sequences [start, stop) of the global batch. tokens: spans of each sequence. between: those that
    it has between tensor-parallel regions (sp). experts: their numbers, None without experts. computes, keeps: numbers
    of parameters.
    """

    rank: int
    site: int | None
    coordinates: dict[str, int]
    stages: dict[int, range]
    first: bool
    last: bool
    tensor: tuple[int, int]
    shard: tuple[int, int]
    expert_shard: tuple[int, int]
    rows: Span
    tokens: tuple[Span, ...]
    between: tuple[Span, ...]
    experts: range | None
    computes: int
    keeps: int


def holding(recipe: Recipe, layout: Layout, rank: int) -> Holding:
    """The holding of a rank, for a resolved recipe. layout: of the whole run."""
    model, T, whole = recipe.model, recipe.model.seq_len, layout
    layout, number = site_layout(whole, recipe.sites.count), rank
    site, rank = in_site(layout, number)
    blocks = stage_blocks(card_of(model), layout) if layout.pp > 1 else (range(model.layers),)
    mine = stages_of(layout, index_in(layout, "pp", rank))
    parts = held(card_of(model), layout, rank)
    B = recipe.train.microbatch_size or 1
    dp = site * layout.dp + index_in(layout, "dp", rank)
    microbatches = share(recipe.train.global_batch_size // B, dp, whole.dp)
    coordinates = layout.coordinates(rank)
    coordinates["dp_replicate"] += site * layout.dp_replicate
    experts = model.experts
    ep = index_in(layout, "ep", rank)
    tp = index_in(layout, "tp", rank), layout.tp
    tokens = joined(token_spans(layout, T, index_in(layout, "cp", rank))) if layout.cp > 1 else ((0, T),)
    group, sharers = sharing_group(layout, expert=True)
    return Holding(
        rank=number,
        site=site if recipe.sites.count > 1 else None,
        coordinates=coordinates,
        stages={stage: blocks[stage] for stage in mine},
        first=0 in mine,
        last=len(blocks) - 1 in mine,
        tensor=tp,
        shard=(index_in(layout, "shard", rank), layout.shards) if layout.zero else (0, 1),
        expert_shard=(index_in(layout, group, rank), sharers) if layout.zero else (0, 1),
        rows=(microbatches.start * B, microbatches.stop * B),
        tokens=tokens,
        between=_piece(tokens, *tp) if layout.sp else tokens,
        experts=range(experts * ep // layout.ep, experts * (ep + 1) // layout.ep) if experts else None,
        computes=sum(size_of(part.computes) for part in parts.values()),
        keeps=sum(size_of(part.keeps) for part in parts.values()),
    )


def _piece(spans: tuple[Span, ...], index: int, parts: int) -> tuple[Span, ...]:
    """Piece `index` of `parts` of these tokens in their order."""
    size = sum(stop - start for start, stop in spans) // parts
    first, last, found, before = index * size, (index + 1) * size, [], 0
    for start, stop in spans:
        a, b = max(first, before), min(last, before + stop - start)
        if a < b:
            found.append((start + a - before, start + b - before))
        before += stop - start
    return tuple(found)


def stage_words(found: Holding) -> str:
    """`embedding, blocks 0-2`."""
    words = ["embedding"] if found.first else []
    words += [f"block{'s' * (len(b) > 1)} {span_words((b.start, b.stop))}" for b in found.stages.values()]
    return ", ".join([*words, "head"] if found.last else words)


def span_words(span: Span) -> str:
    """[start, stop) as `start-last`, or one number."""
    start, stop = span
    return str(start) if stop - start == 1 else f"{start}-{stop - 1}"

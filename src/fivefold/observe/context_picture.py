"""Draws which queries see which keys under context parallelism, by the rank that computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fivefold.draw.canvas import Canvas
from fivefold.draw.palette import NAMES
from fivefold.sharding.layout import Layout
from fivefold.sharding.parts import token_spans

MOST = 16  # ranks drawn
CELL, LEFT, TOP, SIDE = 22, 40, 70, 130  # pixels: a pair of chunks, margins, room for words beside a picture
Plans = Mapping[str, Sequence[int]]


def plans(layout: Layout) -> dict[str, list[int]]:
    """The rank of each of 2 cp chunks of a sequence: as neighbouring parts, and zig-zag as the ring has them. Empty if
    no ring divides the sequence."""
    chunks = 2 * layout.cp
    if layout.cp == 1 or layout.cp_method != "ring":
        return {}
    owner = {first: rank for rank in range(layout.cp) for first, _ in token_spans(layout, chunks, rank)}
    near, zigzag = ([chunk // 2 for chunk in range(chunks)], [owner[chunk] for chunk in range(chunks)])
    return {"neighbouring parts": near, "zig-zag": zigzag}


def tiles(chunks: int, causal: bool) -> Iterator[tuple[int, int, float]]:
    """(chunk of queries, chunk of keys, share of their pairs that are seen) of what attention computes."""
    for query in range(chunks):
        for key in range(query + 1 if causal else chunks):
            yield query, key, 0.5 if causal and key == query else 1.0


def work(owners: Sequence[int], causal: bool) -> list[float]:
    """Each rank's share of the pairs of queries and keys that are computed."""
    found = [0.0] * (max(owners) + 1)
    for query, _, seen in tiles(len(owners), causal):
        found[owners[query]] += seen
    return [one / sum(found) for one in found]


def to_text(found: Plans, causal: bool) -> str:
    """`attention, share of each rank: zig-zag 25%, 25%, ...`, a line for each plan."""
    lines = [
        f"attention of a sequence, share of each rank, {name}: "
        + ", ".join(f"{one:.0%}" for one in work(owners, causal))
        for name, owners in found.items()
    ]
    return "".join(f"{line}\n" for line in lines)


def to_svg(found: Plans, causal: bool, title: str) -> str:
    """Queries down, keys across, a square for each pair of chunks that attention computes, in the colour of its rank;
    paler where half of the pairs are seen."""
    canvas, left, chunks = Canvas(title), LEFT, len(next(iter(found.values())))
    canvas.text(LEFT - 20, 40, "queries down, keys across; ranks of the queries at the left")
    colors = [NAMES[rank % len(NAMES)] for rank in range(chunks)]
    for name, owners in found.items():
        canvas.text(left, TOP - 10, name)
        for query, key, seen in tiles(chunks, causal):
            kind = colors[owners[query]] + " half" * (seen < 1)
            tip = f"rank {owners[query]}: queries {query}, keys {key}"
            canvas.rect(kind, left + key * CELL, TOP + query * CELL, CELL - 2, CELL - 2, tip)
        beside = left + chunks * CELL + 8
        for rank, share in enumerate(work(owners, causal)):
            canvas.legend(beside, TOP + 14 + rank * CELL, [(colors[rank], f"rank {rank}: {share:.0%}")])
        for query, owner in enumerate(owners):
            canvas.text(left - 6, TOP + query * CELL + 14, str(owner), "soft small end")
        left += chunks * CELL + SIDE + 30
    return canvas.svg()

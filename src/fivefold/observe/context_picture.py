"""Draws which queries see which keys under context parallelism, by the rank that computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from fivefold.observe.palette import DARK, LIGHT
from fivefold.spread.layout import Layout
from fivefold.spread.parts import token_spans

MOST = 16  # ranks drawn
CELL, LEFT, TOP, SIDE = 22, 40, 70, 130  # pixels: a pair of chunks, margins, room for words beside a picture
COLORS = len(LIGHT)


def _colors(values: Sequence[str]) -> str:
    return " ".join(f"--c{number}: {value};" for number, value in enumerate(values))


STYLE = f"""
.context {{ color-scheme: light dark; font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif;
  --paper: #fdfcf9; --ink: #22211f; --soft: #66625b; {_colors(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ .context {{ --paper: #171614; --ink: #e9e6df; --soft: #a49f95;
  {_colors(DARK)} }} }}
.context .paper {{ fill: var(--paper); }} .context text {{ fill: var(--ink); }}
.context .soft {{ fill: var(--soft); font-size: 11px; text-anchor: end; }}
.context .title {{ font-size: 15px; font-weight: 600; }}
""" + "".join(f".context .c{number} {{ fill: var(--c{number}); }}\n" for number in range(COLORS))
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
    parts, left, chunks = list[str](), LEFT, len(next(iter(found.values())))
    for name, owners in found.items():
        parts.append(f'<text x="{left}" y="{TOP - 10}">{escape(name)}</text>')
        for query, key, seen in tiles(chunks, causal):
            parts.append(
                f'<rect class="c{owners[query] % COLORS}" x="{left + key * CELL}" y="{TOP + query * CELL}" '
                f'width="{CELL - 2}" height="{CELL - 2}" opacity="{seen:g}">'
                f"<title>rank {owners[query]}: queries {query}, keys {key}</title></rect>"
            )
        beside = left + chunks * CELL + 8
        for rank, share in enumerate(work(owners, causal)):
            y = TOP + 4 + rank * CELL
            parts.append(f'<rect class="c{rank % COLORS}" x="{beside}" y="{y}" width="12" height="12"/>')
            parts.append(f'<text x="{beside + 18}" y="{y + 10}">rank {rank}: {share:.0%}</text>')
        parts += [
            f'<text class="soft" x="{left - 6}" y="{TOP + query * CELL + 14}">{owner}</text>'
            for query, owner in enumerate(owners)
        ]
        left += chunks * CELL + SIDE + 30
    width, height = left - 10, TOP + chunks * CELL + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="context" role="img" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">\n<title>{escape(title)}</title><style>{STYLE}</style>\n'
        f'<rect class="paper" width="100%" height="100%"/>\n'
        f'<text class="title" x="{LEFT - 20}" y="22">{escape(title)}</text>\n'
        f'<text x="{LEFT - 20}" y="40">queries down, keys across; ranks of the queries at the left</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )

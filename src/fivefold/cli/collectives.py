"""`fivefold collectives`: compares the algorithms of a collective on a topology, and draws their rounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fivefold.cli.options import JsonOption, bytes_of, columns, option, print_json, require_writable, save_as
from fivefold.draw.lanes import time_text
from fivefold.errors import UserError
from fivefold.observe.format import size as size_text

if TYPE_CHECKING:
    from fivefold.schedules.collectives.cost import Choice, Topology

EXAMPLES = [
    "fivefold collectives --ranks 8 --size 16M",
    "fivefold collectives --ranks 8 --draw ring --html ring.html",
    "fivefold collectives --ranks 16 --primitive all_to_all --topology h100:2x8",
]
MOST = 128  # ranks; the planner prices larger groups by formulas
SIZES = tuple(4096 << 4 * i for i in range(5))  # 4 KiB to 256 MiB


def collectives(
    ranks: Annotated[int, option("N", "Number of ranks.")] = 8,
    size: Annotated[str, option("BYTES", "Size of the message, such as 4K or 16M.")] = "16M",
    topology: Annotated[
        str, option("CLUSTER", "Cluster such as h100:2x8, TOML file of links, or local.")
    ] = "h100",
    primitive: Annotated[str, option("NAME", "Collective, such as all_gather.")] = "all_reduce",
    draw: Annotated[str | None, option("NAME", "Draw the rounds of this algorithm.")] = None,
    svg: Annotated[Path | None, option("FILE", "Write the rounds as a picture.")] = None,
    html: Annotated[Path | None, option("FILE", "Write a page that steps through them.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare the algorithms of a collective: rounds, bytes, time on a topology, and when to use which.

    --svg and --html show the algorithm of --draw, or the fastest one.
    """
    from fivefold.observe.collective_picture import page, to_svg, to_text
    from fivefold.plan.cluster.clusters import topology as read
    from fivefold.schedules.collectives import algorithm
    from fivefold.schedules.collectives.cost import compare
    from fivefold.schedules.collectives.registry import check_primitive

    check_primitive(primitive)
    if not 1 <= ranks <= MOST:
        raise UserError(f"--ranks: {ranks} is not possible; must be at least 1 and at most {MOST}")
    if draw is not None:
        algorithm(primitive, draw)
    for name, path in (("--svg", svg), ("--html", html)):
        require_writable(name, path)
    message, net = bytes_of("--size", size), read(topology, ranks)
    choices, refused = compare(primitive, net, message)
    found: dict[str, Any] = {"primitive": primitive, "ranks": ranks, "size": message, "topology": net.name}
    found["algorithms"], found["refused"] = [_row(choice) for choice in choices], refused
    lines = _table(choices, refused, net, primitive, message)
    if draw is not None or svg or html:
        chosen = _chosen(choices, primitive, draw, net, message)
        collective, cost = chosen
        if draw is not None:
            found["drawn"] = to_text(collective, columns(60, 160))
            lines = [found["drawn"].rstrip()]
        if svg:
            save_as("--svg", svg, to_svg(collective))
        if html:
            note = f"{size_text(message)} on {net.name}, simulated."
            save_as("--html", html, page(collective, [time_text(end) for end in cost.ends], note))
        found["pictures"] = {name: str(path) for name, path in (("svg", svg), ("html", html)) if path}
        lines += found["pictures"].values()
    if json:
        print_json(found)
    else:
        print("\n".join(lines))


def _chosen(choices: list[Choice], primitive: str, draw: str | None, net: Topology, message: float) -> Any:
    """(the collective to draw, its cost): the named one or the fastest. A pipelined one is drawn in few pieces."""
    from fivefold.schedules.collectives import build
    from fivefold.schedules.collectives.cost import simulate

    name = choices[0].algorithm.name if draw is None else draw
    pieces = next((min(choice.pieces, 4) for choice in choices if choice.algorithm.name == name), 1)
    collective = build(primitive, name, net.shape._replace(pieces=pieces))
    return collective, simulate(collective, net, message)


def _row(choice: Choice) -> dict[str, Any]:
    made, pieces, cost = choice
    return {
        "name": made.name,
        "pieces": pieces,
        "rounds": cost.rounds,
        "seconds": cost.seconds,
        "bytes_per_rank": cost.sent,
        "busiest_link": cost.busiest,
        "busiest_bytes": cost.link_bytes,
        "busiest_seconds": cost.link_seconds,
        "when": made.when,
        "source": made.source,
    }


def _table(
    choices: list[Choice], refused: dict[str, str], net: Topology, primitive: str, message: float
) -> list[str]:
    lines = [f"{primitive} of {size_text(message)} on {net.ranks} ranks; {_links(net)}", ""]
    lines.append(
        f"{'algorithm':18}{'rounds':>6}{'sent/rank':>11}{'time':>10}   {'busiest link':16}use it for"
    )
    for made, pieces, cost in choices:
        name = f"{made.name} ({pieces})" if pieces > 1 else made.name
        figures = f"{cost.rounds:6}{size_text(cost.sent):>11}{time_text(cost.seconds):>10}"
        lines.append(f"{name:18}{figures}   {cost.busiest:16}{made.when}")
    lines += [f"{name:18}{'-':>6}   {why}, not {net.ranks}" for name, why in refused.items()]
    if any(choice.pieces > 1 for choice in choices):
        lines.append("In parentheses: the best number of pieces that follow each other.")
    if primitive != "barrier" and net.ranks in range(2, 65):
        lines += ["", "fastest by size: " + ", ".join(_fastest(net, primitive))]
    return lines


def _fastest(net: Topology, primitive: str) -> list[str]:
    from fivefold.schedules.collectives.cost import compare

    best = ((size, compare(primitive, net, size)[0][0]) for size in SIZES)
    return [
        f"{size_text(size)} {choice.algorithm.name} {time_text(choice.cost.seconds)}" for size, choice in best
    ]


def _links(net: Topology) -> str:
    words = f"{net.name}: {_rate(net.near.bandwidth)}, {time_text(net.near.latency)} inside a node"
    if net.far and net.ranks > net.local:
        cards = f", {net.cards} cards per node" if net.cards else ""
        words += (
            f" of {net.local}, {_rate(net.far.bandwidth)}, {time_text(net.far.latency)} between nodes{cards}"
        )
    return words


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.4g} GB/s"

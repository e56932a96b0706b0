"""Lists of what there is: `fivefold clusters`, devices and clusters with their links; `fivefold optimizers`, their
states, and their paths over surfaces; `fivefold collectives`, the algorithms of a collective on a topology, and their
rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.cli import options
from fivefold.cli.options import option, print_json
from fivefold.draw.lanes import time_text
from fivefold.errors import UserError
from fivefold.observe.format import size as size_text

if TYPE_CHECKING:
    from fivefold.schedules.collectives.cost import Choice, Topology


MATRIX = 4096  # rows and columns of the matrix by which states of optimizers are compared


def clusters(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A cluster as after --cluster: h100, 64xv100, lab.toml, local."),
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """List devices and clusters: memory, rates by format, links, and where the figures come from.

    With a name: that cluster with all its links, from the device's memory to the disk.
    """
    from fivefold.host.devices import SHEETS
    from fivefold_plan.cluster import catalog
    from fivefold_plan.cluster.clusters import PRESETS, parse

    if name is not None:
        cluster = parse(name)
        print_json(catalog.cluster_json(cluster)) if json else print(catalog.description(cluster), end="")
        return
    if json:
        devices = [catalog.device_json(sheet) for sheet in SHEETS]
        print_json({"devices": devices, "clusters": [catalog.cluster_json(one) for one in PRESETS.values()]})
        return
    print(catalog.listing(), end="")


def optimizers(
    draw: Annotated[
        str | None, option("SURFACE", "Draw paths over a surface: contours, ravine, saddle or local.")
    ] = None,
    only: Annotated[str | None, option("NAMES", "Only these optimizers, by commas.")] = None,
    svg: Annotated[Path | None, option("FILE", "Write the paths over all surfaces as a picture.")] = None,
    json: options.JsonOption = False,
) -> None:
    """List the optimizers: bytes of their states, where they come from. Draw their paths over surfaces.

    Paths are those of the optimizers that train models, each at the best of eleven learning rates.
    """
    from fivefold.optim import OPTIMIZERS
    from fivefold_plan.lessons.optimizer_paths import SURFACES, to_svg, to_text, tuned

    names = only.split(",") if only else list(OPTIMIZERS)
    options.require_known("--only", names, OPTIMIZERS)
    options.require_known("--draw", [draw] if draw else [], SURFACES)
    options.require_writable(svg=svg)
    shape = (MATRIX, MATRIX)
    rows = [
        {
            "name": card.name,
            "bytes_per_parameter": card.state_bytes("blocks.0.matrix", shape) / MATRIX**2,
            "rest_bytes_per_parameter": card.state_bytes("embed.weight", shape) / MATRIX**2,
            "states": [state.name for state, *_ in card.states_of("blocks.0.matrix", shape)],
            "needs": card.needs,
            "source": card.source,
            "fields": dict(card.fields),
        }
        for card in (OPTIMIZERS[name] for name in names)
    ]
    found: dict[str, Any] = {"optimizers": rows}
    lines = _optimizer_lines(rows)
    wanted = list(SURFACES) if svg else [draw] if draw else []
    paths = {name: {one: tuned(one, SURFACES[name]) for one in names} for name in wanted}
    if draw:
        lines = [to_text(SURFACES[draw], paths[draw], options.columns(40, 111, words=1))]
    if svg:
        options.save_as("--svg", svg, to_svg(paths))
        lines = [*(lines if draw else []), str(svg)]
        found["picture"] = str(svg)
    found["paths"] = {
        surface: {name: {"lr": lr, "points": path} for name, (lr, path) in drawn.items()}
        for surface, drawn in paths.items()
    }
    print_json(found) if json else print("\n".join(lines))


def _optimizer_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'optimizer':10}{'bytes':>8}{'embed':>9}  {'needs':10}{'source':40}states"]
    for row in rows:
        lines.append(
            f"{row['name']:10}{row['bytes_per_parameter']:8.3g}{row['rest_bytes_per_parameter']:9.3g}  "
            f"{row['needs']:10}{row['source']:40}{', '.join(row['states'])}"
        )
    lines += [
        "",
        f"bytes: of the states, per parameter of a matrix ({MATRIX} x {MATRIX}) in a block; embed: of an embedding.",
        "needs: what the update of one element depends on. Matrices come together on one rank under ZeRO and tp.",
    ]
    return lines


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
    json: options.JsonOption = False,
) -> None:
    """Compare the algorithms of a collective: rounds, bytes, time on a topology, and when to use which.

    --svg and --html write the algorithm of --draw, or the fastest one.
    """
    from fivefold.observe.collective_picture import player, to_svg, to_text
    from fivefold.observe.player import page
    from fivefold.schedules.collectives import build
    from fivefold.schedules.collectives.cost import compare, simulate
    from fivefold.schedules.collectives.registry import check_primitive
    from fivefold_plan.cluster.clusters import topology as read

    check_primitive(primitive)
    if not 1 <= ranks <= MOST:
        raise UserError(f"--ranks: {ranks} is not possible; must be at least 1 and at most {MOST}")
    options.require_writable(svg=svg, html=html)
    message, net = options.bytes_of("--size", size), read(topology, ranks)
    choices, refused = compare(primitive, net, message)
    found: dict[str, Any] = {"primitive": primitive, "ranks": ranks, "size": message, "topology": net.name}
    found["algorithms"], found["refused"] = [_row(choice) for choice in choices], refused
    lines = _collective_lines(choices, refused, net, primitive, message)
    if draw is not None or svg or html:
        name, pieces = _named(choices, refused, net, draw)
        # a pipelined one is drawn in few pieces
        collective = build(primitive, name, net.shape._replace(pieces=min(pieces, 4)))
        if draw is not None:
            found["drawn"] = to_text(collective, options.columns(60, 160))
            lines = [found["drawn"].rstrip()]
        if svg:
            options.save_as("--svg", svg, to_svg(collective))
        if html:
            ends = [time_text(end) for end in simulate(collective, net, message).ends]
            note = f"{size_text(message)} on {net.name}, simulated."
            options.save_as("--html", html, page(name, "Collective", [player(collective, ends, note)]))
        found["pictures"] = {kind: str(path) for kind, path in (("svg", svg), ("html", html)) if path}
        lines += found["pictures"].values()
    print_json(found) if json else print("\n".join(lines))


def _named(
    choices: Sequence[Choice], refused: Mapping[str, str], net: Topology, draw: str | None
) -> tuple[str, int]:
    """(name, pieces) of the algorithm of --draw, else of the fastest one."""
    if draw is None:
        return choices[0].algorithm.name, choices[0].pieces
    if "switch" in refused.get(draw, ""):
        raise UserError(f"--draw {draw}: it {refused[draw]}; '{net.name}' with {net.ranks} ranks has none")
    return draw, next((choice.pieces for choice in choices if choice.algorithm.name == draw), 1)


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


def _collective_lines(
    choices: list[Choice], refused: dict[str, str], net: Topology, primitive: str, message: float
) -> list[str]:
    """The table of algorithms, with what each is for, and the fastest one by size."""
    from fivefold.schedules.collectives.cost import compare

    near, far = net.near, net.far
    links = f"{net.name}: {near.bandwidth / 1e9:.4g} GB/s, {time_text(near.latency)} inside a node"
    if far and net.ranks > net.local:
        links += f" of {net.local}, {far.bandwidth / 1e9:.4g} GB/s, {time_text(far.latency)} between nodes"
        links += f", {net.cards} cards per node" if net.cards else ""
    lines = [
        f"{primitive} of {size_text(message)} on {net.ranks} ranks; {links}",
        "",
        f"{'algorithm':18}{'rounds':>6}{'sent/rank':>11}{'time':>10}   {'busiest link':16}use it for",
    ]
    for made, pieces, cost in choices:
        name = f"{made.name} ({pieces})" if pieces > 1 else made.name
        figures = f"{cost.rounds:6}{size_text(cost.sent):>11}{time_text(cost.seconds):>10}"
        lines.append(f"{name:18}{figures}   {cost.busiest:16}{made.when}")
    lines += [f"{name:18}{'-':>6}   {why}" for name, why in refused.items()]
    if any(choice.pieces > 1 for choice in choices):
        lines.append("In parentheses: the best number of pieces that follow each other.")
    if primitive != "barrier" and net.ranks in range(2, 65):
        best = {size: compare(primitive, net, size)[0][0] for size in SIZES}
        words = [f"{size_text(s)} {c.algorithm.name} {time_text(c.cost.seconds)}" for s, c in best.items()]
        lines += ["", "fastest by size: " + ", ".join(words)]
    return lines

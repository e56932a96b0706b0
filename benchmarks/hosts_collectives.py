"""Part of hosts.py: every all-reduce across hosts, measured and predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPETITIONS = 20
FIGURES = 10 << 20  # bytes at which the rings are compared
FLAT, ALTERNATING = "ring, one channel", "ring, alternating hosts"


def worker(file: Path, sizes: Sequence[int]) -> None:
    """One rank's part. The first one writes what was found."""
    from fivefold.bench.collectives import all_reduces, single_messages
    from fivefold.comm import everyone
    from fivefold.host.machine import describe
    from fivefold.launch.ranks import join

    with join(timeout_s=120) as ranks:
        axis, local = everyone(ranks), ranks.local_world
        messages = single_messages(axis, local)
        seconds = all_reduces(axis, sizes, local, REPETITIONS, extra(ranks.world, local))
        if ranks.first:
            file.write_text(json.dumps({"machine": describe(), "messages": messages, "seconds": seconds}))


def extra(ranks: int, local: int) -> dict[str, Any]:
    """Rings that leave each host through one rank: with ranks in the order of hosts, and with ranks of different hosts
    next to each other."""
    from fivefold.schedules.collectives import build

    ring = build("all_reduce", "ring", ranks)
    order = [rank for place in range(local) for rank in range(place, ranks, local)]
    return {FLAT: ring, ALTERNATING: ring.renamed(order)}


def predicted(found: dict[str, Any]) -> dict[str, Any]:
    """The sizes' tables: the fit, and of each algorithm the measured and the predicted seconds."""
    from fivefold.bench.collectives import collectives, fitted
    from fivefold.plan.topology import of_fit
    from fivefold.schedules.collectives.cost import simulate

    hosts, local = found["hosts"], found["ranks"]
    fit = fitted(found["messages"], hosts * local, local, machine=hosts * local)
    net = of_fit(fit, hosts * local, local, hosts)
    rows: dict[str, Any] = {}
    for size, times in found["seconds"].items():
        made = collectives(net.shape, int(size)) | extra(net.ranks, local)
        priced = {name: simulate(x, net, int(size)).seconds for name, x in made.items()}
        rows[size] = {
            "fit": fit,
            "messages": found["messages"],
            "all_reduce": {
                name: {"seconds": seconds, "predicted": priced.get(name)} for name, seconds in times.items()
            },
        }
    head = {key: found[key] for key in ("machine", "hosts", "ranks", "rate")}
    return head | {"repetitions_at_least": REPETITIONS, "sizes": rows}


def merged(new: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """With the sizes that the file already has."""
    old = json.loads(file.read_text())["sizes"] if file and file.exists() else {}
    sizes = old | new["sizes"]
    return new | {"sizes": {size: sizes[size] for size in sorted(sizes, key=int)}}


def report(found: dict[str, Any]) -> str:
    """A table for each size, and the figures."""
    hosts, ranks = found["hosts"], found["ranks"]
    lines = [f"{hosts} hosts of {ranks} ranks, {found['rate'] or 'unlimited'} between them"]
    for size, part in found["sizes"].items():
        fit = part["fit"]
        lines += ["", " ".join(f"{key} {value:.3g}" for key, value in fit.items())]
        lines += [
            f"| all-reduce of {int(size):,} bytes | measured, ms | predicted, ms | error |",
            "|" + "---|" * 4,
        ]
        for name, row in sorted(part["all_reduce"].items(), key=lambda item: item[1]["seconds"]):
            cells = [name, f"{1e3 * row['seconds']:.2f}", "", ""]
            if row["predicted"]:
                error = row["predicted"] / row["seconds"] - 1
                cells[2:] = f"{1e3 * row['predicted']:.2f}", f"{100 * error:+.0f}%"
            lines.append(f"| {' | '.join(cells)} |")
    if str(FIGURES) in found["sizes"]:
        rows = found["sizes"][str(FIGURES)]["all_reduce"]
        for name in (FLAT, ALTERNATING):
            ratio = rows[name]["seconds"] / rows["hierarchical"]["seconds"]
            lines += ["", f"hierarchical is {ratio:.2f}x as fast as '{name}' at {FIGURES:,} bytes"]
    return "\n".join(lines)

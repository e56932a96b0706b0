"""Part of hosts.py: every all-reduce across hosts, measured and predicted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

REPETITIONS = 20
FIGURES = 10 << 20  # bytes at which the rings are compared
FLAT, ALTERNATING = "ring, one channel", "ring, alternating hosts"


def worker(file: Path, sizes: Sequence[int], only: Sequence[str]) -> None:
    """One rank's part. The first one writes what was found."""
    from planner.host_messages import all_reduces, single_messages

    from fivefold.comm import everyone
    from fivefold.host.machine import describe
    from fivefold.launch.ranks import join

    with join(timeout_s=120) as ranks:
        axis, local = everyone(ranks), ranks.local_world
        messages = single_messages(axis, local)
        seconds = all_reduces(axis, sizes, local, REPETITIONS, extra(ranks.world, local), only)
        if ranks.first:
            file.write_text(json.dumps({"machine": describe(), "messages": messages, "seconds": seconds}))


def extra(ranks: int, local: int) -> dict[str, Any]:
    """Rings that leave each host through one rank: with ranks in the order of hosts, and with ranks of different hosts
    next to each other."""
    from fivefold.schedules.collectives import build
    from fivefold.schedules.collectives.collective import embed

    ring = build("all_reduce", "ring", ranks)
    order = [rank for place in range(local) for rank in range(place, ranks, local)]
    return {FLAT: ring, ALTERNATING: replace(ring, rounds=tuple(embed(ring.rounds, order)))}


def predicted(found: dict[str, Any]) -> dict[str, Any]:
    """What messages cost, and of each size and algorithm the measured and the predicted seconds."""
    from planner.host_links import links_of, simulate
    from planner.host_messages import fitted

    from fivefold_plan.bench.collectives import collectives

    hosts, local = found["hosts"], found["ranks"]
    fit = fitted(found["messages"], local, machine=hosts * local)
    net = links_of(fit, hosts * local, local, hosts)
    rows: dict[str, Any] = {}
    for size, times in found["seconds"].items():
        made = collectives(net.shape, int(size)) | extra(net.ranks, local)
        priced = {name: simulate(x, net, int(size)).seconds for name, x in made.items()}
        rows[size] = {
            name: {"seconds": seconds, "predicted": priced.get(name)} for name, seconds in times.items()
        }
    head = {key: found[key] for key in ("machine", "hosts", "ranks", "rate")} | {"repetitions": REPETITIONS}
    return head | {"runs": [{"fit": fit, "messages": found["messages"]}], "sizes": rows}


def merged(new: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """With what other runs have written into the file."""
    old = json.loads(file.read_text()) if file and file.exists() else {"runs": [], "sizes": {}}
    sizes = {
        size: old["sizes"].get(size, {}) | new["sizes"].get(size, {}) for size in old["sizes"] | new["sizes"]
    }
    ordered = {size: sizes[size] for size in sorted(sizes, key=int)}
    return new | {"runs": old["runs"] + new["runs"], "sizes": ordered}


def report(found: dict[str, Any]) -> str:
    """What messages cost, a table of all sizes, and the figures."""
    lines = [
        f"{found['hosts']} hosts of {found['ranks']} ranks, {found['rate'] or 'unlimited'} between them",
        "",
    ]
    lines += [" ".join(f"{key} {value:.3g}" for key, value in run["fit"].items()) for run in found["runs"]]
    sizes = found["sizes"]
    names = sorted({name for rows in sizes.values() for name in rows})
    lines += ["", "| all-reduce of | " + " | ".join(f"{int(size):,} B" for size in sizes) + " |"]
    lines.append("|" + "---|" * (1 + len(sizes)))
    for name in sorted(names, key=lambda name: list(sizes.values())[-1].get(name, {"seconds": 0})["seconds"]):
        lines.append(f"| {name} | {' | '.join(_cell(rows.get(name)) for rows in sizes.values())} |")
    lines += ["", "Milliseconds, measured / predicted (error)."]
    rows = sizes.get(str(FIGURES), {})
    for name in (FLAT, ALTERNATING):
        if name in rows and "hierarchical" in rows:
            ratio = rows[name]["seconds"] / rows["hierarchical"]["seconds"]
            lines += ["", f"hierarchical is {ratio:.2f}x as fast as '{name}' at {FIGURES:,} bytes"]
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    measured, predicted = row["seconds"], row["predicted"]
    if predicted is None:
        return f"{1e3 * measured:.2f}"
    return f"{1e3 * measured:.2f} / {1e3 * predicted:.2f} ({100 * (predicted / measured - 1):+.0f}%)"

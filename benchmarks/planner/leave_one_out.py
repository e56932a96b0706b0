"""Would the plans be as good for a source whose runs nobody had seen?

    nice python benchmarks/planner/leave_one_out.py [--json FILE] [--only steps|nanotron]

Of each constant the value is chosen by the runs of all other sources, and the runs of the source that was left out are
planned with it. `benchmarks/results/planner_leave_one_out.json` has the result, from which `docs/fill_figures.py` fills
the tables in docs/planner.md. What the package has is not changed: `constants.py` says where each value is from.

Each constant is tried alone, on a grid. `contended` is chosen by how evenly far off runs are that differ in their
devices only, as it was in the package: a source that is too fast everywhere says nothing of it. All others are chosen
by how far off the runs are.
nanotron's constants are chosen by its runs of 1B and tried on those of 3B, and the other way round, from values that
none of its runs has chosen.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import nanotron_runs
import published

from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import Cluster
from fivefold_plan.setting import Setting, Software
from fivefold_plan.software import kind_of
from fivefold_plan.time import time

RESULTS = Path(__file__).parents[1] / "results/planner_leave_one_out.json"
TABLES = Path(__file__).with_name("tables")
SOURCES = published.SOURCES | {"foundry": "llm-foundry"}
HOPPER = ("torchtitan", "NeMo", "KempnerForge", "Fivefold")
"""Sources on Hopper devices with several runs of today's programs."""


class Run(NamedTuple):
    """A published run. steps: its planned seconds by its measured ones."""

    source: str
    setting: Setting
    off: float


class Constant(NamedTuple):
    """How to change one, and the values that are tried. shared: by all generations of devices. even: chosen by how
    evenly far off runs are that differ in their devices only."""

    change: Callable[[Setting, float], Setting]
    values: tuple[float, ...]
    shared: bool = False
    even: bool = False


@lru_cache
def _device(cluster: Cluster, names: tuple[str, ...], value: float, relative: bool) -> Cluster:
    """The cluster with other figures of its device; one object for each, because prices are cached by it."""
    old = {name: getattr(cluster.device, name) for name in names}

    def new(was: Any) -> Any:
        if was is None or not relative:
            return was if was is None else value
        return tuple(one * value for one in was) if isinstance(was, tuple) else was * value

    return replace(cluster, device=replace(cluster.device, **{name: new(was) for name, was in old.items()}))


@lru_cache
def _link(cluster: Cluster, side: str, factor: float) -> Cluster:
    link = getattr(cluster, side)
    reduce = link.reduce and link.reduce * factor
    return replace(cluster, **{side: replace(link, share=link.share * factor, reduce=reduce)})


def device(*names: str, relative: bool = True) -> Callable[[Setting, float], Setting]:
    return lambda s, value: replace(s, cluster=_device(s.cluster, names, value, relative))


def link(side: str) -> Callable[[Setting, float], Setting]:
    return lambda s, factor: replace(s, cluster=_link(s.cluster, side, factor))


def software(name: str) -> Callable[[Setting, float], Setting]:
    """Relative to what the program has."""
    return lambda s, factor: replace(
        s, software=replace(s.software, **{name: factor * getattr(s.software, name)})
    )


AROUND = (0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2)
TIMES = (0.0, 0.5, 1.0, 2.0, 3.0)
CONSTANTS = {
    "contended": Constant(device("contended", relative=False), (0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5), even=True),
    "matmul": Constant(device("matmul", "matmul_fp8"), AROUND),
    "attention": Constant(device("attention", "cudnn"), (0.6, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)),
    "streaming": Constant(device("streaming"), AROUND[:-1]),
    "intra": Constant(link("intra"), AROUND),
    "inter": Constant(link("inter"), AROUND),
    "spread": Constant(device("spread", relative=False), (0, 0.005, 0.01, 0.015, 0.02, 0.03), shared=True),
    "kernel": Constant(software("kernel"), TIMES, shared=True),
    "host": Constant(software("host"), TIMES, shared=True),
}  # fmt: skip


def shipped(name: str, run: Run) -> float:
    """The value on the grid that the package has."""
    return getattr(run.setting.cluster.device, name) if name in ("contended", "spread") else 1.0


def runs(folder: Path) -> list[Run]:
    """All published runs with the seconds of a step, but nanotron's."""
    return [
        Run(source, s, off)
        for table, source in SOURCES.items()
        for s, off in published.TABLES[table](folder)[published.EACH]
    ]


def generation(run: Run) -> str:
    return kind_of(run.setting, "time")[0]


def errors(offs: Sequence[float]) -> dict[str, float]:
    """Of planned by measured seconds."""
    return published.errors((off, 1.0) for off in offs)


def loss(every: Sequence[Run], offs: Sequence[float], even: bool) -> float:
    """How far off the runs of all sources are, each source counted once. even: how far from each other those are that
    differ in their devices only."""
    logs = [math.log(off) for off in offs]
    if even:
        alike = defaultdict[object, list[float]](list)
        for run, x in zip(every, logs, strict=True):
            alike[_but_devices(run)].append(x)
        means = {key: fmean(each) for key, each in alike.items()}
        logs = [x - means[_but_devices(run)] for run, x in zip(every, logs, strict=True)]
        single = {key for key, each in alike.items() if len(each) == 1}
        every, logs = zip(
            *((run, x) for run, x in zip(every, logs, strict=True) if _but_devices(run) not in single),
            strict=True,
        )
    sources = defaultdict[str, list[float]](list)
    for run, x in zip(every, logs, strict=True):
        sources[run.source].append(abs(x))
    return fmean(map(fmean, sources.values()))


def _but_devices(run: Run) -> object:
    s = run.setting
    return run.source, s.model, s.layout.recompute, s.layout.tp, s.layout.cp, s.software.fused, s.mode


def tried(every: Sequence[Run], constant: Constant) -> dict[float, list[float]]:
    """Planned by measured seconds of each run with each value."""
    found = {}
    for value in constant.values:
        found[value] = [
            run.off * time.step(constant.change(run.setting, value)).seconds / time.step(run.setting).seconds
            for run in every
        ]
    return found


def chosen(every: Sequence[Run], table: Mapping[float, Sequence[float]], even: bool) -> float:
    """The value by which the runs are least far off; the first of equals."""
    return min(table, key=lambda value: loss(every, table[value], even))


def left_out(every: Sequence[Run], name: str, constant: Constant) -> dict[str, Any]:
    """Of a constant: the value that each source's others choose, and how far off the source is with it."""
    found, table = dict[str, Any](), tried(every, constant)

    def of(rows: Sequence[int]) -> float:
        some = {value: [offs[i] for i in rows] for value, offs in table.items()}
        return chosen([every[i] for i in rows], some, constant.even)

    told = [i for i, run in enumerate(every) if constant.even or run.source != SOURCES["foundry"]]
    for source in dict.fromkeys(run.source for run in every):
        mine = [i for i, run in enumerate(every) if run.source == source]
        kinds = {generation(every[i]) for i in mine}
        others = [i for i in told if i not in mine and (constant.shared or generation(every[i]) in kinds)]
        value = of(others) if others else shipped(name, every[mine[0]])
        found[source] = {"value": value, "rows": len(others), **errors([table[value][i] for i in mine])}
    return found


# nanotron: the constants of its cluster and of its overheads (`nanotron_runs.FITTED`), with the values tried; first
# those of other programs on this device, which none of its runs chose.
START: dict[str, Any] = {
    "host": Software.host, "host_tensor": 0.0, "contention": 0.0, "far": 0.0, "step": Software.step,
    "optimizer_passes": 1.0, "hop": parse("h100").inter.latency, "matmul": parse("h100").device.matmul,
    "contended": parse("h100").device.contended, "network": dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 0.96),
}  # fmt: skip
TRIED: dict[str, tuple[float, ...]] = {
    "matmul": (0.55, 0.6, 0.65, 0.7, 0.75, 0.8),
    "host": (0.2e-3, 0.3e-3, 0.5e-3, 0.7e-3, 0.9e-3, 1.2e-3),
    "host_tensor": (0.0, 0.3e-3, 0.6e-3, 1.0e-3, 1.5e-3),
    "contention": (0.0, 0.3e-3, 0.7e-3, 1.1e-3, 1.6e-3),
    "far": (0.0, 0.3, 0.6, 0.9, 1.2),
    "step": (5e-3, 15e-3, 25e-3, 40e-3),
    "optimizer_passes": (1.0, 3.0, 6.0, 10.0, 15.0),
    "hop": (14e-6, 50e-6, 150e-6, 300e-6, 600e-6, 1000e-6),
    "contended": (0.0, 0.2),
    "network": (0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.96),
}
ROUNDS, EVERY = 2, 6


def nanotron_fitted(every: Sequence[nanotron_runs.Row]) -> dict[str, Any]:
    """The constants that every sixth of these runs chooses, one after the other, twice."""
    rows = every[::EVERY]
    now: dict[str, Any] = dict(START)

    def off(some: Sequence[nanotron_runs.Row], constants: dict[str, Any]) -> float:
        pairs = (nanotron_runs.seconds(row, constants) for row in some)
        return fmean(abs(math.log(planned / measured)) for planned, measured in pairs)

    for _ in range(ROUNDS):
        for name, values in TRIED.items():
            if name != "network":
                now = min((now | {name: value} for value in values), key=lambda c: off(rows, c))
                continue
            for nodes in (n for n in START["network"] if n > 1):
                some = [row for row in rows if int(row["nodes"]) == nodes]
                if len(some) > 1:
                    shares: Any = now["network"]
                    tries = [now | {"network": {**shares, nodes: value}} for value in values]
                    now = min(tries, key=lambda c: off(some, c))
    return now


def nanotron(folder: Path) -> dict[str, Any]:
    """1B's runs choose, 3B's are planned, and the other way round; and with constants of other programs."""
    rows, result = nanotron_runs.rows(folder), dict[str, Any]()
    for name in sorted({row["model"] for row in rows}):
        mine, others = ([row for row in rows if (row["model"] == name) == same] for same in (True, False))
        fitted = nanotron_fitted(others)
        for how, constants in (("shipped", nanotron_runs.FITTED), ("left out", fitted), ("of others", START)):
            result[f"{name} {how}"] = nanotron_runs.ranking(nanotron_runs.grouped(mine, constants))
        result[f"{name} left out"] |= {"chosen": fitted, "rows fitted": len(others[::EVERY])}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("steps", "nanotron"))
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    result = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    if options.only != "nanotron":
        every = runs(TABLES)
        sources = {
            name: {"shipped": errors([r.off for r in every if r.source == name])} for name in SOURCES.values()
        }
        result["constants"] = {}
        for name, constant in CONSTANTS.items():
            without = left_out(every, name, constant)
            for source, found in without.items():
                sources[source][name] = found
            hopper = [found for source, found in without.items() if found["rows"] and source in HOPPER]
            values = [found["value"] for found in hopper]
            summary = {"shipped": shipped(name, every[-1]), "least": min(values), "most": max(values)}
            result["constants"][name] = summary | {"mean": fmean(found["mean"] for found in hopper)}
            print(name, result["constants"][name])
        result["sources"] = sources
    if options.only != "steps":
        result["nanotron"] = nanotron(TABLES)
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

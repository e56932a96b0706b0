"""Measures this machine for the planner (`fivefold bench hardware`).

It measures one rank with all cores, then 2 and 4 local ranks with their shares of the cores, all at once. This takes
about two minutes.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
import torch.distributed as dist

from fivefold.bench import hardware, links, overhead
from fivefold.bench.hardware import bandwidth, encodings
from fivefold.bench.peak import UNDISTURBED, device_peak, measure_apart
from fivefold.errors import BusyError, UserError, several
from fivefold.files import write
from fivefold.host import cores, memory_bytes, tables
from fivefold.host.machine import has_fast_bf16
from fivefold.host.memory import keep_freed_memory
from fivefold.launch.local import start_ranks
from fivefold.launch.ranks import Ranks
from fivefold.parallel.offload.disk import folder_of
from fivefold.plan.cluster import devices, measured
from fivefold.plan.cluster.measured import Measured, Share
from fivefold.plan.predict import predict
from fivefold.precision import MASTER, TRAINED

WORLDS = (1, 2, 4)


def measure(say: Callable[[str], None] = lambda text: None, busy: bool = False) -> Measured:
    """Measures, and saves the table in the cache. `say` gets a line for each part.

    The process must have used neither torch's threads nor a GPU: ranks are forked.
    busy: other programs may take the cores meanwhile.

    Raises:
        BusyError: they do, before or at the end. The table is not saved.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    units = gpus or cores()
    dtypes = list(TRAINED) if has_fast_bf16("cuda" if gpus else "cpu") else [MASTER]
    keep_freed_memory()
    if not busy:
        _require_cores(dtypes[-1])
    disk = _disk(say)
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
        for world in WORLDS:
            if gpus and world > gpus:
                continue
            say(f"{several(world, 'rank')} on {several(units, 'GPU' if gpus else 'core')}")
            file = Path(folder, f"{world}.json")
            start_ranks(partial(_measure_rank, file, dtypes, world <= units), world, fork=not gpus)
            found[world] = json.loads(file.read_text())
    table = _table(found, units, bool(gpus), dtypes, disk)
    table = replace(table, axes=_axes(table, found, dtypes[-1]))
    if not busy:
        _require_cores(dtypes[-1])
    measured.save(table)
    return table


def _require_cores(dtype: str) -> None:
    """Multiplies for some seconds on all cores.

    Raises:
        BusyError: other programs took a part of them.
    """
    share = measure_apart(dtype, cores())["share"]
    if share < UNDISTURBED:
        raise BusyError(
            f"other programs take {1 - share:.0%} of this machine's cores, so the table would be wrong and is not "
            f"saved; at most {1 - UNDISTURBED:.0%} is allowed. Stop them and repeat `fivefold bench hardware`, or add "
            "--busy to save the table all the same"
        )


def _table(
    found: dict[int, dict[str, Any]], units: int, gpu: bool, dtypes: list[str], disk: dict[str, float]
) -> Measured:
    shares = {n: Share(n, **part["share"]) for n, part in found.items() if "share" in part}
    device = "cuda" if gpu else "cpu"
    two = found.get(2, {"free": 0.0, "added": {}, "spread": 0.0})
    return Measured(
        machine=tables.key(),
        device=device,
        cores=units,
        memory=torch.cuda.get_device_properties(0).total_memory * units if gpu else float(memory_bytes()),
        disk=disk["write"],
        peak={dtype: device_peak(device, dtype) * (units if gpu else 1) for dtype in dtypes},
        shares=shares,
        links={n: part["links"] for n, part in found.items() if "links" in part},
        free=1.0 if gpu else two["free"],
        host=found[1]["plain"] | two["added"],
        axes={},
        spread=two["spread"],
        disk_read=disk["read"],
        disk_both=disk["both"],
    )


def _disk(say: Callable[[str], None]) -> dict[str, float]:
    """Of the folder where offload keeps its files by default. Where it cannot, the rates of a usual disk."""
    try:
        return bandwidth(folder_of(""))
    except (UserError, OSError) as error:
        say(f"the disk is assumed, not measured: {error}")
        return dict.fromkeys(("write", "read", "both"), devices.DISK)


def _axes(
    table: Measured, found: dict[int, dict[str, Any]], dtype: str
) -> dict[int, dict[str, list[list[float]]]]:
    """Measured time of blocks with each axis, minus the table's prediction: the ranks wait for each other."""
    axes: dict[int, dict[str, list[list[float]]]] = {}
    cluster = devices.of_table(replace(table, axes={}))
    for world, part in found.items():
        for name, points in part.get("blocks", {}).items():
            rows = axes.setdefault(world, {}).setdefault(name, [])
            for model, (elements, seconds) in zip(overhead.MODELS, points, strict=True):
                few, many = (
                    predict(r, cluster).step.seconds for r in overhead.recipes(name, world, model, dtype)
                )
                rows.append([elements, seconds - overhead.per_block(few, many)])
    return axes


def _measure_rank(file: Path, dtypes: list[str], has_cores: bool, ranks: Ranks) -> None:
    """Measures one rank's part; the first rank writes its results."""
    found: dict[str, Any] = {}
    if has_cores:
        found["share"] = _share(dtypes, ranks.device)
        found["spread"] = _spread(found["share"], ranks)
    if ranks.world == 1:
        found["plain"] = overhead.plain(ranks)
    else:
        found["links"], found["free"] = links.links(ranks.device)
        if ranks.device.type == "cpu":  # on GPUs, processors do not wait for computation
            found["blocks"] = overhead.blocks(ranks, dtypes[-1])
    if ranks.world == 2:
        at_once = links.links(ranks.device, {4 << 10: 40}, after_computing=False)[0]
        found["added"] = overhead.added(ranks, at_once)
    if ranks.first:
        write(file, json.dumps(found))


def _share(dtypes: list[str], device: torch.device) -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads() if device.type == "cpu" else 1,
        "products": {d: hardware.products(d, device, measured.SIZES, measured.LARGEST) for d in dtypes},
        "attention": {d: hardware.attention(d, device) for d in dtypes},
        "ring": {d: hardware.ring(d, device) for d in dtypes},
        "streams": {
            d: hardware.streams(d, device) | {"optimizer": hardware.optimizer(d, device)} for d in dtypes
        },
        "encodings": encodings(device),
    }


def _spread(share: dict[str, Any], ranks: Ranks) -> float:
    """Standard deviation of the ranks' mean rates, as a share of their mean."""
    if ranks.world == 1:
        return 0.0
    logs = [
        math.log(r) for roles in share["products"].values() for grid in roles.values() for r in grid.values()
    ]
    speeds = [torch.zeros(1, device=ranks.device) for _ in range(ranks.world)]
    dist.all_gather(speeds, torch.tensor([fmean(logs)], device=ranks.device))
    return pstdev([speed.item() for speed in speeds])

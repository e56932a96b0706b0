"""nanotron's published runs, and the constants of its overheads and its cluster, which alone are fitted to them."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fivefold.models.section import ModelSection
from fivefold.recipe import resolve_model
from fivefold.sharding.layout import Layout
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.cluster.devices import Cluster, Device
from fivefold_plan.setting import setting
from fivefold_plan.software import PROGRAMS
from fivefold_plan.time import time

Row = dict[str, str]
Result = dict[str, Any]
Groups = Mapping[tuple[str, int], Sequence[tuple[float, float]]]
"""Planned and measured seconds of the runs of a model on a number of nodes."""

# nanotron on 8 to 512 H100 of one cluster. These constants alone are fitted, to every sixth of the successful rows
# (the 1st, 7th, ...), by minimising the mean |log(predicted / measured)| coordinate by coordinate; reported are the
# rows with even numbers, none of which it saw. The forms are what the rows of one layout show: the processor takes as
# long for a block whatever the microbatch ("host", more with tensor parallelism); with a pipeline over several nodes
# each block takes longer in proportion to tp ("contention"); on 64 nodes a pipeline loses almost a second in each
# microbatch but the first ("far"). `leave_one_out.py` fits them to the runs of one model and plans the other's.
FITTED: dict[str, Any] = {
    "host": PROGRAMS["nanotron"].host,
    "host_tensor": 1.1e-3,
    "contention": 1.08e-3,
    "far": 0.9,
    "step": PROGRAMS["nanotron"].step,
    "optimizer_passes": PROGRAMS["nanotron"].optimizer_passes,
    "hop": 600e-6,
    "matmul": 0.70,
    "contended": 0.0,
    "network": {1: 0.96, 2: 0.96, 4: 0.88, 8: 0.47, 16: 0.55, 32: 0.29, 64: 0.20},
}


@lru_cache
def _cluster(matmul: float, contended: float, hop: float, network: float) -> Cluster:
    h100 = parse("h100")
    return replace(
        h100,
        device=_device(matmul, contended),
        inter=replace(h100.inter, latency=hop, share=network),
    )


@lru_cache
def _device(matmul: float, contended: float) -> Device:
    """One object for each, because prices are cached by it."""
    return replace(parse("h100").device, matmul=matmul, contended=contended)


@lru_cache
def _model(layers: int, dim: int, heads: int, ffn_dim: int, vocabulary: int) -> ModelSection:
    section = ModelSection(
        layers=layers, dim=dim, heads=heads, ffn_dim=ffn_dim, seq_len=4096, tie_embeddings=True
    )
    return resolve_model(section, vocab_size=vocabulary)


def rows(folder: Path) -> list[Row]:
    """The runs that finished and whose batch is that of their layout."""
    with open(folder / "nanotron_ultrascale_1b_3b.csv", newline="", encoding="utf-8") as file:
        every = list(csv.DictReader(file))
    return [row for row in every if row["status"] == "success" and row["batch_consistent"] == "True"]


def seconds(row: Row, constants: Mapping[str, Any] = FITTED) -> tuple[float, float]:
    """Planned and measured, of a step."""
    tp, pp, dp, zero, nodes, count = (
        int(row[name]) for name in ("tp", "pp", "dp", "zero_stage", "nodes", "grad_acc")
    )
    model = _model(*(int(row[name]) for name in ("num_layers", "hidden", "heads", "ffn", "vocab")))
    host = constants["host"] + constants["host_tensor"] * (tp > 1)
    if pp > 1 and tp > 1 and nodes > 1:
        host += constants["contention"] * tp
    if pp > 1 and nodes >= 64:
        host += constants["far"] / 2 / (model.layers / pp) * (count - 1) / count
    own = {name: constants[name] for name in ("step", "optimizer_passes")}
    software = replace(PROGRAMS["nanotron"], overlap_data=zero == 0, host=host, **own)
    shared = bool(zero) and dp > 1
    layout = Layout(
        pp=pp,
        tp=tp,
        sp=tp > 1,
        sp_regather=tp > 1,
        zero=int(shared),
        dp_shard=dp if shared else 1,
        dp_replicate=1 if shared else dp,
    )
    cluster = _cluster(
        constants["matmul"], constants["contended"], constants["hop"], constants["network"][nodes]
    )
    planned = time.step(setting(model, layout, cluster, int(row["mbs"]), count, "bf16", software)).seconds
    return planned, int(row["gbs_seqs"]) * 4096 / float(row["tok_s"])


def grouped(some: Sequence[Row], constants: Mapping[str, Any] = FITTED) -> Groups:
    groups = defaultdict[tuple[str, int], list[tuple[float, float]]](list)
    for row in some:
        groups[row["model"], int(row["nodes"])].append(seconds(row, constants))
    return groups


def compared(folder: Path) -> Result:
    """1117 runs of 1B and 3B on 1 to 64 nodes: how the planner orders the layouts of a model and a number of nodes."""
    every = rows(folder)
    halves = ("fitted half", every[::2]), ("held out", every[1::2])
    return {name: ranking(grouped(half)) for name, half in halves}


def ranking(groups: Groups) -> Result:
    """How well the planned seconds of each group order the measured ones."""
    order = [spearman(*zip(*pairs, strict=True)) for pairs in groups.values()]
    regret = [min(pairs)[1] / min(measured for _, measured in pairs) - 1 for pairs in groups.values()]
    logs = [abs(math.log(p / m)) for pairs in groups.values() for p, m in pairs]
    lines = [
        f"{model} on {nodes} nodes, {len(groups[model, nodes])} rows: Spearman {r:.2f}, regret {100 * lost:.1f}%"
        for (model, nodes), r, lost in sorted(zip(groups, order, regret, strict=True))
    ]
    return {
        "rows": len(logs),
        "spearman": fmean(order),
        "regret": fmean(regret),
        "regret_median": median(regret),
        "mean_log_error": fmean(logs),
        "lines": lines,
    }


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of the ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        place = {index: rank for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__))}
        return [place[index] - (len(values) - 1) / 2 for index in range(len(values))]

    a, b = ranks(first), ranks(second)
    return sum(x * y for x, y in zip(a, b, strict=True)) / sum(x * x for x in a)

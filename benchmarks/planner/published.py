"""Predictions beside published measurements: `python benchmarks/planner/published.py [FOLDER] [--json FILE]`.

FOLDER holds the tables as CSV (columns as read below), by default `tables/`, whose README names their sources.
`constants.py` says where each constant is from; few were chosen by these rows, and `leave_one_out.py` tries what that
is worth.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import hopper_runs
import nanotron_runs

from fivefold.host.devices import GIB
from fivefold.models.card import card_of
from fivefold.models.section import ModelSection
from fivefold.recipe import resolve_model
from fivefold.schedules.pipeline import Costs, build, simulate
from fivefold.sharding.layout import Layout
from fivefold.sharding.tiers import NOT_OFFLOADED
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.predict import FRAGMENTS, limit, price
from fivefold_plan.setting import setting
from fivefold_plan.software import PROGRAMS, PUBLISHED, Kind, kind_of
from fivefold_plan.time import time
from fivefold_plan.time.cost import part

Row = dict[str, str]
Result = dict[str, Any]


EACH, BYTES = "each", "bytes of each"
"""Of a table: the setting of each run, and its planned seconds, or its planned peak, by the measured one."""


def read(folder: Path, name: str) -> list[Row]:
    with open(folder / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def errors(pairs: Iterable[tuple[float, float]]) -> Result:
    """Mean and worst relative error of (predicted, measured), and the mean of the signed ones."""
    found = [predicted / measured - 1 for predicted, measured in pairs]
    return {
        "rows": len(found),
        "mean": fmean(map(abs, found)),
        "worst": max(map(abs, found)),
        "bias": fmean(found),
    }


def gpt(row: Row, vocabulary: int = 51200) -> ModelSection:
    section = ModelSection(
        arch="gpt2",
        layers=int(row["layers"]),
        dim=int(row["hidden"]),
        heads=int(row["heads"]),
        seq_len=int(row["seq"]),
        dropout=0.1,
    )
    return resolve_model(section, vocab_size=vocabulary)


def sc21(folder: Path) -> Result:
    """arXiv 2104.04473, table 1: seconds of an iteration, 1.7B to 1T parameters on 32 to 3072 A100."""
    pairs, lines, each = [], [], []
    for row in read(folder, "megatron_sc21_table1.csv"):
        pp, long = int(row["pp"]), row["layers_per_virtual_stage"]
        virtual = int(row["layers"]) // pp // int(long) if long else 1
        layout = Layout(
            pp=pp,
            tp=int(row["tp"]),
            dp_replicate=int(row["dp"]),
            recompute="full",
            schedule="interleaved" if virtual > 1 else "1f1b",
            virtual_stages=virtual,
        )
        B, batch = int(row["micro_batch"]), int(row["global_batch"])
        s = setting(
            gpt(row), layout, parse("a100"), B, batch // layout.dp // B, "fp16", PROGRAMS["megatron-2021"]
        )
        predicted, measured = time.step(s).seconds, float(row["derived_iter_time_s"])
        pairs.append((predicted, measured))
        each.append((s, predicted / measured))
        lines.append(
            f"{row['params_B']}B: {predicted:.2f} s, measured {measured:.2f} ({100 * (predicted / measured - 1):+.1f}%)"
        )
    return {**errors(pairs), "lines": lines, EACH: each}


def layer_times(folder: Path) -> Result:
    """arXiv 2205.05198, table 4: milliseconds of a layer of 22B, forward and backward, by what is computed again."""
    model = resolve_model(
        ModelSection(arch="gpt2", layers=48, dim=6144, heads=64, seq_len=2048, dropout=0.1), vocab_size=51200
    )
    passes, lines = defaultdict(list), []
    for row in read(folder, "recompute_table4_layer_time.csv"):
        name = row["experiment"]
        how = "full" if "with recompute" in name else "selective" if "Selective" in name else "none"
        sp = "Sequence" in name or "Selective + Sequence" in name
        layout = Layout(tp=8, sp=sp, sp_regather=sp, recompute=how)
        s = setting(model, layout, parse("a100"), 4, 1, "fp16", PROGRAMS["megatron-2021"])
        cost = part(card_of(s.model).block_operations(s.sizes, s.software), s, how)
        for key, seconds in (
            ("fwd", cost.forward),
            ("bwd", cost.input + cost.weight),
            ("combined", cost.seconds),
        ):
            passes[key].append((1e3 * seconds, float(row[f"{key}_ms"])))
        predicted, measured = passes["combined"][-1]
        lines.append(f"{name}: {predicted:.1f} ms, measured {measured:.1f}")
    combined = errors(passes["combined"])
    return combined | {"forward": errors(passes["fwd"]), "backward": errors(passes["bwd"]), "lines": lines}


LLAMA3 = {
    "8b": (4096, 32, 8, 14336),
    "70b": (8192, 64, 8, 28672),
    "405b": (16384, 128, 8, 53248),
}


def llama3(size: str, layers: int, seq_len: int) -> ModelSection:
    dim, heads, kv_heads, ffn_dim = LLAMA3[size]
    section = ModelSection(
        layers=layers, dim=dim, heads=heads, kv_heads=kv_heads, ffn_dim=ffn_dim, seq_len=seq_len
    )
    return resolve_model(section, vocab_size=128256)


# Of the same table: width, feed-forward, expert, experts, experts of a token, shared experts, vocabulary.
DEEPSEEK = {
    "deepseekv2": (5120, 12288, 1536, 160, 6, 2, 102400),
    "deepseekv3": (7168, 18432, 2048, 256, 8, 1, 129280),
}


def deepseek(name: str, layers: int, seq_len: int) -> ModelSection:
    """The models of SimuMax's launcher: one dense block, and a softmax router with a term of the loss."""
    dim, ffn_dim, expert_ffn_dim, experts, per_token, shared_experts, vocabulary = DEEPSEEK[name]
    section = ModelSection(
        arch="deepseek", layers=layers, dim=dim, heads=128, seq_len=seq_len, query_rank=1536, kv_rank=512, nope_dim=128,
        rope_dim=64, value_dim=128, ffn_dim=ffn_dim, expert_ffn_dim=expert_ffn_dim, experts=experts,
        experts_per_token=per_token, shared_experts=shared_experts, dense_layers=1, router_score="softmax",
        balance="aux",
    )  # fmt: skip
    return resolve_model(section, vocab_size=vocabulary)


def simumax(folder: Path) -> Result:
    """SimuMax's runs on 8 B200: milliseconds and allocated memory. Llama 3's shapes."""
    return _simumax(folder, {f"llama3-{size}": (llama3, size) for size in LLAMA3})


def simumax_deepseek(folder: Path) -> Result:
    """The same of DeepSeek's shapes: latent attention, and experts on all 8 devices with an even load."""
    return _simumax(folder, {name: (deepseek, name) for name in DEEPSEEK})


def _simumax(folder: Path, models: dict[str, tuple[Callable[[str, int, int], ModelSection], str]]) -> Result:
    pairs, memory, reserved, lines, each, sizes = [], [], [], [], [], []
    for row in read(folder, "simumax_b200_part.csv"):
        if row["model"] not in models:
            continue
        made, name = models[row["model"]]
        given = {name: int(n) for name, n in re.findall(r"_(tp|cp|pp|dp|ep|seq)(\d+)", row["case"])}
        layout = Layout(
            pp=given.get("pp", 1),
            dp_shard=given["dp"],
            ep=given.get("ep", 1),
            cp=given.get("cp", 1),
            cp_method="ulysses",
            tp=given["tp"],
            sp=given["tp"] > 1,
            sp_regather=given["tp"] > 1,
            zero=1,
        )
        model = made(name, int(row["layers"]), given.get("seq", 4096))
        plan = price(
            setting(
                model,
                layout,
                parse("b200"),
                1,
                int(row["microbatch_count"]),
                "bf16",
                PROGRAMS["megatron-core"],
            )
        )
        predicted, measured = 1e3 * plan.step.seconds, float(row["real_ms"])
        pairs.append((predicted, measured))
        each.append((plan.setting, predicted / measured))
        memory.append((plan.peak_bytes / GIB, float(row["real_max_alloc_gib"])))
        sizes.append((plan.setting, memory[-1][0] / memory[-1][1]))
        reserved.append((plan.peak_bytes / GIB, float(row["real_reserved_gib"])))
        lines.append(
            f"{row['case']}: {predicted:.0f} ms, measured {measured:.0f}; "
            f"{memory[-1][0]:.1f} GiB, measured {memory[-1][1]:.1f}, reserved {reserved[-1][1]:.1f}"
        )
    found = {"memory": errors(memory), "reserved": errors(reserved), "margin": margin(memory, reserved)}
    return {**errors(pairs), **found, "lines": lines, EACH: each, BYTES: sizes}


def margin(memory: Sequence[tuple[float, float]], reserved: Sequence[tuple[float, float]]) -> Result:
    """What would have happened to runs planned to fill what `limit` leaves of a device: the margin that all needed,
    so that their tensors fitted into it without one; those of whom the allocator reserved more than there was."""
    each = parse("b200").device.margin
    needed = max(1 - predicted / measured for predicted, measured in memory)
    room = (1 + FRAGMENTS) / (1 - each)
    return {"needed": needed, "reserved too much": sum(taken > room * p for p, taken in reserved)}


def torchtitan(folder: Path) -> Result:
    """torchtitan in bf16 on H100 that are limited to 500 W, with 2.4 TB/s of memory; sequences of 8192, its default.

    Rows with fp8 are left out: their tensor-parallel messages are in 8 bits. Under a power limit the rate of products
    falls with the power that is left for them: (500 - 120) / (700 - 120) W, 120 W being what a device takes without
    them (assumed).
    """
    h100 = parse("h100")
    device = replace(
        h100.device, bandwidth=2.4e12, memory=96 * GIB, matmul=h100.device.matmul * (500 - 120) / (700 - 120)
    )
    pairs, reserved, lines, each, peaks = [], [], [], [], []
    for row in read(folder, "torchtitan.csv"):
        how, size = row["techniques"], row["model"].rpartition("-")[2].lower()
        if "loat8" in how or "async TP" in how or row["seq"] or size not in ("8b", "70b"):
            continue
        sizes = {name.lower(): int(n) for name, n in re.findall(r"(FSDP|TP)(\d+)", row["parallelism"])}
        tp = sizes.get("tp", 1)
        layout = Layout(
            dp_shard=sizes["fsdp"],
            tp=tp,
            sp=tp > 1,
            sp_regather=tp > 1,
            zero=3,
            recompute="full" if row["ac"] == "full" else "selective",
        )
        software = replace(PROGRAMS["torchtitan"], fused="compile" in how)
        model = llama3(size, {"8b": 32, "70b": 80}[size], 8192)
        s = setting(model, layout, replace(h100, device=device), int(row["local_batch"]), 1, "bf16", software)
        plan = price(s)
        predicted = s.sizes.B * 8192 / plan.step.seconds / tp
        measured = float(row["tps_per_gpu"])
        pairs.append((predicted, measured))
        each.append((s, measured / predicted))
        lines.append(
            f"{row['table']} {row['model']} {row['parallelism']} {how}: {predicted:.0f} tokens/s a device, "
            f"measured {measured:.0f}"
        )
        if row["peak_mem_gib"]:  # what the allocator reserved (its metrics.py)
            reserved.append(((1 + FRAGMENTS) * plan.peak_bytes / GIB, float(row["peak_mem_gib"])))
            peaks.append((s, reserved[-1][0] / reserved[-1][1]))
            lines[-1] += f"; {reserved[-1][0]:.1f} GiB with fragments, reserved {reserved[-1][1]:.1f}"
    return {**errors(pairs), "reserved": errors(reserved), "lines": lines, EACH: each, BYTES: peaks}


def zero_bubble(folder: Path) -> Result:
    """arXiv 2401.10241, table 6: bubble rates from the table's own times. Schedules that are made here only."""
    names = {"1F1B": ("1f1b", 1), "1F1B-I": ("interleaved", None), "ZB-H1": ("zb_h1", 1)}
    worst: dict[str, float] = defaultdict(float)
    for row in read(folder, "zero_bubble_1.5b_6.2b.csv"):
        if row["schedule"] not in names or not row["bubble_rate_calculated"]:
            continue
        name, virtual = names[row["schedule"]]
        p, m = int(row["stages"]), int(row["microbatches"])
        f, b, w, move = (float(row[f"T_{x}_ms"]) for x in ("F", "B", "W", "comm"))
        v = virtual or int(row["layers"] == "22") * 3 or 4
        costs = Costs(f / v, b / v, w / v, transfer=move)
        timeline = simulate(build(name, p, m, v), costs)
        rate = 1 - m * (f + b + w) / timeline.makespan
        worst[row["schedule"]] = max(worst[row["schedule"]], abs(rate - float(row["bubble_rate_calculated"])))
    return {"worst": dict(worst)}


def compared(runs: Iterable[hopper_runs.Run]) -> Result:
    """Seconds of a step of each run beside the measured ones, and memory where it was published."""
    pairs, memory, lines, each, sizes = [], [], [], [], []
    for run in runs:
        plan = price(run.setting)
        pairs.append((plan.step.seconds, run.seconds))
        each.append((run.setting, plan.step.seconds / run.seconds))
        line = f"{run.name}: {plan.step.seconds:.2f} s, measured {run.seconds:.2f}"
        line += f" ({100 * (plan.step.seconds / run.seconds - 1):+.1f}%)"
        if run.gib:
            memory.append((plan.peak_bytes / GIB, run.gib))
            sizes.append((run.setting, memory[-1][0] / run.gib))
            line += f"; {memory[-1][0]:.1f} GiB, measured {run.gib:.1f}"
        lines.append(line)
    found = {"memory": errors(memory)} if memory else {}
    return {**errors(pairs), **found, "lines": lines, EACH: each, BYTES: sizes}


def nemo_fp8(folder: Path) -> Result:
    """NeMo in fp8 on 8 to 2,048 H100 (NVIDIA's dgxc-benchmarking): seconds of a step."""
    return compared(hopper_runs.nemo(read(folder, "nvidia_dgxc_h100_fp8_part.csv")))


def pytorch_tp(folder: Path) -> Result:
    """FSDP2 with PyTorch's own tensor parallelism on 2 to 32 H200 (KempnerForge): seconds of a step, peak memory."""
    return compared(hopper_runs.kempner(read(folder, "pytorch_tp_h200_part.csv")))


def foundry(folder: Path) -> Result:
    """llm-foundry of 2023 on 8 to 512 H100: seconds of a step."""
    return compared(hopper_runs.foundry(read(folder, "mosaicml_fsdp_h100_part.csv")))


def deepseek_v3(folder: Path) -> Result:
    """DeepSeek-V3 on 2,048 H800 (arXiv 2412.19437, table 1): seconds of a step, and whether it fits."""
    (run,) = hopper_runs.deepseek(read(folder, "deepseek_v3.csv"))
    plan = price(run.setting)
    size = f"{plan.peak_bytes / GIB:.1f} of {limit(run.setting.cluster, margin=False) / GIB:.1f} GiB"
    return {**(found := compared([run])), "lines": [f"{found['lines'][0]}; {size}"]}


def own_h100(_: Path) -> Result:
    """This program on an H100: seconds of a step, peak memory (benchmarks/results/gpu_h100.json)."""
    measured = Path(__file__).parents[1] / "results/gpu_h100.json"
    return compared(hopper_runs.own(json.loads(measured.read_text(encoding="utf-8"))))


TABLES: dict[str, Callable[[Path], Result]] = {
    "sc21": sc21,
    "layer_times": layer_times,
    "simumax": simumax,
    "simumax_deepseek": simumax_deepseek,
    "torchtitan": torchtitan,
    "nemo_fp8": nemo_fp8,
    "pytorch_tp": pytorch_tp,
    "foundry": foundry,
    "deepseek_v3": deepseek_v3,
    "own_h100": own_h100,
    "zero_bubble": zero_bubble,
    "nanotron": nanotron_runs.compared,
}

RESULTS = Path(__file__).parents[1] / "results"
SOURCES = {
    "sc21": "Megatron-LM 2021",
    "simumax": "SimuMax",
    "simumax_deepseek": "SimuMax",
    "torchtitan": "torchtitan",
    "nemo_fp8": "NeMo",
    "pytorch_tp": "KempnerForge",
    "deepseek_v3": "DeepSeek-V3",
    "own_h100": "Fivefold",
}
"""Whose runs say how far a plan of their kind may be off (software.py). Not llm-foundry's: programs of 2023."""


def compare(
    folder: Path, names: Iterable[str] = TABLES
) -> tuple[dict[str, Result], dict[str, list[list[Any]]]]:
    """What each table says, and what all say of each kind of run, as `software.PUBLISHED` has it."""
    results = {name: TABLES[name](folder) for name in names}
    kinds = {"time": _kinds(results, EACH, "time"), "memory": _kinds(results, BYTES, "memory")}
    return results, kinds | {"traced": _traced()}


def _traced() -> list[list[Any]]:
    """How far off the memory of traced steps was, without and with offload (gpu_memory.py)."""
    found, ranks = defaultdict[bool, list[float]](list), defaultdict[bool, list[int]](list)
    for name in ("planner_gpu_memory", "planner_gpu_memory_hard"):
        for row in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]:
            fields = dict(field.split("=") for field in row["layout"].split(","))
            away = fields.get("offload", NOT_OFFLOADED) != NOT_OFFLOADED
            found[away].append(abs(row["planned"] / row["traced"] - 1))
            ranks[away].append(math.prod(int(fields.get(axis, 1)) for axis in ("dp", "tp", "pp", "cp")))
    return [
        [
            away,
            "traced",
            min(ranks[away]),
            max(ranks[away]),
            len(off),
            round(fmean(off), 4),
            round(max(off), 4),
        ]
        for away, off in sorted(found.items())
    ]


def _kinds(results: dict[str, Result], runs: str, what: str) -> list[list[Any]]:
    """Takes the runs of each table out of it, and says how far off those of a kind are."""
    found = defaultdict[Kind, list[tuple[str, int, float]]](list)
    for name, result in results.items():
        for s, ratio in result.pop(runs, []):
            if source := SOURCES.get(name):
                found[kind_of(s, what)].append((source, s.layout.ranks, abs(ratio - 1)))
    rows = []
    for kind, listed in sorted(found.items()):
        sources, ranks, off = zip(*listed, strict=True)
        means = round(fmean(off), 4), round(max(off), 4)
        rows.append([*kind, ", ".join(dict.fromkeys(sources)), min(ranks), max(ranks), len(off), *means])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).with_name("tables"))
    parser.add_argument("--only", choices=TABLES, action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--write", action="store_true", help="also write what `fivefold plan` says of its errors"
    )
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write needs all tables; leave --only out")
    results, kinds = compare(options.folder, options.only or TABLES)
    if options.write:
        parts = (f'"{what}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for what, rows in kinds.items())
        PUBLISHED.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
    for name, result in results.items():
        print(f"{name}: {(TABLES[name].__doc__ or '').splitlines()[0]}")
        show(result, "  ")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def show(result: Result, indent: str) -> None:
    for line in result.get("lines", []):
        print(f"{indent}{line}")
    for name, value in result.items():
        if isinstance(value, dict):
            print(f"{indent}{name}:")
            show(value, indent + "  ")
        elif name != "lines":
            print(f"{indent}{name} {value:.4g}" if isinstance(value, float) else f"{indent}{name} {value}")


if __name__ == "__main__":
    main()

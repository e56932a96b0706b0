"""Where each constant of the planner's prices for GPUs comes from.

    python benchmarks/planner/constants.py    writes benchmarks/results/planner_constants.json

`docs/fill_figures.py` fills the table in docs/planner.md from that file. Values are read from the package, so that this
list cannot disagree with it. A constant that published steps have chosen names the sources and how many of their rows
did. All others say which data sheet, measurement of single operations or paper they are from, or that they are assumed.
What is assumed was set before any step was compared, or is a round number of its order of magnitude.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import hopper_runs
import nanotron_runs

from fivefold.models.recomputation import SCORES
from fivefold_plan.cluster.clusters import PRESETS
from fivefold_plan.cluster.devices import DISK, SWITCH, Device
from fivefold_plan.messages.communication import LAUNCH
from fivefold_plan.predict import FRAGMENTS
from fivefold_plan.setting import Software
from fivefold_plan.time import cost

RESULTS = Path(__file__).parents[1] / "results/planner_constants.json"
TABLES = Path(__file__).with_name("tables")
MEASURED = ("a100", "h100", "h200", "b200", "mi300x")
Origin = Literal["data sheet", "measured", "paper", "assumed", "fitted"]


class Constant(NamedTuple):
    """value: in the package. origin, source: where it is from. rows: of each source that chose it, if it is fitted."""

    value: Any
    origin: Origin
    source: str
    rows: Mapping[str, int] = MappingProxyType({})


def of_device(name: str) -> dict[str, Any]:
    return {device: getattr(PRESETS[device].device, name) for device in MEASURED}


def of_link(side: str, name: str) -> dict[str, Any]:
    return {device: getattr(getattr(PRESETS[device], side), name) for device in MEASURED}


MAMF = "ml-engineering's search over shapes of matmuls; B200: a sweep of SimuMax's machine"
CONSTANTS: dict[str, Constant] = {
    "Device.matmul": Constant(of_device("matmul"), "measured", MAMF),
    "Device.matmul_fp8": Constant(
        hopper_runs.MATMUL_FP8,
        "measured",
        "ml-engineering's search, and an H100 of ours; of DeepSeek-V3's plan only, elsewhere as `matmul`",
    ),
    "Device.attention": Constant(
        of_device("attention"), "measured", "arXiv 2307.08691; B200: a sweep of SimuMax's machine"
    ),
    "Device.cudnn": Constant(of_device("cudnn"), "measured", "an H100, benchmarks/results/gpu_h100.json"),
    "Device.streaming": Constant(
        of_device("streaming"), "assumed", "0.85 on all but B200 and MI300X; copies on an H100 reach 0.81"
    ),
    "Device.spread": Constant(Device.spread, "paper", "Sinha et al., SC 2022"),
    "Device.reserve": Constant(Device.reserve, "assumed", "1.5 GiB of the runtime and the network library"),
    "Device.margin": Constant(
        Device.margin, "measured", "22 peaks of SimuMax's runs: none is planned 6.7% too low"
    ),
    "Device.contended": Constant(
        PRESETS["h100"].device.contended,
        "fitted",
        "how evenly far off runs of one model on few devices and on many are",
        {"torchtitan": 4, "llm-foundry": 19},
    ),
    "Link.share within a node": Constant(
        of_link("intra", "share"), "measured", "nccl-tests, ml-engineering's network/README.md"
    ),
    "Link.share between nodes": Constant(of_link("inter", "share"), "data sheet", "NVIDIA: 24 of 25 GB/s"),
    "Link.latency within a node": Constant(
        of_link("intra", "latency"), "paper", "NCCL's tuning model (ring, Simple)"
    ),
    "Link.latency between nodes": Constant(
        of_link("inter", "latency"), "paper", "NCCL's tuning model (ring, Simple)"
    ),
    "Link.reduce": Constant(
        of_link("intra", "reduce"), "measured", "nccl-tests of whole nodes, ml-engineering"
    ),
    "SWITCH": Constant(SWITCH, "paper", "NCCL's tuning model (NVLS)"),
    "LAUNCH": Constant(LAUNCH, "measured", "all-reduces of 32 KiB on 8 A100, H200 and B200, ml-engineering"),
    "DISK": Constant(DISK, "assumed", "a local NVMe drive"),
    "TILES": Constant(
        [share for _, share in cost.TILES], "assumed", "smaller tiles read their factors more often"
    ),
    "FILL": Constant(cost.FILL, "assumed", "what starting a tile takes"),
    "SHORT": Constant(cost.SHORT, "paper", "arXiv 2307.08691, figure 5"),
    "SCORES": Constant(SCORES, "paper", "arXiv 2205.05198, section 5: one of two products"),
    "FRAGMENTS": Constant(FRAGMENTS, "measured", "what the allocator reserved in 22 runs of SimuMax"),
    "Software.kernel": Constant(Software.kernel, "assumed", "the gap between two kernels"),
    "Software.host": Constant(Software.host, "assumed", "Python and PyTorch for a block"),
    "Software.step": Constant(Software.step, "assumed", "Python between steps"),
    "Software.optimizer_passes": Constant(Software.optimizer_passes, "paper", "a fused optimizer reads once"),
    "Software.expert_load": Constant(Software.expert_load, "assumed", "an even load (--expert-load)"),
    "Software.estimates": Constant(Software.estimates, "paper", "of the recipe's optimizer"),
}


def nanotron() -> dict[str, Constant]:
    """The constants of nanotron's runs, with the rows that each depends on. They are of one cluster and program, and
    price nothing else; `--software nanotron` has the first three."""
    rows = nanotron_runs.rows(TABLES)[::6]

    def chosen(name: str, value: Any, counts: Callable[[nanotron_runs.Row], bool]) -> Constant:
        models = [row["model"] for row in rows if counts(row)]
        each = {f"nanotron {model}": models.count(model) for model in sorted({*models})}
        return Constant(value, "fitted", f"every sixth of its runs{name}", each)

    conditions: dict[str, tuple[str, Callable[[nanotron_runs.Row], bool]]] = {
        "host_tensor": (" with tp > 1", lambda r: int(r["tp"]) > 1),
        "contention": (
            " with pp > 1, tp > 1 and several nodes",
            lambda r: int(r["pp"]) > 1 and int(r["tp"]) > 1 and int(r["nodes"]) > 1,
        ),
        "far": (" with pp > 1 and 64 nodes", lambda r: int(r["pp"]) > 1 and int(r["nodes"]) == 64),
        "hop": (" with several nodes", lambda r: int(r["nodes"]) > 1),
    }
    found = {}
    for name, value in nanotron_runs.FITTED.items():
        if name == "network":
            for nodes, share in value.items():
                if nodes > 2:  # as a data sheet has it below

                    def on(row: nanotron_runs.Row, nodes: int = nodes) -> bool:
                        return int(row["nodes"]) == nodes

                    found[f"nanotron network on {nodes}"] = chosen(f" on {nodes} nodes", share, on)
        elif name != "contended":  # 0: the shares of its network say all of what messages take
            words, counts = conditions.get(name, ("", lambda r: True))
            found[f"nanotron {name}"] = chosen(words, value, counts)
    return found


def listed() -> dict[str, Constant]:
    return CONSTANTS | nanotron()


def shown(value: Any) -> str:
    """A value as the table has it."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(each)}" for name, each in value.items() if each is not None)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " and ".join(map(shown, value))
    return f"{value:.3g}"


def main() -> None:
    rows = {
        name: {
            "value": shown(each.value),
            "origin": each.origin,
            "source": each.source,
            "rows": ", ".join(f"{source} {count}" for source, count in each.rows.items()) or "-",
        }
        for name, each in listed().items()
    }
    RESULTS.write_text(json.dumps({"constants": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

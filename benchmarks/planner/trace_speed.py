"""Seconds to trace one rank (`fivefold plan trace`), beside an older checkout, one after the other.

    python benchmarks/planner/trace_speed.py [--base CHECKOUT] > benchmarks/results/trace_speed.json

Each case runs in a process of its own, on one thread. CPU seconds are counted after `import torch`: of torch._dynamo
(the constructor of any optimizer of torch imports it), of importing the package, and of tracing, without the cache.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from fivefold.host.machine import describe

CASES = [
    ("quickstart", "dp=2", []),
    ("quickstart", "dp=2,zero=3", []),
    ("llama-7b", "dp=8,tp=8,zero=3", ["train.global_batch_size=1024"]),
    ("llama-7b", "dp=64,zero=1", ["train.global_batch_size=1024"]),
    ("llama-7b", "dp=4,tp=8,cp=2,sp=true,zero=1", ["train.global_batch_size=1024"]),
    ("llama-7b", "dp=8,tp=4,pp=2,zero=1", ["train.global_batch_size=1024"]),
    ("llama-7b", "tp=8,pp=8", ["train.global_batch_size=1024"]),
    ("llama-7b", "dp=2,tp=8,pp=4,schedule=interleaved,virtual_stages=4", ["train.global_batch_size=1024"]),
]
WORKER = """
import json, sys, time
import torch
started = time.process_time()
import torch._dynamo
began = time.process_time()
from fivefold_plan.predict import resolved
from fivefold.recipe import load
from fivefold_plan.trace import depth
imported = time.process_time()
recipe = resolved(load(sys.argv[1], ["precision.mode=bf16", *sys.argv[3:]], sys.argv[2]))
found = depth.exact(recipe, 0, kept=False) if hasattr(depth, "exact") else depth.dry_run(recipe, 0)
print(json.dumps({"dynamo_s": began - started, "import_s": imported - began, "trace_s": time.process_time() - imported,
                  "peak_bytes": found.step.memory.total, "flops": found.step.flops}))
"""


def run(checkout: Path, recipe: str, layout: str, sets: list[str]) -> dict[str, float]:
    worker = WORKER
    if not (checkout / "src/fivefold_plan/trace").is_dir():  # where it was before
        worker = worker.replace(
            "fivefold_plan.trace import depth", "fivefold.train import dry_depth as depth"
        )
    env = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", worker, recipe, layout, *sets]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="an older checkout")
    base = parser.parse_args().base
    cases = []
    for recipe, layout, sets in CASES:
        case = {"recipe": recipe, "layout": layout, "overrides": sets}
        case["now"] = run(Path(__file__).parents[2], recipe, layout, sets)
        if base:
            case["base"] = run(base, recipe, layout, sets)
        print(json.dumps(case), file=sys.stderr, flush=True)
        cases.append(case)
    print(json.dumps({"machine": describe(), "cases": cases}, indent=1))


if __name__ == "__main__":
    main()

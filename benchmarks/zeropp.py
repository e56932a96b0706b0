"""ZeRO++ beside ZeRO 3 in bf16, across two hosts of two ranks with a slow link: tokens/s, and what the link carries.

    python benchmarks/zeropp.py [--rate 200mbit] [--rounds 3] [--out benchmarks/results/zeropp.json]
    python benchmarks/zeropp.py --loss 300 [--seeds 0 1 2] [--out benchmarks/results/zeropp.json]

The hosts are Linux namespaces (`tests/namespaces.py`). The model is that of the quickstart, with few tokens per step,
so that the link decides. In each round every layout takes some steps; medians count. Bytes are those of a host's
network card, which include headers, beside those of the messages that a step sends. These are counted from the run, and
the planner must count the same. Psi: a bf16 number per parameter. As in the paper, a gather or a sum of the whole model
between nodes is one Psi; in messages across the nodes the ranks of a node send it together. Nothing else should run.

`--loss` compares the validation loss after so many steps of 1,024 tokens, on four ranks of this machine as two nodes.
Its figures are added to those in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from hosts import left_host

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from namespaces import GOODPUT, Hosts, Unavailable, bytes_per_second  # pyright: ignore[reportMissingImports]

BASE = "dp=4,zero=3"
LAYOUTS = (
    BASE,
    *(
        f"{BASE},zeropp={parts}"
        for parts in (
            "hier", "weights", "gradients", "weights,hier,gradients:int8", "weights,hier,gradients",
        )
    ),
)  # fmt: skip
MODEL = [
    "model.vocab_size=4096", "model.seq_len=128", "train.global_batch_size=4", "train.microbatch_size=1",
    "train.steps=1000", "precision.mode=bf16", "precision.reduce=bf16",
]  # fmt: skip
LEARNER = [
    "model.layers=4", "model.dim=128", "model.heads=4", "model.kv_heads=4", "model.ffn_dim=352", "model.seq_len=128",
    "data.tokenizer=bytes", "train.global_batch_size=8", "train.microbatch_size=2", "train.val_sequences=512",
    "optim.lr=2e-3", "precision.mode=bf16", "precision.reduce=bf16",
]  # fmt: skip
STEPS = 3  # per round and layout, after one that does not count


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="of each host's link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loss", type=int, metavar="STEPS", help="train that long instead")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="JSON file for what is measured")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.rounds)
        return 0
    before = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    if args.loss:
        before["validation"] = {"steps": args.loss, "model": LEARNER, **validation(args.loss, args.seeds)}
        print(json.dumps(before["validation"], indent=1))
        if args.out:
            args.out.write_text(json.dumps(before, indent=1) + "\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="fivefold-zeropp-") as folder:
        file = Path(folder, "found.json")
        command = [sys.executable, __file__, "--worker", str(file), "--rounds", str(args.rounds)]
        try:
            with Hosts(2, args.rate) as hosts:
                done = hosts.run(command, 2, env={"OMP_NUM_THREADS": "1"})
        except Unavailable as reason:
            print(f"skipped: {reason}", file=sys.stderr)
            return 0
        if done.code:
            raise SystemExit(f"measuring failed: {done}")
        found = json.loads(file.read_text())
    found = before | {"rate": args.rate, "hosts": 2, "ranks": 2, **found}
    print(report(found))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def worker(file: Path, rounds: int) -> None:
    """One rank's part. The first one writes what was found."""
    from fivefold.host.machine import describe
    from fivefold.launch.ranks import join
    from fivefold.recipe import count_parameters, load, resolve

    with join(timeout_s=120) as ranks:
        recipes = {layout: resolve(load("quickstart", MODEL, layout), vocab_size=4096) for layout in LAYOUTS}
        laps: dict[str, list[dict[str, Any]]] = {layout: [] for layout in LAYOUTS}
        for _ in range(rounds):
            for layout, recipe in recipes.items():
                laps[layout].append(steps(recipe, ranks))
        rows = {}
        for layout, found in laps.items():
            row = found[0] | {key: median(lap[key] for lap in found) for key in ("step_s", "left_bytes")}
            tokens = recipes[layout].train.global_batch_size * recipes[layout].model.seq_len
            rows[layout] = row | {"tokens_per_s": tokens / row["step_s"]}
        for row in rows.values():
            row["speedup"] = rows[BASE]["step_s"] / row["step_s"]
        if ranks.first:
            parameters = count_parameters(recipes[BASE].model)
            found = {"machine": describe(), "model": MODEL, "parameters": parameters, "layouts": rows}
            file.write_text(json.dumps(found))


def steps(recipe: Any, ranks: Any) -> dict[str, Any]:
    """Median seconds and bytes per step of one layout, and its messages."""
    import torch

    from fivefold.comm import everyone
    from fivefold.parallel.mesh import Microbatch
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step
    from fivefold_plan.trace.traffic import Collectives

    state = build_state(recipe, ranks)
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(0, 4096, (1, recipe.model.seq_len + 1), generator=generator)
    batch, marks = [Microbatch(tokens[:, :-1], tokens[:, 1:])], []
    with Collectives(state.mesh) as sent:
        take_step(state, recipe, batch).wait()
    for _ in range(STEPS + 1):
        everyone(ranks).barrier()
        marks.append((time.perf_counter(), left_host()))
        take_step(state, recipe, batch).wait()
    everyone(ranks).barrier()
    marks.append((time.perf_counter(), left_host()))
    for replica in state.parallel.replicas:
        replica.close()
    counted = {key: (calls, size) for key, (calls, size) in sent.found.items()}
    planned, crossing, psi = planned_messages(recipe, ranks, counted)
    assert planned == counted, f"planned {planned}, counted {counted}"
    laps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(marks[1:])]
    return {
        "step_s": median(seconds for seconds, _ in laps),
        "left_bytes": median(size for _, size in laps),
        "counted_bytes": crossing,
        "psi": psi,
        "messages": {f"{what} {axis}": list(found) for (what, axis), found in counted.items()},
    }


def planned_messages(
    recipe: Any, ranks: Any, counted: dict[tuple[str, str], tuple[int, int]]
) -> tuple[dict[tuple[str, str], tuple[int, int]], float, float]:
    """The planner's messages of this rank. Of the counted ones, the bytes that leave a host, and Psi between nodes."""
    from fivefold.recipe import count_parameters
    from fivefold_plan.cluster.clusters import parse
    from fivefold_plan.messages import volume
    from fivefold_plan.messages.communication import group
    from fivefold_plan.predict import predict
    from fivefold_plan.setting import FIVEFOLD_CPU

    cluster = replace(parse("h100"), per_node=ranks.local_world)
    s = predict(recipe, cluster, FIVEFOLD_CPU).setting
    leaving = crossing = 0.0
    for (what, axis), (_, size) in counted.items():
        members = group(s.layout, s.cluster, axis)
        n, here = members.ranks, members.local
        if members.nodes > 1 and what != "all_reduce":  # of a few numbers
            groups = ranks.local_world // here  # on a host
            crossing += size * groups
            # a ring, ordered by hosts, crosses each link once; all-to-all sends every rank its part
            leaving += size * groups * {"all_gather": (n - 1) / n, "all_to_all": here * (n - here) / n}[what]
    return volume.counted(s, ranks.rank), leaving, crossing / 2 / count_parameters(recipe.model)


def validation(steps: int, seeds: list[int]) -> dict[str, Any]:
    """Losses of each layout, by seed, and their mean beside ZeRO 3's."""
    from fivefold.launch.local import start_ranks
    from fivefold.recipe import load, resolve
    from fivefold.train.start import prepare_data

    found: dict[str, Any] = {}
    for layout in (BASE, *LAYOUTS[-2:]):
        losses = []
        for seed in seeds:
            sets = [*LEARNER, f"train.steps={steps}", f"train.seed={seed}", "layout.ranks_per_node=2"]
            recipe = load("quickstart", sets, layout)
            data = prepare_data(recipe, quiet=True)
            recipe = resolve(recipe, vocab_size=data.vocab_size)
            with tempfile.TemporaryDirectory() as name:
                start_ranks(partial(learn, recipe, data, Path(name)), 4, fork=False)
                losses.append(json.loads((Path(name) / "found.json").read_text())["val_loss"])
            print(f"{layout}, seed {seed}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
        found[layout] = {"losses": losses, "mean": mean(losses)}
        found[layout]["to_zero_3"] = found[layout]["mean"] / found[BASE]["mean"] - 1
    return {"layouts": found}


def learn(recipe: Any, data: Any, out: Path, ranks: Any) -> None:
    """A rank's part of a run. The first writes the validation loss."""
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step
    from fivefold.step.validation import validate
    from fivefold.train.job import Job
    from fivefold.train.share import reader, validation_sets

    state, job = build_state(recipe, ranks), Job(recipe, out, data)
    with reader(job, state.mesh, 0) as batches:
        for _ in range(recipe.train.steps):
            take_step(state, recipe, batches()[0])
    found = validate(state, validation_sets(job, state.mesh))
    if ranks.first:
        (out / "found.json").write_text(json.dumps(found))


def report(found: dict[str, Any]) -> str:
    link = bytes_per_second(found["rate"]) * GOODPUT
    columns = (
        "Psi between nodes",
        "MB left a host, card",
        "messages",
        "s at the link's rate",
        "step, s",
        "tokens/s",
        "times",
    )
    lines = [f"| layout | {' | '.join(columns)} |", "|" + "---|" * 8]
    for layout, row in found["layouts"].items():
        counted = row["counted_bytes"]
        sizes = f"{1e-6 * row['left_bytes']:.1f} | {1e-6 * counted:.1f} | {counted / link:.2f}"
        speed = f"{row['step_s']:.3f} | {row['tokens_per_s']:.0f} | {row['speedup']:.2f}"
        lines.append(f"| {layout} | {row['psi']:.3f} | {sizes} | {speed} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

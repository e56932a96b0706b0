"""ZeRO-Infinity (arXiv 2104.07857) on two ranks: states of four times what may be held of them, from disk.

    python benchmarks/infinity.py --batch 2 [--gbps 0.3] [--rounds 2] [--out FILE.json]

Two ranks train a Llama of 207M parameters in bf16 with dp=2,zero=3,offload=all:disk,recompute=full, by gloo on one
machine. Weights, masters, gradients and moments take 18 bytes per parameter. The limit is that of a memory cgroup
(version 1, which must be writable) around both ranks, page cache included: a quarter of the states, and what two
interpreters with PyTorch hold before there is a model. `--batch`: sequences of 256 tokens per step, half of them on
each rank. `--gbps`: a blkio cgroup lets both ranks together read so much, and write so much. Rounds are added to those
in `--out` of the same batch and rate; figures are medians over all. One process runs if there are none yet.

Bits: losses of all steps, and hashes of all masters and moments after the second and the last one, are compared with
the same ranks in memory; those of the first two steps also with one process, which computes the same microbatches. Its
gradient norm is a sum in another order. grad_clip is 0 and no step is skipped, so no weight depends on it. So updates
may be early: they run beside backward (`--update`).

Time: each round runs the same two ranks in memory, then from disk. compute_s is the step in memory. io_s is what the
ranks read and wrote in a step, by the rate of the disk: both ranks at once, reading and writing at once, inside the
limit, before the first step and after the last. The bound is the larger one. Steps count from the third on; the first
update reads no moments. In the table "waited" is for the disk, in the step's own thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from offload import limited, recipe_of, usage

BYTES = 2 + 4 + 4 + 8  # per parameter: weights that compute, masters, gradients, moments
LAYOUTS = {
    "one": "dp=1,recompute=full",
    "memory": "dp=2,zero=3,recompute=full",
    "disk": "dp=2,zero=3,offload=all:disk,recompute=full",
}
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1408)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--gbps", type=float, default=0.0, help="throttles the disk, each way; 0: as it is")
    parser.add_argument(
        "--update", choices=("beside", "early"), default="early", help="layout.offload_update"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.25, help="of the states, that the ranks may hold")
    parser.add_argument("--dir", type=Path, default=Path.cwd() / ".offload")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", choices=LAYOUTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args)
    from fivefold.recipe import count_parameters

    parameters = count_parameters(recipe(args, "one").model)
    states = BYTES * parameters
    found: dict[str, Any] = {"parameters": parameters, "states_bytes": states}
    found |= {"gbps": args.gbps, "update": args.update, "argv": " ".join(sys.argv[1:])}
    before = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    case = f"batch {args.batch}, {args.gbps} GB/s"
    rounds, limit, interpreters = before.get(case, {}).get("rounds", []), 0, 0
    one = None if rounds else run(args, "one", "")[0]
    for _ in range(max(1, args.rounds)):
        memory = run(args, "memory", "")
        interpreters = sum(rank["before"] for rank in memory)
        limit = int(args.share * states) + interpreters
        with limited(limit, args.gbps, args.dir) as enter:
            disk = run(args, "disk", enter)
            found |= usage()
        if one:
            assert_same(one, memory)
        for here, away in zip(memory, disk, strict=True):
            assert here["hashes"] == away["hashes"], "other masters or moments"
            assert [s["loss"] for s in here["steps"]] == [s["loss"] for s in away["steps"]], "other losses"
        rounds.append(figures(memory, disk))
        print(json.dumps(rounds[-1]), flush=True)
    found |= {"limit_bytes": limit, "interpreters_bytes": interpreters}
    found |= {"states_by_limit": states / (limit - interpreters), "states_by_whole_limit": states / limit}
    found |= {"rounds": rounds} | {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    print(json.dumps(found))
    if args.out:
        from fivefold.host.machine import describe

        found = before | {"machine": describe(), case: found}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def recipe(args: argparse.Namespace, which: str) -> Any:
    from fivefold.recipe import change, resolve

    args.microbatch = args.batch // 2
    wanted = recipe_of(args, "all:disk" if which == "disk" else "none", LAYOUTS[which])
    sets = ["optim.grad_clip=0", "faults.on_nonfinite=abort", "faults.on_spike=tell"]
    sets += ["layout.offload_update=early"] * (which == "disk" and args.update == "early")
    return resolve(change(wanted, sets), vocab_size=args.vocab)


def run(args: argparse.Namespace, which: str, enter: str) -> list[dict[str, Any]]:
    """Runs `work` on the ranks of a layout. enter: the shell's words that enter a cgroup."""
    from fivefold.host.machine import TUNED  # as `fivefold train` sets it

    world = 1 if which == "one" else 2
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        env |= {"FIVEFOLD_STORE_FILE": f"{folder}/store", "OMP_NUM_THREADS": "1"} | TUNED
        command = ["sh", "-c", enter + 'exec "$@"', "sh", sys.executable, *sys.argv, "--worker", which]
        started = [
            subprocess.Popen(
                command, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE, text=True
            )
            for r in range(world)
        ]
        outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"{which}: codes {[process.returncode for process in started]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def assert_same(one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """The losses, masters and moments of two ranks are those of one process, for as long as it runs."""
    for number, rank in enumerate(ranks):
        assert all(a["loss"] == b["loss"] for a, b in zip(one["steps"], rank["steps"], strict=False)), (
            "losses"
        )
        assert one["hashes"][0][number] == rank["hashes"][0][0], "other masters or moments"


def figures(memory: list[dict[str, Any]], disk: list[dict[str, Any]]) -> dict[str, Any]:
    """A round: seconds of a step, and its bound."""

    def middle(ranks: list[dict[str, Any]], key: str) -> float:
        return statistics.median(step[key] for step in ranks[0]["steps"][WARM_UP:])

    moved = sum(middle([rank], "read") + middle([rank], "written") for rank in disk)
    rates = [sum(rank["rates"][at]["both"] for rank in disk) for at in range(2)]
    found = {"compute_s": middle(memory, "seconds"), "step_s": middle(disk, "seconds"), "bytes": moved}
    found |= {"rate": statistics.mean(rates), "rate_before": rates[0], "rate_after": rates[1]}
    found["io_s"] = moved / found["rate"]
    found["step_by_bound"] = found["step_s"] / max(found["compute_s"], found["io_s"])
    found["step_by_sum"] = found["step_s"] / (found["compute_s"] + found["io_s"])
    found |= {f"memory_{key}": middle(memory, key) for key in ("cpu", "kernel", "faults", "pages")}
    return found | {key: middle(disk, key) for key in ("busy", "waited", "cpu", "kernel", "faults", "pages")}


def work(args: argparse.Namespace) -> None:
    """One rank. Prints its figures."""
    import torch
    import torch.distributed as dist

    from fivefold.host.machine import keep_freed_memory, keep_little_memory
    from fivefold.launch import ranks as ranks_
    from fivefold.parallel.mesh import Microbatch
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step
    from fivefold_plan.bench.hardware import bandwidth

    which, rates = args.worker, []
    keep_little_memory() if which == "disk" else keep_freed_memory()
    with ranks_.join() as ranks:

        def rate() -> None:
            if which == "disk":
                dist.barrier()
                rates.append(bandwidth(args.dir, 256 << 20))

        wanted, before = recipe(args, which), anonymous()
        rate()
        state = build_state(wanted, ranks)
        disk, steps, half, built = state.parallel.disk, [], args.batch // 2, anonymous()
        hashes, cut = [], recipe(args, "memory") if which == "one" else None
        for step in range(WARM_UP if which == "one" else args.steps):
            torch.manual_seed(step)
            tokens = torch.randint(0, args.vocab, (args.batch, args.seq + 1))
            halves = [Microbatch(rows[:, :-1], rows[:, 1:]) for rows in tokens.split(half)]
            meter = disk.meter.figures() if disk else {}
            began, before_step = time.perf_counter(), usage_of_self()
            done = take_step(state, wanted, halves if which == "one" else [halves[ranks.rank]])
            line = {"loss": done.loss, "norm": done.norm, "seconds": time.perf_counter() - began}
            if disk:
                line |= {key: value - meter[key] for key, value in disk.meter.figures().items()}
            after = usage_of_self()
            line |= {key: after[key] - before_step[key] for key in after} | {"anonymous": anonymous()}
            steps.append(line)
            if ranks.first:
                print(which, json.dumps(line), file=sys.stderr, flush=True)
            if step + 1 in (WARM_UP, args.steps):
                hashes.append([hashed(state, cut, rank) for rank in range(2 if cut else 1)])
                if disk:  # the hash has read files through the page cache
                    disk.drop()
        rate()
        state.parallel.close()
    found = {"steps": steps, "rates": rates, "before": before, "built": built, "hashes": hashes}
    print(json.dumps(found))


def usage_of_self() -> dict[str, float]:
    """Processor seconds of this process, pages that it waited for because they were not in memory, and new pages."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    seconds = {"cpu": found.ru_utime + found.ru_stime, "kernel": found.ru_stime}
    return seconds | {"faults": found.ru_majflt, "pages": found.ru_minflt}


def anonymous() -> int:
    """Bytes of memory of this process that no file backs."""
    words = Path("/proc/self/status").read_text().split()
    return int(words[words.index("RssAnon:") + 1]) << 10


def hashed(state: Any, cut: Any, rank: int) -> str:
    """A hash of masters and moments: of this rank's, or of the rows of them that a rank keeps in the recipe `cut`."""
    from fivefold.models.card import card_of
    from fivefold.sharding.layout import Layout
    from fivefold.sharding.parts import held

    found, digest = state.masters() | state.moments(), hashlib.sha256()
    kept = held(card_of(cut.model), Layout.from_recipe(cut.layout), rank) if cut else {}
    for key in sorted(found):
        tensor, name = found[key], key.removeprefix("exp_avg_sq.").removeprefix("exp_avg.")
        if cut:
            tensor = tensor[tuple(slice(*span) for (span,) in kept[name].keeps)]
        digest.update(key.encode())
        digest.update(tensor.detach().contiguous().numpy().data)
    return digest.hexdigest()


if __name__ == "__main__":
    main()

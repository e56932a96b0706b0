"""Bytes of state per rank under ZeRO, measured on live tensors, beside the paper's formula.

    python benchmarks/zero_memory.py [--ranks 1 2 4] [--modes bf16 fp32] [--out benchmarks/results/zero_memory.json]

The model is the common work's (13.8M parameters, see train_speed.py). A rank is stopped where its states are
largest: behind the first of two microbatches, when weights are gathered and gradients wait to be summed further.
Then every tensor that exists is looked up, and the bytes of their memory are added, each memory once; activations are
gone by then. The formula is that of ZeRO (arXiv 1910.02054, figure 1) with Fivefold's dtypes, in bytes per parameter:

    states that are shared from stage    working weights 3, gradients 2, master weights and moments 1
    bf16: working 2 (gathered from the masters: stage 3 keeps none), gradients 4, master and moments 12
    fp32: working 4 (stage 0: the masters themselves), gradients 4, master and moments 12

The peak of a whole step is what the tensors hold at most, with activations and buffers of communication: the memory of
every tensor that an operation makes is followed until it is freed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

from train_speed import D, F, H, L, T, V

ROWS = 2  # sequences a rank, in microbatches of one


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    parser.add_argument("--modes", nargs="*", default=["bf16", "fp32"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return print(json.dumps(work(args.worker[0], int(args.worker[1]))))
    rows = []
    for mode in args.modes:
        for ranks in args.ranks:
            for zero in range(4) if ranks > 1 else [0]:
                found = apart(mode, ranks, zero)
                wanted = formula(mode, ranks, zero) * found["parameters"]
                rows.append(
                    {"mode": mode, "dp": ranks, "zero": zero, "formula_bytes": round(wanted)}
                    | found
                    | {"error": found["state_bytes"] / wanted - 1}
                )
                print(line(rows[-1]), file=sys.stderr, flush=True)
    text = table(rows)
    print(text)
    if args.out:
        from fivefold.host.machine import describe

        args.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(text + "\n")


def formula(mode: str, ranks: int, zero: int) -> float:
    """Bytes per parameter on one rank."""
    working = 2 if mode == "bf16" else 4
    if zero == 0:
        return (working if mode == "bf16" else 0) + 4 + 12
    shared = (12 if zero >= 1 else 0) + (4 if zero >= 2 else 0)
    whole = (working if zero < 3 else 0) + (4 if zero < 2 else 0)
    return whole + shared / ranks


def apart(mode: str, ranks: int, zero: int) -> dict[str, Any]:
    """Runs `work` on so many ranks, each a process of its own; the figures of the rank that has most."""
    launched = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    launched |= {"MASTER_PORT": str(20000 + os.getpid() % 20000), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, "--worker", mode, str(zero)]
    processes = []
    for rank in range(ranks):
        env = os.environ | launched | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{mode}, {ranks} ranks, zero {zero} failed")
    return max((json.loads(o.splitlines()[-1]) for o in outputs), key=lambda found: found["state_bytes"])


def work(mode: str, zero: int) -> dict[str, Any]:
    """One rank: a step for the moments to exist, then the two measurements."""
    import torch

    from fivefold.launch import ranks as ranks_
    from fivefold.parallel.mesh import Microbatch
    from fivefold.recipe import count_parameters, load, resolve
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step

    with ranks_.join() as ranks:
        sizes = [
            f"model.layers={L}",
            f"model.dim={D}",
            f"model.heads={H}",
            f"model.ffn_dim={F}",
            f"model.seq_len={T}",
        ]
        batch = [f"train.global_batch_size={ROWS * ranks.world}", "train.microbatch_size=1", "train.steps=10"]
        layout = f"dp={ranks.world}" + (f",zero={zero}" if zero else "")
        recipe = resolve(load("quickstart", [*sizes, *batch, f"precision.mode={mode}"], layout), vocab_size=V)
        state = build_state(recipe, ranks)
        tokens = torch.randint(V, (1, T), generator=torch.Generator().manual_seed(0))
        microbatches = [Microbatch(tokens, tokens)] * ROWS

        take_step(state, recipe, microbatches)
        (replica,) = state.parallel.replicas
        replica.start_step()
        state.module(tokens, tokens).backward()
        states = sum(storage.nbytes() for storage in memories()) - tokens.nbytes
        state.module(tokens, tokens).backward()  # what has begun is done, before the next step
        with Peak() as peak:
            take_step(state, recipe, microbatches)
        return {
            "parameters": count_parameters(recipe.model),
            "state_bytes": states,
            "peak_bytes": peak.most,
        }


def memories() -> list[Any]:
    """The memory of every tensor of this process, each once."""
    import torch
    from torch.distributed.tensor import DTensor

    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages = [(t._local_tensor if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return list({s._cdata: s for s in storages if s.device.type != "meta"}.values())


class Peak:
    """The most bytes of tensors at one time while it is entered: those there are, and those that operations make."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}  # bytes of each memory there is
        self.now = self.most = 0

    def __enter__(self) -> Peak:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        peak = self

        class Follow(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                for leaf in tree_leaves(out):
                    if type(leaf) in (torch.Tensor, torch.nn.Parameter):
                        peak.follow(leaf.untyped_storage())
                return out

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = peak.resize(storage, size)
            peak.set(storage._cdata, size)
            return result

        for storage in memories():
            self.follow(storage)
        self.mode, self.resize = Follow(), torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        self.mode.__enter__()
        return self

    def follow(self, storage: Any) -> None:
        """Counts a memory until it is freed."""
        if storage.device.type != "meta" and storage._cdata not in self.sizes:
            self.set(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self.freed, storage._cdata)

    def freed(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def set(self, key: int, size: int) -> None:
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.most = max(self.most, self.now)

    def __exit__(self, *error: object) -> None:
        import torch

        self.mode.__exit__(*error)
        torch.UntypedStorage.resize_ = self.resize  # pyright: ignore[reportAttributeAccessIssue]


HEAD = (
    f"{'mode':5} {'dp':>3} {'ZeRO':>5} {'states MiB':>11} {'formula MiB':>12} {'error':>7} {'peak MiB':>19}"
)


def line(row: dict[str, Any]) -> str:
    mib = {key: row[key] / 2**20 for key in ("state_bytes", "formula_bytes", "peak_bytes")}
    return (
        f"{row['mode']:5} {row['dp']:3} {row['zero']:5} {mib['state_bytes']:11.1f} {mib['formula_bytes']:12.1f} "
        f"{100 * row['error']:6.2f}% {mib['peak_bytes']:19.1f}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    return "\n".join(["```", HEAD, *map(line, rows), "```"])


if __name__ == "__main__":
    main()

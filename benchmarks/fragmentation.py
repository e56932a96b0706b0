"""ZeRO-R's M_D and C_B (arXiv 1910.02054) as an allocator sees them: memory held beside memory used, and temporary
buffers beside the size of the model.

    python benchmarks/fragmentation.py --device cuda [--out benchmarks/results/fragmentation_gpu.json]
    python benchmarks/fragmentation.py --device cpu [--out benchmarks/results/fragmentation_cpu.json]

Two ranks train Llamas of 2, 4 and 8 blocks with recompute = full, by the trainer's own step. With one GPU both share it
and send by gloo. `cases` below lists what is compared: inputs of blocks whole, divided (Pa), divided and in host memory
(Pa+cpu), and divided in one buffer made before the first step. The last one is the paper's M_D. It is put in here, by
`OneBuffer`; the trainer does not do it.

M_D. On a GPU with segments that have a fixed size (before) and that grow (after, the trainer's choice). Held: what
PyTorch's allocator has reserved. Used: what tensors have. Holes: free parts of segments that hold something, too. Then
a limit is set (set_per_process_memory_fraction) and lowered, until a step no longer runs in it: a program without
fragments would run at 1.00 times the peak of its tensors. On a CPU with glibc as it is (before), with freed blocks kept
and with large ones returned (`host/machine.py`). Held: resident memory, less that before the model was built. Holes:
free bytes that glibc holds (mallinfo2); the part that malloc_trim gives back is in whole pages.

C_B. The peak of the tensors, less what must be there then: the states with all gradients, or the states with all inputs
of blocks, whichever is more. With buffers of constant size this does not grow with the number of blocks.

Blocks are not compiled (TORCHDYNAMO_DISABLE). On a GPU all cases run at once, on a CPU one after the other.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LAYERS = (2, 4, 8)
SIZES = {  # dim, heads, ffn_dim, vocab, tokens of a sequence, sequences
    "cpu": (384, 6, 1024, 2048, 1024, 2),
    "cuda": (1024, 8, 2816, 16384, 2048, 2),
}
PA = "tp=2,recompute=full,offload=activations:tp"
LAYOUTS = {
    "inputs whole": "tp=2,recompute=full",
    "Pa": PA,
    "Pa in one buffer": PA,
    "Pa+cpu": "tp=2,recompute=full,offload=activations",
    "states:host": "tp=2,recompute=full,offload=states:host",
    "ZeRO 3": "dp=2,zero=3,recompute=full",
}
ALLOCATORS = {"cuda": ("fixed", "growing"), "cpu": ("glibc", "keep", "return")}
LIMITS = (1.2, 1.1, 1.05, 1.02)  # times the peak of a rank's tensors
MIB = 2**20


def cases(device: str) -> Iterator[tuple[str, str]]:
    """(allocator, name of the layout). The last two layouts are for C_B alone."""
    for allocator in ALLOCATORS[device]:
        for name in LAYOUTS:
            if name not in ("states:host", "ZeRO 3") or allocator in ("growing", "return"):
                yield allocator, name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=ALLOCATORS, required=True)
    parser.add_argument("--only", nargs="*", choices=LAYOUTS, help="these layouts")
    parser.add_argument("--timeout", type=float, default=60, help="seconds until a case is given up")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.device, *args.worker)
    began, wanted = time.perf_counter(), [c for c in cases(args.device) if c[1] in (args.only or LAYOUTS)]
    with ThreadPoolExecutor(len(wanted) if args.device == "cuda" else 1) as pool:
        results = pool.map(lambda case: apart(args.device, case[0], case[1], args.timeout), wanted)
        rows = [row for case in results for row in case]
    print("\n".join(table(rows)))
    print(f"{time.perf_counter() - began:.0f} s")
    if args.out:
        from fivefold.host.machine import describe

        args.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    sys.exit(any("failed" in row for row in rows))


def apart(device: str, allocator: str, name: str, timeout_s: float) -> list[dict[str, Any]]:
    """Runs `work` on two ranks. Their rows, of the rank that holds most; what failed is a row, too."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"FIVEFOLD_STORE_FILE": f"{folder}/store", "GLOO_SOCKET_IFNAME": "lo"}
        env |= {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        env |= {"PYTORCH_ALLOC_CONF": f"expandable_segments:{allocator == 'growing'}"}
        env.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        if device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, __file__, "--device", device, "--worker", allocator, name]
        ranks = []
        for rank in range(2):
            own = env | {"RANK": str(rank), "LOCAL_RANK": "0" if device == "cuda" else str(rank)}
            with open(f"{folder}/out{rank}", "w") as out, open(f"{folder}/err{rank}", "w") as err:
                ranks.append(subprocess.Popen(command, env=own, stdout=out, stderr=err))
        deadline = time.monotonic() + timeout_s
        found, failed = [], ""
        for rank, process in enumerate(ranks):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            found.append([json.loads(line) for line in Path(folder, f"out{rank}").read_text().splitlines()])
            if process.returncode:
                said = Path(folder, f"err{rank}").read_text().splitlines() or [""]
                failed = f"rank {rank}, code {process.returncode}: {said[-1]}"
    here = {"case": name, "allocator": allocator}
    rows = [here | max(both, key=lambda row: row["held_peak"]) for both in zip(*found, strict=False)]
    return [*rows, here | {"failed": failed}] if failed else rows


def work(device: str, allocator: str, name: str) -> None:
    """One rank: a line of figures for each size."""
    from fivefold.host import machine
    from fivefold.launch import ranks as ranks_

    if allocator == "keep":
        machine.keep_freed_memory()
    if allocator == "return":
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: blocks of 1 MiB and more go back at once
    with ranks_.join() as ranks:
        if device == "cpu":  # code is read and libraries take their workspace
            measured(device, name, 1, ranks)
        for layers in LAYERS:
            print(json.dumps(measured(device, name, layers, ranks)), flush=True)
        os._exit(0)  # of two ranks one may be in a message that an error has left behind


def measured(device: str, name: str, layers: int, ranks: Any) -> dict[str, Any]:
    """Builds a model, takes two steps, and measures the third."""
    import torch

    from fivefold.parallel.mesh import Microbatch
    from fivefold.recipe import load, resolve
    from fivefold.step.state import build_state
    from fivefold.step.step import take_step

    dim, heads, ffn, vocab, seq, rows = SIZES[device]
    allocator = (GPU if device == "cuda" else CPU)()
    sets = [
        f"model.layers={layers}", f"model.dim={dim}", f"model.heads={heads}", f"model.ffn_dim={ffn}",
        f"model.seq_len={seq}", "precision.mode=bf16", f"train.microbatch_size={rows}", "train.steps=100",
    ]  # fmt: skip
    dp = 2 if LAYOUTS[name].startswith("dp") else 1
    recipe = load("quickstart", [*sets, f"train.global_batch_size={rows * dp}"], LAYOUTS[name])
    recipe = resolve(recipe, vocab_size=vocab)
    state = build_state(recipe, ranks)
    if name == "Pa in one buffer":
        state.parallel.activations = OneBuffer(state.mesh.axis("tp"), layers * rows * seq * dim // 2)
    tokens = torch.randint(vocab, (rows, seq), generator=torch.Generator().manual_seed(0)).to(ranks.device)

    def step() -> None:
        take_step(state, recipe, [Microbatch(tokens, tokens)]).wait()

    step()
    step()
    at_update: list[int] = []
    (replica,) = state.parallel.replicas
    update = replica.update

    def watched(lr: float, scale: Any, skip: Any) -> None:
        at_update.append(allocator.live())
        update(lr, scale, skip)

    replica.update = watched
    found = allocator.around(step)
    replica.update = update
    share = {"inputs whole": 1, "states:host": 1, "ZeRO 3": 1, "Pa+cpu": 0}.get(name, 0.5)
    inputs = int(layers * rows * seq * dim * 2 * share)
    kept_before = inputs if name == "Pa in one buffer" else 0
    must = max(at_update[0], found["used_rest"] - kept_before + inputs)
    found |= {"layers": layers, "inputs": inputs, "temporary": found["used_peak"] - must}
    if device == "cuda" and layers == LAYERS[-1]:
        return found | GPU.limits(found["used_peak"], step)
    state.parallel.close()
    return found


def OneBuffer(axis: Any, elements: int) -> Any:
    """Parts of inputs in one buffer that is made before the first step, which is ZeRO-R's M_D for what lives longest
    between forward and backward."""
    import torch

    from fivefold.parallel.offload.activations import Part, Parts

    class Buffered(Parts):
        buffer = torch.empty(elements, dtype=torch.bfloat16, device=axis.device)
        at = 0

        def _divide(self, tensor: Any) -> Any:
            found = super()._divide(tensor)
            if not isinstance(found, Part):
                return found
            saved: Any = found.saved
            self.at %= self.buffer.numel()  # the next step
            place = self.buffer[self.at : self.at + saved.numel()]
            self.at += saved.numel()
            return Part(place.copy_(saved), found.shape)

    return Buffered(axis)


class GPU:
    """PyTorch's allocator (`torch.cuda.memory_stats`)."""

    def __init__(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        self.cuda = torch.cuda

    def live(self) -> int:
        self.cuda.synchronize()
        return self.cuda.memory_allocated()

    def around(self, step: Any) -> dict[str, Any]:
        self.cuda.synchronize()
        self.cuda.reset_peak_memory_stats()
        step()
        self.cuda.synchronize()
        stats, pool = self.cuda.memory_stats(), self.cuda.memory_snapshot()
        free = [b["size"] for s in pool for b in s["blocks"] if b["state"] == "inactive"]
        return {
            "used_rest": stats["allocated_bytes.all.current"],
            "used_peak": stats["allocated_bytes.all.peak"],
            "asked_peak": stats["requested_bytes.all.peak"],
            "held_rest": stats["reserved_bytes.all.current"],
            "held_peak": stats["reserved_bytes.all.peak"],
            "holes_rest": stats["inactive_split_bytes.all.current"],
            "holes_peak": stats["inactive_split_bytes.all.peak"],
            "largest_free": max(free, default=0),
            "segments": len(pool),
            "grows": any(s.get("is_expandable") for s in pool),
            "retries": stats["num_alloc_retries"],
        }

    @staticmethod
    def limits(peak: int, step: Any) -> dict[str, Any]:
        """Steps under ever lower limits: retries of the allocator in each, up to the first that is too low."""
        import torch

        total, tried = torch.cuda.get_device_properties(0).total_memory, {}
        for limit in LIMITS:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit * peak / total))
            before = torch.cuda.memory_stats()["num_alloc_retries"]
            try:
                step()
                torch.cuda.synchronize()
            except (RuntimeError, torch.OutOfMemoryError):  # the other rank's message fails, too
                tried[str(limit)] = "out of memory"
                break
            tried[str(limit)] = torch.cuda.memory_stats()["num_alloc_retries"] - before
        return {"retries_by_limit": tried}


class CPU:
    """glibc's allocator, and the kernel's count of this process."""

    FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    FIELDS += ("keepcost",)

    class Info(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]  # mallinfo2's, in the order of FIELDS

    def __init__(self) -> None:
        from fivefold.host.machine import resident_bytes

        if platform.libc_ver()[0] != "glibc":
            raise SystemExit("--device cpu reads glibc's statistics, and this C library is another one")
        gc.collect()
        self.libc, self.resident = ctypes.CDLL(None), resident_bytes
        self.libc.mallinfo2.restype = CPU.Info
        self.libc.malloc_trim(0)  # what a model before has left
        self.base = self.resident()[0]

    def live(self) -> int:
        from zero_memory import memories

        return sum(storage.nbytes() for storage in memories())

    def info(self) -> dict[str, int]:
        found = self.libc.mallinfo2()
        return dict(zip(self.FIELDS, (getattr(found, name) for name in "abcdefghij"), strict=True))

    def around(self, step: Any) -> dict[str, Any]:
        from zero_memory import Peak

        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
        step()
        now, most = self.resident()
        glibc = self.info()
        with Peak() as peak:
            step()
        found = {
            "used_rest": self.live(), "used_peak": peak.most,
            "held_rest": now - self.base, "held_peak": most - self.base,
            "holes_rest": glibc["fordblks"], "largest_free": glibc["keepcost"], "segments": glibc["hblks"],
        }  # fmt: skip
        before = self.resident()[0]
        self.libc.malloc_trim(0)
        return found | {"trimmed": before - self.resident()[0]}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of MiB per rank."""
    heads = ("used", "held", "peak used", "peak held", "holes", "temporary")
    yield f"{'case':17} {'allocator':9} {'blocks':>6} " + " ".join(f"{head:>10}" for head in heads) + "  more"
    keys = ("used_rest", "held_rest", "used_peak", "held_peak", "holes_rest", "temporary")
    for row in rows:
        start = f"{row['case']:17} {row['allocator']:9}"
        if "failed" in row:
            yield f"{start} failed: {row['failed']}"
            continue
        if "trimmed" in row:
            more = f"trimmed {row['trimmed'] / MIB:.1f}"
        else:
            more = f"holes at the peak {row['holes_peak'] / MIB:.1f}, {row['segments']} segments"
        if "retries_by_limit" in row:
            more += f", retries within {row['retries_by_limit']} of the peak"
        yield (
            f"{start} {row['layers']:6} " + " ".join(f"{row[key] / MIB:10.1f}" for key in keys) + f"  {more}"
        )


if __name__ == "__main__":
    main()

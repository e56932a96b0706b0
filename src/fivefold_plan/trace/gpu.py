"""Traces a GPU's step on a machine with neither GPU nor driver: the code's path for GPUs, on tensors that claim to be
on one (fake.py).

Autograd asks for a device guard for "cuda" from C++. PyTorch's CPU build has none, and that of a build for CUDA wants a
driver. guard.cpp is one that only knows the current stream. The machine's C++ compiler builds it at first use (two
seconds). It must be loaded after PyTorch's libraries, whose guard it replaces, and before PyTorch itself. It makes
PyTorch believe in a GPU, so it gets a process of its own (`serve`) and is never loaded in a user's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import torch

from fivefold.errors import UserError
from fivefold.files import cache_folder
from fivefold.kernels.native import build
from fivefold.recipe import Recipe
from fivefold.schedules.timelines import MemoryTimeline
from fivefold_plan.trace.compiled import blocks
from fivefold_plan.trace.depth import CachedFigures, Exact, check_rank, exact, timelines
from fivefold_plan.trace.step import DEVICE, operators

SOURCE = Path(__file__).with_name("guard.cpp")
TORCH = Path(torch.__file__).parent
FLAGS = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{TORCH / 'include'}"]
LINKED = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
LOADING = """
import ctypes, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a library or a compiler prints is no answer
for library in sys.argv[1:]:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
from fivefold_plan.trace.gpu import serve
serve(answers)
os._exit(0)  # autograd's thread for the device may still let go of tensors: Python's own end would abort it
"""


@cache
def guard() -> tuple[Path | None, str]:
    """The guard as a library, in the cache folder; or None and the reason why GPUs cannot be traced here."""
    if torch.version.hip:
        return None, "this PyTorch is built for ROCm. A GPU is traced with builds for CPUs and CUDA only"
    if sys.platform != "linux":
        return None, f"the stand-in for a GPU is built on Linux only, this is {sys.platform}"
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        return None, "no C++ compiler found (looked for $CXX, c++, g++)"
    parts = [SOURCE.read_text(), torch.__version__, compiler, *FLAGS]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_folder() / "kernels" / f"guard-{key}.so"
    try:
        build(library, [compiler, *FLAGS, str(SOURCE), *LINKED])
    except (OSError, subprocess.SubprocessError) as error:
        return None, f"compiling the stand-in for a GPU failed: {error}"
    return library, ""


def why_not() -> str:
    """The reason why GPUs cannot be traced here; empty if they can."""
    return guard()[1]


def libraries() -> list[str]:
    """The paths of what that process loads, in this order: PyTorch's libraries, then the guard."""
    paths = [TORCH / "lib" / f"libtorch_{name}.so" for name in ("cpu", "cuda")]
    return [str(path) for path in (*paths, guard()[0]) if path is not None and path.exists()]


def exact_on_gpu(recipe: Recipe, rank: int) -> Exact:
    """`depth.exact` of the GPU's path, from the cache or from a process of its own. Raises UserError: the layout is not
    valid, or has no such rank."""
    entry = CachedFigures(recipe, rank, "cuda")
    if kept := entry.read():
        return kept
    began, figures = time.perf_counter(), _one_on_gpu(recipe, rank)["exact"]
    entry.write(figures)
    return Exact.from_json(figures, time.perf_counter() - began)


def timelines_on_gpu(recipe: Recipe, rank: int) -> list[tuple[str, MemoryTimeline]]:
    """`depth.timelines` of the GPU's path. Raises UserError: the layout is not valid, or has no such rank."""
    drawn = _one_on_gpu(recipe, rank, True)["timelines"]
    return [(name, MemoryTimeline.from_json(timeline)) for name, timeline in drawn]


def _one_on_gpu(recipe: Recipe, rank: int, over_time: bool = False) -> dict[str, Any]:
    check_rank(recipe, rank)
    [result] = on_gpu([(recipe, rank)], over_time)
    if "error" in result:
        raise RuntimeError(f"the trace failed: {result['error']}")
    return result


def on_gpu(
    jobs: Iterable[tuple[Recipe, int]],
    over_time: bool = False,
    in_python: Iterable[tuple[Recipe, int]] = (),
) -> list[dict[str, Any]]:
    """Traces (resolved recipe, rank) one after the other in one other process. Each result is that of `_answer`.
    over_time: memory over time instead of the exact figures. Blocks are compiled, as the trainer does, which takes
    seconds for each kind of block; those of jobs `in_python`, whose results come behind the others, are not. Raises
    UserError: GPUs cannot be traced here."""
    if reason := why_not():
        raise UserError(f"the step cannot be traced as a GPU computes it: {reason}")
    lines = [
        json.dumps(
            {"recipe": r.model_dump_json(), "rank": rank, "timelines": over_time, "compiles": compiles}
        )
        for compiles, given in ((True, jobs), (False, in_python))
        for r, rank in given
    ]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADING, *libraries()],
        input="\n".join(lines), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the process for traces ended with {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def serve(answers: TextIO) -> None:
    """What that process does: reads one job per line and writes one answer per line, both in JSON."""
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    """Returns {"exact": as `Exact.as_json`, "operators": those that ran on the GPU}, {"timelines": ...} or
    {"error": ...}."""
    operators.clear()
    try:
        recipe, rank = Recipe.model_validate_json(job["recipe"]), job["rank"]
        found = blocks(recipe, rank) if job["compiles"] else None
        if job["timelines"]:
            drawn = timelines(recipe, rank, DEVICE, found)
            return {"timelines": [(name, timeline.as_json()) for name, timeline in drawn]}
        figures = exact(recipe, rank, kept=False, device=DEVICE, blocks=found)
    except Exception:
        return {"error": traceback.format_exc()}
    return {"exact": figures.as_json(), "operators": sorted(operators)}
